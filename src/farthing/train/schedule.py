"""How many steps a run has, and the learning rate at each; a schedule that ends when the money
does.

How many steps a budget buys is worked out before the first step from what the plan estimates a step
to take, and once more from the measured pace, before the rate begins to come down. It is kept in
the run folder from then on, so that a resumed run has the same rate at every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from farthing.config.job import TrainSection
from farthing.errors import InputError, RunDamagedError
from farthing.planner.estimate import Estimate
from farthing.run.folder import SCHEDULE, has_committed, keep, kept_as

MARGIN = 0.03  # of what is left is not planned for: the pace is a mean
MEASURED_STEPS = 10  # before the number of steps is settled; fewer in a run of fewer than 40
EXPORT_S = 0.5  # where the plan does not say
LAST_RATE = 1e-7  # of the polynomial schedule


@dataclass(frozen=True)
class Fit:
    """The steps of a run whose schedule is fitted to its budget. The rate stays up until
    `settles_at`.
    """

    asked_steps: int  # as the job has it; never more
    n_steps: int
    n_warmup_steps: int
    settles_at: int  # after so many steps the number is settled, by the pace that was measured
    settled: bool
    step_s: float | None
    """Seconds that a step was taken to last, evaluations and checkpoints shared out; None: nobody
    knew.
    """


class Schedule:
    def __init__(self, name: str, learning_rate: float, kwargs: Mapping[str, Any] | None) -> None:
        self._name, self._peak = name, learning_rate
        self._more: dict[str, Any] = {"learning_rate": learning_rate, "kwargs": kwargs}
        self.fit: Fit | None = None

    def fix(self, n_steps: int, n_warmup_steps: int) -> None:
        self.n_steps, self.n_warmup_steps = n_steps, n_warmup_steps
        self._factor = schedule(
            self._name, n_warmup_steps=n_warmup_steps, n_steps=n_steps, **self._more
        )

    def follow(self, fit: Fit) -> None:
        self.fit, self.n_steps, self.n_warmup_steps = fit, fit.n_steps, fit.n_warmup_steps
        self._factor = fitted_schedule(
            self._name,
            n_warmup_steps=fit.n_warmup_steps,
            holds_until=fit.settles_at,
            n_steps=fit.n_steps,
            **self._more,
        )

    def learning_rate(self, step: int) -> float:
        """At a step, from 0."""
        return self._peak * self._factor(step)


def first_schedule(
    train: TrainSection,
    learning_rate: float,
    folder: Path,
    left_s: float,
    estimate: Estimate | None,
    steps_per_epoch: int,
) -> Schedule:
    """The schedule of an attempt: by the job, or as fitted to what the `left_s` of its limits buy.

    A fit is kept for later attempts.
    """
    n_steps = train.max_steps
    if n_steps is None:
        n_steps = math.ceil(train.num_train_epochs * steps_per_epoch)
    n_fixed = train.warmup_steps
    if train.warmup_epochs is not None:
        n_fixed = math.ceil(train.warmup_epochs * steps_per_epoch)

    def n_warmup_of(n_steps: int) -> int:
        if n_fixed is not None or n_steps == 1:  # a rate of 0 at the only step teaches nothing
            return n_fixed or 0
        return math.ceil(train.warmup_ratio * n_steps)

    found = Schedule(train.lr_scheduler_type, learning_rate, train.lr_scheduler_kwargs)
    if not train.fit_schedule_to_budget:
        found.fix(n_steps, n_warmup_of(n_steps))
        return found
    fit = kept_fit(folder / SCHEDULE)
    if fit is None:
        step_s, seconds = (None, {}) if estimate is None else (estimate.step_s, estimate.seconds)
        if step_s is not None:
            step_s += (seconds.get("evaluation", 0.0) + seconds.get("checkpoints", 0.0)) / n_steps
        end_s = seconds.get("export", EXPORT_S)
        fit = first_fit(n_steps, n_warmup_of, left_s, step_s, end_s)
        keep_fit(folder / SCHEDULE, fit)
    found.follow(fit)
    return found


def steps_bought(left_s: float, step_s: float, *, at_the_end_s: float) -> int:
    """How many steps of `step_s` there is time for, when leaving takes `at_the_end_s`."""
    if not math.isfinite(left_s):
        return 1 << 60
    return max(0, math.floor((left_s * (1 - MARGIN) - at_the_end_s) / step_s))


def first_fit(
    asked: int,
    n_warmup_of: Callable[[int], int],
    left_s: float,
    step_s: float | None,
    at_the_end_s: float,
) -> Fit:
    """The fit before the first step. Without an estimate the warm-up is no longer than what is
    measured.
    """
    bought = asked if step_s is None else steps_bought(left_s, step_s, at_the_end_s=at_the_end_s)
    n_steps = min(asked, max(3, bought))
    n_warmup = n_warmup_of(n_steps)
    measured = MEASURED_STEPS if step_s is None else max(n_warmup, MEASURED_STEPS)
    settles_at = max(2, min(measured, n_steps // 4))
    return Fit(asked, n_steps, min(n_warmup, settles_at), settles_at, False, step_s)


def settled_fit(fit: Fit, left_s: float, step_s: float | None, at_the_end_s: float) -> Fit:
    """The fit after `settles_at` steps, for good. Where no pace was measured the first one
    stands.
    """
    if step_s is None:
        return replace(fit, settled=True)
    bought = steps_bought(left_s, step_s, at_the_end_s=at_the_end_s)
    n_steps = min(fit.asked_steps, fit.settles_at + max(1, bought))
    return replace(fit, n_steps=n_steps, settled=True, step_s=step_s)


def keep_fit(path: Path, fit: Fit) -> None:
    """Write the fit down, before a step is taken by it."""
    keep(path, {"kind": "farthing schedule", **asdict(fit)})


def kept_fit(path: Path) -> Fit | None:
    """The fit of earlier attempts; None before the first, or while nothing was saved by it.

    Raises `RunDamagedError`: another number would be another run.
    """
    fit = kept_as(
        path,
        lambda values: Fit(**{name: values[name] for name in Fit.__dataclass_fields__}),
        lambda _: None,
    )
    if fit is None and not path.exists() and has_committed(path.parent):
        why = f"{path.name} is gone, which has the schedule that was fitted"
        to_do = "restore it from a copy, or give the job another output_dir"
        raise RunDamagedError(why, where=str(path), to_do=to_do)
    return fit


# ---- learning rates by their Hugging Face names, as pure functions of the step ----


def schedule(
    name: str,
    *,
    n_warmup_steps: int,
    n_steps: int,
    learning_rate: float = 1.0,
    kwargs: Mapping[str, Any] | None = None,
) -> Callable[[int], float]:
    """The factor on `learning_rate` at a step (from 0): to the bit that of
    `transformers.get_scheduler`, which takes a quarter of a second to import. The usual ones do
    without.

    `kwargs` are its `scheduler_specific_kwargs`. Raises `InputError` for a schedule that would have
    to rise, or that has no room for its decay.
    """
    given, is_polynomial = dict(kwargs or {}), name == "polynomial"
    last = given.get("lr_end", LAST_RATE) if is_polynomial else given.get("min_lr", 0.0)
    if last > learning_rate or (is_polynomial and last == learning_rate):
        raise InputError(
            f"{name} decays to {last:g}, and the learning rate is {learning_rate:g}",
            where="train.lr_scheduler_type",
            to_do="use linear, which decays to 0, or a higher learning_rate",
        )
    n_decay = int(given.get("num_decay_steps", 0))
    if n_decay and n_warmup_steps + n_decay > n_steps:
        raise InputError(
            f"{n_warmup_steps} steps of warm-up and {n_decay} of decay are more than the run's"
            f" {n_steps}",
            where="train.lr_scheduler_kwargs",
            to_do="use a smaller num_decay_steps, or train longer",
        )
    n_falling = max(1, n_steps - n_warmup_steps)
    n_cycles = given.get("num_cycles", 0.5)

    def cosine(step: int) -> float:
        share = (step - n_warmup_steps) / n_falling
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * n_cycles * 2.0 * share)))

    usual: dict[str, Callable[[int], float]] = {
        "constant": lambda step: 1.0,
        "constant_with_warmup": lambda step: 1.0,
        "linear": lambda step: max(0.0, (n_steps - step) / n_falling),
        "cosine": cosine,
    }
    if name not in usual:
        return _of_transformers(name, n_warmup_steps, n_steps, learning_rate, given)
    fall = usual[name]
    if name == "constant":
        return fall
    return lambda step: step / n_warmup_steps if step < n_warmup_steps else fall(step)


def _of_transformers(
    name: str, n_warmup_steps: int, n_steps: int, learning_rate: float, kwargs: dict[str, Any]
) -> Callable[[int], float]:
    import torch
    from transformers.optimization import get_scheduler

    weight = torch.nn.Parameter(torch.zeros(1))
    found = get_scheduler(
        name,
        torch.optim.SGD([weight], lr=learning_rate),
        num_warmup_steps=n_warmup_steps,
        num_training_steps=n_steps,
        scheduler_specific_kwargs=kwargs,
    )
    factor: Callable[[int], float] = found.lr_lambdas[0]
    return factor


def fitted_schedule(
    name: str,
    *,
    n_warmup_steps: int,
    holds_until: int,
    n_steps: int,
    learning_rate: float = 1.0,
    kwargs: Mapping[str, Any] | None = None,
) -> Callable[[int], float]:
    """Like `schedule`, but the rate stays up after the warm-up until step `holds_until`, and comes
    down from there.

    What it is before `holds_until` does not depend on `n_steps`, so that the number can be settled
    there.
    """
    given = dict(kwargs or {})
    if n_decay := given.get("num_decay_steps"):  # as many as there are behind what is held
        given["num_decay_steps"] = min(int(n_decay), max(1, n_steps - holds_until))
    rise = schedule(
        "constant_with_warmup" if n_decay else name,
        n_warmup_steps=n_warmup_steps,
        n_steps=max(n_steps, n_warmup_steps + 1),
        learning_rate=learning_rate,
        kwargs={} if n_decay else given,
    )
    fall = schedule(
        name,
        n_warmup_steps=holds_until,
        n_steps=n_steps,
        learning_rate=learning_rate,
        kwargs=given,
    )
    return lambda step: rise(min(step, n_warmup_steps)) if step < holds_until else fall(step)
