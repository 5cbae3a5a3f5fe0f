"""A minute of real micro-batches over the few settings that matter, and the one that costs least
for a useful token.

Every trial computes losses and gradients of the same examples as the first steps of the run, and
throws the gradients away: no weight moves. Tried are the tokens of a micro-batch, then less
activation checkpointing where there is any, uphill from where the plan stands.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from farthing.data.loader import micro_batches
from farthing.device_memory import is_out_of_memory
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
from farthing.train.memory import Steps
from farthing.train.resolve import RunSpec
from farthing.train.step_result import Sums
from farthing.train.update import update_bytes

PROBE_S = 60.0
TRIALS = 16  # that should fit into that time
BETTER = 0.02  # less than this is noise
EXPECTED_SAVING = 0.08
"""Of a run's training time, by assumption: what makes a probe worth its own time."""


@dataclass(frozen=True)
class Trial:
    """What a settings took. `seconds_per_token` is infinite where memory ran out."""

    settings: Settings
    seconds_per_token: float  # seconds of forward and backward for a useful token
    computed_share: float  # useful tokens among the computed ones
    peak_bytes: int  # most memory taken meanwhile; 0 where it can't be read

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
        self.feed, self.step, self.device = steps.feed, steps.step, steps.step.device
        self.trials: list[Trial] = []
        self._clock, self._budget_s = clock, budget_s
        self.deadline = clock() + budget_s
        self.cap_bytes = taken_bytes(self.device) + int(SHARE_OF_FREE * free_bytes(self.device))
        self.sample: list[NDArray[np.int64]] = [self.feed.batches.examples_of(0)[:1]]

    def find(self) -> Trial:
        """The best settings in reach, which the run is left with. Raises `RunInterruptedError`."""
        start = self.feed.settings
        try:
            self._choose_sample(start)
            best = self._try(start)
            for ways in (self._other_sizes, _less_checkpointing):
                for way in ways(best.settings):
                    best = self._climb(best, way)
        except BaseException:
            self.steps.use(start)
            raise
        self.steps.use(best.settings.with_probed(best.settings))
        return best

    def _climb(self, best: Trial, way: list[Settings]) -> Trial:
        """The last of the settings on the way up. What is better once may have been lucky: it is
        measured again, and the slower time counts.
        """
        for settings in way:
            if self._clock() >= self.deadline:
                break
            trial = self._try(settings)
            if trial.is_better_than(best):
                again = self.measure(settings)
                trial = max(trial, again, key=lambda each: each.seconds_per_token)
            if not trial.is_better_than(best):
                break
            best = trial
        return best

    def _other_sizes(self, start: Settings) -> list[list[Settings]]:
        lengths = self.feed.tokens.lengths[np.concatenate(self.sample)]
        n, most, longest = start.micro_batch_tokens, int(lengths.sum()), int(lengths.max())
        up = [n << k for k in range(1, 8) if n << k < 2 * most]
        down = [n >> k for k in range(1, 8) if n >> k >= longest]
        return [[replace(start, micro_batch_tokens=each) for each in way] for way in (up, down)]

    def _choose_sample(self, start: Settings) -> None:
        """As many steps as one trial may take, or a part of one step; the first ones warm up."""
        self.measure(start)
        n_steps = min(64, self.feed.schedule.n_steps)
        steps = [self.feed.batches.examples_of(step) for step in range(n_steps)]
        flat, batch, spent_s, n = np.concatenate(steps), len(steps[0]), 0.0, 1
        most_s = self._budget_s / TRIALS / 2
        while spent_s < most_s and n < len(flat) and self._clock() < self.deadline:
            n = min(len(flat), 2 * n)
            self.sample = [flat[at : min(at + batch, n)] for at in range(0, n, batch)]
            started = self._clock()
            self.measure(start)
            spent_s = self._clock() - started

    def _try(self, settings: Settings) -> Trial:
        trial = self.measure(settings)
        self.trials.append(trial)
        self.emit(Probed(settings, 1 / trial.seconds_per_token))
        return trial

    def measure(self, settings: Settings) -> Trial:
        """Losses and gradients of the sample under a settings. Raises `RunInterruptedError`."""
        self.steps.use(settings)
        feed, forward, optimizer = self.feed, self.feed.forward, self.step.optimizer
        found = micro_batches(
            0,
            len(self.sample),
            lambda step: self.sample[step],
            feed.table_of,
            lambda examples: forward.collate(feed.tokens, examples),
        )
        ready = list(found)
        n_tokens = sum(feed.n_tokens(examples) for examples in self.sample)
        n_computed = sum(forward.n_computed(one.arrays) for one in ready)
        reset_peak_bytes(self.device)
        has_failed, started = False, self._clock()
        try:
            for step, examples in enumerate(self.sample):
                sums = Sums(examples, feed.tokens.n_targets(examples))
                self.step.accumulate(sums, (one for one in ready if one.step == step))
                wait_for(self.device)
                optimizer.zero_grad(set_to_none=True)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            has_failed = True
        finally:
            optimizer.zero_grad(set_to_none=True)
        seconds = self._clock() - started
        peak = max(window_peak_bytes(self.device), self._update_peak_bytes())
        per_token = math.inf if has_failed or peak > self.cap_bytes else seconds / n_tokens
        return Trial(settings, per_token, n_tokens / n_computed, peak)

    def _update_peak_bytes(self) -> int:
        """What the update of a step takes, which no trial makes: gradients and more beside weights
        and state. 0 on a CPU.
        """
        if self.device.type != "cuda":
            return 0
        gradients = sum(weight.nbytes for weight in self.step.trained)
        return taken_bytes(self.device) + gradients + update_bytes(self.step.optimizer)


def _less_checkpointing(start: Settings) -> list[list[Settings]]:
    """Fewer layers computed again: with the same micro-batch, or with half of it."""
    ways = []
    for every in {1: (2, 0), 2: (0,)}.get(start.checkpoint_every, ()):
        fewer = replace(start, checkpoint_every=every)
        half = replace(fewer, micro_batch_tokens=max(1, start.micro_batch_tokens // 2))
        ways += [[fewer], [half]]
    return ways


def is_worth_it(
    spec: RunSpec, estimate: Estimate | None, settings: Settings, left_s: float = math.inf
) -> bool:
    """Whether a probe at the beginning of a run is expected to save more than it takes; `left_s`
    until a limit.

    Only where the job leaves the micro-batch open, and a run with the same settings need not be the
    same to the bit.
    """
    if estimate is None or settings.probed or spec.says_micro_batch or spec.train.full_determinism:
        return False
    if spec.train.probe != "auto":
        return bool(spec.train.probe) and left_s > 2 * PROBE_S
    return EXPECTED_SAVING * min(left_s, estimate.seconds.get("training", 0.0)) > PROBE_S


def probe_run(steps: Steps, emit: Emit, budget_s: float = PROBE_S) -> list[Trial]:
    """Find the best settings for a run at its first step, and leave it on. Returns all trials, best
    first.
    """
    prober = Prober(steps, emit, budget_s)
    best = prober.find()
    return [best, *(trial for trial in prober.trials if trial.settings != best.settings)]
