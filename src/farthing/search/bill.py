"""What a search will cost: the plans of its trials, at the rungs that each is expected to reach.

Settings that change no cost share a plan. The planner is asked for whole trainings; a trial takes
its share of the training and evaluation, and every process its start.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from farthing import api
from farthing.clock import today
from farthing.config.job import Job
from farthing.errors import InputError
from farthing.models.model_config import find_config
from farthing.models.shapes import read_shape
from farthing.planner.serving import Traffic, serve
from farthing.planner.types import Assumptions
from farthing.prices.catalog import read_catalog
from farthing.search.halving import SHARES, Rungs, least_difference, rungs_of, shares_of
from farthing.search.space import by_model, draw, job_of, model_of, n_choices, values_with
from farthing.storage.files import Json

if TYPE_CHECKING:
    from farthing.report.plan_types import Choice
    from farthing.report.plan_view import PlanView

FREE = {
    *("learning_rate", "weight_decay", "seed", "warmup_ratio", "warmup_steps", "warmup_epochs"),
    *("lr_scheduler_type", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("label_smoothing_factor", "neftune_noise_alpha", "lora_alpha", "lora_dropout"),
    *("use_rslora", "init_lora_weights", "loraplus_lr_ratio"),
}
"""Keys whose value changes no cost."""
ONE_GPU = {"gpus": 1}
MOST_PLANS, MOST_AFFORDED = 6, 81
"""Kinds of trials that are planned; trials of a search that only a cap bounds."""
N_DRAWN = 24
KEPT_BACK = 0.15
"""Of the cap, for restarts and for trials that cost more than planned."""
OF_TRAINING = ("training", "checkpoints")
SEGMENT_S = 0.4
"""That each segment of a trial takes besides its model: to open data and run, and to leave."""


@dataclass(frozen=True)
class Place:
    """A machine, and the plan of each kind of trial on one of its GPUs."""

    machine: Choice
    at_a_time: int
    trials: Sequence[Choice]


@dataclass(frozen=True)
class Bill:
    """What searches of any size would cost, by machine."""

    job: Job
    places: Sequence[Place]
    n_parameters: Mapping[str, int]
    """By model that is a choice."""
    usd_per_million_tokens: Mapping[str, float]
    """Of answering with it on the machine that is cheapest at full load; by model that writes."""
    n_eval: int
    n_evaluations: int
    """Of one full training."""
    load_s: float
    """Of a model, which every segment of a trial loads again."""

    def of(self, n_trials: int) -> Json:
        """The bill of so many trials."""
        at_rungs = Counter[float]()
        for rungs, n in self._brackets(n_trials):
            at_rungs.update(dict(zip(rungs.fractions, rungs.n_trials(n), strict=True)))
        rows = [self._row(place, n_trials) for place in self.places]
        rows.sort(key=lambda row: (row["usd"], row["hours"]))
        section = self.job.search
        best = rows[0] if rows else None
        here = next((row for row in rows if row["kind"] == "here"), None)
        return {
            "trials": n_trials,
            "rungs": [{"fraction": each, "trials": at_rungs[each]} for each in sorted(at_rungs)],
            "full_trainings": sum(rungs.full_runs(n) for rungs, n in self._brackets(n_trials)),
            "n_settings": n_choices(section) if section.vary else 1,
            "max_usd": self.job.limits.max_usd,
            "machines": rows,
            "best": best,
            "here": here,
            "n_parameters": dict(self.n_parameters),
            "usd_per_million_tokens": dict(self.usd_per_million_tokens),
            "n_eval": self.n_eval,
            "warnings": self._warnings(n_trials, here or best),
        }

    def n_trials(self, most: int) -> int:
        """Trials of the search: as the job says, as the cap allows, or `most`; no more than there
        are settings.
        """
        section = self.job.search
        wanted = section.trials or self.affordable or most
        n = n_choices(section) if section.vary else 1
        return wanted if n is None else min(wanted, n)

    @property
    def affordable(self) -> int | None:
        """Trials that the cap pays for on this machine, or on the cheapest one; None without a cap
        or a price.
        """
        cap_usd = self.job.limits.max_usd
        there = [place for place in self.places if place.machine.kind == "here"] or self.places
        if cap_usd is None or not there:
            return None
        place = min(there, key=lambda each: float(self._row(each, 1)["usd"]))
        if self._row(place, 1)["usd"] <= 0:
            return None
        n, most = 1, n_choices(self.job.search) or MOST_AFFORDED
        room = cap_usd * (1 - KEPT_BACK)
        while n < most and self._row(place, n + 1)["usd"] <= room:
            n += 1
        return n

    def _brackets(self, n_trials: int) -> list[tuple[Rungs, int]]:
        """Rungs and trials of each; with `stop_at` a model has one of its own."""
        section = self.job.search
        parts = shares_of(n_trials, len(by_model(section)) if section.stop_at else 1)
        factor, least = section.reduction_factor, section.min_fraction
        return [(rungs_of(factor, least, n), n) for n in parts]

    def _row(self, place: Place, n_trials: int) -> Json:
        """What a machine takes for it: the mean over kinds of trials."""
        machine, section, choices = place.machine, self.job.search, place.trials

        def mean(*names: str) -> float:
            return sum(row.seconds.get(each, 0) for row in choices for each in names) / len(choices)

        of_one = mean("evaluation") / max(1, self.n_evaluations) / (2 if section.stop_at else 1)
        wall_s, shares = mean("start-up", "tokenizing"), list[float]()
        for rungs, n in self._brackets(n_trials):
            full_s = mean(*OF_TRAINING) + of_one / rungs.fractions[0]
            before = 0.0
            for fraction, at_rung in zip(rungs.fractions, rungs.n_trials(n), strict=True):
                segment_s = SEGMENT_S + self.load_s + (fraction - before) * full_s
                before, wall_s = fraction, wall_s + ceil(at_rung / place.at_a_time) * segment_s
            wall_s += ceil(at_rung / place.at_a_time) * mean("export")
            if section.stop_at:
                wall_s += self.load_s + of_one
            shares = sorted(share for share in section.data_fraction if share < 1)[::-1]
            wall_s += (n == n_trials) * sum(shares[:: place.at_a_time]) * full_s
        of_machine = ("start-up", "tokenizing", "evaluation", "export", *OF_TRAINING)
        wall_s += sum(each for name, each in machine.seconds.items() if name not in of_machine)
        spread = [each / max(machine.hours, 1e-12) for each in machine.hours_range]
        hours = wall_s / 3600
        rate = machine.total_usd / max(machine.hours, 1e-12) if machine.total_usd else 0.0
        return {
            "name": machine.name,
            "kind": machine.kind,
            "usd": hours * rate,
            "usd_range": [hours * rate * each for each in spread],
            "hours": hours,
            "hours_range": [hours * each for each in spread],
            "usd_of_one_full_training": sum(row.total_usd for row in choices) / len(choices),
        }

    def _warnings(self, n_trials: int, row: Mapping[str, Any] | None) -> list[str]:
        found = []
        metric = (self.job.train.metric_for_best_model or "loss").removeprefix("eval_")
        if metric in SHARES:
            found.append(
                f"{self.n_eval:,} evaluation examples: two settings whose {metric} differs by less"
                f" than {100 * least_difference(self.n_eval):.1f} points can't be told apart"
            )
        cap_usd, factor = self.job.limits.max_usd, self.job.search.reduction_factor
        if cap_usd is not None and row is not None and row["usd"] > cap_usd:
            found.append(
                f"the cap of ${cap_usd:g} pays for {self.affordable or 0} trials, not {n_trials}:"
                " the search would stop before it has a winner"
            )
        if 1 < n_trials < factor:
            found.append(
                f"{n_trials} trials can't be told apart by halving: fewer than the"
                f" reduction_factor of {factor}"
            )
        return found


def priced(job: Job, place: str, **asked: Any) -> Bill | None:
    """The bill of a search; None where its trials can't be planned. `asked` as for `api.plan`."""
    views = []
    machines: PlanView | None = None
    sizes: dict[str, int] = {}
    serving: dict[str, float] = {}
    seen: set[str] = set()
    for settings in _samples(job):
        kind = str({key: settings[key] for key in settings if key.split(".")[-1] not in FREE})
        if kind in seen or len(seen) >= MOST_PLANS:
            continue
        seen.add(kind)
        values = {key: part for key, part in values_with(job, settings).items() if key != "limits"}
        with contextlib.suppress(InputError):
            trial = job_of(values, place)
            if machines is None and job.where.gpus is not None:
                machines = api.plan(trial, **asked).view
            alone = trial.model_copy(update={"where": trial.where.model_copy(update=ONE_GPU)})
            plan = api.plan(alone, **asked)
            views.append(plan.view)
            model = model_of(settings)
            if model is not None:
                sizes[str(model)] = plan.view.job.n_parameters
                config, _ = find_config(trial.model.model_name_or_path, trial.model.revision)
                offers = read_catalog(asked.get("prices"), today()).offers
                served, _ = serve(read_shape(config, job.task), Traffic(), list(offers))
                if served:
                    serving[str(model)] = min(each.usd_per_million_tokens for each in served)
    if not views:
        return None
    of_one = views[0].job
    bytes_of_weights = sum(2.0 * view.job.n_parameters for view in views) / len(views)
    load_s = bytes_of_weights / Assumptions().load_bytes_per_s
    return Bill(
        job,
        _places(job, machines or views[0], views),
        sizes,
        serving,
        of_one.n_eval_examples,
        of_one.n_evaluations,
        load_s,
    )


def _places(job: Job, machines: PlanView, views: Sequence[PlanView]) -> list[Place]:
    """Machines on one GPU of which every kind of trial can be done, the cheapest first."""
    found: dict[str, Place] = {}
    for machine in machines.plans:
        wanted, trials = job.where.gpus or 1, [_on_one(machine, view) for view in views]
        at_a_time = max(1, machine.n_gpus) if wanted == "all" else int(wanted)
        if all(trials):
            there = [trial for trial in trials if trial is not None]
            found.setdefault(machine.name, Place(machine, at_a_time, there))
    return list(found.values())


def _on_one(machine: Choice, view: PlanView) -> Choice | None:
    """The choice of one GPU of a machine in a plan."""
    rows = [row for row in view.plans if row.gpu == machine.gpu and row.is_cpu == machine.is_cpu]
    is_here = machine.kind == "here"
    same = [row for row in rows if row.kind == machine.kind and row.provider == machine.provider]
    rows = same or [row for row in rows if is_here == (row.kind == "here")]
    return next(iter(rows), None)


def _samples(job: Job) -> list[Json]:
    """Settings as a search would begin with; of a small grid all, so that no model is left out."""
    section = job.search.model_copy(update={"sampler": "random"})
    found: list[Json] = []
    for number in range(N_DRAWN if section.vary else 0):
        settings = draw(section, number, [(each, None) for each in found], greater_is_better=True)
        if settings is None:
            break
        found.append(settings)
    return found or [{}]
