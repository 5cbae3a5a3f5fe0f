"""Doing it: files written, inputs sent, machines asked for, watched and given back; and asking how
a launch stands.

Everything here is one call of the command line.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import yaml

from farthing.clock import seconds_since_boot, steady_clock
from farthing.config.job import Job
from farthing.errors import (
    FarthingError,
    InputError,
    RunBusyError,
    RunInterruptedError,
    StoreUnavailableError,
)
from farthing.launch.commands import CommandDriver
from farthing.launch.driver import Driver, ProviderError, UnauthorizedError, UnclearError
from farthing.launch.inputs import INPUTS, Packed, inputs_key, send_inputs, with_token_sets
from farthing.launch.machines import MachineLedger, bill_by_machine
from farthing.launch.prepare import Prepared, launch_id_of, secrets_of
from farthing.launch.request import TEARDOWN_S, LaunchRequest, Patience, values_of
from farthing.launch.still_billed import still_billed
from farthing.launch.supervise import Launch
from farthing.launch.targets.hosts import HostDriver
from farthing.launch.wheel import wheel_of_this
from farthing.launch.words import StoreWords
from farthing.planner.types import AGED_PRICE_DAYS, OfferPlan
from farthing.prices.offers import boot_of
from farthing.run.accounts import read_ledger
from farthing.run.commits import take_run
from farthing.run.folder import LEDGER, run_id_of
from farthing.storage.files import Json, cannot_write, make_private, only_writer, write_text
from farthing.storage.lease import Lease, LeaseLostError
from farthing.storage.objects import Retrying, Store, StoreError, open_store
from farthing.units import plural, say_bytes, say_seconds, say_usd

FOLDER = "launch"
JOB_KEPT = f"{FOLDER}/launched.yaml"
"""In the run folder: the job that was launched, for commands that name none."""
STORE_S, LOOK_S, LEASE_S = 120.0, 15.0, 60.0
Say = Callable[[str], None]


class Session:
    """A launch of one run, from this machine."""

    def __init__(
        self, prepared: Prepared, say: Say, *, clock: Callable[[], float] | None = None
    ) -> None:
        self.prepared, self.say, self.clock = prepared, say, clock or steady_clock()
        self.folder = Path(prepared.job.output_dir)
        self.ledger = MachineLedger(self.folder)

    # ---- files ----

    def files_of(self, ask: LaunchRequest) -> dict[str, str]:
        """Checked. Raises `InputError` for files that the target would not take."""
        files = self.prepared.target.files(ask)
        wrong = self.prepared.target.check(files)
        if wrong:
            raise InputError(
                "the files would be refused:\n    " + "\n    ".join(wrong),
                where=f"--on {self.prepared.target.name}",
                to_do="add --image or --on TARGET:WHERE, or choose another target",
            )
        return files

    def write(self, ask: LaunchRequest) -> Path:
        """The files of a machine, in `launch/NAME/` of the run folder."""
        folder = make_private(make_private(self.folder / FOLDER) / ask.name)
        for name, text in self.files_of(ask).items():
            write_text(folder / name, text)
        if self.prepared.folder and self.prepared.target.name != "local":
            wheel = wheel_of_this()
            (folder / wheel.name).write_bytes(wheel.content)
        return folder

    # ---- dry ----

    def next_ask(self) -> LaunchRequest:
        """What would be asked for first. Raises `NoBudgetError`."""
        accounts, first = read_ledger(self.folder / LEDGER).accounts, self.prepared.offers[0]
        return self.prepared.ask(
            self.ledger.next_number, first, self.ledger, accounts, self.clock()
        )

    # ---- doing ----

    def run(
        self,
        *,
        is_attended: bool,
        tokenize: Callable[[], list[Path]],
        patience: Patience | None = None,
        is_new: bool = True,
    ) -> int:
        """Rent, watch and give back until the run has ended; the exit code. Raises `InputError`,
        `StoreUnavailableError`.

        With `is_new` False there has to be a machine already.
        """
        driver, prepared = self.driver(), self.prepared
        if not is_new and not self.ledger.open and not self._there(driver):
            raise InputError(
                "no machine of this launch is there", where="attach", to_do="rent one with --yes"
            )
        if prepared.target.is_rented and not (driver.ends_by_itself or is_attended):
            raise InputError(
                "if this process dies, this provider does not end the machine: you would pay for"
                " it until you end it",
                where="--on",
                to_do="stay with it and say so with --attended, or take another target",
            )
        if prepared.target.takes_values:  # refuse a missing secret before anything is sent
            values_of(secrets_of(prepared.job, prepared.target))
        with only_writer(make_private(make_private(self.folder) / FOLDER)):
            kept = prepared.job.model_dump(mode="json", exclude_unset=True)
            write_text(self.folder / JOB_KEPT, yaml.safe_dump(kept, sort_keys=False))
            with contextlib.suppress(RunInterruptedError):  # the launch itself waits for an answer
                self._there(driver)  # whoever refuses the key refuses it before anything is sent
            if prepared.travels:
                self._send(tokenize)
            with self.only_watcher() as (sleep, reclaim):
                self.words().ask_to_stop(is_wanted=False)
                try:
                    code = self._launch(driver, patience, sleep, reclaim).run()
                except OSError as error:  # of the files before a request: nothing was rented by it
                    raise cannot_write(self.folder, error) from error
        self.bring_back()
        return code

    def _there(self, driver: Driver) -> dict[str, str]:
        """By name. Raises `InputError` for refused credentials, `RunInterruptedError`."""
        try:
            return driver.names(self.prepared.launch_id)
        except UnauthorizedError as error:
            raise InputError(
                f"{self.prepared.target.title} refuses the credentials ({error})",
                where="environment",
                to_do="export a valid key",
            ) from error
        except ProviderError as error:
            name = self.prepared.target.title
            raise RunInterruptedError(
                f"{name} does not answer ({error})", where="--on", to_do="try again when it does"
            ) from error

    @contextlib.contextmanager
    def only_watcher(self) -> Iterator[tuple[Callable[[float], None], Callable[[], None]]]:
        """Hold the launch against processes on other machines, by a lease in the store as the run
        itself is held; gives a `sleep` that keeps it and a call that makes sure of it. Raises
        `RunBusyError`, `StoreUnavailableError`.
        """
        if self.prepared.job.output_store is None:
            # all who could watch see the run folder, and its lock
            yield time.sleep, lambda: None
            return
        place = f"{self.prepared.job.output_store.rstrip('/')}/launch/{self.prepared.launch_id}"
        opened = open_store(place)
        store = Retrying(opened, STORE_S)
        lease = Lease(self.folder / FOLDER, LEASE_S, list, self.say)

        def reclaim() -> None:
            """Raises `RunInterruptedError`, `UnclearError`."""
            try:
                lease.renew(Retrying(opened, LOOK_S))  # the machine is looked at meanwhile
            except LeaseLostError as error:
                raise RunInterruptedError(
                    f"another process has taken this launch over ({error}); its machines are left"
                    " to it",
                    where=str(self.prepared.job.output_store),
                    to_do="farthing launch status JOB shows them",
                ) from error
            except StoreError as error:
                raise UnclearError(f"the store does not answer ({error})") from error

        def sleep(seconds: float) -> None:
            time.sleep(seconds)
            if seconds_since_boot() - lease.renewed_at > LEASE_S / 3:
                # without a store nobody else can take the launch either
                with contextlib.suppress(UnclearError):
                    reclaim()

        try:
            lease.claim(store, lambda: False)
        except LeaseLostError as error:
            raise RunBusyError(
                f"another process watches this launch ({error})",
                where=str(self.prepared.job.output_store),
                to_do="let it, or end it; launch status and launch stop work from anywhere",
            ) from error
        except StoreError as error:
            raise StoreUnavailableError(
                f"the store does not answer ({error})", to_do="try again when it does"
            ) from error
        try:
            yield sleep, reclaim
        finally:
            with contextlib.suppress(StoreError, LeaseLostError):
                lease.release(store)

    def stop(self, patience: Patience | None = None) -> bool:
        """Destroy every machine, for sure. False where the store could not be read."""
        try:
            self.words(LOOK_S).ask_to_stop(is_wanted=True)
        except UnclearError as error:
            self.say(
                f"the store does not answer ({error}): a process that watches elsewhere is not"
                " told, end it yourself"
            )
        return self._launch(self.driver(), patience).stop()

    def _launch(
        self,
        driver: Driver,
        patience: Patience | None,
        sleep: Callable[[float], None] = time.sleep,
        reclaim: Callable[[], None] = lambda: None,
    ) -> Launch:
        return Launch(
            self.prepared,
            self.ledger,
            driver,
            self.words(LOOK_S),
            self.write,
            self.say,
            self.clock,
            sleep,
            awake=seconds_since_boot,
            patience=patience or Patience(boot_s=self.prepared.wishes.boot_s),
            reclaim=reclaim,
        )

    def _send(self, tokenize: Callable[[], list[Path]]) -> None:
        packed = self.prepared.packed
        if packed.files:
            packed = with_token_sets(packed, tokenize())
        if not self.prepared.wishes.install:
            wheel = wheel_of_this()
            path = make_private(self.folder / FOLDER) / wheel.name
            path.write_bytes(wheel.content)
            packed = Packed((*packed.files, (path, f"{INPUTS}/{wheel.name}")), packed.values)
        self.say(
            f"inputs: {len(packed.files)} files, {say_bytes(packed.n_bytes)}; sending the missing"
            " files to the store"
        )
        sent = send_inputs(self._store(), packed, inputs_key(self.prepared.launch_id))
        self.say(f"inputs: {say_bytes(sent)} sent")

    @cached_property
    def _opened(self) -> Store:
        return open_store(self.prepared.job.output_store or str(self.folder))

    def _store(self, patient_s: float = STORE_S) -> Store:
        return Retrying(self._opened, patient_s)

    def words(self, patient_s: float = STORE_S) -> StoreWords:
        """Where the machines' words are."""
        is_shared = self.prepared.folder and self.prepared.job.output_store is None
        shared = Path(self.prepared.folder) if is_shared else None
        return StoreWords(self._store(patient_s), self.prepared.launch_id, shared)

    def driver(self) -> Driver:
        """Raises `InputError` where its command is not there or a key is not set."""
        target = self.prepared.target
        program = target.program
        if target.name == "ssh":
            program = shlex.split(os.environ.get("FARTHING_SSH", program))[0]
        if program and shutil.which(program) is None:
            raise InputError(
                f"there is no command `{program}` here", where="PATH", to_do=target.install
            )
        if target.client is not None:
            return target.connect()
        if target.commands is not None:
            commands = target.commands(self.prepared.at)
            return CommandDriver(commands, self.write, restarts=target.name != "hf")
        hosts = [offer.instance for offer in self.prepared.offers]
        return HostDriver(hosts, self.prepared.folder)

    # ---- afterwards, and meanwhile ----

    def open_in_words(self) -> list[str]:
        """Each machine that may still be billed, with its price and its latest end."""
        return self.ledger.open_in_words(self.driver().ends_by_itself, self.clock())

    def bring_back(self) -> None:
        """Run and model from the store into a run folder that holds no other run."""
        if self.prepared.folder or self.prepared.job.output_store is None:
            return
        try:
            take_run(self._store(), self.folder, self.say)
        except (StoreError, FarthingError, OSError) as error:
            self.say(f"the run is in the store, and could not be brought back: {error}")

    def _take_in(self) -> str:
        """What the store knows of machines, to look at; why it could not be asked, else empty."""
        try:
            self.ledger.take_over(self.words(LOOK_S).kept(), to_disk=False)
        except UnclearError as error:
            return f"the store does not answer ({error})"
        return ""

    def standing(self) -> Json:
        """Every machine with its seconds and dollars, and how far the run is."""
        prepared, accounts = self.prepared, read_ledger(self.folder / LEDGER).accounts
        step, n_bytes, there, now = None, 0, None, self.clock()
        not_known = [self._take_in()]
        if not not_known[0]:
            try:
                words = self.words(LOOK_S)
                accounts, step = words.accounts() or accounts, words.committed()
                if prepared.job.output_store is not None:
                    entries = self._store(LOOK_S).list("").values()
                    n_bytes = sum(entry.n_bytes for entry in entries)
            except (UnclearError, StoreError) as error:
                not_known = [f"the store does not answer ({error})"]
        try:
            driver = self.driver()
            there = self._there(driver)
            now += driver.clock_offset_s
        except (InputError, RunInterruptedError) as error:
            not_known.append(str(error).splitlines()[0])
        rows = bill_by_machine(list(self.ledger.machines.values()), accounts, now)
        return {
            "kind": "farthing launch",
            "launch": prepared.launch_id,
            "target": prepared.target.name,
            "run": str(self.folder),
            "run_id": run_id_of(self.folder),
            "machines": rows,
            "there_now": there,
            "not_known": "; ".join(filter(None, not_known)),
            "damaged": self.ledger.damaged_in_words(),
            "committed_step": step,
            "usd": sum(row["usd"] for row in rows),
            "still_billed": still_billed(prepared.job.model_dump(mode="json"), rows, n_bytes),
        }

    def log(self) -> str:
        """The end of what the newest machine has printed. Raises `InputError`."""
        if why := self._take_in():
            self.say(f"{why}: only machines known here are looked at")
        if not self.ledger.machines:
            raise InputError(
                "nothing has been launched yet",
                where=str(self.folder),
                to_do="launch it with --yes",
            )
        newest = list(self.ledger.machines.values())[-1]
        try:
            said = self.words().log(newest.name) or self.driver().log(newest)
        except ProviderError as error:
            raise InputError(f"no logs ({error})", where=newest.name, to_do="try again") from error
        return said or f"{newest.name} has printed nothing yet"


def where_it_is(job: Job, *, only_open: bool) -> str | None:
    """The target of the newest machine of a job's launch, as --on names it: of those that may still
    cost money, else of all.

    None where none is known. Without a machine in this folder the store is asked, unless only open
    ones are wanted. Raises `StoreUnavailableError` where it does not answer.
    """
    ledger = MachineLedger(Path(job.output_dir))
    if not (only_open or ledger.machines) and job.output_store:
        words = StoreWords(Retrying(open_store(job.output_store), LOOK_S), launch_id_of(job))
        try:
            ledger.take_over(words.kept(), to_disk=False)
        except UnclearError as error:
            raise StoreUnavailableError(
                f"can't tell whether anything was launched: the store does not answer ({error})",
                where=job.output_store,
                to_do="try again when it does, or name where to look: --on TARGET",
            ) from error
    known = ledger.open or ([] if only_open else list(ledger.machines.values()))
    return next((machine.on or machine.target or None for machine in reversed(known)), None)


def paid_s(plan: OfferPlan) -> float:
    """Seconds of a plan that are paid for beside the boot: waiting for spot capacity is free."""
    return plan.wall_s - plan.seconds.get("setup", 0.0) - plan.seconds.get("waiting", 0.0)


def dry_view(
    session: Session,
    ask: LaunchRequest,
    folder: Path,
    files: Sequence[str],
    searches_s: float | None = None,
) -> Json:
    """As plain values. A search takes so many seconds; None: not known."""
    prepared, offer, rate = session.prepared, ask.offer, ask.usd_per_hour
    target, plan, boot = prepared.target, prepared.plans.get(offer), boot_of(offer.provider)
    train_s = None if plan is None else paid_s(plan)
    if prepared.job.search.is_asked:
        train_s = searches_s
    seconds = {"boot": boot.seconds, "train": train_s, "teardown": float(TEARDOWN_S)}
    if not target.is_rented:
        seconds |= {"boot": 0.0, "teardown": 0.0}
    usd_of = {name: s / 3600 * rate for name, s in seconds.items() if s is not None}
    of_offer = ("provider", "instance", "gpu", "n_gpus", "region", "is_spot")
    return {
        "kind": "farthing launch",
        "launch": prepared.launch_id,
        "name": ask.name,
        "target": target.name,
        "title": target.title,
        **{name: getattr(offer, name) for name in of_offer},
        "usd_per_hour": rate,
        "price_date": offer.date.isoformat(),
        "seconds": {name: seconds[name] for name in usd_of},
        "usd_of": usd_of,
        "planned_usd": None if train_s is None else sum(usd_of.values()),
        "boot_source": boot.source,
        "most_s": ask.most_s,
        "most_usd": ask.most_s / 3600 * rate,
        "max_usd": prepared.job.limits.max_usd,
        "ends": target.ends,
        "store": prepared.job.output_store,
        "inputs_bytes": prepared.packed.n_bytes,
        "n_inputs": len(prepared.packed.files),
        "secrets": list(ask.secrets),
        "image": ask.image,
        "folder": str(folder),
        "files": list(files),
        "next_offers": [
            f"{each.provider} {each.n_gpus}x {each.gpu} {each.kind}"
            if each.gpu
            else f"{each.provider} {each.instance}"
            for each in prepared.offers[1:6]
        ],
        "notes": notes_of(prepared, ask),
    }


def notes_of(prepared: Prepared, ask: LaunchRequest) -> list[str]:
    """What somebody should know before saying yes."""
    target, store = prepared.target, prepared.job.output_store
    kept = [name for name in prepared.job.train.report_to if name in ("tensorboard", "trackio")]
    plan, own = prepared.plans.get(ask.offer), prepared.wishes.prices
    age = 0 if plan is None else plan.price_age_days
    planned_s = 0.0 if plan is None else paid_s(plan) + boot_of(plan.offer.provider).seconds
    renewal = f"renew {own}" if own else "`farthing prices update` reads newer ones"
    notes = {
        f"nothing at {target.title} ends the machine when this process dies: --attended only": (
            not target.ends
        ),
        "it has no price (where.usd_per_hour): the bill is $0": not ask.usd_per_hour,
        f"{store} has to be the same folder on every host": (
            target.name == "ssh" and store and "://" not in store
        ),
        f"{target.keeps_billing[0] if target.keeps_billing else ''} is not counted here": (
            target.keeps_billing
        ),
        "the secrets have to be in Secret Manager of the project, each by the name of its"
        " variable": (target.name == "vertex" and ask.secrets),
        f"image: {ask.image}, on which this farthing is installed; --image names your own": (
            ask.image and not prepared.wishes.image
        ),
        "when_done does not run there: the launch gives the machine back": (
            prepared.job.when_done and target.is_rented
        ),
        "when_done does not run there, and only you can end that machine": (
            prepared.job.when_done and not target.is_rented
        ),
        f"{' and '.join(kept)} of train.report_to write on the machine alone, and go with it": (
            kept and not prepared.folder
        ),
        "HF_TOKEN is not set, and the login of `hf auth login` does not travel: a gated or private"
        " model can't be fetched there": (
            prepared.travels and not os.environ.get("HF_TOKEN") and _has_hub_login()
        ),
        f"the price is {age} days old: {renewal}": age >= AGED_PRICE_DAYS,
        "the plan takes longer than a limit allows: the run would stop unfinished": (
            planned_s > ask.most_s
        ),
        f"the price is the lowest of many hosts' on {ask.offer.date}: it may not be had": (
            ask.offer.billing.prices_are == "from"
        ),
    }
    return [note for note, is_so in notes.items() if is_so]


def _has_hub_login() -> bool:
    from huggingface_hub.constants import HF_TOKEN_PATH

    return Path(HF_TOKEN_PATH).is_file()


def said(view: Json) -> list[str]:
    """A dry run in lines for people."""
    price = f"{say_usd(view['usd_per_hour'])} an hour" if view["usd_per_hour"] else "no price"
    if view["target"] in ("local", "ssh", "slurm", "kubernetes"):
        where = " ".join(filter(None, (view["title"], view["instance"])))
        rows = [("would run", f"on {where}: {price}")]
    else:
        kind = "spot" if view["is_spot"] else "on demand"
        at = " by ".join(dict.fromkeys([view["provider"], view["title"]]))
        what = (
            f"{view['n_gpus']}x {view['gpu']}, {kind}"
            if view["gpu"]
            else view["instance"] or view["title"]
        )
        rows = [("would rent", f"{what} at {at}: {price} ({view['price_date']})")]
    if view["planned_usd"] is not None:
        parts = (
            f"{name} {say_usd(usd)} ({say_seconds(view['seconds'][name])})"
            for name, usd in view["usd_of"].items()
        )
        rows.append(("planned", f"{say_usd(view['planned_usd'])}: {', '.join(parts)}"))
    most = "nothing limits its time there"
    if view["most_s"] < 365 * 86400:
        cap = f" of {say_usd(view['max_usd'])}" if view["max_usd"] is not None else ""
        usd = f"{say_usd(view['most_usd'])}{cap}" if view["usd_per_hour"] else "dollars not known"
        most = f"{say_seconds(view['most_s'])}, {usd}"
    rows += [("at most", most), ("ended by", view["ends"] or "nothing but this process")]
    if view["n_inputs"]:
        size = say_bytes(view["inputs_bytes"])
        files = plural(view["n_inputs"], "file")
        rows.append(("goes along", f"{files}, {size}, by way of {view['store']}"))
    if view["secrets"]:
        names = ", ".join(view["secrets"])
        rows.append(("secrets", f"{names}: by name, the values are in no file"))
    if view["next_offers"]:
        rows.append(("then", "; ".join(view["next_offers"])))
    rows += [("note", note) for note in view["notes"]]
    rows.append(("wrote", f"{view['folder']}: {', '.join(view['files'])}"))
    return [f"{name:<12} {text}" for name, text in rows]
