"""One optimizer step, from top to bottom: micro-batches, losses, gradients, their reduction over
ranks, clipping, the update.

The host never waits for a GPU here: losses and the gradient norm stay on the device until somebody
reads them, and an update that is not finite is left out on the device. `room.py` takes a step
again where memory runs out.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farthing.data.loader import MicroBatch
from farthing.dist.ranks import GO_ON, Ranks, refuse
from farthing.dist.reduce import reducer_of
from farthing.errors import RunInterruptedError
from farthing.model.casts import add_up
from farthing.model.forward import Forward
from farthing.model.hardware import pinned
from farthing.objectives.objective import OfStep
from farthing.run.ledger import Meter
from farthing.train.bf16_adamw import StochasticAdamW
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
    """Takes one optimizer step at a time."""

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
        self.reducer = reducer_of(self.ranks, self.trained, self.feed.settings.slots)
        self.number = 0
        self.is_agreed = False
        """All ranks have this step's gradients: none can take it again by itself."""
        self.totals = OfStep(0, ())

    @property
    def n_ahead(self) -> int:
        """Steps that may be under way on the device while the host begins the next."""
        can_wait = self.guards_on_device or self.scaler.is_enabled()
        return 1 if self.device.type == "cuda" and can_wait else 0

    # ---- a step ----

    def take(self, number: int) -> StepResult:
        """Step `number`, from 0. Raises `RunInterruptedError`, `torch.OutOfMemoryError`."""
        started_s = self.meter.wall_s
        self.begin(number)
        n_passes = self.feed.n_passes(number) if self.ranks.is_fsdp else 1
        sums = self.gradients(self.feed.of(number), n_passes)
        if self.feed.n_slots > 1:
            self._gather_places(sums)
        rate, names = self.feed.schedule.learning_rate(number), self.forward.of.figures
        self.before_update()
        with self.meter.span("optimizer"):
            losses = torch.stack(sums.losses).double() / sums.n_targets
            found = torch.stack(sums.figures).flatten() if names else losses[:0]
            all_ranks = self.ranks.sum_up(torch.cat([losses, found]))
            losses, found = all_ranks.split([len(losses), len(found)])
            found = found.reshape(len(losses), 2 * len(names)).sum(0)
            arriving = None  # made before the update: after it nothing may fail
            if self.device.type == "cuda":
                arriving = pinned(torch.empty(len(losses) + 1 + len(found), dtype=losses.dtype))
            began = _now_on(self.device)
            figures = torch.cat([self.update(rate, losses), found])
            update = None if began is None else (began, _now_on(self.device))
        taken = StepResult(number, rate, started_s, sums, figures, names, _update=update)
        if arriving is not None:
            taken.figures = arriving.copy_(figures, non_blocking=True)
            taken._arrived = _now_on(self.device)
        return taken

    def begin(self, number: int) -> None:
        """Set the generators, and find what an objective of units has to know of the whole step."""
        self.number, self.is_agreed = number, False
        self.update_guard.begin()
        seed_everything(self.seed, number)
        if not self.forward.of.learns_units:
            return
        examples = self.feed.batches.examples_of(number)
        self.totals = self.forward.of_step(self.feed.tokens, examples)
        if self.forward.of.is_mismatched:
            self.totals = self.totals._replace(baseline=self._baseline(len(examples)))

    def gradients(
        self, micro_batches: Iterator[MicroBatch], n_passes: int, *, counts: bool = True
    ) -> Sums:
        """Leave the gradients of a step with the weights, on every rank; zeros where they do not
        count, as in a rehearsal. Over spread weights the busiest rank has `n_passes` micro-batches.

        Where one rank has to stop or has no memory left, all take the step again. Raises
        `RunInterruptedError`, `torch.OutOfMemoryError`.
        """
        sums, word, is_shared, fsdp = Sums(), GO_ON, self.feed.n_slots > 1, self.ranks.fsdp
        if is_shared:
            self.reducer.begin()
        if fsdp is not None:
            fsdp.begin_step(n_passes)
        try:
            sums = self.accumulate(micro_batches, shared=is_shared, counts=counts)
            if is_shared and self.ranks.is_fsdp:
                self._keep_up(sums, n_passes)
            reserve_for_update(self.optimizer)
            if not counts:
                load_update_kernels(self.optimizer)
        except Exception as error:
            word = self.ranks.word_for(error)
        if is_shared:
            self._reduce(sums, word)
        if fsdp is not None:
            fsdp.take_gradients()
        return sums

    def accumulate(
        self, micro_batches: Iterator[MicroBatch], *, shared: bool = False, counts: bool = True
    ) -> Sums:
        """Add up the gradients of a step's micro-batches, each divided by the targets of all, or
        zeros where they do not count. Raises `RunInterruptedError`.

        Where the step is `shared` the reducer hears of each micro-batch, and dropout follows from
        the place in the table.
        """
        sums, of = Sums(), self.forward.of
        first = next(micro_batches, None)
        if first is None:
            return sums
        sums.examples = first.step_examples
        sums.n_targets = self.feed.tokens.n_targets(first.step_examples)
        with self._casts_kept(several=not first.is_last):
            for micro_batch in itertools.chain([first], micro_batches):
                if shared:
                    self.reducer.slot(micro_batch.slot)
                    if not len(micro_batch.examples):
                        continue
                    seed_everything(self.seed, micro_batch.step, micro_batch.number)
                with self.meter.span("host_to_device"):
                    batch = self.forward.to_device(micro_batch.arrays)
                before_s = self.meter.spans.get("compute", 0.0)
                with self.meter.span("compute"):
                    figures: Tensor | None = None
                    if not of.learns_units:
                        loss = self.forward.loss(batch, self._gradient_scale(sums.n_targets))
                    else:
                        loss, figures = self.forward.unit_loss(batch, self.totals)
                forward_s = self.meter.spans["compute"] - before_s
                if shared and micro_batch.is_last:
                    self.reducer.last_backward_begins()
                with self.meter.span("compute"), self.ranks.computing():
                    self.scaler.scale(loss / sums.n_targets if counts else 0.0 * loss).backward()
                    add_up()
                if self.device.type == "cpu":
                    sums.forward_s += forward_s
                    sums.compute_s += self.meter.spans["compute"] - before_s
                n_computed = self.forward.n_computed(micro_batch.arrays)
                sums.add(micro_batch, loss.detach(), n_computed, figures)
                # with spread weights others would wait for this rank's
                if self.should_stop() and not self.ranks.is_fsdp:
                    raise RunInterruptedError("stopped within a step; it is taken again")
        return sums

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
        """Forget a step that failed."""
        self.feed.close()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ranks.fsdp is not None:
            self.ranks.fsdp.begin_anew()
        forget_unscaling(self.scaler)

    # ---- parts of it ----

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

    @torch.no_grad()
    def _baseline(self, n_units: int) -> Tensor:
        """The mean log-ratio to the reference of the step's mismatched sequences, at least 0."""
        feed = self.feed
        table = feed.table(self.number)
        own = {cell.number for cell in table.of_slots(feed.slots)}
        sums = torch.zeros(len(table.cells), dtype=torch.float64, device=self.device)
        n_more = feed.n_passes(self.number) if self.ranks.is_fsdp else 0
        for place, cell in enumerate(table.cells):
            if cell.number in own:
                with self.meter.span("compute"):
                    sums[place] = self.forward.mismatched_ratio(feed.tokens, cell.examples)
                n_more -= 1
        for _ in range(n_more):  # all ranks go through the model as often
            self.forward.mismatched_ratio(feed.tokens, table.cells[-1].examples)
        return (self.ranks.sum_up(sums).sum() / n_units).clamp(min=0).float()

    def _reduce(self, sums: Sums, word: int) -> None:
        """Sum gradients and counts over ranks, where all of them have come so far."""
        of_ranks = [
            sums.n_computed if rank == self.ranks.index else 0 for rank in range(self.ranks.n)
        ]
        has_gradient = self.reducer.end(word != GO_ON)
        word, marks = self.ranks.agree(word, [*of_ranks, *has_gradient])
        if word != GO_ON:
            self.reducer.give_up()
        refuse(word)
        self.is_agreed = self.ranks.n > 1
        self.reducer.finish(marks[self.ranks.n :])
        sums.n_computed = sum(marks[: self.ranks.n])

    def _gather_places(self, sums: Sums) -> None:
        """Leave losses and figures of all micro-batches of the step's table: 0 but for those of
        this rank.
        """
        cells = self.feed.table(self.number).cells
        places = {cell.number: place for place, cell in enumerate(cells)}
        n_figures = len(self.forward.of.figures)
        losses = torch.zeros(len(places), device=self.device)
        figures = torch.zeros(len(places), 2, n_figures, dtype=torch.float64, device=self.device)
        for at, number in enumerate(sums.numbers):
            losses[places[number]] = sums.losses[at]
            if n_figures:
                figures[places[number]] = sums.figures[at]
        sums.micro_batches, sums.losses = [cell.examples for cell in cells], list(losses)
        sums.figures = list(figures)

    def _keep_up(self, sums: Sums, n_passes: int) -> None:
        """Where weights are spread: go through the model as often as the busiest rank, for nothing.
        Raises `RunInterruptedError`.
        """
        smallest = self.feed.table(self.number).cells[-1].examples
        small = MicroBatch(self.number, sums.examples, smallest, {}, True)
        with self.reducer.aside():
            for _ in range(n_passes - len(sums.losses)):
                for weight in [] if self.ranks.trains_rows else self.trained:
                    weight.grad = None
                arrays = self.forward.collate(self.feed.tokens, smallest)
                self.accumulate(iter([replace(small, arrays=arrays)]), counts=False)
        if self.should_stop():
            raise RunInterruptedError("stopped within a step; it is taken again")


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
    digest = hashlib.blake2b(
        "/".join(str(each) for each in (seed, *place)).encode(), digest_size=8
    ).digest()
    number = int.from_bytes(digest, "little") >> 1
    # as torch.manual_seed, which also notes a stack trace for each kind of device that is not in
    # use
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
    np.random.seed(number % 2**32)
    random.seed(number)
