"""How long the examples are, in tokens: what a plan's memory and seconds depend on most.

`Lengths` is a distribution with its padding: a step's examples are sorted by length and cut into micro-batches
(`data/batches.cut`), and a micro-batch is as long as its longest example. Refuses to import torch and transformers and to
reach the network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farthing.data.tokens import TokenSet
from farthing.errors import UserMistake

SAMPLE_SIZE = 4096
SPREAD = 0.6  # standard deviation of ln(length) where only the mean is known: between a chat set and a set of prompts
_N_SIMULATED = 1 << 17  # examples drawn to find the padding of pairs
_MOST_CELLS = 1_500_000  # of one table of order statistics: a finer one takes seconds and changes nothing


class Padded(NamedTuple):
    """A mean example of a full step as it is computed, padding included."""

    tokens: float
    targets: float  # seq2seq; 0 otherwise
    token_pairs: float  # mean of the padded length squared: what attention is made of
    target_pairs: float  # the same in a decoder with an encoder
    cross_pairs: float  # padded source times padded target


class Largest(NamedTuple):
    """The largest micro-batch of a run: its rows, and the tokens of each."""

    n_rows: int
    tokens: int
    targets: int  # seq2seq; 0 otherwise

    @property
    def n_tokens(self) -> int:
        """Padded tokens, sources and targets together."""
        return self.n_rows * (self.tokens + self.targets)


@dataclass(frozen=True)
class Lengths:
    """The lengths of a set of examples after truncation. Make one with `from_arrays`, `from_token_set` or `from_mean`."""

    n_examples: int
    tokens: NDArray[np.int64]
    """Input tokens of at most 4096 examples, evenly from the shortest to the longest; seq2seq: of the source."""
    targets: NDArray[np.int64] | None
    """Seq2seq: target tokens of the same examples."""
    n_tokens: float
    """All input tokens; seq2seq: of the sources."""
    n_target_tokens: float
    """All labelled tokens; classification: examples."""
    longest: int
    longest_target: int
    """0 but for seq2seq."""
    is_exact: bool
    source: str
    """Where the lengths are from, in words."""
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def mean(self) -> float:
        """Mean input length."""
        return self.n_tokens / max(1, self.n_examples)

    @property
    def mean_target(self) -> float:
        """Mean labelled tokens of an example."""
        return self.n_target_tokens / max(1, self.n_examples)

    @property
    def mean_of_squares(self) -> float:
        """Mean of the input length squared, without padding."""
        return float(np.mean(np.square(self.tokens, dtype=np.float64)))

    def percentile(self, percent: float) -> float:
        """The input length that so many percent of the examples do not exceed."""
        return float(np.percentile(self.tokens, percent))

    # ---- padding ----

    def padded(self, micro: int, global_batch: int) -> Padded:
        """What a mean example becomes when steps of `global_batch` random examples are cut into pieces of `micro`.

        Exact for the distribution when only sources are padded: the longest of a piece is an order statistic of the
        step. For seq2seq, whose pieces are sorted by source and target together, epochs are simulated from a fixed
        seed; the standard error stays below 1 %.
        """
        global_batch = max(1, min(global_batch, self.n_examples))
        micro = max(1, min(micro, global_batch))
        key = ("padded", micro, global_batch)
        if key not in self._known:
            make = self._padded_alone if self.targets is None else self._padded_pairs
            self._known[key] = make(micro, global_batch)
        found: Padded = self._known[key]
        return found

    def padded_per_micro_batch(self, micro: int, global_batch: int) -> float:
        """Expected padded tokens of a micro-batch, targets of seq2seq included."""
        one = self.padded(micro, global_batch)
        batch = max(1, min(global_batch, self.n_examples))
        return (one.tokens + one.targets) * batch / -(-batch // max(1, micro))

    def padded_per_epoch(self, micro: int, global_batch: int) -> float:
        """Expected padded tokens of an epoch, its smaller last step included."""
        total = 0.0
        n_full, rest = divmod(self.n_examples, max(1, global_batch))
        for n_steps, batch in ((n_full, global_batch), (1, rest)):
            if n_steps and batch:
                one = self.padded(micro, batch)
                total += n_steps * batch * (one.tokens + one.targets)
        return total

    def attention_pairs(self, micro: int, global_batch: int) -> float:
        """Mean over the examples of the padded input length squared."""
        return self.padded(micro, global_batch).token_pairs

    def largest_micro_batch(self, micro: int) -> Largest:
        """The most that a micro-batch of an epoch can hold: as many rows as may be, each as long as the longest."""
        return Largest(max(1, min(micro, self.n_examples)), self.longest, self.longest_target)

    def _padded_alone(self, micro: int, global_batch: int) -> Padded:
        key = ("order", global_batch)
        if key not in self._known:
            self._known[key] = _order_statistics(self.tokens, self.n_examples, global_batch)
        longest, squared = (of_all[::micro] for of_all in self._known[key])
        starts = np.arange(0, global_batch, micro)
        rows = np.minimum(starts + micro, global_batch) - starts
        tokens, pairs = float(rows @ longest) / global_batch, float(rows @ squared) / global_batch
        return Padded(tokens, 0.0, pairs, 0.0, 0.0)

    def _padded_pairs(self, micro: int, global_batch: int) -> Padded:
        assert self.targets is not None
        key = ("steps", global_batch)
        if key not in self._known:
            self._known[key] = self._simulated_steps(global_batch)
        tokens, targets = self._known[key]
        starts = np.arange(0, global_batch, micro)
        rows = np.minimum(starts + micro, global_batch) - starts
        source = np.maximum.reduceat(tokens, starts, axis=1).astype(np.float64)
        target = np.maximum.reduceat(targets, starts, axis=1).astype(np.float64)
        sums = [float((each @ rows).sum()) for each in (source, target, source**2, target**2, source * target)]
        return Padded(*(value / tokens.size for value in sums))

    def _simulated_steps(self, global_batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sources and targets [steps, global_batch] of shuffled epochs, longest first in each step."""
        assert self.targets is not None
        size = max(len(self.tokens), min(self.n_examples, 4 * global_batch))  # more than the sample for a large step
        picked = np.arange(size) * len(self.tokens) // size
        tokens, targets = self.tokens[picked], self.targets[picked]
        n_taken = size // global_batch * global_batch
        draws = np.random.Generator(np.random.Philox(key=global_batch)).random((max(1, _N_SIMULATED // size), size))
        steps = np.argsort(draws, axis=1, kind="stable")[:, :n_taken].reshape(-1, global_batch)
        steps = np.take_along_axis(steps, np.argsort(-(tokens + targets)[steps], axis=1, kind="stable"), axis=1)
        return tokens[steps], targets[steps]


def _order_statistics(
    sample: NDArray[np.int64], n_examples: int, n_drawn: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Expected longest, second longest ... of `n_drawn` examples, and the expected squares of them.

    Drawn without replacement from `n_examples` that are distributed as the sample: the number of drawn ones above a
    length is hypergeometric, and the k-th longest is at most that length when fewer than k are above it (David and
    Nagaraja, Order Statistics, 2003, section 3.7).
    """
    values, counts = np.unique(sample, return_counts=True)
    n_most = max(64, _MOST_CELLS // n_drawn)
    means = values.astype(np.float64)
    if len(values) > n_most:  # bins of neighbouring lengths, each with its mean
        bins = np.arange(len(values)) * n_most // len(values)
        means = np.bincount(bins, counts * means) / np.bincount(bins, counts)
        counts = np.bincount(bins, counts).astype(np.int64)
    n_above = n_examples - np.round(np.cumsum(counts)[:-1] * (n_examples / len(sample))).astype(np.int64)
    n_above = np.clip(n_above, 0, n_examples)
    log_factorial = _log_factorials(n_examples)
    k = np.arange(n_drawn + 1)
    above, below = n_above[:, None] - k, (n_examples - n_above)[:, None] - (n_drawn - k)
    is_possible = (above >= 0) & (below >= 0)
    log_p = log_factorial(n_above)[:, None] - log_factorial(k) - log_factorial(np.maximum(above, 0))
    log_p += log_factorial(n_examples - n_above)[:, None] - log_factorial(n_drawn - k)
    log_p -= log_factorial(np.maximum(below, 0))
    log_p -= log_factorial(n_examples) - log_factorial(n_drawn) - log_factorial(n_examples - n_drawn)
    p = np.where(is_possible, np.exp(np.minimum(log_p, 0.0)), 0.0)
    at_most = np.minimum(np.cumsum(p, axis=1)[:, :-1], 1.0)  # [length, k]: fewer than k + 1 drawn ones are longer
    squares = means**2
    return means[-1] - np.diff(means) @ at_most, squares[-1] - np.diff(squares) @ at_most


def _log_factorials(most: int) -> Any:
    """ln(n!) for arrays of whole numbers up to `most`: a table where it is small, Stirling's series beyond it."""
    table = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, min(most, 100_000) + 1)))])

    def of(n: Any) -> Any:
        n = np.asarray(n)
        large = np.maximum(n, 2).astype(np.float64)
        series = large * np.log(large) - large + 0.5 * np.log(2 * math.pi * large) + 1 / (12 * large)
        return np.where(n < len(table), table[np.minimum(n, len(table) - 1)], series) if most > 100_000 else table[n]

    return of


# ---- making one ----


def from_arrays(
    tokens: NDArray[Any],
    targets: NDArray[Any] | None = None,
    *,
    source: str,
    n_examples: int | None = None,
    n_target_tokens: float | None = None,
    is_exact: bool = True,
) -> Lengths:
    """Lengths of all examples, or of a sample that stands for `n_examples`.

    `n_target_tokens` is of the examples given; without it every input token is labelled, or every target of seq2seq.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    targets = None if targets is None else np.asarray(targets, dtype=np.int64)
    n_given = len(tokens)
    if n_given == 0:
        raise UserMistake("no examples: there is nothing to plan for", where=source, to_do="check the data")
    n_examples = n_given if n_examples is None else n_examples
    order = np.argsort(tokens, kind="stable") if targets is None else np.lexsort((targets, tokens))
    if n_given > SAMPLE_SIZE:
        order = order[np.linspace(0, n_given - 1, SAMPLE_SIZE).round().astype(np.int64)]
    if n_target_tokens is None:
        n_target_tokens = float((tokens if targets is None else targets).sum())
    return Lengths(
        n_examples=n_examples,
        tokens=tokens[order],
        targets=None if targets is None else targets[order],
        n_tokens=float(tokens.sum()) * n_examples / n_given,
        n_target_tokens=n_target_tokens * n_examples / n_given,
        longest=int(tokens.max()),
        longest_target=0 if targets is None else int(targets.max()),
        is_exact=is_exact,
        source=source,
    )


def from_token_set(tokens: TokenSet, indices: NDArray[np.int64] | None, task: str, *, source: str) -> Lengths:
    """The exact lengths of a token set, or of the examples `indices` of it."""
    offsets = np.asarray(tokens.offsets)
    lengths = np.diff(offsets)
    if task == "classification":
        n_targets = np.ones(len(lengths), np.int64)
    else:  # the running sum before and after an example: `reduceat` has no empty ranges
        running = np.concatenate([[0], np.cumsum(tokens.targets, dtype=np.int64)])
        n_targets = running[offsets[1:]] - running[offsets[:-1]]
    if indices is not None:
        lengths, n_targets = lengths[indices], n_targets[indices]
    if task == "seq2seq":
        return from_arrays(lengths - n_targets, n_targets, source=source)
    return from_arrays(lengths, source=source, n_target_tokens=float(n_targets.sum()))


def from_mean(n_examples: int, mean: float, longest: int | None = None, mean_target: float | None = None) -> Lengths:
    """Lengths of which only the mean is known: lognormal around it, cut at `longest`.

    `mean_target` makes pairs of source and target, long ones with long ones.
    """
    where = "given on the command line"
    if n_examples < 1 or mean < 1 or (mean_target is not None and mean_target < 1):
        raise UserMistake(
            "examples and tokens are whole numbers above 0", where=where, to_do="e.g. --examples 5000 --mean-tokens 300"
        )
    if longest is not None and longest < mean:
        what = f"the longest example has {longest} tokens, the mean {mean:g}"
        raise UserMistake(what, where=where, to_do="the longest can't be shorter than the mean")
    tokens = _lognormal(min(n_examples, SAMPLE_SIZE), mean, longest)
    targets = None if mean_target is None else _lognormal(len(tokens), mean_target, None)
    return Lengths(
        n_examples=n_examples,
        tokens=tokens,
        targets=targets,
        n_tokens=mean * n_examples,
        n_target_tokens=(mean if mean_target is None else mean_target) * n_examples,
        longest=int(tokens[-1]),
        longest_target=0 if targets is None else int(targets[-1]),
        is_exact=False,
        source=f"{where}: {n_examples:,} examples of {mean:g} tokens, spread by assumption",
    )


def _lognormal(n: int, mean: float, longest: int | None) -> NDArray[np.int64]:
    """`n` sorted lengths with this mean, none above `longest`, the last one equal to it."""
    normal = NormalDist(0.0, SPREAD)
    shape = np.exp([normal.inv_cdf((i + 0.5) / n) for i in range(n)])
    low, high = 0.0, 64.0 * mean
    for _ in range(60):  # the scale whose cut lengths have the mean
        scale = (low + high) / 2
        cut = np.clip(shape * scale, 1.0, longest)
        low, high = (scale, high) if cut.mean() < mean else (low, scale)
    lengths = np.maximum(1, np.round(np.clip(shape * high, 1.0, longest))).astype(np.int64)
    if longest is not None and n > 1:
        lengths[-1] = longest
    return lengths
