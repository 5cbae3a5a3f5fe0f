"""Splits the examples of a step by tokens into micro-batches, end to end without padding: pure
functions of lengths.

The global batch stays what `batches` says it is. Here it is split by a token budget, so that a
micro-batch takes about the same memory and time whatever the lengths are: packed micro-batches for
models that can take documents end to end, and padded ones of similar lengths for the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from farthing.arrays import Arrays, Ints
from farthing.data.batches import rows_of
from farthing.data.token_set import TokenSet
from farthing.objectives.registry import objective_of


class MicroBatchCost(NamedTuple):
    """What a micro-batch takes on a device, in computed tokens; `planner.speed.micro_batch_cost`
    reckons it for a GPU.
    """

    least_tokens: int = 0
    """A smaller micro-batch takes no less: the host is still launching kernels, or weights are
    still read.
    """
    more_tokens: int = 32
    """Beside its own: gradients of all weights added up. 32 to 128 were the quickest for T5 on a
    CPU (evidence/log.md).
    """

    def of(self, n_computed: Any) -> Any:
        """The cost of micro-batches of so many computed tokens."""
        return np.maximum(self.least_tokens, n_computed + self.more_tokens)


ON_CPU = MicroBatchCost()


def split_by_tokens(examples: Ints, lengths: Ints, micro_batch_tokens: int) -> list[Ints]:
    """The step's examples in few packed micro-batches of nearly equal tokens, each at most
    `micro_batch_tokens`.

    `lengths` [n_examples of the set] are tokens of each example. An example that is longer than the
    budget is a micro-batch of its own. Longest first onto the lightest (Graham 1969), one more
    until all fit: the same examples in the same order give the same micro-batches everywhere. The
    largest comes first, and in it the longest example, so that memory that is short is missed at
    once and equal lengths stand side by side.
    """
    sizes = lengths[examples]
    order, n_of = np.argsort(-sizes, kind="stable"), sizes.tolist()
    n_alone = int((sizes >= micro_batch_tokens).sum())
    alone = [[int(place)] for place in order[:n_alone]]
    rest, n_tokens = order[n_alone:], int(sizes[order[n_alone:]].sum())
    n_micro_batches = max(1, -(-n_tokens // micro_batch_tokens))
    while (spread := _spread(rest, sizes, n_micro_batches, micro_batch_tokens)) is None:
        n_micro_batches += 1
    micro_batches = sorted([*alone, *spread], key=lambda places: -sum(n_of[at] for at in places))
    return [examples[places] for places in micro_batches]


def _spread(
    order: Ints,
    sizes: Ints,
    n_micro_batches: int,
    micro_batch_tokens: int,
) -> list[list[int]] | None:
    """`order` over `n_micro_batches`, each example onto the lightest; None where one does
    not fit.
    """
    lightest = [(0, number) for number in range(n_micro_batches)]
    micro_batches: list[list[int]] = [[] for _ in range(n_micro_batches)]
    for place, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        n_tokens, number = lightest[0]
        if n_tokens + size > micro_batch_tokens:
            return None
        micro_batches[number].append(place)
        heapq.heapreplace(lightest, (n_tokens + size, number))
    return [micro_batch for micro_batch in micro_batches if micro_batch]


def split_padded(
    examples: Ints,
    lengths: Ints,
    micro_batch_tokens: int,
    *,
    target_lengths: Ints | None = None,
    cost: MicroBatchCost = ON_CPU,
) -> list[Ints]:
    """The step's examples in padded micro-batches of similar lengths, each at most
    `micro_batch_tokens` with its padding.

    `lengths` [n_examples of the set] are tokens of each input and `target_lengths`, for seq2seq, of
    each target, which is padded apart. An example that is longer than the budget is a micro-batch
    of its own. Sorted and filled to the budget; then each is split in two, by input or by target,
    for as long as that saves something, by what micro-batches `cost`. The largest comes first.
    """
    sides = (
        [lengths[examples]]
        if target_lengths is None
        else [lengths[examples], target_lengths[examples]]
    )
    sizes = np.stack(sides, axis=1)  # [n, sides]
    left = _filled(np.lexsort((-sizes[:, -1], -sizes.sum(1))), sizes, micro_batch_tokens)
    found: list[Ints] = []
    while left:
        micro_batch = left.pop()
        parts = _best_split(micro_batch, sizes, cost)
        left += parts
        found += [] if parts else [micro_batch]
    found.sort(key=lambda each: (-padded_tokens(sizes[each]), int(each[0])))
    return [examples[each] for each in found]


def padded_tokens(sizes: Ints) -> int:
    """Computed tokens of a padded micro-batch, its lengths [n, sides]: as many rows as the longest
    of each side is wide.
    """
    return int(len(sizes) * sizes.max(axis=0).sum())


def _filled(order: Ints, sizes: Ints, micro_batch_tokens: int) -> list[Ints]:
    """Neighbours in `order` as long as the budget holds."""
    micro_batches: list[Ints] = []
    start = 0
    width: list[int] = [0] * sizes.shape[1]
    for at, sides in enumerate(sizes[order].tolist()):
        wider = [max(pair) for pair in zip(width, sides, strict=True)]
        n = at - start + 1
        if n > 1 and n * sum(wider) > micro_batch_tokens:
            micro_batches.append(order[start:at])
            start, wider = at, sides
        width = wider
    return [*micro_batches, order[start:]] if len(order) else []


def _best_split(micro_batch: Ints, sizes: Ints, cost: MicroBatchCost) -> list[Ints]:
    """The parts of the split in two that costs least; none where no split saves anything."""
    own, counts = sizes[micro_batch], np.arange(1, len(micro_batch))
    least, parts = int(cost.of(padded_tokens(own))), list[Ints]()
    for side in range(sizes.shape[1] if len(counts) and least > 2 * cost.of(0) else 0):
        order = np.argsort(-own[:, side], kind="stable")
        ordered = own[order]
        before = np.maximum.accumulate(ordered)[:-1].sum(1) * counts
        behind = np.maximum.accumulate(ordered[::-1])[-2::-1].sum(1) * counts[::-1]
        both = cost.of(before) + cost.of(behind)
        at = int(both.argmin())
        if int(both[at]) < least:
            least, parts = (
                int(both[at]),
                [
                    micro_batch[order[: at + 1]],
                    micro_batch[order[at + 1 :]],
                ],
            )
    return parts


def collate_packed(
    tokens: TokenSet,
    examples: Sequence[int] | Ints,
    task: str,
    first_position: int = 0,
    skipped: Ints | None = None,
) -> Arrays:
    """Arrays of one micro-batch, its examples end to end: T tokens of N documents and nothing else.

    input_ids, position_ids int64 [1, T]; lengths int64 [N], tokens of each document, in order
    labels, as the task lays them out: int64 [1, T] aligned with input_ids, or one of each document
    [N]

    Positions begin again at `first_position` in each document. Empty examples are refused. The
    first `skipped` [N] tokens of each example are left out; the others keep their positions.
    """
    of = objective_of(task)
    if of.lay_out is not None:
        raise ValueError(f"{task} can't be laid flat: pad it")
    n_skipped = np.zeros(len(examples), dtype=np.int64) if skipped is None else skipped
    rows = rows_of(tokens, examples, n_skipped)
    if not len(rows.lengths) or not rows.lengths.all():
        raise ValueError("a packed batch needs documents of at least one token")
    starts = np.cumsum(rows.lengths) - rows.lengths
    ids = rows.ids.astype(np.int64)
    return {
        "input_ids": ids[None],
        "position_ids": (
            np.arange(len(ids)) - np.repeat(starts - n_skipped, rows.lengths) + first_position
        )[None],
        "lengths": rows.lengths,
        "labels": of.packed_labels(rows),
    }
