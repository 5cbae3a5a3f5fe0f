"""One optimizer step, from top to bottom: micro-batches, losses, gradients, clipping, the update.

The host never waits for a GPU here: losses and the gradient norm stay on the device until somebody
reads them, and an update that is not finite is left out on the device. `memory.py` takes a step
again where memory runs out, `shared_step.py` shares it with other ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from farthing.data.loader import MicroBatch
from farthing.dist.reduce import Reducer
from farthing.errors import RunInterruptedError
from farthing.model.casts import add_up
from farthing.model.hardware import pinned
from farthing.objectives.objective import OfStep
from farthing.train.bf16_adamw import StochasticAdamW
from farthing.train.context import Training
from farthing.train.randomness import seed_everything
from farthing.train.shared_step import SharedStep
from farthing.train.step_result import StepResult, Sums, now_on
from farthing.train.update import WeightUpdate, reserve_for_update

STOPPED = "stopped within a step; it is taken again"


class Step:
    def __init__(self, training: Training, before_update: Callable[[], None]) -> None:
        """`before_update` is called before weights and state change: it waits for what is still
        copied from them.
        """
        context, train = training.context, training.spec.train
        self.forward, self.feed = training.forward, training.feed
        self.optimizer, self.scaler = training.optimizer, training.scaler
        self.seed, self.max_grad_norm = train.seed, train.max_grad_norm or math.inf
        self.meter, self.ranks = context.meter, context.ranks
        self.should_stop, self.before_update = context.is_asked_to_leave, before_update
        self.device = self.forward.numerics.device
        self.trained = list(self.ranks.trained_of(self.forward.model).values())
        self.update = WeightUpdate(self.optimizer, self.scaler, self.trained, self.device)
        self.shared = SharedStep(training, self.trained)
        self.number, self.totals = 0, OfStep(0, ())

    def take(self, number: int) -> StepResult:
        """Step `number`, from 0. Raises `RunInterruptedError`, `torch.OutOfMemoryError`."""
        started_s, rate = self.meter.wall_s, self.feed.schedule.learning_rate(number)
        sums = self.begin(number)
        n_passes = self.feed.n_passes(number) if self.ranks.is_fsdp else 1
        word = self.shared.begin(n_passes)
        try:
            self.accumulate(sums, self.feed.of(number), self.shared.reducer)
            for idle in self.shared.idle(number, n_passes - len(sums.losses)):
                self.accumulate(Sums(sums.examples, sums.n_targets, counts=False), [idle])
            if self.should_stop() and self.shared.waits_in_layers:
                raise RunInterruptedError(STOPPED)
            reserve_for_update(self.optimizer)
        except Exception as error:
            word = self.ranks.word_for(error)
        self.shared.reduce(sums, word)  # the error no longer holds on to what had filled the memory
        self.before_update()
        with self.meter.span("optimizer"):
            losses, found = self.shared.of_all_ranks(number, sums)
            room = torch.empty(len(losses) + 1 + len(found), dtype=losses.dtype)
            if self.device.type == "cuda":
                room = pinned(room)  # here: after the update nothing may fail
            began = now_on(self.device)
            figures = torch.cat([losses, self.clip(rate).double().reshape(1)])
            self.update.apply(figures)
            updated = now_on(self.device)
            room.copy_(torch.cat([figures, found]), non_blocking=True)
        names, arrived = self.forward.of.figures, now_on(self.device)
        return StepResult(number, rate, started_s, sums, room, names, began, updated, arrived)

    def begin(self, number: int) -> Sums:
        """Set the generators, and find what the objective has to know of the whole step."""
        self.number, self.shared.is_agreed = number, False
        self.update.begin()
        seed_everything(self.seed, number)
        examples = self.feed.batches.examples_of(number)
        with self.meter.span("compute"):
            self.totals = self.shared.totals(number, examples)
        return Sums(examples, self.feed.tokens.n_targets(examples))

    def accumulate(
        self, sums: Sums, micro_batches: Iterable[MicroBatch], reducer: Reducer | None = None
    ) -> None:
        """Add up the gradients of a step's micro-batches, each divided by the targets of all.
        Raises `RunInterruptedError`.

        Where a `reducer` hears of each micro-batch, dropout follows from the place in the table.
        """
        casts = self.forward.casts
        with contextlib.ExitStack() as stack:
            for place, micro_batch in enumerate(micro_batches):
                if place == 0 and casts is not None:
                    several, at_once = not micro_batch.is_last, self.ranks.n > 1
                    stack.enter_context(casts.kept(several=several, at_once=at_once))
                if reducer is not None:
                    reducer.slot(micro_batch.slot)
                    if not len(micro_batch.examples):
                        continue
                    seed_everything(self.seed, micro_batch.step, micro_batch.number)
                self._backward(sums, micro_batch, reducer)
                # with spread weights others would wait for this rank's
                if self.should_stop() and not self.ranks.is_fsdp:
                    raise RunInterruptedError(STOPPED)

    def _backward(self, sums: Sums, micro_batch: MicroBatch, reducer: Reducer | None) -> None:
        """One micro-batch: to the device, forward, loss / targets of the step, backward."""
        with self.meter.span("host_to_device"):
            batch = self.forward.to_device(micro_batch.arrays)
        with self.meter.span("compute"):
            scale: float | Tensor = 1.0  # of the gradient, which fp16 has to know beforehand
            if self.scaler.is_enabled():
                scale = self.scaler.scale(torch.ones((), device=self.device)) / sums.n_targets
            loss, figures = self.forward.loss(batch, self.totals, scale)
            if reducer is not None and micro_batch.is_last:
                reducer.last_backward_begins()
            with self.ranks.computing():
                self.scaler.scale(loss / sums.n_targets if sums.counts else 0.0 * loss).backward()
            add_up()
        sums.add(micro_batch, loss, figures, self.forward.n_computed(micro_batch.arrays))

    def clip(self, rate: float) -> Tensor:
        """Set the learning rate and clip the gradients; their norm before."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_ratio", 1.0)
        self.scaler.unscale_(self.optimizer)
        self.ranks.share_overflow(self.scaler, self.optimizer)
        norm = self.ranks.clip(self.trained, self.max_grad_norm)
        if isinstance(self.optimizer, StochasticAdamW):  # alike where ranks have the same rows
            seed_everything(self.seed, self.number, -1 - self.ranks.shard)
        return norm

    def undo(self) -> None:
        """Forget a step that has failed before its update."""
        self.feed.close()
        self.update.undo()
        if self.ranks.fsdp is not None:
            self.ranks.fsdp.begin_anew()
