"""Micro-batches made ready ahead of the loop, by one thread.

The examples of a step follow from its number, so the thread needs nothing from the loop and leaves
nothing to save: a new feed may begin at any step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from farthing.data.row_table import Cell

Arrays = dict[str, NDArray[Any]]
"""What a model takes of a micro-batch, by name."""
AHEAD = 3  # micro-batches that wait ready: enough to bridge an uneven one, and little memory


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of a step."""

    step: int
    examples: NDArray[np.int64]
    arrays: Arrays
    is_last: bool
    """Of the step, for this process."""
    number: int = 0
    """In the step's table."""
    slot: int = 0


def micro_batches(
    first_step: int,
    n_steps: int,
    examples_of: Callable[[int], NDArray[np.int64]],
    cells_of: Callable[[NDArray[np.int64]], Sequence[Cell]],
    collate: Callable[[NDArray[np.int64]], Arrays],
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


Item = TypeVar("Item")


class Ahead(Generic[Item]):
    """An iterator that a thread runs ahead of. An error in it is raised where the next item is
    taken.
    """

    def __init__(self, items: Iterator[Item], ahead: int = AHEAD) -> None:
        self._queue: queue.Queue[Item | BaseException | None] = queue.Queue(ahead)
        self._is_closed = threading.Event()
        self.thread = threading.Thread(
            target=self._run, args=(items,), name="farthing-feed", daemon=True
        )
        self.thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        """The next item, waited for. Raises `StopIteration` after the last."""
        item = self._queue.get()
        if item is None:
            raise StopIteration
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Stop the thread; what was ready is dropped."""
        self._is_closed.set()
        while self.thread.is_alive():
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue

    def _run(self, items: Iterator[Item]) -> None:
        try:
            for item in items:
                if not self._put(item):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: Item | BaseException | None) -> bool:
        while not self._is_closed.is_set():
            try:
                self._queue.put(item, timeout=0.05)
                return True
            except queue.Full:
                continue
        return False


Feed = Ahead[MicroBatch]
"""Micro-batches that a thread makes ready."""
