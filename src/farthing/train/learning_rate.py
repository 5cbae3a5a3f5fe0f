"""The schedule of a run: how many steps, and the learning rate at each, as the job says or as its
limits buy.

`schedule.py` has the arithmetic of a budget, `optim.py` the curves by their Hugging Face names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from farthing.config.job import Job
from farthing.events import Note
from farthing.planner.estimate import Estimate
from farthing.run.folder import SCHEDULE
from farthing.run.ledger import Ledger
from farthing.train.attempt import Attempt
from farthing.train.budget import seconds_left
from farthing.train.forecast import EXPORT_S, evaluation_s, leaving_s, next_s
from farthing.train.optim import fitted_schedule, schedule
from farthing.train.schedule import Fit, Schedule, first_fit, keep_fit, kept_fit, settled_fit
from farthing.train.step_log import settle
from farthing.units import plural


def first_schedule(
    job: Job, folder: Path, ledger: Ledger, estimate: Estimate | None, steps_per_epoch: int
) -> Schedule:
    """The schedule of an attempt: by the job, or as fitted to what its limits buy."""
    train = job.train
    n_steps = (
        math.ceil(train.num_train_epochs * steps_per_epoch)
        if train.max_steps is None
        else train.max_steps
    )
    if not train.fit_schedule_to_budget:
        n_warmup = _warmup_of(job, steps_per_epoch)(n_steps)
        curve, rate = train.lr_scheduler_type, job.learning_rate
        return Schedule(
            n_steps,
            n_warmup,
            schedule(
                curve,
                n_warmup_steps=n_warmup,
                n_steps=n_steps,
                learning_rate=rate,
                kwargs=train.lr_scheduler_kwargs,
            ),
        )
    return as_fitted(
        job,
        kept_fit(folder / SCHEDULE)
        or _first_fit(job, folder, ledger, estimate, (n_steps, steps_per_epoch)),
    )


def settle_schedule(attempt: Attempt) -> None:
    """Settle for good how many steps the limits buy, by the measured pace, before the rate comes
    down.
    """
    fit, job, train = attempt.schedule.fit, attempt.job, attempt.job.train
    assert fit is not None
    settle(attempt)
    ledger, ranks = attempt.ledger, attempt.ranks
    step_s = attempt.pace.step_s or ledger.takes.get("step_s")
    if step_s is not None:
        if attempt.eval_examples is not None and train.eval_strategy != "no":
            step_s += evaluation_s(attempt) / (train.eval_steps or attempt.batches.steps_per_epoch)
        step_s += attempt.saving.took_s / (
            train.save_steps or max(1.0, attempt.saving.every_s / step_s)
        )
    # the last step begins only where the longest would fit
    end_s = leaving_s(attempt) + max(0.0, next_s(attempt) - (step_s or 0.0))
    fit = settled_fit(fit, seconds_left(job, ledger), step_s, end_s)
    fit = Fit(**ranks.tell_all(asdict(fit)))
    keep_fit(attempt.folder / SCHEDULE, fit)
    attempt.schedule = as_fitted(job, fit)
    attempt.steps.feed.n_steps = attempt.n_steps
    attempt.steps.feed.close()  # what was made ready knew the number
    text = (
        f"the schedule is fixed: {plural(attempt.n_steps, 'step')} of {fit.asked_steps:,} fit the"
        " limits"
    )
    attempt.emit(Note(text))


def _first_fit(
    job: Job, folder: Path, ledger: Ledger, estimate: Estimate | None, asked: tuple[int, int]
) -> Fit:
    """The steps that the limits buy by what a step is estimated to take, kept for later attempts.

    `asked`: (steps, those of an epoch).
    """
    n_steps, steps_per_epoch = asked
    step_s, seconds = (None, {}) if estimate is None else (estimate.step_s, estimate.seconds)
    if step_s is not None:
        step_s += (seconds.get("evaluation", 0.0) + seconds.get("checkpoints", 0.0)) / n_steps
    left_s, end_s = seconds_left(job, ledger), seconds.get("export", EXPORT_S)
    return keep_fit(
        folder / SCHEDULE,
        first_fit(n_steps, _warmup_of(job, steps_per_epoch), left_s, step_s, end_s),
    )


def as_fitted(job: Job, fit: Fit) -> Schedule:
    """The schedule of a fit."""
    factor = fitted_schedule(
        job.train.lr_scheduler_type,
        n_warmup_steps=fit.n_warmup_steps,
        holds_until=fit.settles_at,
        n_steps=fit.n_steps,
        learning_rate=job.learning_rate,
        kwargs=job.train.lr_scheduler_kwargs,
    )
    return Schedule(fit.n_steps, fit.n_warmup_steps, factor, fit)


def _warmup_of(job: Job, steps_per_epoch: int) -> Callable[[int], int]:
    """Steps of warm-up in a run of so many steps."""
    train = job.train
    fixed = train.warmup_steps
    if train.warmup_epochs is not None:
        fixed = math.ceil(train.warmup_epochs * steps_per_epoch)
    return lambda n_steps: math.ceil(train.warmup_ratio * n_steps) if fixed is None else fixed
