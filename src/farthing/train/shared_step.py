"""What a step asks of the other ranks that share it: their gradients, their losses, and whether all
have come as far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from farthing.data.loader import MicroBatch
from farthing.dist.ranks import GO_ON, Ranks, refuse
from farthing.dist.reduce import AllReduce, FixedOrder, reducer_of
from farthing.model.forward import Forward
from farthing.train.step_feed import StepFeed
from farthing.train.step_result import Sums


class SharedStep:
    """A step of several ranks, or of a run in a fixed order of sums. A rank on its own, and with
    sums in any order, is asked nothing.
    """

    def __init__(
        self, ranks: Ranks, forward: Forward, feed: StepFeed, trained: Sequence[Tensor]
    ) -> None:
        self.ranks, self.forward, self.feed, self.trained = ranks, forward, feed, trained
        self.is_on = feed.n_slots > 1
        self.reducer = reducer_of(ranks, trained, feed.settings.slots)
        self.is_agreed = False
        """All ranks have this step's gradients: none can take it again by itself."""

    def gradients(
        self, n_passes: int, compute: Callable[[AllReduce | FixedOrder | None], Sums]
    ) -> Sums:
        """What `compute` finds, with the gradients of all ranks left with the weights.

        Where one rank has to stop or has no memory left, all take the step again. Raises
        `RunInterruptedError`, `torch.OutOfMemoryError`.
        """
        sums, word, fsdp = Sums(), GO_ON, self.ranks.fsdp
        if self.is_on:
            self.reducer.begin()
        if fsdp is not None:
            fsdp.begin_step(n_passes)
        try:
            sums = compute(self.reducer if self.is_on else None)
        except Exception as error:
            word = self.ranks.word_for(error)
        if self.is_on:
            self._reduce(sums, word)
        if fsdp is not None:
            fsdp.take_gradients()
        return sums

    def _reduce(self, sums: Sums, word: int) -> None:
        """Sum gradients and counts over ranks, where all of them have come so far."""
        ranks, reducer = self.ranks, self.reducer
        of_ranks = [sums.n_computed if rank == ranks.index else 0 for rank in range(ranks.n)]
        word, marks = ranks.agree(word, [*of_ranks, *reducer.end(word != GO_ON)])
        if word != GO_ON:
            reducer.give_up()
        refuse(word)
        self.is_agreed = ranks.n > 1
        reducer.finish(marks[ranks.n :])
        sums.n_computed = sum(marks[: ranks.n])

    def keep_up(self, step: int, n_passes: int, idle: Callable[[MicroBatch], None]) -> None:
        """Go through the model as often as the busiest rank, for nothing: over spread weights all
        compute a layer together.
        """
        examples = self.feed.batches.examples_of(step)
        smallest = self.feed.table(step).cells[-1].examples
        with self.reducer.aside():
            for _ in range(n_passes):
                for weight in [] if self.ranks.trains_rows else self.trained:
                    weight.grad = None
                arrays = self.forward.collate(self.feed.tokens, smallest)
                idle(MicroBatch(step, examples, smallest, arrays, True))

    def of_all_ranks(self, step: int, sums: Sums) -> tuple[Tensor, Tensor]:
        """(what each micro-batch of the step adds to its mean loss [n]; sums of the objective's
        figures, and of how many [2F]), in fp64. Leaves the micro-batches of all with `sums`.
        """
        parts = [torch.stack(sums.losses).double()[:, None] / sums.n_targets] if sums.losses else []
        if sums.figures:
            parts.append(torch.stack(sums.figures).flatten(1))
        rows = torch.cat(parts, 1) if parts else None
        if self.is_on:
            cells, own = self.feed.table(step).cells, rows
            places = {cell.number: place for place, cell in enumerate(cells)}
            width = 1 + 2 * len(self.forward.of.figures)
            rows = torch.zeros(
                len(cells), width, dtype=torch.float64, device=self.forward.numerics.device
            )
            for at, number in enumerate(sums.numbers):
                assert own is not None
                rows[places[number]] = own[at]
            self.ranks.sum_up(rows)
            sums.micro_batches = [cell.examples for cell in cells]
        assert rows is not None
        return rows[:, 0], rows[:, 1:].sum(0)

    @torch.no_grad()
    def baseline(self, step: int, n_units: int) -> Tensor:
        """The mean log-ratio to the reference of the step's mismatched sequences, at least 0."""
        feed, forward = self.feed, self.forward
        cells = feed.table(step).cells
        sums = torch.zeros(len(cells), dtype=torch.float64, device=forward.numerics.device)
        n_more = feed.n_passes(step) if self.ranks.is_fsdp else 0
        for place, cell in enumerate(cells):
            if cell.slot in feed.slots:
                sums[place] = forward.mismatched_ratio(feed.tokens, cell.examples)
                n_more -= 1
        for _ in range(n_more):  # all ranks go through the model as often
            forward.mismatched_ratio(feed.tokens, cells[-1].examples)
        return (self.ranks.sum_up(sums).sum() / n_units).clamp(min=0).float()
