"""One optimizer step, from top to bottom: micro-batches, losses, gradients, clipping, the update.

The host never waits for a GPU here: losses and the gradient norm stay on the device until somebody
reads them, and an update that is not finite is left out on the device. `room.py` takes a step
again where memory runs out, `shared_step.py` shares it with other ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farthing.data.loader import MicroBatch
from farthing.dist.ranks import Ranks
from farthing.dist.reduce import AllReduce, FixedOrder
from farthing.errors import RunInterruptedError
from farthing.model.casts import add_up
from farthing.model.forward import Forward
from farthing.model.hardware import pinned
from farthing.objectives.objective import OfStep
from farthing.run.ledger import Meter
from farthing.train.bf16_adamw import StochasticAdamW
from farthing.train.shared_step import SharedStep
from farthing.train.step_feed import StepFeed
from farthing.train.step_result import StepResult, Sums
from farthing.train.update_guard import (
    UpdateGuard,
    forget_unscaling,
    load_update_kernels,
    reserve_for_update,
)


@dataclass(kw_only=True)
class Step:
    forward: Forward
    feed: StepFeed
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    max_grad_norm: float
    seed: int
    meter: Meter
    should_stop: Callable[[], bool]
    before_update: Callable[[], None]
    """Called before weights and state change: what is still being copied from them has to be waited
    for.
    """
    ranks: Ranks

    def __post_init__(self) -> None:
        self.device = self.forward.numerics.device
        self.trained = list(self.ranks.trained_of(self.forward.model).values())
        self.guards_on_device = all(
            weight.device.type == self.device.type for weight in self.trained
        ) and all(group.get("fused") for group in self.optimizer.param_groups)
        self.update_guard = UpdateGuard(self.optimizer)
        self.shared = SharedStep(self.ranks, self.forward, self.feed, self.trained)
        self.number = 0
        self.totals = OfStep(0, ())

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
        sums = self.gradients(self.feed.of(number), n_passes)
        self.before_update()
        with self.meter.span("optimizer"):
            losses, found = self.shared.of_all_ranks(number, sums)
            arriving = None  # made before the update: after it nothing may fail
            if self.device.type == "cuda":
                arriving = pinned(torch.empty(len(losses) + 1 + len(found), dtype=losses.dtype))
            began = _now_on(self.device)
            figures = torch.cat([self.update(rate, losses), found])
            update = None if began is None else (began, _now_on(self.device))
        names = self.forward.of.figures
        taken = StepResult(number, rate, started_s, sums, figures, names, _update=update)
        if arriving is not None:
            taken.figures = arriving.copy_(figures, non_blocking=True)
            taken._arrived = _now_on(self.device)
        return taken

    def begin(self, number: int) -> None:
        """Set the generators, and find what an objective of units has to know of the whole step."""
        self.number = number
        self.update_guard.begin()
        self.shared.is_agreed = False
        seed_everything(self.seed, number)
        if self.forward.of.learns_units:
            examples = self.feed.batches.examples_of(number)
            self.totals = self.forward.of_step(self.feed.tokens, examples)
            if self.forward.of.is_mismatched:
                with self.meter.span("compute"):
                    baseline = self.shared.baseline(number, len(examples))
                self.totals = self.totals._replace(baseline=baseline)

    def gradients(
        self, micro_batches: Iterator[MicroBatch], n_passes: int, *, counts: bool = True
    ) -> Sums:
        """Leave the gradients of a step with the weights, on every rank; zeros where they do not
        count, as in a rehearsal. The busiest rank has `n_passes` micro-batches. Raises as `take`.
        """

        def idle(micro_batch: MicroBatch) -> None:
            self.accumulate(iter([micro_batch]), counts=False)

        def compute(reducer: AllReduce | FixedOrder | None) -> Sums:
            sums = self.accumulate(micro_batches, reducer=reducer, counts=counts)
            if reducer is not None and self.ranks.is_fsdp:
                n_more = n_passes - len(sums.losses)
                self.shared.keep_up(self.number, n_more, idle)
                if self.should_stop():
                    raise RunInterruptedError("stopped within a step; it is taken again")
            reserve_for_update(self.optimizer)
            if not counts:
                load_update_kernels(self.optimizer)
            return sums

        return self.shared.gradients(n_passes, compute)

    def accumulate(
        self,
        micro_batches: Iterator[MicroBatch],
        *,
        reducer: AllReduce | FixedOrder | None = None,
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
                self._backward(micro_batch, sums, reducer, counts=counts)
                # with spread weights others would wait for this rank's
                if self.should_stop() and not self.ranks.is_fsdp:
                    raise RunInterruptedError("stopped within a step; it is taken again")
        return sums

    def _backward(
        self,
        micro_batch: MicroBatch,
        sums: Sums,
        reducer: AllReduce | FixedOrder | None = None,
        *,
        counts: bool = True,
    ) -> None:
        """One micro-batch: to the device, forward, loss / targets of the step, backward."""
        spans, figures = self.meter.spans, None
        with self.meter.span("host_to_device"):
            batch = self.forward.to_device(micro_batch.arrays)
        before_s = spans.get("compute", 0.0)
        with self.meter.span("compute"):
            if self.forward.of.learns_units:
                loss, figures = self.forward.unit_loss(batch, self.totals)
            else:
                loss = self.forward.loss(batch, self._gradient_scale(sums.n_targets))
        forward_s = spans["compute"] - before_s
        if reducer is not None and micro_batch.is_last:
            reducer.last_backward_begins()
        with self.meter.span("compute"), self.ranks.computing():
            self.scaler.scale(loss / sums.n_targets if counts else 0.0 * loss).backward()
            add_up()
        if self.device.type == "cpu":
            sums.forward_s += forward_s
            sums.compute_s += spans["compute"] - before_s
        sums.add(micro_batch, loss.detach(), self.forward.n_computed(micro_batch.arrays), figures)

    def update(self, rate: float, losses: Tensor) -> Tensor:
        """Clip and update, unless something is not finite. Returns losses and norm in one
        tensor.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_ratio", 1.0)
        self.scaler.unscale_(self.optimizer)
        self.ranks.share_overflow(self.scaler, self.optimizer)
        norm = self.ranks.clip(self.trained, self.max_grad_norm or math.inf)
        figures = torch.cat([losses, norm.double().reshape(1)])
        reserve_for_update(self.optimizer)
        if isinstance(self.optimizer, StochasticAdamW):  # alike where ranks have the same rows
            seed_everything(self.seed, self.number, -1 - self.ranks.shard)
        if self.scaler.is_enabled():
            self.update_guard.enter()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.guards_on_device:
            # the way GradScaler tells a fused kernel to leave everything as it is
            self.optimizer.grad_scale = None
            self.optimizer.found_inf = (~figures.isfinite()).any().float()
            self.update_guard.enter()
            self.optimizer.step()
        elif bool(figures.isfinite().all()):
            self.update_guard.enter()
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return figures

    def undo(self) -> None:
        self.feed.close()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ranks.fsdp is not None:
            self.ranks.fsdp.begin_anew()
        forget_unscaling(self.scaler)

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


def _now_on(device: torch.device) -> Any:
    """A moment of a GPU's own time; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seed_everything(seed: int, *place: int) -> None:
    """Every generator as a function of (seed, step), in a step of several slots of the micro-batch
    too: dropout after a resume, and on another rank, is what it would have been."""
    text = "/".join(str(each) for each in (seed, *place))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    # as torch.manual_seed, which also notes a stack trace for each kind of device that is not in
    # use
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
    np.random.seed(number % 2**32)
    random.seed(number)
