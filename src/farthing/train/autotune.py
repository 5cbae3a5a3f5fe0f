"""A minute of real micro-batches over the few settings that matter, and the one that costs least
for a useful token.

Every trial computes losses and gradients of the same examples as the first steps of the run, and
throws the gradients away: no weight moves. Tried are the tokens of a micro-batch, then activation
checkpointing where there is any, uphill from where the plan stands.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from farthing.config.job import Job
from farthing.data.loader import MicroBatch, micro_batches
from farthing.device_memory import is_out_of_memory
from farthing.errors import RunInterruptedError
from farthing.events import Emit, Probed
from farthing.model.activation_checkpointing import SHARE_OF_FREE
from farthing.model.hardware import (
    free_bytes,
    reset_peak_bytes,
    taken_bytes,
    wait_for,
    window_peak_bytes,
)
from farthing.planner.estimate import Estimate
from farthing.settings import Settings
from farthing.train.room import Steps
from farthing.train.update_guard import update_bytes

PROBE_S = 60.0
TRIALS = 16  # that should fit into that time
BETTER = 0.02  # less than this is noise
EXPECTED_SAVING = (
    0.08  # of a run's training time, by assumption: what makes a probe worth its own time
)


@dataclass(frozen=True)
class Trial:
    """What a settings took. `seconds_per_token` is infinite where memory ran out."""

    settings: Settings
    seconds_per_token: float
    """Seconds of forward and backward for a useful token."""
    computed_share: float
    """Useful tokens among the computed ones."""
    peak_bytes: int
    """Most memory taken meanwhile; 0 where it can't be read."""

    def is_better_than(self, other: Trial) -> bool:
        """By more than noise."""
        return self.seconds_per_token <= other.seconds_per_token * (1 - BETTER)


class Prober:
    def __init__(
        self,
        steps: Steps,
        emit: Emit,
        budget_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.steps, self.emit = steps, emit
        self.feed, self.forward, self.device = steps.feed, steps.feed.forward, steps.step.device
        self.trials: list[Trial] = []
        self._clock = clock
        self._budget_s = budget_s
        self.deadline = clock() + budget_s
        self.cap_bytes = taken_bytes(self.device) + int(SHARE_OF_FREE * free_bytes(self.device))
        self.sample: list[NDArray[np.int64]] = [self.feed.batches.examples_of(0)[:1]]

    def find(self) -> Trial:
        """The best settings in reach, which the run is left with. Raises `RunInterruptedError`."""
        start = self.steps.settings
        try:
            self._choose_sample(start)
            best = self._try(start)
            for ways in (self._other_budgets, _less_checkpointing):
                for way in ways(best.settings):
                    best = self._climb(best, way)
        except BaseException:
            self.steps.use(start)
            raise
        self.steps.use(best.settings.with_probed(best.settings))
        return best

    # ---- the search ----

    def _climb(self, best: Trial, way: list[Settings]) -> Trial:
        for settings in way:
            if self._clock() >= self.deadline or not self._has_room(best, settings):
                break
            trial = self._try(settings)
            # what is better once may have been lucky: both again, and the quicker time of each
            # counts
            if trial.is_better_than(best):
                best, trial = self._again(best), self._again(trial)
            if not trial.is_better_than(best):
                break
            best = trial
        return best

    def _other_budgets(self, start: Settings) -> list[list[Settings]]:
        lengths = self.feed.tokens.lengths[np.concatenate(self.sample)]
        n, most, longest = start.micro_batch_tokens, int(lengths.sum()), int(lengths.max())
        up = [n << k for k in range(1, 8) if n << k < 2 * most]
        down = [n >> k for k in range(1, 8) if n >> k >= longest]
        return [[replace(start, micro_batch_tokens=each) for each in way] for way in (up, down)]

    def _has_room(self, best: Trial, settings: Settings) -> bool:
        """Whether it may fit: what was taken beyond the resting state grows with the tokens of a
        micro-batch.
        """
        if not best.peak_bytes or settings.checkpoint_every != best.settings.checkpoint_every:
            return True  # tried; memory that runs out is an answer too
        growth = max(1.0, settings.micro_batch_tokens / best.settings.micro_batch_tokens)
        resting = taken_bytes(self.device)
        return resting + growth * max(0, best.peak_bytes - resting) <= self.cap_bytes

    # ---- one trial ----

    def _choose_sample(self, start: Settings) -> None:
        """As many steps as one trial may take, or a part of one step; the first ones warm up."""
        self.measure(start)
        spent_s, examples = 0.0, 1
        n_steps = min(64, self.feed.schedule.n_steps)
        steps = [self.feed.batches.examples_of(step) for step in range(n_steps)]
        flat, batch = np.concatenate(steps), len(steps[0])
        while (
            spent_s < self._budget_s / TRIALS / 2
            and examples < len(flat)
            and self._clock() < self.deadline
        ):
            examples = min(len(flat), 2 * examples)
            self.sample = [flat[at : min(at + batch, examples)] for at in range(0, examples, batch)]
            started = self._clock()
            self.measure(start)
            spent_s = self._clock() - started

    def _try(self, settings: Settings) -> Trial:
        trial = self.measure(settings)
        self.trials.append(trial)
        self.emit(Probed(settings, 1 / trial.seconds_per_token))
        return trial

    def _again(self, trial: Trial) -> Trial:
        if self._clock() >= self.deadline:
            return trial
        second = self.measure(trial.settings)
        return second if second.seconds_per_token < trial.seconds_per_token else trial

    def measure(self, settings: Settings) -> Trial:
        """Losses and gradients of the sample under a settings. Raises `RunInterruptedError`."""
        self.steps.use(settings)
        ready = list(self._micro_batches())
        n_tokens = sum(int(self.feed.tokens.lengths[examples].sum()) for examples in self.sample)
        n_computed = sum(self.forward.n_computed(one.arrays) for one in ready)
        reset_peak_bytes(self.device)
        failed = False
        started = self._clock()
        try:
            for step in range(len(self.sample)):
                self.steps.step.accumulate(one for one in ready if one.step == step)
                wait_for(self.device)
                self.steps.step.optimizer.zero_grad(set_to_none=True)
        except Exception as error:
            if isinstance(error, RunInterruptedError) or not is_out_of_memory(error):
                raise
            failed = True
        finally:
            self.steps.step.optimizer.zero_grad(set_to_none=True)
        seconds = self._clock() - started
        peak = max(window_peak_bytes(self.device), self._update_peak_bytes())
        per_token = math.inf if failed or peak > self.cap_bytes else seconds / n_tokens
        return Trial(settings, per_token, n_tokens / n_computed, peak)

    def _update_peak_bytes(self) -> int:
        """What the update of a step takes, which no trial makes: gradients and more beside weights
        and state. 0 on a CPU.
        """
        if self.device.type != "cuda":
            return 0
        gradients = sum(weight.nbytes for weight in self.steps.step.trained)
        return taken_bytes(self.device) + gradients + update_bytes(self.steps.step.optimizer)

    def _micro_batches(self) -> Iterator[MicroBatch]:
        tokens = self.feed.tokens
        return micro_batches(
            0,
            len(self.sample),
            lambda step: self.sample[step],
            lambda examples: self.feed.table_of(examples).cells,
            lambda examples: self.forward.collate(tokens, examples),
        )


def _less_checkpointing(start: Settings) -> list[list[Settings]]:
    """Fewer layers computed again: with the same micro-batch, or with half of it."""
    ways = []
    for every in {1: (2, 0), 2: (0,)}.get(start.checkpoint_every, ()):
        fewer = replace(start, checkpoint_every=every)
        half = replace(fewer, micro_batch_tokens=max(1, start.micro_batch_tokens // 2))
        ways += [[fewer], [half]]
    return ways


# ---- for a run ----


def is_worth_it(
    job: Job,
    estimate: Estimate | None,
    settings: Settings,
    left_s: float = math.inf,
) -> bool:
    """Whether a probe at the beginning of a run is expected to save more than it takes; `left_s`
    until a limit.

    Only where the job leaves the micro-batch open, and a run with the same settings need not be the
    same to the bit.
    """
    if estimate is None or settings.probed or job.says_micro_batch or job.train.full_determinism:
        return False
    if job.train.probe != "auto":
        return bool(job.train.probe) and left_s > 2 * PROBE_S
    return EXPECTED_SAVING * min(left_s, estimate.seconds.get("training", 0.0)) > PROBE_S


def probe_run(steps: Steps, emit: Emit, budget_s: float = PROBE_S) -> list[Trial]:
    """Find the best settings for a run at its first step, and leave it on. Returns all trials, best
    first.
    """
    prober = Prober(steps, emit, budget_s)
    best = prober.find()
    return [best, *(trial for trial in prober.trials if trial.settings != best.settings)]
