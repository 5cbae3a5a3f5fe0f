"""What stands around a step for memory: steps that run out of it are taken again, and the largest
is rehearsed before the first.

What nobody needs is given back and the step is taken again; then the micro-batch is halved, then
layers are computed again. What a step is made of stays the same. An update that has begun to change
weights can't be taken again: memory that runs out in it ends the attempt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from farthing.data.loader import MicroBatch
from farthing.device_memory import first_line, is_out_of_memory
from farthing.events import Note
from farthing.model.activation_checkpointing import checkpoint_layers
from farthing.model.hardware import free_cached
from farthing.settings import Settings
from farthing.train.context import Training
from farthing.train.forecast import Forecast
from farthing.train.step import Step
from farthing.train.step_feed import StepFeed
from farthing.train.step_result import StepResult
from farthing.train.update import load_update_kernels, reserve_for_update
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
        self.step.ranks.leave_less = self._leave_less
        self._n_freed = 0

    @property
    def feed(self) -> StepFeed:
        return self.step.feed

    @property
    def settings(self) -> Settings:
        """How the steps are computed, now."""
        return self.feed.settings

    def use(self, settings: Settings) -> None:
        if settings.checkpoint_every != self.settings.checkpoint_every:
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
                if not is_out_of_memory(error) or self.step.shared.is_agreed:
                    raise
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
        examples, largest = feed.batches.examples_of(step), feed.largest(step)
        arrays = of.forward.collate(feed.tokens, largest)
        passes = [
            MicroBatch(step, examples, largest, arrays, is_last, slot=slot)
            for is_last, slot in ((False, feed.slots[0]), (True, feed.slots[-1]))
        ]
        if feed.n_slots == 1 and not ranks.is_fsdp and not feed.first_steps()[1]:
            passes = passes[1:]
        word = of.shared.begin(len(passes))
        try:
            of.accumulate(sums, passes, of.shared.reducer, counts=False)
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
        return self.feed.largest_of(step)[0] > 1 or self.settings.checkpoint_every != 1

    def _lowered(self, step: int) -> Settings:
        """Half the micro-batch; when it is one example already, more layers are computed again
        instead of kept.
        """
        n_examples, n_tokens = self.feed.largest_of(step)
        if n_examples > 1:
            halved = max(1, min(self.settings.micro_batch_tokens, n_tokens) // 2)
            return replace(self.settings, micro_batch_tokens=halved)
        return replace(self.settings, checkpoint_every=1 if self.settings.checkpoint_every else 2)

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


def rehearse(training: Training, steps: Steps, forecast: Forecast) -> None:
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
