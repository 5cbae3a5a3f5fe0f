"""The micro-batches of each step: which examples are computed together, on which rank, and made
ready ahead of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farthing.data.batches import Batches
from farthing.data.loader import Feed, MicroBatch, micro_batches
from farthing.data.row_table import Table, rows_of
from farthing.data.token_set import TokenSet
from farthing.dist.ranks import Ranks
from farthing.dist.reduce import slots_of
from farthing.model.forward import Forward
from farthing.run.ledger import Meter
from farthing.settings import Settings
from farthing.train.prefix_budget import accumulates
from farthing.train.schedule import Schedule


@dataclass(kw_only=True)
class StepFeed:
    """The micro-batches of a run's steps, as its `settings` cut them."""

    forward: Forward
    batches: Batches
    tokens: TokenSet
    schedule: Schedule
    settings: Settings
    ranks: Ranks
    meter: Meter

    def __post_init__(self) -> None:
        self.n_slots = self.settings.slots or self.ranks.n
        self.slots = slots_of(self.ranks.index, self.ranks.n, self.n_slots)
        self._feed: Feed | None = None
        self._fed_step = -1

    def of(self, step: int) -> Iterator[MicroBatch]:
        """Those of a step that this rank computes; the next step's are made ready meanwhile."""
        if self._feed is None or self._fed_step != step:
            self.close()
            ahead = micro_batches(
                step,
                self.schedule.n_steps,
                self.batches.examples_of,
                lambda examples: self.table_of(examples).of_slots(self.slots),
                lambda examples: self.forward.collate(self.tokens, examples),
            )
            self._feed = Feed(ahead)
        is_last = False
        while not is_last:
            with self.meter.span("data_wait"):
                micro_batch = next(self._feed)
            is_last = micro_batch.is_last
            yield micro_batch
        self._fed_step = step + 1

    def n_tokens(self, examples: NDArray[np.int64]) -> int:
        """Without padding."""
        return int(self.tokens.lengths[examples].sum())

    @property
    def accumulates(self) -> bool:
        """Whether a step may have several micro-batches, as they are cut now."""
        most_tokens, n_steps = self.settings.micro_batch_tokens, self.schedule.n_steps
        return accumulates(self.forward, self.tokens, self.batches, n_steps, most_tokens)

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
        self._feed = None

    def table(self, step: int) -> Table:
        """All micro-batches of a step, whichever rank computes them."""
        return self.table_of(self.batches.examples_of(step))

    def table_of(self, examples: NDArray[np.int64]) -> Table:
        def costs(some: NDArray[np.int64]) -> NDArray[np.int64]:
            return self.forward.costs(self.tokens, some)

        return rows_of(
            examples,
            self.forward.lengths_of(self.tokens),
            self.settings.micro_batch_tokens,
            self.n_slots,
            split=lambda some, most: self.forward.split(self.tokens, some, most),
            squares_at=self.forward.squares_at,
            costs=costs if self.forward.mixes_freely else None,
        )

    def n_passes(self, step: int) -> int:
        table, n = self.table(step), self.ranks.n
        return max(len(table.of_slots(slots_of(rank, n, self.n_slots))) for rank in range(n))

    def largest(self, step: int) -> NDArray[np.int64]:
        cells = self.table(step).cells
        if self.n_slots == 1 and not self.ranks.is_fsdp:
            return cells[0].examples  # comes first
        lengths = self.forward.lengths_of(self.tokens)
        return max((cell.examples for cell in cells), key=lambda some: int(lengths[some].sum()))

    def largest_of(self, step: int) -> tuple[int, int]:
        """(examples, computed tokens) of the step's largest micro-batch."""
        largest = self.largest(step)
        return len(largest), self.forward.n_computed(self.forward.collate(self.tokens, largest))
