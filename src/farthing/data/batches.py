"""Which examples make up step k, and how they are padded: pure functions of (seed, epoch, step).

There is no cursor, so there is nothing to save and a resume is O(1). The global batch is a number of examples; cutting it
into micro-batches (`pieces`) is an execution detail that never changes which examples a step has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.data.encode import sums_of
from farthing.data.token_set import TokenSet

IGNORED = -100  # label of a position the loss does not count, as in transformers


@dataclass
class Batches:
    """The examples of every step.

    Each epoch is a permutation of `examples` that follows from (seed, epoch); its last step takes what is left.
    """

    examples: NDArray[np.int64]
    global_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        self._epoch = -1
        self._order = self.examples

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass; the last may be a smaller batch."""
        return -(-len(self.examples) // self.global_batch_size)

    def examples_of(self, step: int) -> NDArray[np.int64]:
        """Indices of the examples of optimizer step `step`, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order, self._epoch = self.examples[permutation(len(self.examples), self.seed, epoch)], epoch
        return self._order[place * self.global_batch_size : (place + 1) * self.global_batch_size]


def permutation(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A shuffle of range(n) that is the same on every machine and with every numpy.

    It ranks raw draws of Philox, whose stream numpy guarantees (NEP 19); `Generator.permutation` may change.
    """
    draws = np.random.Philox(key=_fold(seed, epoch)).random_raw(n)
    return np.argsort(draws, kind="stable")


def _fold(*numbers: int) -> int:
    """A 128-bit key from numbers."""
    text = ",".join(str(number) for number in numbers)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def split_by_input(
    groups: NDArray[np.uint64], fraction: float, seed: int, inputs: NDArray[np.uint64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(train, eval) example indices. Examples with equal input fall on the same side; `fraction` is of distinct inputs.

    The distinct inputs are ranked by a hash of (input, seed): which side one falls on hardly depends on the others.
    `inputs` are those of all rows, also of rows that became no example, so that it does not depend on why they did not.
    """
    distinct = np.unique(groups if inputs is None else inputs)
    n_eval = min(max(1, round(fraction * len(distinct))), len(distinct) - 1)
    with np.errstate(over="ignore"):  # the finaliser of splitmix64 (Steele, Lea, Flood 2014), modulo 2^64
        mixed = distinct + np.uint64(_fold(seed) & 0xFFFFFFFFFFFFFFFF)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    chosen = distinct[np.argsort(mixed, kind="stable")[:n_eval]] if n_eval > 0 else distinct[:0]
    is_eval = np.isin(groups, chosen)
    return np.flatnonzero(~is_eval), np.flatnonzero(is_eval)


def collate(tokens: TokenSet, examples: Sequence[int] | NDArray[np.int64], task: str, pad_id: int) -> dict[str, Any]:
    """Arrays of one micro-batch, padded on the right to its longest example.

    causal-lm:      input_ids, attention_mask, labels [batch, length]; labels are aligned with input_ids (not shifted)
    seq2seq:        input_ids, attention_mask [batch, source], labels [batch, target]
    classification: input_ids, attention_mask [batch, length], labels [batch]
    """
    places, lengths = tokens.places_of(examples)
    ids = tokens.ids[places]
    if task == "classification":
        assert tokens.labels is not None
        return {**_padded(ids, lengths, pad_id), "labels": tokens.labels[np.asarray(examples)].astype(np.int64)}
    is_target = tokens.targets[places].astype(bool)
    if task == "seq2seq":  # inputs before targets in each example
        n_targets = sums_of(is_target, lengths)
        batch = _padded(ids[~is_target], lengths - n_targets, pad_id)
        return {**batch, "labels": _filled(ids[is_target], _rows(n_targets), IGNORED)}
    batch = _padded(ids, lengths, pad_id)
    return {**batch, "labels": _filled(np.where(is_target, ids, IGNORED), batch["attention_mask"] > 0, IGNORED)}


def _rows(lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[n, longest]: where a padded batch holds something."""
    return np.arange(lengths.max()) < lengths[:, None]


def _filled(values: NDArray[Any], where: NDArray[np.bool_], otherwise: int) -> NDArray[np.int64]:
    array = np.full(where.shape, otherwise, dtype=np.int64)
    array[where] = values
    return array


def _padded(ids: NDArray[np.int32], lengths: NDArray[np.int64], pad_id: int) -> dict[str, Any]:
    where = _rows(lengths)
    return {"input_ids": _filled(ids, where, pad_id), "attention_mask": where.astype(np.int64)}
