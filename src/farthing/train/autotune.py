"""A minute of real micro-batches over the few settings that matter, and the one that costs least for a useful token.

Every trial computes losses and gradients of the same examples as the first steps of the run, and throws the gradients
away: no weight moves. Tried are the tokens of a micro-batch, activation checkpointing where there is any, and the tile of
the head, one after the other, uphill from where the plan stands.

Refuses settings that change the result, and to go on past its time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.config.job import Job
from farthing.data.loader import Ready, micro_batches
from farthing.device_memory import is_out_of_memory
from farthing.durability.run_folder import PLAN, keep
from farthing.errors import Interrupted
from farthing.events import Probed
from farthing.model.activation_checkpointing import SHARE_OF_FREE, checkpoint_layers
from farthing.model.hardware import (
    free_bytes,
    reset_peak_bytes,
    taken_bytes,
    wait_for,
    window_peak_bytes,
)
from farthing.planner.lengths import Lengths
from farthing.planner.tiles import default_tile_tokens
from farthing.train.attempt import Attempt
from farthing.train.autotune_cache import PROBES, Setting, Subject, known_setting, leave_probe
from farthing.train.update_guard import update_bytes

PROBE_S = 60.0
TRIALS = 16  # that should fit into that time
BETTER = 0.02  # less than this is noise
EXPECTED_SAVING = 0.08  # of a run's training time, by assumption: what makes a probe worth its own time


@dataclass(frozen=True)
class Trial:
    """What a setting took. `seconds_per_token` is infinite where memory ran out."""

    setting: Setting
    seconds_per_token: float
    """Seconds of forward and backward for a useful token."""
    computed_share: float
    """Useful tokens among the computed ones."""
    peak_bytes: int
    """Most memory taken meanwhile; 0 where it can't be read."""

    def usd_per_million_tokens(self, usd_per_hour: float) -> float:
        """Price of a million useful tokens of forward and backward."""
        return self.seconds_per_token * 1e6 / 3600 * usd_per_hour


class Prober:
    """Tries settings on a run that has not begun."""

    def __init__(self, attempt: Attempt, budget_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.attempt, self.steps, self.forward = attempt, attempt.steps, attempt.forward
        self.device = attempt.numerics.device
        self.trials: list[Trial] = []
        self._clock = clock
        self._budget_s = budget_s
        self._deadline = clock() + budget_s
        self._cap_bytes = taken_bytes(self.device) + int(SHARE_OF_FREE * free_bytes(self.device))
        self._sample: list[NDArray[np.int64]] = [self.steps.batches.examples_of(0)[:1]]

    def find(self) -> Trial:
        """The best setting in reach, which the run is left with. Raises `Interrupted`."""
        before = self.steps.most_tokens, self.steps.every_n_layers, self.forward.tile_tokens
        start = Setting(*before)
        try:
            self._choose_sample(start)
            best = self._climb(self._try(start), self._other_budgets)
            best = self._climb(best, _less_checkpointing)
            best = self._climb(best, self._other_tiles)
        except BaseException:
            self._apply(start)
            raise
        self._apply(best.setting)
        return best

    # ---- the search ----

    def _climb(self, best: Trial, neighbours: Callable[[Setting], Iterator[Iterator[Setting]]]) -> Trial:
        """Along each way that `neighbours` leads, as long as it gets better."""
        for way in neighbours(best.setting):
            for setting in way:
                if self._clock() >= self._deadline or not self._has_room(best, setting):
                    break
                trial = self._try(setting)
                if trial.seconds_per_token > best.seconds_per_token * (1 - BETTER):
                    break
                # what is better once may have been lucky: both again, and the quicker time of each counts
                best, trial = self._again(best), self._again(trial)
                if trial.seconds_per_token > best.seconds_per_token * (1 - BETTER):
                    break
                best = trial
        return best

    def _other_budgets(self, start: Setting) -> Iterator[Iterator[Setting]]:
        most = sum(int(self.steps.tokens.lengths[examples].sum()) for examples in self._sample)
        longest = int(max(self.steps.tokens.lengths[examples].max() for examples in self._sample))
        up = (replace(start, most_tokens=start.most_tokens * 2**k) for k in range(1, 8))
        down = (replace(start, most_tokens=start.most_tokens // 2**k) for k in range(1, 8))
        yield (s for s in up if s.most_tokens < 2 * most)
        yield (s for s in down if s.most_tokens >= longest)

    def _other_tiles(self, start: Setting) -> Iterator[Iterator[Setting]]:
        if self.forward.head is None:
            return
        weight = self.forward.head.linear.weight
        trained_width = weight.shape[1] if weight.requires_grad else 0
        tile = start.tile_tokens or default_tile_tokens(weight.shape[0], self.device.type, trained_width)
        yield (replace(start, tile_tokens=tile * 2**k) for k in range(1, 4))
        yield (replace(start, tile_tokens=tile // 2**k) for k in range(1, 4) if tile >= 64 * 2**k)

    def _has_room(self, best: Trial, setting: Setting) -> bool:
        """Whether it may fit: what was taken beyond the resting state grows with the tokens of a micro-batch."""
        if not best.peak_bytes or setting.every_n_layers != best.setting.every_n_layers:
            return True  # tried; memory that runs out is an answer too
        growth = max(1.0, setting.most_tokens / best.setting.most_tokens)
        resting = taken_bytes(self.device)
        return resting + growth * max(0, best.peak_bytes - resting) <= self._cap_bytes

    # ---- one trial ----

    def _choose_sample(self, start: Setting) -> None:
        """As many steps as one trial may take, or a part of one step; the first ones warm up."""
        self._measure(start)
        spent_s, examples = 0.0, 1
        all_examples = [self.steps.batches.examples_of(step) for step in range(min(self.attempt.n_steps, 64))]
        flat = np.concatenate(all_examples)
        while spent_s < self._budget_s / TRIALS / 2 and examples < len(flat) and self._clock() < self._deadline:
            examples = min(len(flat), 2 * examples)
            self._sample = _in_steps(flat[:examples], len(all_examples[0]))
            started = self._clock()
            self._measure(start)
            spent_s = self._clock() - started

    def _try(self, setting: Setting) -> Trial:
        trial = self._measure(setting)
        self.trials.append(trial)
        self.attempt.context.emit(
            Probed(setting.most_tokens, setting.every_n_layers, setting.tile_tokens or 0, 1 / trial.seconds_per_token)
        )
        return trial

    def _again(self, trial: Trial) -> Trial:
        if self._clock() >= self._deadline:
            return trial
        second = self._measure(trial.setting)
        return second if second.seconds_per_token < trial.seconds_per_token else trial

    def _measure(self, setting: Setting) -> Trial:
        """Losses and gradients of the sample under a setting. Raises `Interrupted`."""
        self._apply(setting)
        ready = list(self._micro_batches(setting))
        n_tokens = sum(int(self.steps.tokens.lengths[examples].sum()) for examples in self._sample)
        n_computed = sum(self.forward.n_computed(one.arrays) for one in ready)
        reset_peak_bytes(self.device)
        failed = False
        started = self._clock()
        try:
            for step in range(len(self._sample)):
                self.steps.accumulate(one for one in ready if one.step == step)
                wait_for(self.device)
                self.steps.optimizer.zero_grad(set_to_none=True)
        except Exception as error:
            if isinstance(error, Interrupted) or not is_out_of_memory(error):
                raise
            failed = True
        finally:
            self.steps.optimizer.zero_grad(set_to_none=True)
        seconds = self._clock() - started
        peak = max(window_peak_bytes(self.device), self._update_peak_bytes())
        failed = failed or peak > self._cap_bytes
        return Trial(setting, float("inf") if failed else seconds / n_tokens, n_tokens / n_computed, peak)

    def _update_peak_bytes(self) -> int:
        """What the update of a step takes, which no trial makes: gradients and more beside weights and state. 0 on a CPU."""
        if self.device.type != "cuda":
            return 0
        gradients = sum(weight.nbytes for weight in self.steps.trained)
        return taken_bytes(self.device) + gradients + update_bytes(self.steps.optimizer)

    def _apply(self, setting: Setting) -> None:
        self.steps.most_tokens, self.forward.tile_tokens = setting.most_tokens, setting.tile_tokens
        if setting.every_n_layers != self.steps.every_n_layers:
            self.steps.every_n_layers = setting.every_n_layers
            checkpoint_layers(self.forward.model, setting.every_n_layers)

    def _micro_batches(self, setting: Setting) -> Iterator[Ready]:
        tokens = self.steps.tokens
        return micro_batches(
            0,
            len(self._sample),
            lambda step: self._sample[step],
            lambda examples: self.forward.cut(tokens, examples, setting.most_tokens),
            lambda examples: self.forward.collate(tokens, examples),
        )


def _in_steps(examples: NDArray[np.int64], batch: int) -> list[NDArray[np.int64]]:
    return [examples[start : start + batch] for start in range(0, len(examples), batch)]


def _less_checkpointing(start: Setting) -> Iterator[Iterator[Setting]]:
    """Fewer layers computed again: with the same micro-batch, or with half of it."""
    for every in {1: (2, 0), 2: (0,)}.get(start.every_n_layers, ()):
        fewer = replace(start, every_n_layers=every)
        yield iter([fewer])
        yield iter([replace(fewer, most_tokens=max(1, start.most_tokens // 2))])


def in_words(trial: Trial) -> dict[str, Any]:
    """A trial in plain values."""
    return {
        **dataclasses.asdict(trial.setting),
        "tokens_per_s": 1 / trial.seconds_per_token,
        "useful_share": trial.computed_share,
        "peak_bytes": trial.peak_bytes,
    }


# ---- for a run ----


def subject_of(job: Job, config: Any, lengths: Lengths, precision: str, hardware: str) -> Subject:
    """What a probe of this job is of."""
    text = config.get_text_config()
    return Subject(
        hardware=hardware,
        model_type=config.model_type,
        hidden=text.hidden_size,
        n_layers=text.num_hidden_layers,
        vocab=text.vocab_size,
        task=job.task,
        method=job.method.name,
        lora_r=0 if job.method.name == "full" else job.method.lora_r,
        precision=precision,
        optim=job.train.optim,
        global_batch_size=job.global_batch_size,
        mean_tokens=lengths.mean + (lengths.mean_target if job.task == "seq2seq" else 0.0),
        longest=lengths.longest + lengths.longest_target,
    )


def as_probed(job: Job, folder: Path, promise: dict[str, Any], subject: Subject) -> dict[str, Any]:
    """The promise with the setting that a probe of the like has found; kept, so that later attempts are cut alike."""
    if not promise or "probed" in promise or job.says_micro_batch or job.train.probe is False:
        return promise
    setting = known_setting(Path(job.cache_dir or ".") / PROBES, subject)
    return promise if setting is None else keep_setting(folder, promise, setting)


def keep_setting(folder: Path, promise: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """Write down that the run is computed so from its first step on."""
    promise = promise | {
        "micro_batch_tokens": setting.most_tokens,
        "every_n_layers": setting.every_n_layers,
        "tile_tokens": setting.tile_tokens,
        "probed": True,
    }
    keep(folder / PLAN, promise)
    return promise


def is_worth_it(job: Job, promise: dict[str, Any], *, is_deterministic: bool, left_s: float = float("inf")) -> bool:
    """Whether a probe at the beginning of a run is expected to save more than it takes; `left_s` until a limit.

    Only where the job leaves the cut open, and a run with the same settings need not be the same to the bit.
    """
    if not promise or "probed" in promise or job.says_micro_batch or is_deterministic:
        return False
    if job.train.probe != "auto":
        return bool(job.train.probe) and left_s > 2 * PROBE_S
    return EXPECTED_SAVING * min(left_s, float(promise.get("seconds", {}).get("training", 0.0))) > PROBE_S


def probe_run(attempt: Attempt, budget_s: float = PROBE_S) -> list[Trial]:
    """Find the best setting for a run at its first step, and leave it on and written down. Returns all trials, best first."""
    prober = Prober(attempt, budget_s)
    best = prober.find()
    trials = [best, *(trial for trial in prober.trials if trial.setting != best.setting)]
    when = datetime.now(UTC).isoformat(timespec="seconds")
    finite = [in_words(trial) for trial in trials if trial.seconds_per_token < float("inf")]
    leave_probe(Path(attempt.job.cache_dir or ".") / PROBES, attempt.subject, best.setting, when, finite)
    return trials
