"""What a search will cost: the plans of its trials, at the rungs that each is expected to reach.

Settings that change no cost share a plan. The planner is asked for whole trainings; a trial takes
its share of the training and evaluation, and every process its start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from farthing.search.halving import SHARES, Rungs, least_difference, rungs_of
from farthing.search.space import draw, job_of, model_of, n_choices, values_with
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
MOST_PLANS = 6
N_DRAWN = 24
KEPT_BACK = 0.15
"""Of the cap, for restarts and for trials that cost more than planned."""
OF_TRAINING = ("training", "checkpoints")
SEGMENT_S = 0.3
"""That each segment of a trial takes besides its model: to open its data and its run, and to leave."""


@dataclass(frozen=True)
class Bill:
    """What searches of any size would cost, by machine."""

    job: Job
    plans: Mapping[str, Sequence[Choice]]
    """By machine: its choice in the plan of each kind of trial."""
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
        rungs = self._rungs(n_trials)
        rows = [self._row(name, choices, n_trials) for name, choices in self.plans.items()]
        rows.sort(key=lambda row: (row["usd"], row["hours"]))
        section = self.job.search
        best = rows[0] if rows else None
        here = next((row for row in rows if row["kind"] == "here"), None)
        return {
            "trials": n_trials,
            "rungs": [
                {"fraction": fraction, "trials": n}
                for fraction, n in zip(rungs.fractions, rungs.n_trials(n_trials), strict=True)
            ],
            "full_trainings": rungs.full_runs(n_trials),
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
        rows = [self._row(name, choices, 1) for name, choices in self.plans.items()]
        there = [row for row in rows if row["kind"] == "here"] or rows
        if cap_usd is None or not there:
            return None
        name = min(there, key=lambda row: row["usd"])["name"]
        if self._row(name, self.plans[name], 1)["usd"] <= 0:
            return None
        n, most = 1, n_choices(self.job.search) or 1000
        room = cap_usd * (1 - KEPT_BACK)
        while n < most and self._row(name, self.plans[name], n + 1)["usd"] <= room:
            n += 1
        return n

    def _rungs(self, n_trials: int) -> Rungs:
        section = self.job.search
        return rungs_of(section.reduction_factor, section.min_fraction, n_trials)

    def _row(self, name: str, choices: Sequence[Choice], n_trials: int) -> Json:
        """What a machine takes for it: the mean over kinds of trials."""
        rungs = self._rungs(n_trials)
        at_rungs, runs = rungs.n_trials(n_trials), rungs.full_runs(n_trials)
        n_kinds, first = len(choices), choices[0]
        if self.job.search.data_fraction:
            runs += sum(share for share in self.job.search.data_fraction if share < 1)

        def mean(*names: str) -> float:
            return sum(row.seconds.get(each, 0) for row in choices for each in names) / n_kinds

        evaluations = 1 / rungs.fractions[0]
        of_one = mean("evaluation") / max(1, self.n_evaluations)
        start_s, export_s = mean("start-up"), mean("export") * at_rungs[-1]
        others_s = sum(
            seconds
            for part, seconds in first.seconds.items()
            if part not in (*OF_TRAINING, "evaluation", "start-up", "export")
        )
        wall_s = runs * (mean(*OF_TRAINING) + evaluations * of_one) + export_s + others_s
        wall_s += start_s + sum(at_rungs) * (SEGMENT_S + self.load_s)
        spread = [each / max(first.hours, 1e-12) for each in first.hours_range]
        hours = wall_s / 3600
        rate = first.total_usd / max(first.hours, 1e-12) if first.total_usd else 0.0
        return {
            "name": name,
            "kind": first.kind,
            "usd": hours * rate,
            "usd_range": [hours * rate * each for each in spread],
            "hours": hours,
            "hours_range": [hours * each for each in spread],
            "usd_of_one_full_training": sum(row.total_usd for row in choices) / n_kinds,
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
        if n_trials < factor:
            found.append(
                f"{n_trials} trials can't be told apart by halving: fewer than the"
                f" reduction_factor of {factor}"
            )
        return found


def priced(job: Job, place: str, **asked: Any) -> Bill | None:
    """The bill of a search; None where its trials can't be planned. `asked` as for `api.plan`."""
    views = []
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
            plan = api.plan(trial, **asked)
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
    plans = {
        name: choices
        for name in {row.name: None for row in views[0].plans}
        if (choices := _on(name, views))
    }
    of_one = views[0].job
    bytes_of_weights = sum(2.0 * view.job.n_parameters for view in views) / len(views)
    load_s = bytes_of_weights / Assumptions().load_bytes_per_s
    return Bill(job, plans, sizes, serving, of_one.n_eval_examples, of_one.n_evaluations, load_s)


def _on(name: str, views: Sequence[PlanView]) -> list[Choice]:
    """The choice of a machine in every plan; none where it can't do one of them."""
    found = [next((row for row in view.plans if row.name == name), None) for view in views]
    choices = [row for row in found if row is not None]
    return choices if len(choices) == len(views) else []


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
