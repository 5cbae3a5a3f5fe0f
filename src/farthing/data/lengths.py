"""How long the examples are, in tokens: what a plan's memory and seconds depend on most.

`Lengths` is a distribution, and what becomes of it: `cut` says how the trainer cuts steps by a
budget of tokens (`data/packing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farthing.arrays import Floats, Ints
from farthing.data.packing import ON_CPU, MicroBatchCost, split_by_tokens, split_padded
from farthing.data.token_set import TokenSet
from farthing.data.units import shared_tokens
from farthing.errors import InputError
from farthing.objectives.registry import objective_of

SAMPLE_SIZE = 4096
# standard deviation of ln(length) where only the mean is known: between a chat set and a set of
# prompts
SPREAD = 0.6
_N_SIMULATED = 1 << 17  # examples of simulated steps that are only added up
_N_CUT, _N_CUT_PADDED = (
    2048,
    768,
)  # examples of those that are really cut, flat and padded, which takes longer
_N_EVEN = 128  # examples of a step from which on only a remainder of a micro-batch is empty
MORE_THAN_DRAWN = (
    1.4  # the largest padded micro-batch against that of the simulated steps, by assumption
)


class Padded(NamedTuple):
    """A mean example of a full step as it is computed, padding included."""

    tokens: float
    targets: float  # seq2seq; 0 otherwise
    token_pairs: float  # mean of the padded length squared: what attention is made of
    target_pairs: float  # the same in a decoder with an encoder
    cross_pairs: float  # padded source times padded target


class Largest(NamedTuple):
    """The largest micro-batch of a run: its rows, and the tokens of each. Documents end to end are
    one row.
    """

    n_rows: int
    tokens: int
    targets: int  # seq2seq; 0 otherwise
    # of documents end to end: the squares of their lengths added up; 0 where rows are squares
    pairs: int = 0

    @property
    def n_tokens(self) -> int:
        """Padded tokens, sources and targets together."""
        return self.n_rows * (self.tokens + self.targets)


@dataclass(frozen=True)
class Cut:
    """What steps become when they are cut by a budget of tokens."""

    example: Padded
    """The mean one as it is computed."""
    largest: Largest
    count: Callable[[], float]

    @cached_property
    def n_micro_batches(self) -> float:
        """Of a mean step; counted when it is asked for."""
        return self.count()


@dataclass(frozen=True, eq=False)
class Lengths:
    """The lengths of a set of examples after truncation. Make one with `from_arrays`,
    `from_token_set` or `from_mean`.
    """

    n_examples: int
    tokens: Ints
    """Input tokens of at most 4096 examples, evenly from the shortest to the longest; seq2seq: of
    the source.
    """
    targets: Ints | None
    """Seq2seq: target tokens of the same examples."""
    n_tokens: float
    """All input tokens; seq2seq: of the sources."""
    n_target_tokens: float
    """All labelled tokens; classification: examples."""
    longest: int
    longest_target: int
    """0 but for seq2seq."""
    longest_example: int
    """Tokens of the longest example, its target included: a micro-batch may have to hold that many.
    """
    is_exact: bool
    source: str
    """Where the lengths are from."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What there is to say of the data: columns that nobody reads, and the like."""
    n_labels: int = 0
    """Outputs of a head that scores whole examples; 0: not known, or no such task."""
    of_sources: tuple[float, ...] = field(default=(), compare=False)
    """Of a sample: about how many of the examples each source has."""

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
        return self.example.token_pairs

    @cached_property
    def _targets(self) -> Ints:
        return np.zeros_like(self.tokens) if self.targets is None else self.targets

    @cached_property
    def _both(self) -> Ints:
        return self.tokens + self._targets

    @cached_property
    def example(self) -> Padded:
        """A mean example without padding."""
        found = Padded(*_figures(self.tokens, self._targets).mean(1).tolist())
        return found._replace(
            tokens=self.mean, targets=0.0 if self.targets is None else self.mean_target
        )

    def repeated(self, n_examples: int) -> Lengths:
        """So many examples of the same lengths."""
        share = n_examples / self.n_examples
        return replace(
            self,
            n_examples=n_examples,
            n_tokens=self.n_tokens * share,
            n_target_tokens=self.n_target_tokens * share,
            is_exact=False,
            source=f"{n_examples:,} examples as long as these: {self.source}",
        )

    def truncated(self, most: int) -> Lengths:
        """The same examples with inputs of at most `most` tokens."""
        tokens = np.minimum(self.tokens, most)
        share = float(tokens.sum()) / max(1.0, float(self.tokens.sum()))
        return replace(
            self,
            tokens=tokens,
            n_tokens=self.n_tokens * share,
            n_target_tokens=self.n_target_tokens * (share if self.targets is None else 1.0),
            longest=min(self.longest, most),
            longest_example=int((tokens + self._targets).max()),
        )

    # ---- cut by tokens ----

    def cut(
        self,
        micro_batch_tokens: int,
        global_batch: int,
        *,
        is_packed: bool,
        cost: MicroBatchCost = ON_CPU,
    ) -> Cut:
        """Steps of `global_batch` random examples in micro-batches of at most `micro_batch_tokens`
        computed tokens.

        `is_packed`: end to end, without padding, so that all but the number of micro-batches is
        exact; else padded by
        `split_padded`, by what micro-batches `cost` on the device. What is not exact is counted in
        steps drawn from a fixed seed and cut by the trainer's own functions: within 2 % for packed
        micro-batches and 5 % for padded ones (tests).
        """
        batch = self._batch(global_batch)
        if is_packed:
            most = max(1, micro_batch_tokens)
            return _packed(self, most, batch)
        # more than all of the longest is never needed, and no micro-batch is larger
        most = max(1, min(micro_batch_tokens, batch * (self.longest + self.longest_target)))
        least = min(cost.least_tokens, max(most, self.longest_example))
        own = cost._replace(least_tokens=least)
        return _padded(self, most, batch, own)

    def largest_step(self, global_batch: int) -> int:
        """The most tokens of a step, sources and targets together, among as many as are drawn from
        a fixed seed.
        """
        return _largest_step(self, self._batch(global_batch))[0]

    def _batch(self, global_batch: int) -> int:
        return max(1, min(global_batch, self.n_examples))

    def _top(self, micro_batch_tokens: int, batch: int) -> int:
        """The most tokens of a micro-batch."""
        return min(max(micro_batch_tokens, self.longest_example), self.largest_step(batch))


# ---- simulated steps, each asked for often ----


@lru_cache(maxsize=4096)
def _largest_step(of: Lengths, batch: int) -> tuple[int, int]:
    """(most tokens, most squares of input lengths added up) of the drawn steps."""
    steps = _steps(of, batch, _N_SIMULATED)
    squares = of.tokens[steps] ** 2
    return int(of._both[steps].sum(1).max()), int(squares.sum(1).max())


@lru_cache(maxsize=4096)
def _packed(of: Lengths, micro_batch_tokens: int, batch: int) -> Cut:
    top, of_targets = of._top(micro_batch_tokens, batch), 0
    if of.targets is not None:
        of_targets = round(top * of.mean_target / (of.mean + of.mean_target))
    of_inputs = top - of_targets
    of_step, pairs = _largest_step(of, batch)
    if of_inputs < of_step:  # the longest example and mean ones
        beside = max(0, of_inputs - of.longest) * of.mean_of_squares
        pairs = round(min(pairs, of.longest**2 + beside / max(1.0, of.mean)))

    def count() -> float:
        if of_step <= micro_batch_tokens:
            return 1.0
        steps = _steps(of, batch, min(4 * _N_CUT, max(_N_CUT, 32 * batch)))
        sizes = of._both[steps]
        n_tokens = sizes.sum(1)
        counts = np.ceil(n_tokens / micro_batch_tokens)
        if batch <= _N_EVEN:  # more examples fill their micro-batches
            # longest first onto the lightest: none is fuller than this (Graham 1969)
            fullest = n_tokens / counts + (1 - 1 / counts) * sizes.max(1)
            for at in np.flatnonzero(fullest > micro_batch_tokens):
                cut = split_by_tokens(steps[at], of._both, micro_batch_tokens)
                counts[at] = len(cut)
        return float(counts.mean())

    return Cut(of.example, Largest(1, of_inputs, of_targets, pairs), count)


@lru_cache(maxsize=4096)
def _padded(of: Lengths, micro_batch_tokens: int, batch: int, cost: MicroBatchCost) -> Cut:
    # of a larger step a part stands for the whole: no better sorted, so padded a little more
    n = min(batch, _N_CUT_PADDED)
    steps = _steps(of, n, _N_CUT_PADDED)
    cuts = [
        split_padded(step, of.tokens, micro_batch_tokens, target_lengths=of.targets, cost=cost)
        for step in steps
    ]
    cells = [
        (len(each), of.tokens[each].max(), of._targets[each].max())
        for micro_batches in cuts
        for each in micro_batches
    ]
    rows, source, target = np.array(cells, np.float64).T
    # means of all, padded as the drawn ones were, which are longer or shorter by chance
    useful = _figures(of.tokens[steps].ravel(), of._targets[steps].ravel()).sum(1)
    padding = _figures(source, target) @ rows / np.maximum(1.0, useful)
    example = Padded(*(np.array(of.example) * padding).tolist())
    n_passes = len(rows) / len(steps)
    if batch > n:
        of_batch = batch * (example.tokens + example.targets)
        n_passes = max(n_passes, of_batch / micro_batch_tokens)
    # micro-batches are split before they fill a large budget; others may be larger than those
    # that were drawn
    drawn_top = math.ceil(MORE_THAN_DRAWN * float((rows * (source + target)).max()))
    top = of._top(micro_batch_tokens, batch)
    top = max(min(top, of.longest_example), min(top, drawn_top))
    widest = of.longest + of.longest_target
    n_rows = max(1, min(batch, -(-top // widest)))
    share = min(1.0, top / (n_rows * widest))
    longest = math.ceil(share * of.longest), math.ceil(share * of.longest_target)
    return Cut(example, Largest(n_rows, *longest), lambda: n_passes)


def _steps(of: Lengths, batch: int, n_examples: int) -> Ints:
    """Places in the sample [steps, batch] of about `n_examples` in shuffled steps, the same
    each time.
    """
    size = max(len(of.tokens), batch)
    n_rounds = max(1, n_examples // (size // batch * batch))
    order = _shuffled(size, n_rounds)[:, : size // batch * batch]
    steps = order.reshape(-1, batch) * len(of.tokens) // size
    return steps[: max(4 if batch < 128 else 1, n_examples // batch)]


@lru_cache(maxsize=16)
def _shuffled(size: int, n_rounds: int) -> Ints:
    """So many shuffles of `range(size)`; those that are asked for first are those of more."""
    draws = np.random.Generator(np.random.Philox(key=1)).random((n_rounds, size))
    return np.argsort(draws, axis=1, kind="stable")


def _figures(source: NDArray[Any], target: NDArray[Any]) -> Floats:
    """[5, n]: the figures of `Padded` for examples of such lengths."""
    source, target = source.astype(np.float64), target.astype(np.float64)
    return np.stack([source, target, source**2, target**2, source * target])


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

    `n_target_tokens` is of the examples given; without it every input token is labelled, or every
    target of seq2seq.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    targets = None if targets is None else np.asarray(targets, dtype=np.int64)
    n_given = len(tokens)
    if n_given == 0:
        raise InputError(
            "no examples: there is nothing to plan for", where=source, to_do="check the data"
        )
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
        longest_example=int((tokens if targets is None else tokens + targets).max()),
        is_exact=is_exact,
        source=source,
    )


def from_token_set(tokens: TokenSet, indices: Ints | None, task: str, *, source: str) -> Lengths:
    """The exact lengths of a token set, or of the examples `indices` of it."""
    lengths, n_targets = tokens.lengths - shared_tokens(tokens), tokens.target_lengths
    if not objective_of(task).scores_tokens:
        n_targets = np.ones(len(lengths), np.int64)
    if indices is not None:
        lengths, n_targets = lengths[indices], n_targets[indices]
    if objective_of(task).is_pair:
        return from_arrays(lengths - n_targets, n_targets, source=source)
    return from_arrays(lengths, source=source, n_target_tokens=float(n_targets.sum()))


def from_mean(
    n_examples: int,
    mean: float,
    longest: int | None = None,
    mean_target: float | None = None,
    *,
    spread: float = SPREAD,
) -> Lengths:
    """Lengths of which only the mean is known: lognormal around it, cut at `longest`; `spread` is
    of the logarithm.

    `mean_target` makes pairs of source and target, long ones with long ones.
    """
    where = "given on the command line"
    if n_examples < 1 or not 1 <= mean < math.inf or (mean_target or 1) < 1:
        raise InputError(
            "examples and tokens are whole numbers above 0",
            where=where,
            to_do="e.g. --examples 5000 --mean-tokens 300",
        )
    if longest is not None and longest < mean:
        what = f"the longest example has {longest} tokens, the mean {mean:g}"
        raise InputError(what, where=where, to_do="the longest can't be shorter than the mean")
    tokens = _lognormal(min(n_examples, SAMPLE_SIZE), mean, longest, spread)
    targets = None if mean_target is None else _lognormal(len(tokens), mean_target, None, spread)
    source = f"{where}: {n_examples:,} examples of {mean:g} tokens, spread by assumption"
    found = from_arrays(tokens, targets, source=source, n_examples=n_examples, is_exact=False)
    n_targets = (mean if mean_target is None else mean_target) * n_examples
    return replace(found, n_tokens=mean * n_examples, n_target_tokens=n_targets)


def _lognormal(n: int, mean: float, longest: int | None, spread: float) -> Ints:
    """`n` sorted lengths with this mean, none above `longest`, the last one equal to it."""
    normal = NormalDist(0.0, spread)
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
