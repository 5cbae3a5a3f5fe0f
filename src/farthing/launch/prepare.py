"""From a job to what is asked of a target: which offers in which order, for how long at most, with
which files.

Everything that can be refused is refused here, before anything is rented: no store, no cap, several
GPUs, a GPU that the target does not have. Reads the job, the plan and the clock it is given;
refuses to reach the network and to import torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from farthing import __version__
from farthing.addresses import is_remote, without_secrets
from farthing.config.job import Job
from farthing.data.read import place_of
from farthing.errors import InputError
from farthing.launch.inputs import INPUTS, Packed, inputs_key, pack
from farthing.launch.machines import MachineLedger, RentedMachine
from farthing.launch.registry import HERE, called, find_target, refuse_nowhere, target_of
from farthing.launch.request import (
    FETCH,
    GRACE_S,
    MOST_OVER,
    PLAIN_IMAGES,
    TEARDOWN_S,
    LaunchRequest,
    Patience,
    least_s,
)
from farthing.launch.target import Target
from farthing.launch.wheel import (
    FETCHER,
    fetch_script,
    lacking,
    refuse_without_extras,
    wheel_of_this,
)
from farthing.objectives.registry import package_of
from farthing.planner.inputs import PlanOptions, study_job
from farthing.planner.optimizers import optimizer
from farthing.planner.software import Torch, build_of
from farthing.planner.types import OfferPlan
from farthing.prices.gpus import find_gpu
from farthing.prices.offers import Billing, Offer, boot_of
from farthing.run.accounts import Account
from farthing.storage.files import Json, cannot_write, make_private, write_text
from farthing.tables import facts
from farthing.units import say_seconds, say_usd

NO_LIMIT_S = 366 * 86400
SETTINGS = [
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", "AWS_REGION"),
    *("HF_ENDPOINT", "HF_HUB_OFFLINE"),
]
GOOGLE_KEY = "GOOGLE_SERVICE_ACCOUNT_KEY"
AZURE_KEYS = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY", "AZURE_CLIENT_SECRET")
TRACKER_PLACES = (("wandb", "WANDB_BASE_URL"), ("mlflow", "MLFLOW_TRACKING_URI"))
"""Those that say where its server is."""
EXTRA_OF = {row["module"]: row["extra"] for row in facts("extras")}
ATTENTION_OF_TORCH = ("sdpa", "eager", "flex_attention")
"""What needs no package besides."""
S3_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
OF_PLACE = (
    *("device", "usd_per_hour", "power_watts", "usd_per_kwh"),
    *("gpu", "provider", "region", "offers", "spot"),
)
"""What `where` says of this machine, or of which to rent; the rest goes along."""
OF_DATA = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
LAUNCH_ID = "launch/id"
OWN_FOLDERS = ("local", "slurm")
"""Targets whose machines see the files of this one: nothing has to travel."""


class NoBudgetError(Exception):
    """The rest of the cap, the hours or the time buys no further machine."""


Finding = Callable[[Any, str], Any]
"""(study, text) -> the choice of the plan that the text means. Raises `InputError`."""


@dataclass(frozen=True)
class Wishes:
    """What the command line says beside the job."""

    on: str | None = None
    offer: str | None = None
    """Rank or name of an offer in the plan; `find` knows which it is."""
    find: Finding | None = None
    image: str = ""
    install: str = ""
    disk_gb: int = 100
    boot_s: float = Patience.boot_s
    prices: str | None = None


@dataclass(frozen=True)
class Prepared:
    """A launch that could begin."""

    job: Job
    target: Target
    at: str
    wishes: Wishes
    offers: tuple[Offer, ...] = ()
    plans: dict[Offer, OfferPlan] = field(default_factory=dict)
    packed: Packed = field(default_factory=Packed)
    n_steps: int = 0
    """Of the whole job, where it was planned."""

    @property
    def launch_id(self) -> str:
        return launch_id_of(self.job)

    @property
    def folder(self) -> str:
        """The run folder, where all machines of the target see it; else empty."""
        return self.job.output_dir if _shares(self.target, self.at) else ""

    @property
    def travels(self) -> bool:
        """Whether data and model go along by way of the store."""
        return self.target.name not in OWN_FOLDERS and self.job.output_store is not None

    def reaches(self, machine: RentedMachine) -> bool:
        """Whether a machine is where the driver of this launch looks."""
        if self.target.name in ("kubernetes", "vertex", "hf") and machine.on:
            return machine.on == (f"{self.target.name}:{self.at}" if self.at else self.target.name)
        return machine.target in ("", self.target.name)

    def is_in_time(self, offer: Offer, now: float, committed: int) -> bool:
        """Spot only while the deadline leaves room, and a quarter, for on demand."""
        deadline = self.job.limits.deadline
        steady = [plan for plan in self.plans.values() if not plan.offer.is_spot]
        if deadline is None or not offer.is_spot or not steady:
            return True
        rest = 1.0 - min(1.0, committed / max(1, self.n_steps))
        needed_s = min(plan.wall_s for plan in steady) * rest
        needed_s += boot_of(steady[0].offer.provider).seconds
        spare_s = 2 * boot_of(offer.provider).seconds
        return deadline.timestamp() - now > 1.25 * needed_s + spare_s

    def ask(
        self,
        number: int,
        offer: Offer,
        ledger: MachineLedger,
        accounts: Sequence[Account],
        now: float,
    ) -> LaunchRequest:
        """What to ask for as the machine of this number. Raises `NoBudgetError`."""
        calls = called(self.target, offer)
        assert calls is not None  # others were left out
        rate, max_usd = offer.usd_per_hour or 0.0, self.job.limits.max_usd
        spent_usd = ledger.spent_usd(accounts, now)
        most_rate = rate * MOST_OVER if self.target.is_rented else rate
        reserve_usd = TEARDOWN_S / 3600 * most_rate
        most_s, left_usd, train_usd = NO_LIMIT_S, None, None
        lasts = self._lasts(offer, accounts, now)
        if max_usd is not None:
            left_usd = max_usd - spent_usd
            overhead_usd = spent_usd - sum(account.usd for account in accounts)
            train_usd = round(max_usd - overhead_usd - reserve_usd, 6)
            if rate > 0:
                seconds = (left_usd - reserve_usd) / most_rate * 3600
                lasts[f"limits.max_usd ({say_usd(max_usd)})"] = seconds
        if lasts:
            which = min(lasts, key=lambda name: lasts[name])
            boot_s, most_s = self._boot_s(offer), int(lasts[which])
            if lasts[which] < least_s(boot_s):
                raise NoBudgetError(
                    f"{which} leaves {say_seconds(max(0.0, lasts[which]))} of {offer.provider}"
                    f" {offer.gpu or offer.instance}: not enough to boot ({say_seconds(boot_s)})"
                    f" and train; {say_usd(spent_usd)} were spent"
                )
        name = f"{self.launch_id}-{number}"
        told = {
            "name": name,
            "does": ["search"] if self.job.search.is_asked else ["train", "--retry"],
            "store": self.job.output_store or self.job.output_dir,
            "inputs": inputs_key(self.launch_id) if self.travels else None,
            "most_s": most_s,
            "boot_limit_s": self.wishes.boot_s,
            "usd_per_hour": rate,
            "max_usd": train_usd,
            "n_gpus": offer.n_gpus if self.target.is_rented else 0,
        }
        is_here = self.target.name in (*OWN_FOLDERS, "ssh")
        return LaunchRequest(
            name=name,
            target=self.target.name,
            at=self.at,
            offer=offer,
            usd_per_hour=rate,
            most_s=most_s,
            left_usd=left_usd,
            job_text=self._job_text(offer),
            told=told,
            gpu_id=calls.gpu_id,
            machine_type=calls.machine_type,
            image="" if is_here else self.wishes.image or plain_image(offer.gpu),
            install=self._install(offer),
            needs=("any" if self.wishes.install else __version__, *modules_of(self.job)),
            fetch=self._fetch(),
            disk_gb=self.wishes.disk_gb,
            folder=self.folder,
            secrets=secrets_of(self.job, self.target),
            settings={
                name: value
                for name, value in os.environ.items()
                # no address with a password; and a rented machine has an empty cache
                if (name in SETTINGS and value and value == without_secrets(value))
                and not (name == "HF_HUB_OFFLINE" and self.target.is_rented)
            },
        )

    def _boot_s(self, offer: Offer) -> float:
        return boot_of(offer.provider).seconds if self.target.is_rented else 0.0

    def _lasts(self, offer: Offer, accounts: Sequence[Account], now: float) -> dict[str, float]:
        """Seconds that limits of time leave, by limit."""
        limits, lasts = self.job.limits, dict[str, float]()
        around_s = self._boot_s(offer) + GRACE_S + TEARDOWN_S
        if limits.max_hours is not None:
            trained_s = sum(account.wall_s for account in accounts)
            lasts["limits.max_hours"] = limits.max_hours * 3600 - trained_s + around_s
        if limits.max_gpu_hours is not None:
            left_s = limits.max_gpu_hours * 3600 - sum(account.gpu_s for account in accounts)
            lasts["limits.max_gpu_hours"] = left_s / max(1, offer.n_gpus) + around_s
        if limits.deadline is not None:
            lasts["limits.deadline"] = limits.deadline.timestamp() - now
        return lasts

    def _install(self, offer: Offer) -> str:
        """Shell commands that install farthing: what the user names, else this very one."""
        pip = "python3 -m pip install --quiet"
        if self.wishes.install:
            return f"{pip} {shlex.quote(self.wishes.install)}"
        extras = extras_of(self.job, offer.n_gpus)
        refuse_without_extras(extras)
        what = f"./{wheel_of_this().name}[{','.join(extras)}]"
        brought = f"{pip} {FETCHER} && python3 {FETCH} && " if self._fetch() else ""
        return f"{brought}{pip} {shlex.quote(what)}"

    def _fetch(self) -> str:
        """The script that brings the wheel; empty where it lies beside the job already."""
        if self.wishes.install or not self.travels:
            return ""
        wheel = wheel_of_this()
        return fetch_script(wheel, self.job.output_store or "", f"{INPUTS}/sha256-{wheel.sha256}")

    def _job_text(self, offer: Offer) -> str:
        """The job as the machine reads it: its own price, and paths that are there."""
        values: Json = self.job.model_dump(mode="json", exclude_unset=True)
        if self.travels:
            for section, moved in self.packed.values.items():
                values[section] = {**values.get(section, {}), **moved}
        if not self.folder:
            values |= {"output_dir": "./run", "cache_dir": "./cache"}
            if self.job.train.push_to_hub and not self.job.train.hub_model_id:
                values["train"]["hub_model_id"] = Path(self.job.output_dir).name
        if self.target.is_rented:
            of_run = {
                key: value for key, value in values.get("where", {}).items() if key not in OF_PLACE
            }
            # no machine with more GPUs than the job would use is rented
            of_run |= {"gpus": "all"} if "gpus" in of_run else {}
            of_run |= {"usd_per_hour": offer.usd_per_hour or 0.0, "spot": offer.is_spot}
            values["where"] = of_run
        if self.job.limits.deadline is not None:
            moment = datetime.fromtimestamp(self.job.limits.deadline.timestamp(), UTC)
            values["limits"]["deadline"] = moment.isoformat(timespec="seconds")
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _has_files(choices: Any) -> bool:
    """Whether a choice of a search is, by its form, a file or folder of this machine."""
    if isinstance(choices, str):
        return choices.startswith((".", "/", "~")) or choices.endswith(OF_DATA)
    inner = choices.values() if isinstance(choices, dict) else choices
    return isinstance(choices, list | tuple | dict) and any(map(_has_files, inner))


def _shares(target: Target, at: str) -> bool:
    """Whether all machines of a target see the run folder of this one."""
    return target.name in OWN_FOLDERS or (target.name == "kubernetes" and "/" in at)


def launch_id_of(job: Job) -> str:
    """`farthing-` and eight hex digits: of the store that keeps the run, so that it is one launch
    from whatever machine; without a store, drawn once and kept in the run folder, since two folders
    of two machines may have one path.
    """
    if job.output_store:
        where = _one_spelling(job.output_store)
        return f"farthing-{hashlib.sha256(where.encode()).hexdigest()[:8]}"
    path = Path(job.output_dir) / LAUNCH_ID
    try:
        known = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        known = ""
    if re.fullmatch(r"[0-9a-f]{8}", known):
        return f"farthing-{known}"
    drawn = secrets.token_hex(4)
    try:
        make_private(make_private(path.parent.parent) / path.parent.name)
        write_text(path, f"{drawn}\n")
    except OSError as error:
        raise cannot_write(path.parent, error) from error
    return f"farthing-{drawn}"


def _one_spelling(place: str) -> str:
    """One text for every way to write a store: s3://b/run/ is s3://b/run."""
    scheme, is_url, path = place.rpartition("://")
    if is_url and scheme != "file":
        return f"{scheme}://{'/'.join(filter(None, path.split('/')))}"
    return os.path.realpath(path)


def modules_of(job: Job) -> tuple[str, ...]:
    """Modules of farthing's extras without which the job fails."""
    names = (*job.data.train, *job.data.eval)
    has_data_sets = any(place_of(name) in ("folder", "hub") for name in names)
    in_4_bits = job.method.name == "qlora"
    needs = {
        "bitsandbytes": in_4_bits or optimizer(job.train.optim).needs_bitsandbytes,
        "datasets": has_data_sets,
        "liger_kernel": job.train.use_liger_kernel is True,
        "optuna": job.search.is_asked,
    }
    return (*(name for name, is_so in needs.items() if is_so), *job.train.report_to)


def extras_of(job: Job, n_gpus: int) -> tuple[str, ...]:
    """The extras of farthing that are installed for the job on a machine."""
    extras = {EXTRA_OF[name] for name in modules_of(job)}
    extras |= {"sentencepiece"}  # which tokenizer a model has is known there
    return tuple(sorted(extras | ({"gpu"} if n_gpus else set())))


def plain_image(gpu: str) -> str:
    """The default image for a GPU: of those with code for it, the one for the oldest drivers."""
    fits = (
        image
        for build, image in PLAIN_IMAGES.items()
        if gpu and build_of(Torch("2.13.0", build)).runs_on(find_gpu(gpu))
    )
    return next(fits, PLAIN_IMAGES["cu126"])


def secrets_of(job: Job, target: Target) -> tuple[str, ...]:
    """Names of the variables that a run needs there, and of those that travel where they are set:
    of its trackers, of the addresses of its data and store, and the Hub's token.
    """
    schemes = {
        address.partition("://")[0]
        for address in (job.output_store or "", *job.data.train, *job.data.eval)
    }
    is_strangers = target.is_rented or target.name == "kubernetes"
    needed = {*job.train.report_to, *(schemes if is_strangers else ())}
    names = {
        row["name"]
        for row in facts("variables")
        if (row["use"] in needed and row["is_needed"])
        or (row["use"] in needed | schemes and os.environ.get(row["name"]))
    }
    return tuple(sorted(names | ({"HF_TOKEN"} if os.environ.get("HF_TOKEN") else set())))


# ---- what may be launched ----


def prepare(job: Job, wishes: Wishes, now: datetime, *, asks: bool = True) -> Prepared:
    """Everything up to the first request. Raises `InputError`.

    A launch that asks for no machine, only after those that there are, needs no plan and no data:
    those may have changed.
    """
    named = find_target(wishes.on) if wishes.on else None
    if named is not None and not asks and named[0].is_rented:
        return Prepared(job, *named, wishes)
    if named is not None and asks:
        _refuse_what_cannot_work(job, *named, wishes)  # before anything is planned
    if named is not None and not named[0].providers:
        prepared = Prepared(job, *named, wishes, _own_offers(job, *named, now.date()))
    else:
        prepared = _planned(job, wishes, named, now)
    target = prepared.target
    if named is None:
        _refuse_what_cannot_work(job, target, "", wishes)
    if target.name in OWN_FOLDERS:
        return prepared
    prepared = replace(prepared, packed=pack(job))
    files = [path for path, _ in prepared.packed.files]
    outside = [str(path) for path in files if not path.is_relative_to(job.output_dir)]
    if outside and not prepared.travels:  # on a volume with the run folder, and nothing else
        raise InputError(
            "a file of this machine, which has no way there without a store",
            where=outside[0],
            to_do="set output_store, or move it into the run folder on that volume",
        )
    return prepared


def _own_offers(job: Job, target: Target, at: str, today: date) -> tuple[Offer, ...]:
    """Machines that no price table has, at the price that the job names."""
    hosts = [HERE if target.name == HERE else ""]
    if target.name == "ssh":
        hosts = [host for host in at.split(",") if host]
    for host in hosts:
        if host.startswith("-") or re.search(r"[\s'\"`$;&|<>]", host):
            to_do = "name it as ssh knows it: user@host, or of its config"
            raise InputError(f"{host!r} is no host", where="--on", to_do=to_do)
    gpu = job.where.gpu[0] if job.where.gpu else "L4" if target.name == "hf" else ""
    offers = tuple(
        Offer(
            target.title,
            host,
            gpu,
            int(job.where.device != "cpu"),
            "",
            "",
            job.where.spot and target.name != "hf",
            "machine_hour",
            job.usd_per_hour,
            "the job's own price: where.usd_per_hour and electricity",
            today,
            Billing(target.title),
        )
        for host in hosts
    )
    if called(target, offers[0]) is None:
        raise InputError(
            f"{target.title} has no {gpu}", where="where.gpu", to_do="name another GPU"
        )
    return offers


def _planned(job: Job, wishes: Wishes, named: tuple[Target, str] | None, now: datetime) -> Prepared:
    """A launch with the offers of the plan that the target, or any, can rent, the best first."""
    providers = named[0].providers if named else ()
    # where one is, no rank of the whole plan is asked for
    is_one = len(providers) == 1 and not wishes.offer and not job.where.provider
    # no more GPUs are paid for than the job would use
    most = 8 if job.where.gpus == "all" else job.where.gpus or 1
    asked = PlanOptions(
        provider=providers if is_one else (),
        max_gpus=8 if wishes.offer else most,
        prices=wishes.prices,
        is_local=bool(wishes.offer),
    )
    study = study_job(job, asked, now=now)
    plans = list(study.answer.plans)
    if wishes.offer and wishes.find is not None:
        plans = _chosen(study, wishes.find(study, wishes.offer), most)
    plans = [p for p in plans if not p.on.machine.is_local and p.offer.n_gpus <= most]
    target = named[0] if named else next(filter(None, (target_of(p.offer) for p in plans)), None)
    found: dict[tuple[object, ...], OfferPlan] = {}
    for plan in plans:
        offer = plan.offer
        if target is None or offer.provider not in target.providers:
            continue
        if called(target, offer) is not None:
            instance = offer.instance if target.rents_instances else ""
            kind = offer.provider, offer.gpu, offer.n_gpus, offer.is_spot, instance
            found.setdefault(kind, plan)
    if target is None or not found:
        what = (
            f"no offer of {', '.join(providers) or 'a provider that can be rented from'} can do"
            " this job"
        )
        if wishes.offer and plans:
            offer = plans[0].offer
            renter = target.title if target else "farthing"
            what = (
                f"`{wishes.offer}` is {offer.n_gpus}x {offer.gpu} at {offer.provider}, which"
                f" {renter} can't rent"
            )
        raise InputError(
            what,
            where="--offer" if wishes.offer else "the plan",
            to_do=(
                "see `farthing plan`; rent by hand and launch with --on ssh:HOST, or allow more"
                " GPUs and providers"
            ),
        )
    at = named[1] if named else ""
    refuse_nowhere(target, at)
    ours = {plan.offer: plan for plan in found.values()}
    return Prepared(job, target, at, wishes, (*ours,), ours, n_steps=study.answer.n_steps)


def _chosen(study: Any, row: Any, most: int) -> list[OfferPlan]:
    """The plans of a choice of `farthing plan`. Raises `InputError`."""
    found = [
        plan
        for plan in study.answer.plans
        if (plan.offer.provider, plan.on.machine.gpu) == (row.provider, row.gpu)
        and (max(1, plan.offer.n_gpus), plan.offer.is_spot) == (row.n_gpus, row.kind == "spot")
    ]
    if found[0].on.machine.is_local:
        raise InputError(
            "that is this machine", where="--offer", to_do="`farthing train`, or --on local"
        )
    if row.n_gpus > most:
        raise InputError(
            f"{row.n_gpus} GPUs, of which the job would use {most}",
            where="--offer",
            to_do=(
                "take an offer of one GPU, or set where.gpus: all (several GPUs were never tried on"
                " real ones)"
            ),
        )
    return found


def _is_here(place: str) -> bool:
    """Whether a tracker's address means this machine: a file, or a server on it."""
    parts = urlsplit(place)
    is_file = parts.scheme.partition("+")[0] in ("file", "sqlite") or place.startswith(("/", "."))
    return is_file or (parts.hostname or "").startswith(("localhost", "127.", "::1"))


def _refuse_what_cannot_work(job: Job, target: Target, at: str, wishes: Wishes) -> None:
    """Raise `InputError` for what can be told without a plan."""
    for is_so, what, where, to_do in _refusals(job, target, at, wishes):
        if is_so:
            raise InputError(what, where=where, to_do=to_do)


def _refusals(
    job: Job, target: Target, at: str, wishes: Wishes
) -> Iterator[tuple[object, str, str, str]]:
    """(whether it is so, what is wrong, where, what to do)."""
    store, limits, names = job.output_store or "", job.limits, (*job.data.train, *job.data.eval)
    is_rented, is_shared = target.is_rented, _shares(target, at)
    leaves, is_plain = target.name not in OWN_FOLDERS, not (wishes.image or wishes.install)
    brings = "name an image that has it (--image), or a pip requirement (--install)"
    attention = job.model.attn_implementation
    yield (
        leaves and is_plain and attention not in (None, *ATTENTION_OF_TORCH),
        "no package with this attention is installed there",
        f"model.attn_implementation: {attention}",
        f"use {' or '.join(ATTENTION_OF_TORCH)}, or {brings}",
    )
    for name in names:
        parts = name.split("::")
        is_file = any(part.startswith(("file:", "/", ".", "~")) for part in parts)
        yield (
            leaves and is_remote(name) and is_file,
            "an address of a file that only this machine has",
            f"data: {without_secrets(name)}",
            "name the file by its path: then it travels",
        )
    for tracker, variable in TRACKER_PLACES:
        place = os.environ.get(variable, "")
        yield (
            leaves and tracker in job.train.report_to and _is_here(place),
            "a tracker on this machine can't be told anything from another one",
            f"{variable}={without_secrets(place)}",
            "export the address of a server, or take it out of train.report_to",
        )
    also = " (or --on kubernetes:NAMESPACE/CLAIM, with the run folder on that volume)"
    yield (
        not store and not is_shared,
        "the run would be lost with the machine: the job has no store",
        "output_store",
        "set output_store: s3://bucket/prefix, or another place that both sides reach"
        + (also if target.name == "kubernetes" else ""),
    )
    yield (
        is_rented and store and (not is_remote(store) or store.startswith("file:")),
        "a rented machine does not see this folder",
        f"output_store: {store}",
        "name a bucket: s3://bucket/prefix, gs://bucket/prefix",
    )
    has_key = target.name in ("vertex", "skypilot") or os.environ.get(GOOGLE_KEY)
    yield (
        is_rented and store.startswith("gs://") and not has_key,
        f"credentials of Google Cloud are a file, which does not travel to {target.title}",
        f"output_store: {store}",
        f'export {GOOGLE_KEY}="$(cat key.json)" of a service account, or use --on vertex',
    )
    yield (
        is_rented and store.startswith("az://") and not any(map(os.environ.get, AZURE_KEYS)),
        f"no key of that container is set here, to travel to {target.title}",
        f"output_store: {store}",
        f"export one of {', '.join(AZURE_KEYS)}",
    )
    yield (
        is_rented and not limits.is_set,
        "the job has no limit on its cost",
        "limits",
        "set limits.max_usd, e.g. --set limits.max_usd=5",
    )
    varied = next((key for key, values in job.search.vary.items() if _has_files(values)), "")
    yield (
        varied and not is_shared,
        "files that only this machine has do not travel as choices of a search",
        f"search.vary.{varied}",
        "name a model or data set of the Hub, or run `farthing search` where the files are",
    )
    absent = lacking(modules_of(job)) if target.name == HERE else []
    yield (
        absent,
        f"not installed here: {', '.join(absent)}",
        "the job",
        f"pip install 'farthing[{','.join(EXTRA_OF[name] for name in absent)}]'",
    )
    yield (
        leaves and job.model.from_run is not None,
        "the weights of another run do not travel",
        f"model.from_run: {job.model.from_run}",
        "farthing export that run, and name the exported folder as the model",
    )
    package = package_of(job.task)
    yield (
        leaves and package and is_plain,
        f"the objective is in the package {package}, which does not travel",
        f"objective: {job.task}",
        brings,
    )
    yield (
        not target.providers and job.usd_per_hour == 0 and limits.max_usd is not None,
        "a cap in dollars does not hold without a price",
        "where.usd_per_hour",
        "give the price of an hour there, or limits.max_hours in place of limits.max_usd",
    )
    yield (
        is_rented and job.train.push_to_hub and not os.environ.get("HF_TOKEN"),
        "the machine could not push to the Hub: HF_TOKEN is not set here",
        "train.push_to_hub",
        "export HF_TOKEN=... (the login of `hf auth login` is a file, which does not travel)",
    )
    secret = next((name for name in names if name != without_secrets(name)), "")
    yield (
        secret,
        "an address with a password, key or signature does not travel",
        without_secrets(secret),
        "give the address without it, and the key in the environment of the machine",
    )
