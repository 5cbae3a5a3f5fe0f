"""How many steps a run has, and the learning rate at each; a schedule that ends when the money
does.

How many steps a budget buys is worked out before the first step from what the plan estimates a step
to take, and once more from the measured pace, before the rate begins to come down; kept in the run
folder from then on, so that a resumed run has the same rate at every step. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from farthing.errors import RunDamagedError
from farthing.run.folder import has_committed, keep, kept_as

MARGIN = 0.03  # of what is left is not planned for: the pace is a mean
MEASURED_STEPS = 10  # before the number of steps is settled; fewer in a run of fewer than 40


@dataclass(frozen=True)
class Fit:
    """The steps of a run whose schedule is fitted to its budget. The rate stays up until
    `settles_at`.
    """

    asked_steps: int
    """As the job has it; never more."""
    n_steps: int
    n_warmup_steps: int
    settles_at: int
    """After so many steps the number is settled, by the pace that was measured."""
    settled: bool
    step_s: float | None
    """Seconds that a step was taken to last, evaluations and checkpoints shared out; None: nobody
    knew.
    """


@dataclass(frozen=True)
class Schedule:
    """Steps of a run, and the factor on its learning rate as a function of the step, from 0."""

    n_steps: int
    n_warmup_steps: int
    factor: Callable[[int], float]
    fit: Fit | None = None
    """Where the steps are what a budget buys."""


def steps_bought(left_s: float, step_s: float, *, at_the_end_s: float) -> int:
    """How many steps of `step_s` there is time for, when leaving takes `at_the_end_s`."""
    return (
        max(0, math.floor((left_s * (1 - MARGIN) - at_the_end_s) / step_s))
        if math.isfinite(left_s)
        else 1 << 60
    )


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
    settles_at = max(2, min(max(n_warmup, MEASURED_STEPS), n_steps // 4))
    if step_s is None:
        settles_at = max(2, min(MEASURED_STEPS, n_steps // 4))
        n_warmup = min(n_warmup, settles_at)
    return Fit(asked, n_steps, min(n_warmup, settles_at), settles_at, False, step_s)


def settled_fit(fit: Fit, left_s: float, step_s: float | None, at_the_end_s: float) -> Fit:
    """The fit after `settles_at` steps, for good. Where no pace was measured the first one
    stands.
    """
    if step_s is None:
        return replace(fit, settled=True)
    bought = steps_bought(left_s, step_s, at_the_end_s=at_the_end_s)
    return replace(
        fit,
        n_steps=min(fit.asked_steps, fit.settles_at + max(1, bought)),
        settled=True,
        step_s=step_s,
    )


def keep_fit(path: Path, fit: Fit) -> Fit:
    """Write the fit down, before a step is taken by it."""
    keep(path, {"kind": "farthing schedule", **asdict(fit)})
    return fit


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
