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
MOST_PLANS, MOST_AFFORDED = 6, 81
"""Kinds of trials that are planned; trials of a search that only a cap bounds."""
N_DRAWN = 24
KEPT_BACK = 0.15
"""Of the cap, for restarts and for trials that cost more than planned."""
OF_TRAINING = ("training", "checkpoints")
OF_TRIALS = ("start-up", "tokenizing", "evaluation", "export", *OF_TRAINING)
"""Parts of a plan that are counted for each trial; the others once for the machine."""
SEGMENT_S = 0.4
"""That each segment of a trial takes besides its model: to open data and run, and to leave."""


@dataclass(frozen=True)
class PlannedMachine:
    """A machine, and the plan of each kind of trial on one of its GPUs."""

    machine: Choice
    at_a_time: int
    trials: Sequence[Choice]

    def mean_s(self, *parts: str) -> float:
        """Seconds of these parts, the mean over kinds of trials."""
        seconds = [row.seconds.get(part, 0.0) for row in self.trials for part in parts]
        return sum(seconds) / len(self.trials)


@dataclass(frozen=True)
class SearchBill:
    """What searches of any size would cost, by machine."""

    job: Job
    places: Sequence[PlannedMachine]
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
        brackets, at_rungs = self._brackets(n_trials), Counter[float]()
        for rungs, n in brackets:
            at_rungs.update(dict(zip(rungs.fractions, rungs.n_trials(n), strict=True)))
        rows = [self._row(place, n_trials) for place in self.places]
        rows.sort(key=lambda row: (row["usd"], row["hours"]))
        best = rows[0] if rows else None
        here = next((row for row in rows if row["kind"] == "here"), None)
        return {
            "trials": sum(n for _, n in brackets),
            "rungs": [{"fraction": each, "trials": at_rungs[each]} for each in sorted(at_rungs)],
            "full_trainings": sum(rungs.full_runs(n) for rungs, n in brackets),
            "n_settings": n_choices(self.job.search),
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
        return min(wanted, n_choices(section) or wanted)

    @property
    def affordable(self) -> int | None:
        """Trials that the cap pays for on this machine, or on the cheapest one; None without a cap
        or a price.
        """
        cap_usd = self.job.limits.max_usd
        there = [place for place in self.places if place.machine.kind == "here"] or self.places
        if cap_usd is None or not there:
            return None

        def usd(n: int) -> float:
            return min(float(self._row(place, n)["usd"]) for place in there)

        n, most = 1, n_choices(self.job.search) or MOST_AFFORDED
        if usd(n) <= 0:
            return None
        while n < most and usd(n + 1) <= cap_usd * (1 - KEPT_BACK):
            n += 1
        return n

    def _brackets(self, n_trials: int) -> list[tuple[Rungs, int]]:
        """Rungs and trials of each; with `stop_at` a model has one of its own."""
        section = self.job.search
        parts = shares_of(n_trials, len(by_model(section)) if section.stop_at else 1)
        factor, least = section.reduction_factor, section.min_fraction
        return [(rungs_of(factor, least, n), n) for n in parts]

    def _row(self, place: PlannedMachine, n_trials: int) -> Json:
        """What a machine takes for it."""
        machine, section, at_a_time = place.machine, self.job.search, place.at_a_time
        evaluation_s = place.mean_s("evaluation") / max(1, self.n_evaluations)
        evaluation_s /= 2 if section.stop_at else 1
        wall_s = place.mean_s("start-up", "tokenizing")
        wall_s += sum(each for name, each in machine.seconds.items() if name not in OF_TRIALS)
        for rungs, n in self._brackets(n_trials):
            full_s = place.mean_s(*OF_TRAINING) + evaluation_s / rungs.fractions[0]
            before = 0.0
            for fraction, at_rung in zip(rungs.fractions, rungs.n_trials(n), strict=True):
                segment_s = SEGMENT_S + self.load_s + (fraction - before) * full_s
                before, wall_s = fraction, wall_s + ceil(at_rung / at_a_time) * segment_s
            wall_s += ceil(at_rung / at_a_time) * place.mean_s("export")
            if section.stop_at:
                wall_s += self.load_s + evaluation_s
        if section.data_fraction:  # by one bracket: `stop_at` excludes it
            shares = sorted((share for share in section.data_fraction if share < 1), reverse=True)
            wall_s += sum(shares[::at_a_time]) * full_s
        per_hour = 1 / max(machine.hours, 1e-12)
        hours, rate_usd = wall_s / 3600, (machine.total_usd or 0.0) * per_hour
        ranged_hours = [hours * each * per_hour for each in machine.hours_range]
        return {
            "name": machine.name,
            "kind": machine.kind,
            "usd": hours * rate_usd,
            "usd_range": [each * rate_usd for each in ranged_hours],
            "hours": hours,
            "hours_range": ranged_hours,
            "usd_of_one_full_training": sum(row.total_usd for row in place.trials)
            / len(place.trials),
        }

    def _warnings(self, n_trials: int, row: Mapping[str, Any] | None) -> list[str]:
        found, cap_usd = [], self.job.limits.max_usd
        if (metric := self.job.metric) in SHARES:
            found.append(
                f"{self.n_eval:,} evaluation examples: two settings whose {metric} differs by less"
                f" than {100 * least_difference(self.n_eval):.1f} points can't be told apart"
            )
        if cap_usd is not None and row is not None and row["usd"] > cap_usd:
            found.append(
                f"the cap of ${cap_usd:g} pays for {self.affordable or 0} trials, not {n_trials}:"
                " the search would stop before it has a winner"
            )
        if 1 < n_trials < self.job.search.reduction_factor:
            found.append(
                f"{n_trials} trials can't be told apart by halving: fewer than the"
                f" reduction_factor of {self.job.search.reduction_factor}"
            )
        return found


def priced(job: Job, place: str, **asked: Any) -> SearchBill | None:
    """The bill of a search; None where its trials can't be planned. `asked` as for `api.plan`."""
    views: list[PlanView] = []
    machines: PlanView | None = None
    sizes, serving = dict[str, int](), dict[str, float]()
    for settings in _kinds(job):
        values = values_with(job, settings)
        values.pop("limits", None)
        with contextlib.suppress(InputError):
            trial = job_of(values, place)
            if machines is None and job.where.gpus is not None:
                machines = api.plan(trial, **asked).view
            on_one = trial.where.model_copy(update={"gpus": 1})
            view = api.plan(trial.model_copy(update={"where": on_one}), **asked).view
            views.append(view)
            if (model := model_of(settings)) is not None:
                sizes[str(model)] = view.job.n_parameters
                config, _ = find_config(trial.model.model_name_or_path, trial.model.revision)
                offers = read_catalog(asked.get("prices"), today()).offers
                served, _ = serve(read_shape(config, job.task), Traffic(), list(offers))
                if served:
                    serving[str(model)] = min(each.usd_per_million_tokens for each in served)
    if not views:
        return None
    bytes_of_weights = sum(2.0 * view.job.n_parameters for view in views) / len(views)
    return SearchBill(
        job,
        _places(job, machines or views[0], views),
        sizes,
        serving,
        views[0].job.n_eval_examples,
        views[0].job.n_evaluations,
        bytes_of_weights / Assumptions().load_bytes_per_s,
    )


def _places(job: Job, machines: PlanView, views: Sequence[PlanView]) -> list[PlannedMachine]:
    """Machines on one GPU of which every kind of trial can be done, the cheapest first."""
    found, wanted = dict[str, PlannedMachine](), job.where.gpus or 1
    for machine in machines.plans:
        trials = [choice for view in views if (choice := _on_one(machine, view)) is not None]
        if len(trials) == len(views):
            at_a_time = max(1, machine.n_gpus) if wanted == "all" else int(wanted)
            found.setdefault(machine.name, PlannedMachine(machine, at_a_time, trials))
    return list(found.values())


def _on_one(machine: Choice, view: PlanView) -> Choice | None:
    """The choice of one GPU of a machine in a plan."""
    rows = [row for row in view.plans if row.gpu == machine.gpu and row.is_cpu == machine.is_cpu]
    same = [row for row in rows if (row.kind, row.provider) == (machine.kind, machine.provider)]
    is_here = machine.kind == "here"
    return next(iter(same or [row for row in rows if is_here == (row.kind == "here")]), None)


def _kinds(job: Job) -> list[Json]:
    """Settings of different costs, as a search would begin with; of a small grid all, so that no
    model is left out.
    """
    section = job.search.model_copy(update={"sampler": "random"})
    drawn, kinds = list[Json](), dict[str, Json]()
    for number in range(N_DRAWN if section.vary else 0):
        settings = draw(section, number, [(each, None) for each in drawn], greater_is_better=True)
        if settings is None:
            break
        drawn.append(settings)
        costly = {key: value for key, value in settings.items() if key.split(".")[-1] not in FREE}
        kinds.setdefault(str(costly), settings)
    return list(kinds.values())[:MOST_PLANS] or [{}]
