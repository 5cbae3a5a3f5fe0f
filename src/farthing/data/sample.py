"""How long the rows of a file become, from a few of them: for a plan, which can't wait for all to
be tokenized.

The rows are ordered by their bytes and cut into strata; one row of each is read and tokenized as
for training, and the others are taken to have as many tokens a byte as the one that stands for
them. The longest rows are strata of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farthing.data.encode import Encoder
from farthing.data.read import Source
from farthing.data.reader import SourceReader
from farthing.data.rows import BadRow, Block, Reading, Row, Text
from farthing.data.token_set import Recipe
from farthing.data.units import computed_once
from farthing.errors import DataError
from farthing.objectives.registry import objective_of

MOST_ROWS = 2000
_FEWEST_ROWS, _MOST_BYTES_OF_FEWEST = 250, 64 << 20
_MOST_SAMPLED_BYTES = 1_500_000  # what is tokenized in about half a second
_N_LONGEST = 16  # rows that are strata of their own
_MOST_READ_BYTES = 256 << 20
_NO_LIMIT = 1 << 40


class Sampled(NamedTuple):
    """Estimated lengths of usable rows, in no order; `n_examples` is how many they stand for."""

    tokens: NDArray[np.int64]  # seq2seq: of the source
    targets: NDArray[np.int64] | None  # seq2seq
    n_target_tokens: float  # of the rows in `tokens`; classification: examples
    n_examples: int
    n_rows: int
    n_tokenized: int
    is_all_read: bool  # the file was; else its rows are estimated too
    notes: tuple[str, ...] = ()
    """Columns that nobody reads, and what the job has chosen to learn of data of another kind."""


def sample_lengths(sources: list[Source], tokenizer: Any, recipe: Recipe) -> Sampled:
    """The lengths of these files' rows after tokenization by `tokenizer`. Raises `DataError` when
    no row can be used.
    """
    populations = [_population(source) for source in sources]
    total_bytes = sum(float(each.sizes.sum()) for each in populations)
    n_seen = sum(len(each.sizes) for each in populations)
    if n_seen == 0:
        raise DataError("no rows", where=sources[0].name, to_do="check how the file was written")
    of_rows = n_seen / max(1.0, total_bytes)
    fewest = max(1, min(_FEWEST_ROWS, int(_MOST_BYTES_OF_FEWEST * of_rows)))
    n_wanted = min(MOST_ROWS, max(fewest, int(_MOST_SAMPLED_BYTES * of_rows)))
    lengths, weights = [], []
    n_rows, n_tokenized = 0.0, 0
    why, notes = "", []
    for source, population in zip(sources, populations, strict=True):
        sizes = population.sizes
        picked, stratum = _strata(sizes, max(1, round(n_wanted * len(sizes) / n_seen)))
        rows = population.rows(picked)
        reader = SourceReader(source, recipe, tokenizer)
        of_picked, counts, reasons = _tokenized(reader, rows, tokenizer, recipe)
        notes += [f"{source.name}: {what}" for what in reader.said()]
        why = why or next(iter(reasons), "")
        shares = sizes / np.maximum(sizes[picked], 1)[stratum]
        lengths.append(np.repeat(of_picked[stratum] * shares[:, None], counts[stratum], axis=0))
        of_each = source.weight * population.n_rows / max(1, len(sizes))
        weights.append(np.full(len(lengths[-1]), of_each))
        n_rows += population.n_rows
        n_tokenized += int(counts.sum())
    found, weight = np.concatenate(lengths), np.concatenate(weights)
    tokens, targets, labelled = found.T
    limit = recipe.max_length * objective_of(recipe.task).n_sequences
    kept = np.ones(len(found), bool)
    if recipe.too_long == "skip":
        kept = (tokens <= limit + 0.5) & (targets <= recipe.max_target_length + 0.5)
    tokens, targets, labelled, weight = tokens[kept], targets[kept], labelled[kept], weight[kept]
    if len(tokens) == 0:
        reason = why or f"all are longer than max_length {limit}"
        raise DataError(
            f"no usable row ({reason})",
            where=sources[0].name,
            to_do="correct them, or check `data:`",
        )
    tokens = np.clip(np.round(tokens), 1, limit).astype(np.int64)
    pairs = np.clip(np.round(targets), 1, recipe.max_target_length).astype(np.int64)
    task = objective_of(recipe.task)
    n_labelled = (
        float((pairs if task.is_pair else labelled).sum())
        if task.scores_tokens
        else float(len(tokens))
    )
    return Sampled(
        tokens=tokens,
        targets=pairs if task.is_pair else None,
        n_target_tokens=n_labelled,
        n_examples=max(1, round(float(weight.sum()))),
        n_rows=round(n_rows),
        n_tokenized=n_tokenized,
        is_all_read=all(each.is_whole for each in populations),
        notes=tuple(notes),
    )


def _strata(sizes: NDArray[np.int64], n_wanted: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(rows to tokenize, index of the one that stands for each row): the middle of each stratum by
    size.
    """
    n = len(sizes)
    order = np.argsort(sizes, kind="stable")
    n_single = min(_N_LONGEST, n) if n > n_wanted else 0
    n_strata = min(n, n_wanted) if n_single == 0 else max(1, min(n - n_single, n_wanted - n_single))
    edges = np.round(np.linspace(0, n - n_single, n_strata + 1)).astype(np.int64)
    middles = np.concatenate([(edges[:-1] + edges[1:]) // 2, np.arange(n - n_single, n)])
    of_ordered = np.concatenate(
        [np.repeat(np.arange(n_strata), np.diff(edges)), np.arange(n_single) + n_strata]
    )
    stratum = np.empty(n, np.int64)
    stratum[order] = of_ordered
    return order[middles], stratum


def _tokenized(
    reader: SourceReader, rows: list[Row | BadRow], tokenizer: Any, recipe: Recipe
) -> tuple[NDArray[np.float64], NDArray[np.int64], list[str]]:
    """[row, (input, target, labelled tokens)] of a mean example of each row, [row] how many it has,
    and why rows can't be used. Before truncation, but for the labelled tokens of causal-lm: only
    those within max_length.
    """
    found, counts = np.zeros((len(rows), 3)), np.zeros(len(rows), np.int64)
    reasons: list[str] = []
    texts: list[tuple[int, Text]] = []
    for index, (_, text) in enumerate(reader.texts(rows)):
        if isinstance(text, Text):
            texts += [(index, each) for each in text.of_row]
        else:
            reasons.append(str(text))
    task = objective_of(recipe.task)
    encode = Encoder(tokenizer, recipe.task, _NO_LIMIT, _NO_LIMIT, recipe.train_on_prompt)
    encoded = encode([text for _, text in texts])
    n_computed = encoded.lengths - computed_once(encoded)
    examples = zip(texts, encoded.examples(), n_computed.tolist(), strict=True)
    for (index, _), (_, is_target), n_tokens in examples:
        n_targets = int(is_target.sum())
        within = (
            is_target[: recipe.max_length * task.n_sequences] if task.predicts_next else is_target
        )
        if task.scores_tokens and not within.any():
            continue
        found[index] += n_tokens - n_targets * task.is_pair, n_targets, within.sum()
        counts[index] += 1
    if texts and not counts.any():
        reasons.append("every target is masked: prompts fill max_length")
    return found / np.maximum(counts, 1)[:, None], counts, reasons


# ---- the rows of a file ----


@dataclass(frozen=True)
class _Population:
    """What was seen of a file: bytes of each row, and a way to read some of them."""

    blocks: list[Block]
    sizes: NDArray[np.int64]
    n_rows: float
    is_whole: bool

    def rows(self, picked: NDArray[np.int64]) -> list[Row | BadRow]:
        """The rows at these places, in this order."""
        starts = np.cumsum([0, *(len(block.sizes) for block in self.blocks)])
        of_block = np.searchsorted(starts, picked, side="right") - 1
        found: dict[int, Row | BadRow] = {}
        for number in np.unique(of_block).tolist():
            places = picked[of_block == number]
            rows = self.blocks[number].read((places - starts[number]).tolist())
            found.update(zip(places.tolist(), rows, strict=True))
        return [found[place] for place in picked.tolist()]


def _population(source: Source) -> _Population:
    reading = Reading(_MOST_READ_BYTES)
    blocks = list(source.blocks(reading))
    share = 1.0 if reading.is_whole else reading.share()
    sizes = np.concatenate([np.zeros(0, np.int64), *(block.sizes for block in blocks)])
    return _Population(blocks, sizes, len(sizes) / share, reading.is_whole)
