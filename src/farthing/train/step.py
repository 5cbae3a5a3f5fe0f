"""One optimizer step, from top to bottom: micro-batches, losses, gradients, clipping, the update.

The host never waits for a GPU here: losses and the gradient norm stay on the device until somebody
reads them, and an update that is not finite is left out on the device. `memory.py` takes a step
again where memory runs out, `shared_step.py` shares it with other ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

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
from farthing.train.optim import UpdateGuard
from farthing.train.randomness import seed_everything
from farthing.train.shared_step import SharedStep
from farthing.train.step_result import StepResult, Sums, now_on

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
        self.guards_on_device = all(
            weight.device.type == self.device.type for weight in self.trained
        ) and all(group.get("fused") for group in self.optimizer.param_groups)
        self.update_guard = UpdateGuard(self.optimizer)
        self.shared = SharedStep(training, self.trained, self.accumulate)
        self.number, self.totals = 0, OfStep(0, ())

    @property
    def n_ahead(self) -> int:
        """Steps that may be under way on the device while the host begins the next."""
        can_wait = self.guards_on_device or self.scaler.is_enabled()
        return 1 if self.device.type == "cuda" and can_wait else 0

    def take(self, number: int) -> StepResult:
        """Step `number`, from 0. Raises `RunInterruptedError`, `torch.OutOfMemoryError`."""
        started_s, rate = self.meter.wall_s, self.feed.schedule.learning_rate(number)
        self.begin(number)
        n_passes = self.feed.n_passes(number) if self.ranks.is_fsdp else 1
        sums = self.shared.gradients(number, self.feed.of(number), n_passes)
        self.before_update()
        with self.meter.span("optimizer"):
            losses, found = self.shared.of_all_ranks(number, sums)
            arriving = None  # made before the update: after it nothing may fail
            if self.device.type == "cuda":
                arriving = pinned(torch.empty(len(losses) + 1 + len(found), dtype=losses.dtype))
            began = now_on(self.device)
            figures = torch.cat([self.update(rate, losses), found])
            update = None if began is None else (began, now_on(self.device))
        names = self.forward.of.figures
        taken = StepResult(number, rate, started_s, sums, figures, names, update=update)
        if arriving is not None:
            taken.figures = arriving.copy_(figures, non_blocking=True)
            taken.arrived = now_on(self.device)
        return taken

    def begin(self, number: int) -> None:
        """Set the generators, and find what an objective of units has to know of the whole step."""
        self.number, self.shared.is_agreed = number, False
        self.update_guard.begin()
        seed_everything(self.seed, number)
        if self.forward.of.learns_units:
            examples = self.feed.batches.examples_of(number)
            self.totals = self.forward.of_step(self.feed.tokens, examples)
            if self.forward.of.is_mismatched:
                with self.meter.span("compute"):
                    baseline = self.shared.baseline(number, len(examples))
                self.totals = self.totals._replace(baseline=baseline)

    def accumulate(
        self,
        micro_batches: Iterator[MicroBatch],
        reducer: Reducer | None = None,
        counts: bool = True,
    ) -> Sums:
        """Add up the gradients of a step's micro-batches, each divided by the targets of all, or
        zeros where they do not count. Raises `RunInterruptedError`.

        Where a `reducer` hears of each micro-batch, dropout follows from the place in the table.
        """
        first = next(micro_batches, None)
        if first is None:
            return Sums()
        sums = Sums(first.step_examples, self.feed.tokens.n_targets(first.step_examples))
        with self._casts_kept(several=not first.is_last):
            for micro_batch in itertools.chain([first], micro_batches):
                if reducer is not None:
                    reducer.slot(micro_batch.slot)
                    if not len(micro_batch.examples):
                        continue
                    seed_everything(self.seed, micro_batch.step, micro_batch.number)
                self._backward(micro_batch, sums, reducer, counts)
                # with spread weights others would wait for this rank's
                if self.should_stop() and not self.ranks.is_fsdp:
                    raise RunInterruptedError(STOPPED)
        return sums

    def _backward(
        self, micro_batch: MicroBatch, sums: Sums, reducer: Reducer | None, counts: bool
    ) -> None:
        """One micro-batch: to the device, forward, loss / targets of the step, backward."""
        with self.meter.span("host_to_device"):
            batch = self.forward.to_device(micro_batch.arrays)
        with self.meter.span("compute"):
            if self.forward.of.learns_units:
                loss, figures = self.forward.unit_loss(batch, self.totals)
                sums.figures.append(figures)
            else:
                loss = self.forward.loss(batch, self._gradient_scale(sums.n_targets))
            if reducer is not None and micro_batch.is_last:
                reducer.last_backward_begins()
            with self.ranks.computing():
                self.scaler.scale(loss / sums.n_targets if counts else 0.0 * loss).backward()
            add_up()
        n_computed = self.forward.n_computed(micro_batch.arrays)
        sums.done.append(micro_batch)
        sums.losses.append(loss.detach())
        sums.computed.append(n_computed)
        sums.n_computed += n_computed

    def update(self, rate: float, losses: Tensor) -> Tensor:
        """Clip and update, unless something is not finite. Returns losses and norm in one
        tensor.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_ratio", 1.0)
        self.scaler.unscale_(self.optimizer)
        self.ranks.share_overflow(self.scaler, self.optimizer)
        norm = self.ranks.clip(self.trained, self.max_grad_norm)
        figures = torch.cat([losses, norm.double().reshape(1)])
        if isinstance(self.optimizer, StochasticAdamW):  # alike where ranks have the same rows
            seed_everything(self.seed, self.number, -1 - self.ranks.shard)
        self.update_guard.enter()
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.guards_on_device:
            # the way GradScaler tells a fused kernel to leave everything as it is
            self.optimizer.grad_scale = None
            self.optimizer.found_inf = (~figures.isfinite()).any().float()
            self.optimizer.step()
        elif bool(figures.isfinite().all()):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return figures

    def undo(self) -> None:
        """Forget a step that has failed before its update."""
        self.feed.close()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ranks.fsdp is not None:
            self.ranks.fsdp.begin_anew()
        if self.scaler.is_enabled():
            # it remembers that gradients were unscaled, which are gone; `update` would change the
            # scale
            self.scaler._per_optimizer_states.clear()

    def _casts_kept(self, *, several: bool) -> contextlib.AbstractContextManager[Any]:
        casts = self.forward.casts
        if casts is None or self.feed.settings.compiled:
            return contextlib.nullcontext()
        return casts.kept(several=several, at_once=self.ranks.n > 1)

    def _gradient_scale(self, n_targets: int) -> float | Tensor:
        """What the gradient of a summed loss will be. Only fp16 has to know it beforehand."""
        if not self.scaler.is_enabled():
            return 1.0
        return self.scaler.scale(torch.ones((), device=self.device)) / n_targets
