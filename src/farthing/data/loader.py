"""Micro-batches made ready ahead of the loop, by one thread.

The examples of a step follow from its number, so the thread needs nothing from the loop and leaves
nothing to save: a new feed may begin at any step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from farthing.arrays import Arrays, Ints
from farthing.data.row_table import Cell

AHEAD = 3  # micro-batches that wait ready: enough to bridge an uneven one, and little memory


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of a step."""

    step: int
    examples: Ints
    arrays: Arrays
    is_last: bool
    """Of the step, for this process."""
    number: int = 0
    """In the step's table."""
    slot: int = 0


def micro_batches(
    first_step: int,
    n_steps: int,
    examples_of: Callable[[int], Ints],
    cells_of: Callable[[Ints], Sequence[Cell]],
    collate: Callable[[Ints], Arrays],
) -> Iterator[MicroBatch]:
    """The micro-batches of all steps from `first_step` to the end, in order; a step that has none
    for this process is one without examples."""
    for step in range(first_step, n_steps):
        examples = examples_of(step)
        cells = cells_of(examples)
        for cell in cells:
            arrays = collate(cell.examples)
            is_last = cell is cells[-1]
            yield MicroBatch(step, cell.examples, arrays, is_last, cell.number, cell.slot)
        if not cells:
            yield MicroBatch(step, examples[:0], {}, True)


class Prefetcher:
    """Micro-batches that a thread makes ready; its error is raised where the next one is taken."""

    def __init__(self, items: Iterator[MicroBatch], ahead: int = AHEAD) -> None:
        self._items, self._pool = items, ThreadPoolExecutor(1, "farthing-feed")
        self._ready = deque(self._ask() for _ in range(ahead + 1))

    def _ask(self) -> Future[MicroBatch | None]:
        return self._pool.submit(next, self._items, None)

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        """The next one, waited for. Raises `StopIteration` after the last."""
        found = self._ready.popleft().result()
        if found is None:
            raise StopIteration
        self._ready.append(self._ask())
        return found

    def close(self) -> None:
        """Stop the thread; what was ready is dropped."""
        self._pool.shutdown(cancel_futures=True)
