"""Which examples make up step k, and how they are padded: pure functions of (seed, epoch, step).

There is no cursor, so there is nothing to save and a resume is O(1). The global batch is a number
of examples; cutting it into micro-batches (`pieces`) is an execution detail that never changes
which examples a step has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farthing.arrays import Arrays, Floats, Ints
from farthing.data.token_set import TokenSet
from farthing.objectives.objective import Rows
from farthing.objectives.registry import objective_of


@dataclass
class Batches:
    """The examples of every step.

    Each epoch is a permutation of `examples`, taken by their weights, that follows from (seed,
    epoch); its last step takes what is left.
    """

    examples: Ints
    global_batch_size: int
    seed: int
    weights: Floats | None = None
    """How often each example is learned in an epoch [n]; examples of one source have the same.
    None: once each.
    """

    def __post_init__(self) -> None:
        self._epoch: int | None = None
        self._order = self.examples

    @property
    def n_per_epoch(self) -> int:
        """Examples of one pass, repeated ones as often as they are repeated."""
        return (
            len(self.examples) if self.weights is None else sum(n for _, _, n in self._portions())
        )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass; the last may be a smaller batch."""
        return -(-self.n_per_epoch // self.global_batch_size)

    def _portions(self) -> list[tuple[Ints, float, int]]:
        """(examples, weight, how many an epoch takes of them) of each weight there is."""
        assert self.weights is not None
        found = []
        for weight in np.unique(self.weights).tolist():
            examples = self.examples[self.weights == weight]
            found.append((examples, weight, max(1, round(weight * len(examples)))))
        return found

    def _of_epoch(self, epoch: int) -> Ints:
        """What an epoch learns, in no order: whole passes, and of the rest a drawn part that
        differs from epoch to epoch.
        """
        if self.weights is None:
            return self.examples
        parts = []
        for number, (examples, _, n) in enumerate(self._portions()):
            n_whole, n_more = divmod(n, len(examples))
            drawn = permutation(
                len(examples), _fold(self.seed, number) & 0x7FFFFFFFFFFFFFFF, epoch
            )[:n_more]
            parts += [examples] * n_whole + [examples[drawn]]
        return np.concatenate(parts)

    def examples_of(self, step: int) -> Ints:
        """Indices of the examples of optimizer step `step`, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            examples = self._of_epoch(epoch)
            self._order, self._epoch = examples[permutation(len(examples), self.seed, epoch)], epoch
        return self._order[place * self.global_batch_size : (place + 1) * self.global_batch_size]


def permutation(n: int, seed: int, epoch: int) -> Ints:
    """A shuffle of range(n) that is the same on every machine and with every numpy.

    It ranks raw draws of Philox, whose stream numpy guarantees (NEP 19); `Generator.permutation`
    may change.
    """
    draws = np.random.Philox(key=_fold(seed, epoch)).random_raw(n)
    return np.argsort(draws, kind="stable")


def _fold(*numbers: int) -> int:
    """A 128-bit key from numbers."""
    text = ",".join(str(number) for number in numbers)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def split_by_input(
    groups: NDArray[np.uint64], fraction: float, seed: int, inputs: NDArray[np.uint64] | None = None
) -> tuple[Ints, Ints]:
    """(train, eval) example indices. Examples with equal input fall on the same side; `fraction` is
    of distinct inputs.

    The distinct inputs are ranked by a hash of (input, seed): which side one falls on hardly
    depends on the others.
    `inputs` are those of all rows, also of rows that became no example, so that it does not depend
    on why they did not.
    """
    distinct = np.unique(groups if inputs is None else inputs)
    n_eval = max(0, min(max(1, round(fraction * len(distinct))), len(distinct) - 1))
    with np.errstate(
        over="ignore"
    ):  # the finaliser of splitmix64 (Steele, Lea, Flood 2014), modulo 2^64
        mixed = distinct + np.uint64(_fold(seed) & 0xFFFFFFFFFFFFFFFF)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    chosen = distinct[np.argsort(mixed, kind="stable")[:n_eval]]
    is_eval = np.isin(groups, chosen)
    return np.flatnonzero(~is_eval), np.flatnonzero(is_eval)


def collate(tokens: TokenSet, examples: Sequence[int] | Ints, task: str, pad_id: int) -> Arrays:
    """Arrays of one micro-batch, padded on the right to its longest example, as its task lays them
    out: see `Objective.pad`.
    """
    return objective_of(task).pad(rows_of(tokens, examples), pad_id)


def rows_of(
    tokens: TokenSet,
    examples: Sequence[int] | Ints,
    skipped: Ints | int = 0,
) -> Rows:
    """These examples end to end, without the first `skipped` tokens of each."""
    places, lengths = tokens.places_of(examples, skipped)
    is_target = tokens.targets[places].astype(bool)
    return Rows(tokens.ids[places], is_target, lengths, tokens.labels_of(examples))
