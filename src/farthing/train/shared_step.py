"""What a step asks of the other ranks that share it: their gradients, their losses, and whether all
have come as far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farthing.data.loader import MicroBatch
from farthing.dist.ranks import GO_ON, refuse
from farthing.dist.reduce import reducer_of
from farthing.objectives.objective import OfStep
from farthing.train.context import Training
from farthing.train.randomness import seed_everything
from farthing.train.step_result import Sums


class SharedStep:
    """A step of several ranks, or of a run in a fixed order of sums. A rank on its own, and with
    sums in any order, is asked nothing.
    """

    def __init__(self, training: Training, trained: Sequence[Tensor]) -> None:
        self._forward, self._feed, self._trained = training.forward, training.feed, trained
        self._seed = training.spec.train.seed
        self._ranks, is_shared = training.context.ranks, training.feed.n_slots > 1
        reducer = reducer_of(self._ranks, trained, self._feed.settings.slots)
        self.reducer = reducer if is_shared else None
        self.waits_in_layers = is_shared and self._ranks.is_fsdp
        """All ranks must go through the model as often: over spread weights they compute a layer
        together.
        """
        self.is_agreed = False
        """All ranks have this step's gradients: none can take it again by itself."""

    def begin(self, n_passes: int) -> int:
        """A step begins, in which the busiest rank has `n_passes` micro-batches. The word of a rank
        where all is well.
        """
        if self.reducer is not None:
            self.reducer.begin()
        if self._ranks.fsdp is not None:
            self._ranks.fsdp.begin_step(n_passes)
        return GO_ON

    def reduce(self, sums: Sums, word: int) -> None:
        """Leave the gradients of all ranks with the weights of each, where all have come so far.

        Where one has to stop or has no memory left, all take the step again. Raises
        `RunInterruptedError`, `torch.OutOfMemoryError`.
        """
        ranks, reducer = self._ranks, self.reducer
        if reducer is not None:
            of_ranks = [sums.n_computed if rank == ranks.index else 0 for rank in range(ranks.n)]
            word, marks = ranks.agree(word, [*of_ranks, *reducer.end(word != GO_ON)])
            if word != GO_ON:
                reducer.give_up()
            refuse(word)
            self.is_agreed = ranks.n > 1
            reducer.finish(marks[ranks.n :])
            sums.n_computed = sum(marks[: ranks.n])
        if ranks.fsdp is not None:
            ranks.fsdp.take_gradients()

    def idle(self, step: int, n: int) -> Iterator[MicroBatch]:
        """Micro-batches that count for nothing, where this rank has fewer than the busiest."""
        if self.reducer is None or not self.waits_in_layers:
            return
        smallest = self._feed.table(step)[-1].examples
        with self.reducer.aside():
            for _ in range(n):
                for weight in [] if self._ranks.trains_rows else self._trained:
                    weight.grad = None
                arrays = self._forward.collate(self._feed.tokens, smallest)
                yield MicroBatch(step, smallest, arrays, True)

    def of_all_ranks(self, step: int, sums: Sums) -> tuple[Tensor, Tensor]:
        """(what each micro-batch of the step adds to its mean loss [n]; sums of the objective's
        figures, and of how many [2F]), in fp64. Leaves the micro-batches of all with `sums`.
        """
        device, width = self._forward.numerics.device, 1 + 2 * len(self._forward.of.figures)
        rows = torch.zeros(0, width, dtype=torch.float64, device=device)
        if sums.losses:
            losses = torch.stack(sums.losses).double()[:, None] / sums.n_targets
            rows = torch.cat([losses, torch.stack(sums.figures).flatten(1)], 1)
        sums.micro_batches = [each.examples for each in sums.done]
        if self.reducer is not None:
            cells = self._feed.table(step)
            places = {cell.number: place for place, cell in enumerate(cells)}
            of_all = torch.zeros(len(cells), width, dtype=torch.float64, device=device)
            for each, row in zip(sums.done, rows, strict=True):
                of_all[places[each.number]] = row
            rows = self._ranks.sum_up(of_all)
            sums.micro_batches = [cell.examples for cell in cells]
        return rows[:, 0], rows[:, 1:].sum(0)

    @torch.no_grad()
    def totals(self, step: int, examples: NDArray[np.int64]) -> OfStep:
        """Of all examples of a step; with mismatched sequences the mean of their log-ratios to the
        reference, at least 0.
        """
        feed, forward = self._feed, self._forward
        found = forward.of_step(feed.tokens, examples)
        if not forward.of.is_mismatched:
            return found
        cells = feed.table(step)
        sums = torch.zeros(len(cells), dtype=torch.float64, device=forward.numerics.device)
        n_more = feed.n_passes(step) if self._ranks.is_fsdp else 0
        with self._ranks.all_or_none():  # one that made room by itself would cut other cells
            for place, cell in enumerate(cells):
                if cell.slot in feed.slots:
                    if self.reducer is not None:  # dropout is that of the cell, on any rank
                        seed_everything(self._seed, step, cell.number)
                    sums[place] = forward.mismatched_ratio(feed.tokens, cell.examples)
                    n_more -= 1
            for _ in range(n_more):  # all ranks go through the model as often
                forward.mismatched_ratio(feed.tokens, cells[-1].examples)
        mean = self._ranks.sum_up(sums).sum() / len(examples)
        return found._replace(baseline=mean.clamp(min=0).float())
