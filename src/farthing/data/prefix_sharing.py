"""What examples begin with in common is computed once in a micro-batch: a system prompt, tools, few
shots, a dialogue.

In a model that looks back only, what it makes of a token depends on the tokens before it and on
nothing else. So an example may continue from the beginning of another as if that were its own: loss
and gradients are those of the whole examples. It may only where the tokens it takes over score
nothing for it: they end before the token ahead of its first target. The other's labels do not
matter, nor how long its own way has been: what a set of examples costs is what a tree of their
texts has in tokens.
"""

from __future__ import annotations

import bisect
import itertools

import numpy as np
from numpy.typing import NDArray

from farthing.arrays import Arrays, Ints
from farthing.data.batches import Batches
from farthing.data.packing import collate_packed
from farthing.data.token_set import TokenSet
from farthing.data.units import LEAST_TOKENS, n_common

# of all tokens, saved: at 5 % the copies and the masks took the time that was saved, at 13 % the
# step was 11 % quicker, at 61 % 2.3 times as quick (6 layers of 256 on one thread of a CPU)
WORTH = 0.1
"""Of the computed tokens, from where sharing was clearly quicker: 9.5 % gave 3 % of the time, 13 %
gave 11 %.
"""
# what the copy of a token's keys and values takes, in computed tokens: between 1/50 and 1/25 of all
# that is kept of one with grouped heads, about 1/9 without (worked out from the shapes of models,
# not measured)
COPY_SHARE = 1 / 16
SAMPLED = 4096  # examples, at least, from which that is judged


def in_common(tokens: TokenSet, examples: Ints) -> tuple[Ints, Ints]:
    """(places of `examples` in the order of their texts [n], how many tokens each takes over from
    the one before it [n]).

    In that order no other one before it has more in common with it. 0, or `LEAST_TOKENS` or more;
    one token, and all that score, are left.
    """
    starts, stops = tokens.offsets[examples], tokens.offsets[examples + 1]
    texts = [tokens.ids[start:stop].tobytes() for start, stop in zip(starts, stops, strict=True)]
    order = np.array(sorted(range(len(texts)), key=texts.__getitem__), dtype=np.int64)
    taken = np.zeros(len(order), dtype=np.int64)
    head = 4 * LEAST_TOKENS
    for at in range(1, len(order)):
        one, other = texts[order[at - 1]], texts[order[at]]
        if one[:head] == other[:head]:
            n = min(
                n_common(np.frombuffer(one, np.int32), np.frombuffer(other, np.int32)),
                _n_unscored(tokens.targets[starts[order[at]] : stops[order[at]]]),
            )
            taken[at] = n if n >= LEAST_TOKENS else 0
    return order, taken


def _n_unscored(is_target: NDArray[np.uint8]) -> int:
    """How many tokens an example could do without: what they say of the next one is not asked, and
    one more is left.
    """
    first = int(is_target.argmax())
    return (first if is_target[first] else len(is_target)) - 1


def split_shared(tokens: TokenSet, examples: Ints, micro_batch_tokens: int) -> list[Ints]:
    """The step's examples in few packed micro-batches of nearly equal tokens, each at most
    `micro_batch_tokens`.

    Tokens in common count once. Copies count too, `COPY_SHARE` of a token each. An example longer
    than the budget is alone. The micro-batches are stretches of the examples in the order of their
    texts, which keeps together what has most in common: as few as possible, and the largest as
    small as it can be with so many. The largest comes first, and within a micro-batch the example
    with most tokens of its own.
    """
    order, taken = in_common(tokens, examples)
    sizes = tokens.lengths[examples][order]
    saved = taken - np.ceil(COPY_SHARE * taken).astype(
        np.int64
    )  # unless it is the first of its micro-batch
    total = np.concatenate([[0], np.cumsum(sizes - saved)])

    def cut_at(limit: int) -> list[int]:
        """Where the micro-batches end; as full as they get, which makes as few as possible."""
        ends = [0]
        while (start := ends[-1]) < len(order):
            fitting = (
                int(np.searchsorted(total, limit + total[start] - saved[start], side="right")) - 1
            )
            ends.append(max(fitting, start + 1))
        return ends

    fewest = len(cut_at(micro_batch_tokens))
    ends = cut_at(
        bisect.bisect_left(
            range(micro_batch_tokens), True, key=lambda limit: len(cut_at(limit)) <= fewest
        )
    )
    micro_batches = []
    for start, stop in itertools.pairwise(ends):
        own = (sizes - taken)[start:stop]
        own[0] = sizes[start]
        cost = int(total[stop] - total[start] + saved[start])
        micro_batches.append((cost, examples[order[start:stop][np.argsort(-own, kind="stable")]]))
    return [
        micro_batch
        for _, micro_batch in sorted(micro_batches, key=lambda micro_batch: -micro_batch[0])
    ]


def collate_shared(tokens: TokenSet, examples: Ints, task: str, first_position: int = 0) -> Arrays:
    """As `collate_packed`, but what an example has in common with one before it in the order of
    their texts is left out.

    Where there is such a thing: key_lengths int64 [N], tokens that each document sees, left out or
    its own; key_rows int64 [K], document by document, which tokens of the batch those are. Its
    positions continue from what it sees.
    """
    order, taken = in_common(tokens, examples)
    skipped = np.zeros_like(taken)
    skipped[order] = taken
    batch = collate_packed(tokens, examples, task, first_position, skipped)
    if not taken.any():
        return batch
    own = np.split(np.arange(batch["input_ids"].size), np.cumsum(batch["lengths"])[:-1])
    seen, before = list(own), own[0]
    for place, n in zip(order.tolist(), taken.tolist(), strict=True):
        seen[place] = before = np.concatenate([before[:n], own[place]])
    return {**batch, "key_lengths": batch["lengths"] + skipped, "key_rows": np.concatenate(seen)}


def saved_by_sharing(tokens: TokenSet, batches: Batches, micro_batch_tokens: int) -> float:
    """The share of all tokens that need not be computed, in sampled steps of the first epoch; from
    `WORTH` on it pays.

    It follows from its arguments alone, so that a run that is taken up again decides alike.
    """
    n_steps = batches.steps_per_epoch
    n_sampled = min(n_steps, -(-SAMPLED // batches.global_batch_size))
    n_all = n_saved = 0
    for number in range(n_sampled):
        step = batches.examples_of(number * n_steps // n_sampled)[: 2 * SAMPLED]
        n_all += int(tokens.lengths[step].sum())
        for micro_batch in split_shared(tokens, step, micro_batch_tokens):
            n_saved += int(in_common(tokens, micro_batch)[1].sum())
        tokens.release()
    return n_saved / max(1, n_all)
