"""How long the examples are, in tokens: what a plan's memory and seconds depend on most.

`Lengths` is a distribution, and what becomes of it: `cut` says how the trainer cuts steps by a budget of tokens
(`data/pieces`), `padded` how others do by a number of examples, sorted by length and each piece as long as its longest.
`read_lengths` takes lengths from the token cache where training or tokenizing has left them, else from a sample. Refuses to
import torch and transformers and to reach the network.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farthing.addresses import is_remote, without_secrets
from farthing.config.job import Job
from farthing.data.batches import split_by_input
from farthing.data.packing import cut_by_tokens, cut_padded
from farthing.data.read import KINDS, Source, folder_sha256, is_dataset, kind_of_file, short_name
from farthing.data.sample import Sampled, light_tokenizer, sample_lengths
from farthing.data.tokens import CACHE_VERSION, Recipe, TokenSet, open_token_set
from farthing.durability.files import Damaged, make_private, sha256_of, write_json
from farthing.errors import FarthingError, ModelError, UserMistake
from farthing.planner.model_config import CONFIG, cached_snapshot, find_config
from farthing.planner.shapes import read_shape
from farthing.units import plural

SAMPLE_SIZE = 4096
SPREAD = 0.6  # standard deviation of ln(length) where only the mean is known: between a chat set and a set of prompts
_CHUNK = 16_384  # examples
_N_SIMULATED = 1 << 17  # examples of simulated steps that are only added up
_N_CUT, _N_CUT_PADDED = 2048, 512  # examples of those that are really cut, flat and padded, which takes longer
MORE_THAN_DRAWN = 1.4  # the largest padded micro-batch against that of the simulated steps, by assumption
_MOST_CELLS = 1_500_000  # of one table of order statistics: a finer one takes seconds and changes nothing


class Padded(NamedTuple):
    """A mean example of a full step as it is computed, padding included."""

    tokens: float
    targets: float  # seq2seq; 0 otherwise
    token_pairs: float  # mean of the padded length squared: what attention is made of
    target_pairs: float  # the same in a decoder with an encoder
    cross_pairs: float  # padded source times padded target


class Largest(NamedTuple):
    """The largest micro-batch of a run: its rows, and the tokens of each. Documents end to end are one row."""

    n_rows: int
    tokens: int
    targets: int  # seq2seq; 0 otherwise
    pairs: int = 0  # of documents end to end: the squares of their lengths added up; 0 where rows are squares

    @property
    def n_tokens(self) -> int:
        """Padded tokens, sources and targets together."""
        return self.n_rows * (self.tokens + self.targets)


class Cut(NamedTuple):
    """What steps become when they are cut by a budget of tokens."""

    example: Padded
    """The mean one as it is computed."""
    n_micro_batches: float
    """Of a mean step."""
    largest: Largest


@dataclass(frozen=True, eq=False)
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
    longest_example: int
    """Tokens of the longest example, its target included: a micro-batch may have to hold that many."""
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

    # ---- cut by tokens ----

    def cut(self, most_tokens: int, global_batch: int, *, is_flat: bool) -> Cut:
        """Steps of `global_batch` random examples in micro-batches of at most `most_tokens` computed tokens.

        `is_flat`: end to end, without padding, so that all but the number of micro-batches is exact; else padded by
        `cut_padded`, which leaves nearly all of the tokens useful. What is not exact is counted in steps drawn from a
        fixed seed and cut by the trainer's own functions: within 2 % for flat pieces and 5 % for padded ones (tests).
        """
        batch = max(1, min(global_batch, self.n_examples))
        key = ("cut", max(1, most_tokens), batch, is_flat)
        if key not in self._known:
            self._known[key] = self._cut(max(1, most_tokens), batch, is_flat)
        found: Cut = self._known[key]
        return found

    def largest_step(self, global_batch: int) -> int:
        """The most tokens of a step, sources and targets together, among as many as are drawn from a fixed seed."""
        return self._largest_step(max(1, min(global_batch, self.n_examples)))[0]

    def _largest_step(self, batch: int) -> tuple[int, int]:
        """(most tokens, most squares of input lengths added up) of the drawn steps."""
        key = ("largest step", batch)
        if key not in self._known:
            steps = self._steps(batch, _N_SIMULATED)
            squares = self.tokens[steps] ** 2
            self._known[key] = int(self._both[steps].sum(axis=1).max()), int(squares.sum(axis=1).max())
        found: tuple[int, int] = self._known[key]
        return found

    def truncated(self, most: int) -> Lengths:
        """The same examples with inputs of at most `most` tokens."""
        tokens = np.minimum(self.tokens, most)
        share = float(tokens.sum()) / max(1.0, float(self.tokens.sum()))
        of_targets = 1.0 if self.targets is not None else share
        return replace(
            self,
            tokens=tokens,
            n_tokens=self.n_tokens * share,
            n_target_tokens=self.n_target_tokens * of_targets,
            longest=min(self.longest, most),
            longest_example=int((tokens if self.targets is None else tokens + self.targets).max()),
        )

    @property
    def _both(self) -> NDArray[np.int64]:
        return self.tokens if self.targets is None else self.tokens + self.targets

    def _cut(self, most_tokens: int, batch: int, is_flat: bool) -> Cut:
        top = min(max(most_tokens, self.longest_example), self.largest_step(batch))
        if is_flat:
            flat = Padded(self.mean, 0.0, self.mean_of_squares, 0.0, 0.0)
            return Cut(flat, self._n_flat(most_tokens, batch), Largest(1, top, 0, self._pairs_of_flat(top, batch)))
        return self._cut_padded(most_tokens, batch, top)

    def _n_flat(self, most_tokens: int, batch: int) -> float:
        """Mean number of flat pieces of a step."""
        if self.largest_step(batch) <= most_tokens:
            return 1.0
        if batch > _N_CUT:  # so many examples fill their pieces
            return max(1.0, batch * self.mean / most_tokens)
        steps = self._steps(batch, _N_CUT)
        return sum(len(cut_by_tokens(step, self.tokens, most_tokens)) for step in steps) / len(steps)

    def _pairs_of_flat(self, top: int, batch: int) -> int:
        """Squares of the lengths in a piece of `top` tokens: a whole step, or the longest example with mean ones beside it."""
        of_step, squares = self._largest_step(batch)
        if top < of_step:
            beside = max(0, top - self.longest) * self.mean_of_squares / max(1.0, self.mean)
            return round(min(squares, self.longest**2 + beside))
        return squares

    def _cut_padded(self, most_tokens: int, batch: int, top: int) -> Cut:
        n = min(
            batch, _N_CUT_PADDED
        )  # of a larger set a part stands for the whole: no better sorted, so padded a little more
        steps = self._steps(n, _N_CUT_PADDED)
        targets = np.zeros_like(self.tokens) if self.targets is None else self.targets
        of_pieces = []
        for step in steps:
            pieces = cut_padded(
                step, self.tokens, most_tokens, target_lengths=None if self.targets is None else targets
            )
            of_pieces += [(len(piece), self.tokens[piece].max(), targets[piece].max()) for piece in pieces]
        rows, source, target = (np.array(column, dtype=np.float64) for column in zip(*of_pieces, strict=True))
        drawn = self.tokens[steps].astype(np.float64), targets[steps].astype(np.float64)

        def scaled(padded: NDArray[np.float64], useful: NDArray[np.float64], mean: float) -> float:
            """The mean of all, padded as the drawn ones were: what was drawn is longer or shorter by chance."""
            return mean * float(padded @ rows) / max(1.0, float(useful.sum()))

        squares = [np.square(of, dtype=np.float64).mean() for of in (self.tokens, targets)]
        crossed = float(np.mean(self.tokens.astype(np.float64) * targets))
        example = Padded(
            scaled(source, drawn[0], self.mean),
            scaled(target, drawn[1], 0.0 if self.targets is None else self.mean_target),
            scaled(source**2, drawn[0] ** 2, float(squares[0])),
            scaled(target**2, drawn[1] ** 2, float(squares[1])),
            scaled(source * target, drawn[0] * drawn[1], crossed),
        )
        n_passes = len(rows) / len(steps)
        if batch > n:
            n_passes = max(n_passes, batch * (example.tokens + example.targets) / most_tokens)
        # pieces are split before they fill a large budget; others may be larger than those that were drawn
        drawn_top = MORE_THAN_DRAWN * float((rows * (source + target)).max())
        top = max(min(top, self.longest_example), min(top, math.ceil(drawn_top)))
        widest = self.longest + self.longest_target
        n_rows = max(1, min(batch, -(-top // widest)))
        share = min(1.0, top / (n_rows * widest))
        longest = math.ceil(share * self.longest), math.ceil(share * self.longest_target)
        return Cut(example, n_passes, Largest(n_rows, *longest))

    def _steps(self, batch: int, n_examples: int) -> NDArray[np.int64]:
        """Places in the sample [steps, batch] of about `n_examples` in shuffled steps, the same each time."""
        size = max(len(self.tokens), batch)
        n_rounds = max(1, n_examples // (size // batch * batch))
        draws = np.random.Generator(np.random.Philox(key=batch)).random((n_rounds, size))
        order = np.argsort(draws, axis=1, kind="stable")[:, : size // batch * batch]
        steps = order.reshape(-1, batch) * len(self.tokens) // size
        return steps[: max(4, n_examples // batch)]

    # ---- padded, as others do ----

    def padded(self, micro: int, global_batch: int) -> Padded:
        """What a mean example becomes when steps of `global_batch` random examples are cut into pieces of `micro`.

        Exact for the distribution: the longest of a piece is an order statistic of the step. Targets of seq2seq are left
        out: no published run that it is for has any.
        """
        global_batch = max(1, min(global_batch, self.n_examples))
        micro = max(1, min(micro, global_batch))
        key = ("order", global_batch)
        if key not in self._known:
            self._known[key] = _order_statistics(self.tokens, self.n_examples, global_batch)
        longest, squared = (of_all[::micro] for of_all in self._known[key])
        starts = np.arange(0, global_batch, micro)
        rows = np.minimum(starts + micro, global_batch) - starts
        tokens, pairs = float(rows @ longest) / global_batch, float(rows @ squared) / global_batch
        return Padded(tokens, 0.0, pairs, 0.0, 0.0)


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
        longest_example=int((tokens if targets is None else tokens + targets).max()),
        is_exact=is_exact,
        source=source,
    )


def from_token_set(tokens: TokenSet, indices: NDArray[np.int64] | None, task: str, *, source: str) -> Lengths:
    """The exact lengths of a token set, or of the examples `indices` of it."""
    offsets = np.asarray(tokens.offsets)
    lengths = np.diff(offsets)
    if task == "classification":
        n_targets = np.ones(len(lengths), np.int64)
    else:
        n_targets = np.empty(len(lengths), np.int64)
        for start in range(0, len(lengths), _CHUNK):  # the running sum of a few examples, before and after each
            around = offsets[start : start + _CHUNK + 1]
            running = np.concatenate([[0], np.cumsum(tokens.targets[around[0] : around[-1]], dtype=np.int64)])
            n_targets[start : start + _CHUNK] = np.diff(running[around - around[0]])
    if indices is not None:
        lengths, n_targets = lengths[indices], n_targets[indices]
    if task == "seq2seq":
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
    """Lengths of which only the mean is known: lognormal around it, cut at `longest`; `spread` is of the logarithm.

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
    tokens = _lognormal(min(n_examples, SAMPLE_SIZE), mean, longest, spread)
    targets = None if mean_target is None else _lognormal(len(tokens), mean_target, None, spread)
    return Lengths(
        n_examples=n_examples,
        tokens=tokens,
        targets=targets,
        n_tokens=mean * n_examples,
        n_target_tokens=(mean if mean_target is None else mean_target) * n_examples,
        longest=int(tokens[-1]),
        longest_target=0 if targets is None else int(targets[-1]),
        longest_example=int(tokens[-1] if targets is None else tokens[-1] + targets[-1]),
        is_exact=False,
        source=f"{where}: {n_examples:,} examples of {mean:g} tokens, spread by assumption",
    )


def _lognormal(n: int, mean: float, longest: int | None, spread: float) -> NDArray[np.int64]:
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


# ---- those of a job ----

INDEX = "token_index"  # the folder in the cache that tells which token set a job's data became
_INDEX_VERSION = 1
_TOKENIZER_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
_MOST_TOKENIZER_BYTES = 256 << 20  # a larger json file is none of a tokenizer


def read_lengths(job: Job, *, cache_dir: Path) -> tuple[Lengths, Lengths | None]:
    """The lengths of a job's training and evaluation examples, exact where they have been tokenized before.

    Raises `DataError` for data that can't be used, `UserMistake` for data that can't be seen without the network.
    """
    cache = Path(cache_dir)
    tokens = _tokens_of(job, "train", cache)
    if tokens is not None:
        found = _exact(job, tokens, cache)
        if found is not None:
            return found
    return _estimated(job)


def note_token_set(
    job: Job, role: str, train_sources: list[Source], eval_sources: list[Source], folder: Path, *, cache_dir: Path
) -> None:
    """Remember which token set the data of `role` (train or eval) became, for `read_lengths`. Raises `OSError`."""
    known = {"train": [source.sha256 for source in train_sources], "eval": [source.sha256 for source in eval_sources]}
    key = _index_key(job, role, known)
    if key is not None and _noted(cache_dir, key) != folder.name:
        when = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(make_private(cache_dir / INDEX) / f"{key}.json", {"set": folder.name, "when": when})


def _exact(job: Job, tokens: TokenSet, cache: Path) -> tuple[Lengths, Lengths | None] | None:
    """From token sets; None when that of the evaluation data is not there."""
    train = np.arange(len(tokens))
    held_out: tuple[TokenSet, NDArray[np.int64]] | None = None
    if job.data.eval:
        eval_tokens = _tokens_of(job, "eval", cache)
        if eval_tokens is None:
            return None
        held_out = eval_tokens, np.arange(len(eval_tokens))
    elif job.data.eval_fraction > 0:
        train, chosen = split_by_input(tokens.groups, job.data.eval_fraction, job.train.seed)
        held_out = (tokens, chosen) if len(chosen) else None
    train = train[: job.data.max_train_samples]
    is_exact = not any(_is_elsewhere(name) for name in (*job.data.train, *job.data.eval))

    def lengths_of(of: TokenSet, indices: NDArray[np.int64]) -> Lengths:
        words = f"token cache, {plural(len(indices), 'example')}"
        words += "" if is_exact else "; the data was not looked at again"
        found = from_token_set(of, indices, job.task, source=words)
        return found if is_exact else replace(found, is_exact=False)

    if held_out is None:
        return lengths_of(tokens, train), None
    return lengths_of(tokens, train), lengths_of(held_out[0], held_out[1][: job.data.max_eval_samples])


def _estimated(job: Job) -> tuple[Lengths, Lengths | None]:
    """From a sample of the rows."""
    folder = _tokenizer_folder(job)
    template = None
    if job.data.chat_template is not None:
        try:
            template = Path(job.data.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            what = f"the chat template can't be read ({type(error).__name__})"
            raise ModelError(what, where=job.data.chat_template, to_do="check data.chat_template") from error
    tokenizer = light_tokenizer(folder, template)
    recipe = Recipe(
        task=job.task,
        max_length=_max_length(job, folder),
        max_target_length=job.data.max_target_length,
        too_long=job.data.too_long,
        train_on_prompt=job.data.train_on_prompt,
        columns=dict(job.data.columns),
        label_map=dict(job.data.label_map),
    )

    def sampled(names: tuple[str, ...], split: str) -> Sampled:
        return sample_lengths(_local_sources(names, split), tokenizer, recipe)

    def lengths_of(found: Sampled, share: float, most: int | None) -> Lengths:
        n_examples = max(1, round(found.n_examples * share))
        n_rows = f"{found.n_rows:,}" if found.is_all_read else f"about {found.n_rows:,}"
        words = f"{found.n_tokenized:,} of {n_rows} rows tokenized"
        if not tokenizer.is_exact:
            words = f"guessed from characters, no tokenizer was found here: {found.n_tokenized:,} of {n_rows} rows"
        return from_arrays(
            found.tokens,
            found.targets,
            n_examples=n_examples if most is None else min(most, n_examples),
            n_target_tokens=found.n_target_tokens,
            is_exact=False,
            source=words,
        )

    data = job.data
    train = sampled(data.train, data.train_split)
    if data.eval:
        held_out = lengths_of(sampled(data.eval, data.eval_split), 1.0, data.max_eval_samples)
        return lengths_of(train, 1.0, data.max_train_samples), held_out
    if data.eval_fraction > 0:
        held_out = lengths_of(train, data.eval_fraction, data.max_eval_samples)
        return lengths_of(train, 1 - data.eval_fraction, data.max_train_samples), held_out
    return lengths_of(train, 1.0, data.max_train_samples), None


def _is_elsewhere(name: str) -> bool:
    """Whether a name of data means something that only the network can show."""
    return is_remote(name) or (is_dataset(name) and not Path(name).is_dir())


def _local_sources(names: tuple[str, ...], split: str) -> list[Source]:
    """The files that these names mean; their content is not hashed. Raises `UserMistake`, `DataError`."""
    sources = []
    for name in names:
        if _is_elsewhere(name):
            what = "a file of another machine" if is_remote(name) else "no file here; as a data set of the Hub"
            raise UserMistake(
                f"{what}, it can't be looked at without the network",
                where=without_secrets(name),
                to_do="give --examples N --mean-tokens M, or run `farthing train` once: tokenized data is remembered",
            )
        paths = _files_of_split(Path(name), split) if Path(name).is_dir() else [Path(name)]
        for path in paths:
            shown = short_name(str(path))
            sources.append(Source(shown, "", kind_of_file(path, shown), path))
    return sources


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """The data files of a data set folder that hold a split: its name is in theirs, or no file names a split at all."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in KINDS and path.is_file())
    files = [path for path in files if path.name not in ("dataset_info.json", "state.json", "dataset_dict.json")]
    words = {"validation": ("valid", "dev")}.get(split, (split,))
    inside = {path: str(path.relative_to(folder)).lower() for path in files}
    named = [path for path in files if any(word in inside[path] for word in words)]
    if not named and split == "train":
        named = [path for path in files if not any(word in inside[path] for word in ("valid", "dev", "test", "eval"))]
    if not named:
        raise UserMistake(
            f"the folder has no file that can be seen to be its split `{split}`",
            where=str(folder),
            to_do="give --examples N --mean-tokens M, or run `farthing train` once: tokenized data is remembered",
        )
    return named


# ---- the index of token sets ----


def _tokens_of(job: Job, role: str, cache: Path) -> TokenSet | None:
    """The token set that the job's data became, if it was made from the same bytes in the same way and is whole."""
    if not (cache / INDEX).is_dir():
        return None
    try:
        key = _index_key(job, role, {})
        name = None if key is None else _noted(cache, key)
        return None if name is None else open_token_set(cache / "tokens" / name, check_bytes=False)
    except (OSError, ValueError, Damaged):
        return None


def _noted(cache: Path, key: str) -> str | None:
    """The name of the token set that is noted under a key."""
    try:
        name = json.loads((cache / INDEX / f"{key}.json").read_text(encoding="utf-8"))["set"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) and Path(name).name == name else None


def _index_key(job: Job, role: str, known: dict[str, list[str]]) -> str | None:
    """A hash of everything a token set follows from that can be known without transformers; None without a tokenizer.

    `known` has the hashes of sources that were opened already.
    """
    folder = _tokenizer_folder(job)
    if folder is None:
        return None
    data = job.data
    names = {"train": (data.train, data.train_split), "eval": (data.eval, data.eval_split)}
    template = data.chat_template
    content = {
        "version": [_INDEX_VERSION, CACHE_VERSION, _version("transformers"), _version("tokenizers")],
        "data": {  # the labels of the evaluation data are those of the training data
            each: _content_of(*names[each], data.dataset_config_name, known.get(each))
            for each in (("train",) if role == "train" else ("train", "eval"))
        },
        "role": role,
        "task": job.task,
        "tokenizer": _files_sha256(folder),
        "model": sha256_of(config) if (config := _model_folder(job) / CONFIG).is_file() else None,
        "max_length": job.max_length,
        "template": sha256_of(Path(template)) if template else None,
        "settings": data.model_dump(
            include={
                "columns", "label_map", "max_length", "max_target_length", "too_long", "train_on_prompt", "max_bad_rows",
            }
        ),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _content_of(names: tuple[str, ...], split: str, config_name: str | None, known: list[str] | None) -> list[str]:
    """The identity of data: of its bytes, or of the address where only the network could tell."""
    found = []
    for index, name in enumerate(names):
        if _is_elsewhere(name):
            asked = json.dumps([name, split, config_name])
            found.append("at " + hashlib.sha256(asked.encode()).hexdigest())
        elif known is not None:
            found.append(known[index])
        else:
            found.append(folder_sha256(Path(name), split) if Path(name).is_dir() else sha256_of(Path(name)))
    return found


def _tokenizer_folder(job: Job) -> Path | None:
    """The folder with the job's tokenizer: a local one, or what the Hugging Face cache holds."""
    own = job.model.tokenizer_name_or_path
    name = own or job.model.model_name_or_path
    if Path(name).is_dir():
        return Path(name)
    return cached_snapshot(name, None if own and own != job.model.model_name_or_path else job.model.revision)


def _model_folder(job: Job) -> Path:
    """The folder with the model's configuration, here or in the Hugging Face cache; one that is not there otherwise."""
    path = Path(job.model.model_name_or_path)
    return path if path.is_dir() else cached_snapshot(str(path), job.model.revision) or path


def _files_sha256(folder: Path) -> str:
    """Identity of the tokenizer's and the model's settings in a folder."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)}):
        if path.is_file() and path.stat().st_size <= _MOST_TOKENIZER_BYTES:
            digest.update(f"{path.name}:{sha256_of(path)}\n".encode())
    return digest.hexdigest()


def _max_length(job: Job, folder: Path | None) -> int:
    """The longest input as `prepare.open_inputs` settles it: the job's, or what model and tokenizer allow of the default."""
    if job.data.max_length:
        return job.data.max_length
    limits = [job.max_length]
    try:
        config, _ = find_config(job.model.model_name_or_path, job.model.revision, ask_hub=False)
        limits.append(read_shape(config, "body").max_positions or job.max_length)
    except FarthingError:
        pass  # whoever needs the model will say so
    try:
        says = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")) if folder else {}
        limits.append(int(says.get("model_max_length") or job.max_length))
    except (OSError, ValueError, AttributeError):
        pass
    return min(limits)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
