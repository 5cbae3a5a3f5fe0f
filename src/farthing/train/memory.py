"""What stands around a step for memory: how much is computed at once, steps that run out of memory
and are taken again, and the rehearsal of the largest before the first.

What nobody needs is given back and the step is taken again; then the micro-batch is halved, then
layers are computed again. What a step is made of stays the same. An update that has begun to change
weights can't be taken again: memory that runs out in it ends the attempt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from farthing.data.loader import MicroBatch
from farthing.device_memory import first_line, is_out_of_memory
from farthing.dist.ranks import Ranks
from farthing.dist.reduce import reduce_bytes
from farthing.events import Emit, Note
from farthing.model.activation_checkpointing import (
    Beside,
    Gathered,
    Linear,
    MemoryNeed,
    Sample,
    checkpoint_layers,
    choose_checkpointing,
)
from farthing.model.hardware import free_cached
from farthing.settings import Settings
from farthing.train.context import Training
from farthing.train.forecast import Forecaster
from farthing.train.optim import state_bytes
from farthing.train.resolve import Examples
from farthing.train.step import Step
from farthing.train.step_feed import StepFeed
from farthing.train.step_result import StepResult
from farthing.train.update import load_update_kernels, reserve_for_update, update_bytes
from farthing.units import plural

T = TypeVar("T")
# steps of an attempt that are taken again as they were: a device that is full again is too small
MOST_FREED = 3
REHEARSED_OF = 8
"""Steps with the longest examples, and as many of the first, whose cuts are looked at."""
LOOKS_S = 2.0


@dataclass
class Steps:
    """Takes the steps of a run as its `settings` say, which memory that runs out lowers."""

    step: Step
    ran_out: Callable[[int, str, bool], None]
    """Told (step, why, whether `settings` have changed) after room was made."""

    def __post_init__(self) -> None:
        self.feed = self.step.feed
        self.step.ranks.leave_less = self._leave_less
        self._n_freed = 0

    def use(self, settings: Settings) -> None:
        if settings.checkpoint_every != self.feed.settings.checkpoint_every:
            checkpoint_layers(self.step.forward.model, settings.checkpoint_every)
        self.feed.settings = settings

    def take(self, step: int) -> StepResult:
        """Step number `step`, from 0; nothing has changed when it raises. Raises
        `RunInterruptedError`, `torch.OutOfMemoryError`.
        """
        return self._with_room(step, self.step.take)

    def rehearse(self, step: int) -> tuple[int, int]:
        """Take the largest micro-batch of a step forward and backward for nothing, twice where
        gradients of several add up; (examples, computed tokens) of it. Raises as `take`."""
        return self._with_room(step, self._rehearse)

    def _with_room(self, step: int, call: Callable[[int], T]) -> T:
        """What `call(step)` gives, called again with less at once where memory runs out."""
        has_freed = False
        while True:
            try:
                return call(step)
            except BaseException as error:
                self.step.undo()
                if not is_out_of_memory(error):
                    raise
                if self.step.shared.is_agreed:
                    raise self.step.ranks.no_room() from error
                self.step.update.refuse_half_an_update(step, error)
                frees = not has_freed and self._n_freed < MOST_FREED
                if not frees and not self._can_make_room(step):
                    raise
                why = first_line(error)
            # out here, where the error no longer holds on to what had filled the memory
            if frees:
                has_freed = True
                self._n_freed += 1
            else:
                self.use(self._lowered(step))
            free_cached(self.step.device)
            self.ran_out(step, why, not frees)

    def _rehearse(self, step: int) -> tuple[int, int]:
        feed, of, ranks = self.feed, self.step, self.step.ranks
        sums = of.begin(step)
        sums.counts = False
        largest = feed.largest(step)
        arrays = of.forward.collate(feed.tokens, largest)
        passes = [
            MicroBatch(step, largest, arrays, is_last, slot=slot)
            for is_last, slot in ((False, feed.slots[0]), (True, feed.slots[-1]))
        ]
        if feed.n_slots == 1 and not ranks.is_fsdp and not feed.first_steps()[1]:
            passes = passes[1:]
        word = of.shared.begin(len(passes))
        try:
            of.accumulate(sums, passes, of.shared.reducer)
            reserve_for_update(of.optimizer)
            load_update_kernels(of.optimizer)
        except Exception as error:
            word = ranks.word_for(error)
        of.shared.reduce(sums, word)
        if ranks.fsdp is not None:
            ranks.fsdp.begin_anew()
        for weight in of.trained:
            weight.grad = None
        return len(largest), of.forward.n_computed(arrays)

    def _can_make_room(self, step: int) -> bool:
        return self.feed.largest_of(step)[0] > 1 or self.feed.settings.checkpoint_every != 1

    def _lowered(self, step: int) -> Settings:
        """Half the micro-batch; when it is one example already, more layers are computed again
        instead of kept.
        """
        n_examples, n_tokens = self.feed.largest_of(step)
        if n_examples > 1:
            halved = max(1, min(self.feed.settings.micro_batch_tokens, n_tokens) // 2)
            return replace(self.feed.settings, micro_batch_tokens=halved)
        every = 1 if self.feed.settings.checkpoint_every else 2
        return replace(self.feed.settings, checkpoint_every=every)

    def _leave_less(self) -> bool:
        """On the first rank, before all end as spread weights leave no step to take again: note
        what the next attempt begins with. Whether it can be less."""
        step = self.step.number
        if not self._can_make_room(step):
            return False
        self.feed.settings = self._lowered(step)
        self.ran_out(step, "a rank has no memory left", True)
        return True


# ---- the rehearsal ----


def rehearse(training: Training, steps: Steps, forecast: Forecaster) -> None:
    """On a GPU, or where ranks wait for each other in every layer: take the dearest micro-batch
    forward and backward before the first step of an attempt. Memory that is not there is missed
    where nothing is lost yet.

    Gradients are thrown away, random generators are set anew by each step. Raises as a step does.
    """
    context = training.context
    if steps.step.device.type != "cuda" and not context.ranks.is_fsdp:
        return
    is_over = forecast.is_done or context.limits.over() is not None
    own = None if is_over or not context.ranks.is_first else dearest_step(training)
    step = context.ranks.tell_all(own)
    if step is None:
        return
    with context.meter.span("probe"):
        n_examples, n_tokens = steps.rehearse(step)
    text = (
        f"the largest micro-batch was rehearsed: {plural(n_examples, 'example')} of step"
        f" {step + 1}, {n_tokens:,} tokens"
    )
    context.emit(Note(text))


def dearest_step(training: Training) -> int | None:
    """The step that has the largest micro-batch of what is left of the run, as far as was looked;
    None where none is left.
    """
    at, feed, n_steps = training.progress.step, training.feed, training.schedule.n_steps
    until, longest = time.monotonic() + LOOKS_S, list[tuple[int, int]]()
    for step in range(at, n_steps):
        longest.append((-int(feed.tokens.lengths[feed.batches.examples_of(step)].max()), step))
        if time.monotonic() > until:
            break
    looked_at = {step for _, step in sorted(longest)[:REHEARSED_OF]}
    looked_at |= set(range(at, min(at + REHEARSED_OF, n_steps)))
    return max(sorted(looked_at), key=lambda step: feed.largest_of(step)[1], default=None)


# ---- how much is computed at once, by the memory that small forward passes take ----


def settle_checkpointing(
    wanted: Any,
    feed: StepFeed,
    train: Examples,
    optimizer: torch.optim.Optimizer,
    free_bytes: int,
    emit: Emit,
) -> MemoryNeed:
    """Measure small forward passes and switch on as much activation checkpointing as the largest
    micro-batch needs.

    With `wanted` "auto" no less is tried than the settings have. `free_bytes` are those before the
    optimizer's state was made.
    """
    forward, settings, ranks = feed.forward, feed.settings, feed.ranks
    lengths = forward.lengths_of(train.tokens).astype(np.int64)
    (largest, has_several), of_all = feed.first_steps(), lengths[train.indices]
    # as many pairs for each token as all have together: where scores are kept, they grow with the
    # squares of lengths
    middle = np.argmin(abs(of_all - (of_all**2).sum() / of_all.sum()))
    sorted_largest = largest[np.argsort(lengths[largest])]
    some = train.indices[:: max(1, len(of_all) // 4096)]
    n_scored, n_all = train.tokens.target_lengths[some].sum(), train.tokens.lengths[some].sum()
    scored = float(n_scored) / max(1.0, float(n_all))

    def sample_of(size: int) -> Sample:
        sample = np.full(size, train.indices[middle])
        if forward.has_decoder and len(largest) >= 8:  # padded in groups, as all of them will be
            sample = sorted_largest[2 // size :: 4 // size]
        arrays = forward.collate(train.tokens, sample)
        batch = forward.to_device(arrays)
        return Sample(forward.n_computed(arrays), lambda: forward.before_head(batch))

    n_tokens = forward.n_tokens_of(train.tokens, largest)
    head, twice = forward.head_bytes(n_tokens, scored), forward.head_bytes(2 * n_tokens, scored)
    trained = [weight for group in optimizer.param_groups for weight in group["params"]]
    beside_update = 0
    if forward.numerics.device.type == "cuda":
        beside_update = max(update_bytes(optimizer), reduce_bytes(ranks, trained))
    fsdp = ranks.fsdp
    need = choose_checkpointing(
        forward.model,
        (sample_of(1), sample_of(2)),
        Beside(
            n_tokens=n_tokens,
            accumulates=has_several or settings.slots > ranks.n,
            optimizer_bytes=state_bytes(optimizer, forward.numerics.device),
            update_bytes=beside_update,
            free_bytes=free_bytes,
            head=Linear(2 * head - twice, (twice - head) / max(1, n_tokens)),
            autocast=None if fsdp is not None and fsdp.casts_rows else forward.numerics.autocast,
            casts_once=forward.casts is not None and bool(forward.casts.weights),
            gathered=Gathered() if fsdp is None else fsdp.gathered,
        ),
        wanted=wanted if wanted == "auto" else int(wanted),
        planned=settings.checkpoint_every,
        fits_all=lambda fits: fits if fsdp is None else bool(ranks.least(int(fits))),
    )
    if fsdp is None:
        return need
    fsdp.let_go()  # no backward pass has come after
    if has_several and fsdp.trains_rows and ranks.n > 1:
        need = _accumulating(need, ranks, emit)
    return need


def _accumulating(need: MemoryNeed, ranks: Ranks, emit: Emit) -> MemoryNeed:
    """Add gradients of several micro-batches up whole where all ranks have room for that."""
    fsdp = ranks.fsdp
    assert fsdp is not None
    more = fsdp.whole_gradients_bytes
    whole = replace(need, gathered=Gathered(*(each + more for each in need.gathered)))
    fsdp.accumulates_whole = bool(ranks.least(int(whole.fits)))
    how = "whole, and sent once a step"
    if not fsdp.accumulates_whole:
        how = "by rows, as whole ones do not fit"
    emit(Note(f"gradients of several micro-batches are added up {how}"))
    return whole if fsdp.accumulates_whole else need


def share_prefix(feed: StepFeed, memory: MemoryNeed, *, may_grow: bool, emit: Emit) -> MemoryNeed:
    """Compute once in a micro-batch what its examples begin with, where the data has enough of
    that. Changes the settings of `feed`.

    Decided by the first attempt, as it changes rounding. A prefix is computed once in each
    micro-batch, so they grow, up to a step, while that saves more and needs no more activation
    checkpointing; unless somebody else has said how large they are (`may_grow`).
    """
    settings, tokens, batches = feed.settings, feed.tokens, feed.batches

    def need_of(micro_batch_tokens: int) -> MemoryNeed:
        """The memory of this run with larger micro-batches than those it was judged by."""
        several = feed.first_steps(micro_batch_tokens)[1]
        return replace(memory, n_tokens=micro_batch_tokens, accumulates=several)

    if settings.shares_prefix is None:
        budgets = [settings.micro_batch_tokens]
        if may_grow:
            mean = tokens.lengths[batches.examples].mean()
            of_a_step = int(mean * batches.global_batch_size)
            while budgets[-1] < of_a_step and need_of(2 * budgets[-1]).fits:
                budgets.append(2 * budgets[-1])
        saved, n_tokens = feed.forward.share(tokens, batches, budgets)
        settings = replace(settings, shares_prefix=n_tokens > 0)
        if n_tokens:
            text = (
                f"{saved:.0%} of the tokens are beginnings that examples share: computed once in"
                " each micro-batch"
            )
            emit(Note(text))
            settings = replace(settings, micro_batch_tokens=n_tokens)
            memory = need_of(n_tokens)
    feed.forward.shares = bool(settings.shares_prefix)
    feed.settings = settings
    return memory
