"""The micro-batches of each step: which examples are computed together, on which rank, and made
ready ahead of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from farthing.arrays import Ints
from farthing.data.batches import Batches
from farthing.data.loader import MicroBatch, Prefetcher, micro_batches
from farthing.data.row_table import Cell, of_slots, rows_of
from farthing.data.token_set import TokenSet
from farthing.dist.ranks import Ranks
from farthing.dist.reduce import slots_of
from farthing.model.forward import Forward
from farthing.run.ledger import Meter
from farthing.settings import Settings
from farthing.train.schedule import Schedule

LOOKED_AT_STEPS = 64  # of a run, before its first: whether they have several micro-batches


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
        self._feed: Prefetcher | None = None
        self._fed_step = -1

    def of(self, step: int) -> Iterator[MicroBatch]:
        """Those of a step that this rank computes; the next step's are made ready meanwhile."""
        if self._feed is None or self._fed_step != step:
            self.close()
            ahead = micro_batches(
                step,
                self.schedule.n_steps,
                self.batches.examples_of,
                lambda examples: of_slots(self.table_of(examples), self.slots),
                lambda examples: self.forward.collate(self.tokens, examples),
            )
            self._feed = Prefetcher(ahead)
        is_last = False
        while not is_last:
            with self.meter.span("data_wait"):
                micro_batch = next(self._feed)
            is_last = micro_batch.is_last
            yield micro_batch
        self._fed_step = step + 1

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
        self._feed = None

    def n_tokens(self, examples: Ints) -> int:
        """Without padding."""
        return int(self.tokens.lengths[examples].sum())

    def first_steps(self, micro_batch_tokens: int = 0) -> tuple[Ints, bool]:
        """(examples of the largest micro-batch, whether a step has several), by the first steps,
        cut as the settings say or into micro-batches of so many tokens.
        """
        has_several, cells = False, list[Ints]()
        most_tokens = micro_batch_tokens or self.settings.micro_batch_tokens
        for step in range(min(self.schedule.n_steps, LOOKED_AT_STEPS)):
            of_step = self.forward.split(self.tokens, self.batches.examples_of(step), most_tokens)
            cells += of_step
            has_several = has_several or len(of_step) > 1
        return max(cells, key=lambda cell: self.forward.n_tokens_of(self.tokens, cell)), has_several

    def table(self, step: int) -> list[Cell]:
        """All micro-batches of a step, whichever rank computes them."""
        return self.table_of(self.batches.examples_of(step))

    def table_of(self, examples: Ints) -> list[Cell]:
        forward, tokens = self.forward, self.tokens
        return rows_of(
            examples,
            forward.lengths_of(tokens),
            self.settings.micro_batch_tokens,
            self.n_slots,
            split=lambda some, most: forward.split(tokens, some, most),
            squares_at=forward.squares_at,
            costs=(lambda some: forward.costs(tokens, some)) if forward.mixes_freely else None,
        )

    def n_passes(self, step: int) -> int:
        """Micro-batches of the busiest rank."""
        table, n = self.table(step), self.ranks.n
        return max(len(of_slots(table, slots_of(rank, n, self.n_slots))) for rank in range(n))

    def largest(self, step: int) -> Ints:
        """The examples of the step's largest micro-batch."""
        cells = self.table(step)
        if self.n_slots == 1 and not self.ranks.is_fsdp:
            return cells[0].examples  # comes first
        lengths = self.forward.lengths_of(self.tokens)
        return max((cell.examples for cell in cells), key=lambda some: int(lengths[some].sum()))

    def largest_of(self, step: int) -> tuple[int, int]:
        """(examples, computed tokens) of the step's largest micro-batch."""
        largest = self.largest(step)
        return len(largest), self.forward.n_computed(self.forward.collate(self.tokens, largest))
