"""What a step asks of the other ranks that share it: their gradients, their losses, and whether all
have come as far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from farthing.data.loader import MicroBatch
from farthing.dist.ranks import GO_ON, refuse
from farthing.dist.reduce import Reducer, reducer_of
from farthing.errors import RunInterruptedError
from farthing.train.context import Training
from farthing.train.optim import load_update_kernels, reserve_for_update
from farthing.train.step_result import Sums

Accumulate = Callable[[Iterator[MicroBatch], Reducer | None, bool], Sums]
"""See `Step.accumulate`."""


class SharedStep:
    """A step of several ranks, or of a run in a fixed order of sums. A rank on its own, and with
    sums in any order, is asked nothing.
    """

    def __init__(
        self, training: Training, trained: Sequence[Tensor], accumulate: Accumulate
    ) -> None:
        self._forward, self._feed, self._trained = training.forward, training.feed, trained
        self._ranks, self._accumulate = training.context.ranks, accumulate
        self._should_stop = training.context.is_asked_to_leave
        self._optimizer = training.optimizer
        self._is_on = self._feed.n_slots > 1
        self._reducer = reducer_of(self._ranks, trained, self._feed.settings.slots)
        self.is_agreed = False
        """All ranks have this step's gradients: none can take it again by itself."""

    def gradients(
        self,
        step: int,
        micro_batches: Iterator[MicroBatch],
        n_passes: int,
        *,
        counts: bool = True,
    ) -> Sums:
        """Leave the gradients of a step with the weights, on every rank; zeros where they do not
        count, as in a rehearsal. The busiest rank has `n_passes` micro-batches.

        Where one rank has to stop or has no memory left, all take the step again. Raises
        `RunInterruptedError`, `torch.OutOfMemoryError`.
        """
        sums, word, fsdp = Sums(), GO_ON, self._ranks.fsdp
        if self._is_on:
            self._reducer.begin()
        if fsdp is not None:
            fsdp.begin_step(n_passes)
        try:
            sums = self._accumulate(micro_batches, self._reducer if self._is_on else None, counts)
            if self._is_on and fsdp is not None:
                self._keep_up(step, n_passes - len(sums.losses))
                if self._should_stop():
                    raise RunInterruptedError("stopped within a step; it is taken again")
            reserve_for_update(self._optimizer)
            if not counts:
                load_update_kernels(self._optimizer)
        except Exception as error:
            word = self._ranks.word_for(error)
        if self._is_on:
            self._reduce(sums, word)
        if fsdp is not None:
            fsdp.take_gradients()
        return sums

    def _reduce(self, sums: Sums, word: int) -> None:
        """Sum gradients and counts over ranks, where all of them have come so far."""
        ranks, reducer = self._ranks, self._reducer
        of_ranks = [sums.n_computed if rank == ranks.index else 0 for rank in range(ranks.n)]
        word, marks = ranks.agree(word, [*of_ranks, *reducer.end(word != GO_ON)])
        if word != GO_ON:
            reducer.give_up()
        refuse(word)
        self.is_agreed = ranks.n > 1
        reducer.finish(marks[ranks.n :])
        sums.n_computed = sum(marks[: ranks.n])

    def _keep_up(self, step: int, n_passes: int) -> None:
        """Go through the model as often as the busiest rank, for nothing: over spread weights all
        compute a layer together.
        """
        examples = self._feed.batches.examples_of(step)
        smallest = self._feed.table(step).cells[-1].examples
        with self._reducer.aside():
            for _ in range(n_passes):
                for weight in [] if self._ranks.trains_rows else self._trained:
                    weight.grad = None
                arrays = self._forward.collate(self._feed.tokens, smallest)
                idle = MicroBatch(step, examples, smallest, arrays, True)
                self._accumulate(iter([idle]), None, False)

    def of_all_ranks(self, step: int, sums: Sums) -> tuple[Tensor, Tensor]:
        """(what each micro-batch of the step adds to its mean loss [n]; sums of the objective's
        figures, and of how many [2F]), in fp64. Leaves the micro-batches of all with `sums`.
        """
        device, width = self._forward.numerics.device, 1 + 2 * len(self._forward.of.figures)
        rows = torch.zeros(0, width, dtype=torch.float64, device=device)
        if sums.losses:
            rows = torch.stack(sums.losses).double()[:, None] / sums.n_targets
        if sums.figures:
            rows = torch.cat([rows, torch.stack(sums.figures).flatten(1)], 1)
        sums.micro_batches = [each.examples for each in sums.done]
        if self._is_on:
            cells = self._feed.table(step).cells
            places = {cell.number: place for place, cell in enumerate(cells)}
            of_all = torch.zeros(len(cells), width, dtype=torch.float64, device=device)
            for each, row in zip(sums.done, rows, strict=True):
                of_all[places[each.number]] = row
            rows = self._ranks.sum_up(of_all)
            sums.micro_batches = [cell.examples for cell in cells]
        return rows[:, 0], rows[:, 1:].sum(0)

    @torch.no_grad()
    def baseline(self, step: int, n_units: int) -> Tensor:
        """The mean log-ratio to the reference of the step's mismatched sequences, at least 0."""
        feed, forward = self._feed, self._forward
        cells = feed.table(step).cells
        sums = torch.zeros(len(cells), dtype=torch.float64, device=forward.numerics.device)
        n_more = feed.n_passes(step) if self._ranks.is_fsdp else 0
        for place, cell in enumerate(cells):
            if cell.slot in feed.slots:
                sums[place] = forward.mismatched_ratio(feed.tokens, cell.examples)
                n_more -= 1
        for _ in range(n_more):  # all ranks go through the model as often
            forward.mismatched_ratio(feed.tokens, cells[-1].examples)
        return (self._ranks.sum_up(sums).sum() / n_units).clamp(min=0).float()
