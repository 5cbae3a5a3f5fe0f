"""An optimizer step: the micro-batches of a global batch, their gradients, clipping and the update.

The host never waits for a GPU here: losses and the gradient norm stay on the device until somebody
reads them, and an update that is not finite is left out on the device. When memory runs out, what
nobody needs is given back and the step is taken again; then the micro-batch is halved. What a step
is made of stays the same. An update that has begun to change weights can't be taken again: memory
that runs out in it ends the run in words.

Refuses to know what a run is: it saves, logs and judges nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farthing.data.batches import Batches
from farthing.data.loader import Feed, MicroBatch, micro_batches
from farthing.data.row_table import Table, rows_of
from farthing.data.token_set import TokenSet
from farthing.device_memory import first_line, is_out_of_memory
from farthing.dist.ranks import GO_ON, Ranks, refuse
from farthing.dist.reduce import reducer_of, slots_of
from farthing.errors import RunInterruptedError
from farthing.model.activation_checkpointing import checkpoint_layers
from farthing.model.casts import add_up
from farthing.model.forward import Forward, Host
from farthing.model.hardware import free_cached, pinned
from farthing.objectives.objective import OfStep
from farthing.run.ledger import Meter
from farthing.settings import Settings
from farthing.train.update_guard import (
    UpdateGuard,
    forget_unscaling,
    load_update_kernels,
    reserve_for_update,
)

T = TypeVar("T")
# steps of an attempt that are taken again as they were: a device that is full again is too small
MOST_FREED = 3


@dataclass
class Sums:
    """The micro-batches of a step, whose gradients were added up."""

    examples: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    n_targets: int = 0
    n_computed: int = 0
    """Computed tokens."""
    largest: tuple[int, int] = (0, 0)
    """(examples, computed tokens) of the largest micro-batch."""
    micro_batches: list[NDArray[np.int64]] = field(default_factory=list)
    """The same examples as they were cut into micro-batches."""
    numbers: list[int] = field(default_factory=list)
    """Of the micro-batches of this process, in the step's table."""
    computed: list[int] = field(default_factory=list)
    """Computed tokens of each."""
    forward_s: float = 0.0
    compute_s: float = 0.0
    """Of the forward passes, and of those and the backward passes, where the host waits for the
    device.
    """
    losses: list[Tensor] = field(default_factory=list)
    """Of each micro-batch: a sum, on the device."""
    figures: list[Tensor] = field(default_factory=list)
    """[2, F] of each, of an objective of units: see `Forward.unit_loss`."""
    hosts: list[Host] = field(default_factory=list)
    """Arrays that may still be on their way to the device."""

    def add(
        self, micro_batch: MicroBatch, loss: Tensor, n_computed: int, figures: Tensor | None
    ) -> None:
        """Count a micro-batch."""
        if figures is not None:
            self.figures.append(figures)
        self.micro_batches.append(micro_batch.examples)
        self.numbers.append(micro_batch.number)
        self.losses.append(loss)
        self.hosts.append(micro_batch.arrays)
        self.computed.append(n_computed)
        self.n_computed += n_computed
        if n_computed > self.largest[1]:
            self.largest = len(micro_batch.examples), n_computed


@dataclass
class StepResult:
    """A step that was taken; its figures may still be on their way from the device."""

    step: int
    """From 0."""
    learning_rate: float
    started_s: float
    sums: Sums
    figures: Tensor
    """float64 [micro-batches + 1 + 2F]: what each adds to the mean loss of the step's targets; the
    gradient norm; sums of the objective's figures, and of how many.
    """
    names: tuple[str, ...] = ()
    """Of the objective's figures."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Their means, once `read`."""
    _arrived: Any = None
    _update: Any = None

    def read(self) -> tuple[list[float], float]:
        """(what each micro-batch adds to the mean loss, gradient norm before clipping); waited for."""  # noqa: E501
        if self._arrived is not None:
            self._arrived.synchronize()
        n = len(self.sums.losses)
        losses, norm, found = self.figures.split([n, 1, 2 * len(self.names)])
        for name, total, count in zip(self.names, *found.reshape(2, -1).tolist(), strict=True):
            if count:
                self.metrics[name] = total / count
        self.sums.hosts.clear()
        return losses.tolist(), float(norm)

    def update_s(self) -> float:
        """Seconds of a GPU for clipping and the update, once `read`; 0 where the host has done it
        in its own time.
        """
        return 0.0 if self._update is None else self._update[0].elapsed_time(self._update[1]) / 1000


@dataclass(kw_only=True)
class Steps:
    """Takes the steps of a run as its `settings` say, which memory that runs out lowers."""

    forward: Forward
    batches: Batches
    tokens: TokenSet
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    n_steps: int
    learning_rate_at: Callable[[int], float]
    max_grad_norm: float
    seed: int
    settings: Settings
    meter: Meter
    should_stop: Callable[[], bool]
    ran_out: Callable[[int, str, bool], None]
    """Told (step, why, whether `settings` have changed) after room was made."""
    before_update: Callable[[], None] = lambda: None
    """Called before weights and state change: what is still being copied from them has to be waited
    for.
    """
    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        self.trained = list(self.ranks.trained_of(self.forward.model).values())
        is_there = all(
            weight.device.type == self.forward.numerics.device.type for weight in self.trained
        )
        self.guards_on_device = is_there and all(
            group.get("fused") for group in self.optimizer.param_groups
        )
        self._feed: Feed | None = None
        self._fed_step = -1
        self._step = 0
        self._of_step = OfStep(0, ())
        self.ranks.leave_less = self._leave_less
        self._n_freed = 0
        self._is_agreed = False
        self._update_guard = UpdateGuard(self.optimizer)
        self.n_slots = self.settings.slots or self.ranks.n
        self._slots = slots_of(self.ranks.index, self.ranks.n, self.n_slots)
        self._reducer = reducer_of(self.ranks, self.trained, self.settings.slots)

    @property
    def n_ahead(self) -> int:
        """Steps that may be under way on the device while the host begins the next."""
        can_wait = self.guards_on_device or self.scaler.is_enabled()
        return 1 if self.forward.numerics.device.type == "cuda" and can_wait else 0

    def use(self, settings: Settings) -> None:
        """Compute as these settings say from now on."""
        if settings.checkpoint_every != self.settings.checkpoint_every:
            checkpoint_layers(self.forward.model, settings.checkpoint_every)
        self.settings, self.forward.tile_tokens = settings, settings.tile_tokens

    def close(self) -> None:
        """Stop what is made ready ahead."""
        if self._feed is not None:
            self._feed.close()
        self._feed = None

    def take(self, step: int) -> StepResult:
        """Step number `step`, from 0; nothing has changed when it raises. Raises
        `RunInterruptedError`, `torch.OutOfMemoryError`,
        `NoRoomLeft`."""
        return self._with_room(step, self._take)

    def rehearse(self, step: int, adds_up: Callable[[], bool] = lambda: True) -> tuple[int, int]:
        """Take the largest micro-batch of a step forward and backward for nothing, twice where
        `adds_up` says that gradients of several add up; (examples, computed tokens) of it. Raises
        as `take`."""
        return self._with_room(step, lambda step: self._rehearse(step, adds_up))

    def _with_room(self, step: int, call: Callable[[int], T]) -> T:
        """What `call(step)` gives, called again with less at once where memory runs out."""
        has_freed = False
        self._step = step
        while True:
            self._update_guard.begin()
            try:
                return call(step)
            except BaseException as error:
                self.close()
                self.optimizer.zero_grad(set_to_none=True)
                if self.ranks.fsdp is not None:
                    self.ranks.fsdp.begin_anew()
                forget_unscaling(self.scaler)
                if not is_out_of_memory(error) or self._is_agreed:
                    raise
                self._update_guard.refuse_half_an_update(step, error)
                frees = not has_freed and self._n_freed < MOST_FREED
                if not frees and not self._can_make_room(step):
                    raise
                why = first_line(error)
            # out here, where the error no longer holds on to what had filled the memory
            if frees:
                has_freed = True
                self._n_freed += 1
                free_cached(self.forward.numerics.device)
                self.ran_out(step, why, False)
            else:
                self._make_room(step, why)

    def _totals(self, step: int) -> OfStep:
        """What an objective of units has to know of the whole step."""
        if self.forward.of.loss is None:
            return OfStep(0, ())
        examples = self.batches.examples_of(step)
        found = self.forward.of_step(self.tokens, examples)
        if not self.forward.of.is_mismatched:
            return found
        return found._replace(baseline=self._baseline(step, len(examples)))

    @torch.no_grad()
    def _baseline(self, step: int, n_units: int) -> Tensor:
        """The mean log-ratio to the reference of the step's mismatched sequences, at least 0."""
        table = self.table_of(self.batches.examples_of(step), self.settings.micro_batch_tokens)
        own = {cell.number for cell in table.of_slots(self._slots)}
        sums = torch.zeros(
            len(table.cells), dtype=torch.float64, device=self.forward.numerics.device
        )
        n_more = self._n_passes(step) if self.ranks.is_fsdp else 0
        for place, cell in enumerate(table.cells):
            if cell.number in own:
                with self.meter.span("compute"):
                    sums[place] = self.forward.mismatched_ratio(self.tokens, cell.examples)
                n_more -= 1
        for _ in range(n_more):  # all ranks go through the model as often
            self.forward.mismatched_ratio(self.tokens, table.cells[-1].examples)
        return (self.ranks.sum_up(sums).sum() / n_units).clamp(min=0).float()

    def _rehearse(self, step: int, adds_up: Callable[[], bool]) -> tuple[int, int]:
        self._is_agreed = False
        seed_everything(self.seed, step)
        self._of_step = self._totals(step)
        examples = self.batches.examples_of(step)
        largest = self._largest_cell(step)
        arrays = self.forward.collate(self.tokens, largest)
        first, last = (
            MicroBatch(step, examples, largest, arrays, is_last, slot=slot)
            for is_last, slot in ((False, self._slots[0]), (True, self._slots[-1]))
        )
        is_one = self.n_slots == 1 and not self.ranks.is_fsdp and not adds_up()
        passes = [last] if is_one else [first, last]
        self._gradients(step, iter(passes), len(passes), counts=False)
        if self.ranks.fsdp is not None:
            self.ranks.fsdp.begin_anew()
        for weight in self.trained:
            weight.grad = None
        return len(largest), self.forward.n_computed(arrays)

    def _take(self, step: int) -> StepResult:
        started_s, device = self.meter.wall_s, self.forward.numerics.device
        self._is_agreed = False
        seed_everything(self.seed, step)
        self._of_step = self._totals(step)
        n_passes = self._n_passes(step) if self.ranks.is_fsdp else 1
        sums = self._gradients(step, self._micro_batches_of(step), n_passes)
        if self.n_slots > 1:
            self._gather_places(step, sums)
        rate = self.learning_rate_at(step)
        self.before_update()
        with self.meter.span("optimizer"):
            losses = torch.stack(sums.losses).double() / sums.n_targets
            names = self.forward.of.figures
            found = torch.stack(sums.figures).flatten() if names else losses[:0]
            losses, found = self.ranks.sum_up(torch.cat([losses, found])).split(
                [len(losses), len(found)]
            )
            found = found.reshape(len(losses), 2 * len(names)).sum(0)
            arriving = None  # made before the update: after it nothing may fail
            if device.type == "cuda":
                arriving = pinned(torch.empty(len(losses) + 1 + len(found), dtype=losses.dtype))
            began = _now_on(device)
            figures = torch.cat([self._update(rate, losses), found])
            update = None if began is None else (began, _now_on(device))
        taken = StepResult(step, rate, started_s, sums, figures, names, _update=update)
        if arriving is not None:
            taken.figures = arriving.copy_(figures, non_blocking=True)
            taken._arrived = _now_on(device)
        return taken

    def _gradients(
        self, step: int, micro_batches: Iterator[MicroBatch], n_passes: int, *, counts: bool = True
    ) -> Sums:
        """Leave the gradients of a step with the weights, on every rank; zeros where they do not
        count, as in a rehearsal. Over spread weights the busiest rank has `n_passes` micro-batches.

        Where one rank has to stop or has no memory left, all take the step again. Raises
        `RunInterruptedError`,
        `torch.OutOfMemoryError`.
        """
        sums, word, is_shared = Sums(), GO_ON, self.n_slots > 1
        if is_shared:
            self._reducer.begin()
        if self.ranks.fsdp is not None:
            self.ranks.fsdp.begin_step(n_passes)
        try:
            sums = self.accumulate(micro_batches, shared=is_shared, counts=counts)
            if is_shared:
                self._keep_up(step, sums, n_passes)
            reserve_for_update(self.optimizer)
            if not counts:
                load_update_kernels(self.optimizer)
        except Exception as error:
            word = self.ranks.word_for(error)
        if is_shared:
            self._reduce(sums, word)
        if self.ranks.fsdp is not None:
            self.ranks.fsdp.take_gradients()
        return sums

    def _reduce(self, sums: Sums, word: int) -> None:
        """Sum gradients and counts over ranks, where all of them have come so far."""
        reducer = self._reducer
        of_ranks = [
            sums.n_computed if rank == self.ranks.index else 0 for rank in range(self.ranks.n)
        ]
        has_gradient = reducer.end(word != GO_ON)
        word, marks = self.ranks.agree(word, [*of_ranks, *has_gradient])
        if word != GO_ON:
            reducer.give_up()
        refuse(word)
        self._is_agreed = self.ranks.n > 1  # from here on no rank can take the step again by itself
        reducer.finish(marks[self.ranks.n :])
        sums.n_computed = sum(marks[: self.ranks.n])

    def _gather_places(self, step: int, sums: Sums) -> None:
        """Leave losses and figures of all micro-batches of the step's table: 0 but for those of
        this rank.
        """
        table = self.table_of(self.batches.examples_of(step), self.settings.micro_batch_tokens)
        places = {cell.number: place for place, cell in enumerate(table.cells)}
        device, n_figures = self.forward.numerics.device, len(self.forward.of.figures)
        losses = torch.zeros(len(places), device=device)
        figures = torch.zeros(len(places), 2, n_figures, dtype=torch.float64, device=device)
        for at, number in enumerate(sums.numbers):
            losses[places[number]] = sums.losses[at]
            if n_figures:
                figures[places[number]] = sums.figures[at]
        sums.micro_batches, sums.losses = [cell.examples for cell in table.cells], list(losses)
        sums.figures = list(figures)

    def _keep_up(self, step: int, sums: Sums, n_passes: int) -> None:
        """Where weights are spread: go through the model as often as the busiest rank, for nothing.
        Raises `RunInterruptedError`.
        """
        if not self.ranks.is_fsdp:
            return
        ranks = self.ranks
        table = self.table_of(self.batches.examples_of(step), self.settings.micro_batch_tokens)
        small = MicroBatch(step, sums.examples, table.cells[-1].examples, {}, True)
        with self._reducer.aside():
            for _ in range(n_passes - len(sums.losses)):
                for weight in [] if ranks.trains_rows else self.trained:
                    weight.grad = None
                again = replace(small, arrays=self.forward.collate(self.tokens, small.examples))
                self.accumulate(iter([again]), counts=False)
        if self.should_stop():
            raise RunInterruptedError("stopped within a step; it is taken again")

    def _n_passes(self, step: int) -> int:
        """Micro-batches of the busiest rank."""
        table, n = (
            self.table_of(self.batches.examples_of(step), self.settings.micro_batch_tokens),
            self.ranks.n,
        )
        return max(len(table.of_slots(slots_of(rank, n, self.n_slots))) for rank in range(n))

    def accumulate(
        self,
        micro_batches: Iterator[MicroBatch],
        *,
        shared: bool = False,
        counts: bool = True,
    ) -> Sums:
        """Add up the gradients of a step's micro-batches, each divided by the targets of all, or
        zeros where they do not count. Raises `RunInterruptedError`.

        Where the step is `shared` the reducer hears of each micro-batch, and dropout follows from
        the place in the table.
        """
        first, casts = next(micro_batches, None), self.forward.casts
        if first is None:
            return Sums()
        micro_batches = itertools.chain([first], micro_batches)
        if casts is None or self.settings.compiled:
            return self._accumulate(micro_batches, shared=shared, counts=counts)
        with casts.kept(adds=self.ranks.n == 1, several=not first.is_last):
            return self._accumulate(micro_batches, shared=shared, counts=counts)

    def _accumulate(
        self, micro_batches: Iterator[MicroBatch], *, shared: bool, counts: bool
    ) -> Sums:
        sums = Sums()
        for micro_batch in micro_batches:
            if not sums.micro_batches:
                sums.examples, sums.n_targets = (
                    micro_batch.step_examples,
                    self.tokens.n_targets(micro_batch.step_examples),
                )
            if shared:
                self._reducer.slot(micro_batch.slot)
                if not len(micro_batch.examples):
                    continue
                seed_everything(self.seed, micro_batch.step, micro_batch.number)
            with self.meter.span("host_to_device"):
                batch = self.forward.to_device(micro_batch.arrays)
            before_s = self.meter.spans.get("compute", 0.0)
            with self.meter.span("compute"):
                figures: Tensor | None = None
                if self.forward.of.loss is None:
                    loss = self.forward.loss(batch, self._gradient_scale(sums.n_targets))
                else:
                    loss, figures = self.forward.unit_loss(batch, self._of_step)
            forward_s = self.meter.spans["compute"] - before_s
            if shared and micro_batch.is_last:
                self._reducer.last_backward_begins()
            with self.meter.span("compute"), self.ranks.computing():
                self.scaler.scale(loss / sums.n_targets if counts else 0.0 * loss).backward()
                add_up()
            if self.forward.numerics.device.type == "cpu":
                sums.forward_s += forward_s
                sums.compute_s += self.meter.spans["compute"] - before_s
            n_computed = self.forward.n_computed(micro_batch.arrays)
            sums.add(micro_batch, loss.detach(), n_computed, figures)
            if self.should_stop() and not self.ranks.is_fsdp:  # others would wait for their weights
                raise RunInterruptedError("stopped within a step; it is taken again")
        return sums

    def _update(self, rate: float, losses: Tensor) -> Tensor:
        """Clip and update, unless something is not finite. Returns losses and norm in one tensor."""  # noqa: E501
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_ratio", 1.0)
        self.scaler.unscale_(self.optimizer)
        self.ranks.share_overflow(self.scaler, self.optimizer)
        norm = self.ranks.clip(self.trained, self.max_grad_norm or math.inf)
        figures = torch.cat([losses, norm.double().reshape(1)])
        reserve_for_update(self.optimizer)
        # weights in bf16 are rounded by chance: alike on all ranks that have the same rows
        seed_everything(self.seed, self._step, -1 - self.ranks.shard)
        if self.scaler.is_enabled():
            self._update_guard.enter()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif (
            self.guards_on_device
        ):  # the way GradScaler tells a fused kernel to leave everything as it is
            self.optimizer.grad_scale = None
            self.optimizer.found_inf = (~figures.isfinite()).any().float()
            self._update_guard.enter()
            self.optimizer.step()
        elif bool(figures.isfinite().all()):
            self._update_guard.enter()
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return figures

    def _gradient_scale(self, n_targets: int) -> float | Tensor:
        """What the gradient of a summed loss will be. Only fp16 has to know it beforehand."""
        if not self.scaler.is_enabled():
            return 1.0
        return self.scaler.scale(torch.ones((), device=self.forward.numerics.device)) / n_targets

    # ---- what is made ready ahead ----

    def _micro_batches_of(self, step: int) -> Iterator[MicroBatch]:
        """The micro-batches of a step, from a feed that goes on with the next step."""
        if self._feed is None or self._fed_step != step:
            self.close()
            self._feed = Feed(self._micro_batches_from(step))
        is_last = False
        while not is_last:
            with self.meter.span("data_wait"):
                micro_batch = next(self._feed)
            is_last = micro_batch.is_last
            yield micro_batch
        self._fed_step = step + 1

    def _micro_batches_from(self, step: int) -> Iterator[MicroBatch]:
        most = self.settings.micro_batch_tokens
        return micro_batches(
            step,
            self.n_steps,
            self.batches.examples_of,
            lambda examples: self.table_of(examples, most).of_slots(self._slots),
            lambda examples: self.forward.collate(self.tokens, examples),
        )

    def table_of(self, examples: NDArray[np.int64], micro_batch_tokens: int) -> Table:
        """The micro-batches of a step's examples, whichever rank computes them."""

        def costs(some: NDArray[np.int64]) -> NDArray[np.int64]:
            return self.forward.costs(self.tokens, some)

        return rows_of(
            examples,
            self.forward.lengths_of(self.tokens),
            micro_batch_tokens,
            self.n_slots,
            split=lambda some, most: self.forward.split(self.tokens, some, most),
            squares_at=self.forward.squares_at,
            costs=costs if self.forward.mixes_freely else None,
        )

    # ---- memory that runs out ----

    def _largest_cell(self, step: int) -> NDArray[np.int64]:
        """The examples of the step's largest micro-batch."""
        cells = self.table_of(
            self.batches.examples_of(step), self.settings.micro_batch_tokens
        ).cells
        if self.n_slots == 1 and not self.ranks.is_fsdp:
            return cells[0].examples  # comes first
        lengths = self.forward.lengths_of(self.tokens)
        return max((cell.examples for cell in cells), key=lambda some: int(lengths[some].sum()))

    def largest_of(self, step: int) -> tuple[int, int]:
        """(examples, computed tokens) of the step's largest micro-batch."""
        largest = self._largest_cell(step)
        return len(largest), self.forward.n_computed(self.forward.collate(self.tokens, largest))

    def _can_make_room(self, step: int) -> bool:
        return self.largest_of(step)[0] > 1 or self.settings.checkpoint_every != 1

    def _lowered(self, step: int) -> Settings:
        """Half the micro-batch; when it is one example already, more layers are computed again
        instead of kept.
        """
        n_examples, n_tokens = self.largest_of(step)
        if n_examples > 1:
            halved = max(1, min(self.settings.micro_batch_tokens, n_tokens) // 2)
            return replace(self.settings, micro_batch_tokens=halved)
        return replace(self.settings, checkpoint_every=1 if self.settings.checkpoint_every else 2)

    def _make_room(self, step: int, why: str) -> None:
        self.close()
        self.use(self._lowered(step))
        free_cached(self.forward.numerics.device)
        self.ran_out(step, why, True)

    def _leave_less(self) -> bool:
        """On the first rank, before all end as spread weights leave no step to take again: note
        what the next attempt begins with. Whether it can be less."""
        if not self._can_make_room(self._step):
            return False
        self.settings = self._lowered(self._step)
        self.ran_out(self._step, "a rank has no memory left", True)
        return True


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
