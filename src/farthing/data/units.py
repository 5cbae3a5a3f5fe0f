"""Units of several sequences as micro-batches: pairs of answers to one prompt.

A further sequence of a unit begins as the first one does: with the prompt, and with what both
answers begin with. A model that looks back only computes that beginning once; the further sequence
continues from the first one's tokens, and a token that both score is scored once. Losses and
gradients are those of whole sequences.

Shapes: n units of k sequences, m = n * k; T computed tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farthing.arrays import Arrays, Bools, Ints
from farthing.data.token_set import TokenSet, ranges

LEAST_TOKENS = 32  # that a sequence takes over; for fewer it is not worth copying keys and values
POSITIONS, TARGETS = "labelled_positions", "labelled_targets"
SCORED, OWNERS, N_TARGETS = "scored_targets", "owners_of_targets", "n_targets"
REFERENCE, VALUES = "reference_log_probs", "unit_values"


class Sequences(NamedTuple):
    """The sequences of some units end to end: ids and is_target [n_tokens], lengths [m], and how
    many tokens each has in common with the first of its unit [m], for which that is 0.
    """

    ids: NDArray[np.int32]
    is_target: Bools
    lengths: Ints
    shared: Ints
    n_sequences: int


def n_shared(ids: NDArray[np.int32], lengths: Ints) -> Ints:
    """[n, k]: tokens that each sequence has in common with the first of its unit, 0 for the first;
    one of its own is left. `lengths` [n, k].
    """
    found = np.zeros_like(lengths)
    stops = np.cumsum(lengths.ravel()).reshape(lengths.shape)
    for unit, (ends, sizes) in enumerate(zip(stops, lengths, strict=True)):
        begins = (ends - sizes).tolist()
        for place in range(1, len(begins)):
            n = int(min(sizes[0], sizes[place] - 1))
            one = ids[begins[0] : begins[0] + n]
            found[unit, place] = n_common(one, ids[begins[place] : begins[place] + n])
    return found


def n_common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many tokens both begin with."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n


def shared_tokens(tokens: TokenSet) -> Ints:
    """[n]: tokens of each unit of a set that need not be computed."""
    return worth_sharing(tokens.shared, len(tokens))


def worth_sharing(shared: NDArray[Any] | None, n: int) -> Ints:
    """[n]: the same of n units that have so many tokens in common with their first sequence."""
    if shared is None:
        return np.zeros(n, np.int64)
    return np.where(shared >= LEAST_TOKENS, shared, 0).reshape(n, -1).sum(1, dtype=np.int64)


def sequences_of(tokens: TokenSet, units: Ints) -> Sequences:
    """The sequences of these units."""
    starts, lengths = tokens.sequences_of(units)
    places = ranges(starts, lengths)
    k = tokens.n_sequences
    shared = np.zeros(len(lengths), np.int64)
    if tokens.shared is not None:
        shared = tokens.shared.reshape(-1, k)[units].astype(np.int64).ravel()
    return Sequences(tokens.ids[places], tokens.targets[places].astype(bool), lengths, shared, k)


def mismatched(tokens: TokenSet, units: Ints) -> Sequences:
    """Each unit's input with the answer of the unit before it in the set: one sequence a unit, cut
    to the set's longest.
    """
    most = tokens.facts["max_length"]
    ids, targets, lengths = [], [], []
    for unit in units.tolist():
        own, is_own = tokens.example(unit)
        other, is_other = tokens.example((unit - 1) % len(tokens))
        n_input, n_before = int(is_own.argmax()), int(is_other.argmax())
        joined = np.concatenate([own[:n_input], other[n_before:]])[:most]
        marks = np.concatenate([is_own[:n_input], is_other[n_before:]])[:most].astype(bool)
        marks[0] = False
        ids.append(joined)
        targets.append(marks)
        lengths.append(len(joined))
    return Sequences(
        np.concatenate(ids),
        np.concatenate(targets),
        np.array(lengths, np.int64),
        np.zeros(len(lengths), np.int64),
        1,
    )


def collate_units(
    found: Sequences, *, first_position: int = 0, shares: bool = False, pad_id: int | None = None
) -> Arrays:
    """Arrays of a micro-batch: packed [1, T], or with `pad_id` padded [m, longest].

    labelled_positions, labelled_targets int64 [u]: the distinct (place in the flattened batch,
    token that is scored there); scored_targets int64 [s]: which of these each target token of each
    sequence is; owners_of_targets int64 [s]: its sequence; n_targets float32 [m]. Packed, lengths
    int64 [m] are the computed tokens of each; where some are shared key_lengths and key_rows are as
    in `prefix_sharing.collate_shared`.
    """
    lengths, ids = found.lengths, found.ids.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    owner = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(ids)) - starts[owner]
    arrays: Arrays
    if pad_id is not None:
        longest = int(lengths.max())
        rows = owner * longest + place
        padded = np.full(len(lengths) * longest, pad_id, np.int64)
        mask = np.zeros(len(lengths) * longest, np.int64)
        padded[rows], mask[rows] = ids, 1
        arrays = {
            "input_ids": padded.reshape(-1, longest),
            "attention_mask": mask.reshape(-1, longest),
        }
    else:
        shared = np.where(shares & (found.shared >= LEAST_TOKENS), found.shared, 0)
        is_own = place >= shared[owner]
        rows = np.cumsum(is_own) - 1
        of_first = starts[owner - owner % found.n_sequences]
        rows = np.where(is_own, rows, rows[np.where(is_own, 0, of_first + place)])
        arrays = {
            "input_ids": ids[is_own][None],
            "position_ids": (place[is_own] + first_position)[None],
            "lengths": lengths - shared,
        }
        if shared.any():
            arrays |= {"key_lengths": lengths, "key_rows": rows}
    scored = np.flatnonzero(found.is_target)
    entries = rows[scored - 1] << 32 | ids[scored]
    distinct, which = np.unique(entries, return_inverse=True)
    return arrays | {
        POSITIONS: distinct >> 32,
        TARGETS: distinct & 0xFFFFFFFF,
        SCORED: which.astype(np.int64),
        OWNERS: owner[scored],
        N_TARGETS: np.bincount(owner[scored], minlength=len(lengths)).astype(np.float32),
    }
