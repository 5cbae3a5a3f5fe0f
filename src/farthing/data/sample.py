"""How long the rows of a file become, from a few of them: for a plan, which can't wait for all to
be tokenized.

The rows are ordered by their bytes and cut into strata; one row of each is read, and of those again
some are tokenized exactly as for training. The others are taken to have as many tokens a character,
and the rows that were not read as many a byte, as the one that stands for them. The longest rows
are strata of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farthing.data.blocks import n_characters
from farthing.data.encode import Encoder
from farthing.data.formats import RENDERED
from farthing.data.read import Source
from farthing.data.reader import SourceReader
from farthing.data.rows import BadRow, Block, Reading, Row, Text
from farthing.data.token_set import Recipe
from farthing.data.units import computed_once
from farthing.errors import DataError
from farthing.objectives.columns import Unusable
from farthing.objectives.registry import objective_of

MOST_ROWS = 2000
_FEWEST_ROWS, _MOST_BYTES_OF_FEWEST = 250, 64 << 20
_MOST_SAMPLED_BYTES = 800_000  # what is tokenized in about a quarter of a second
_MOST_READ_ROWS, _MOST_ROW_BYTES = (
    6000,
    4_000_000,
)  # rows and bytes that are read; a tenth of a second
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
    n_read = min(_MOST_READ_ROWS, max(n_wanted, int(_MOST_ROW_BYTES * of_rows)))
    lengths, weights = [], []
    n_rows, n_tokenized = 0.0, 0
    why, notes = "", []
    for source, population in zip(sources, populations, strict=True):
        share = len(population.sizes) / n_seen
        picked, stratum = _strata(population.sizes, max(1, round(n_read * share)))
        rows = population.rows(picked)
        reader = SourceReader(source, recipe, tokenizer)
        reader.look(rows)
        n_tried = max(1, round(n_wanted * share))
        of_picked, counts, n, reasons = _tokenized(reader, rows, n_tried, tokenizer, recipe)
        notes += [f"{source.name}: {what}" for what in reader.said()]
        why = why or next(iter(reasons), "")
        of_all = _spread(of_picked, population.sizes[picked], population.sizes, stratum)
        of_all[picked] = of_picked
        lengths.append(np.repeat(of_all, counts[stratum], axis=0))
        weights.append(
            np.full(
                len(lengths[-1]), source.weight * population.n_rows / max(1, len(population.sizes))
            )
        )
        n_rows += population.n_rows
        n_tokenized += n
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


def _spread(
    tokens: NDArray[np.float64],
    sizes: NDArray[Any],
    all_sizes: NDArray[Any],
    stands_for: NDArray[np.int64],
) -> NDArray[np.float64]:
    """[row, kind of token] for all rows from [stratum, kind of token], in proportion to their
    sizes.
    """
    return np.asarray(tokens[stands_for] * (all_sizes / np.maximum(sizes, 1)[stands_for])[:, None])


def _tokenized(
    reader: SourceReader, rows: list[Row | BadRow], n_wanted: int, tokenizer: Any, recipe: Recipe
) -> tuple[NDArray[np.float64], NDArray[np.int64], int, list[str]]:
    """[row, (input, target, labelled tokens)] of an example of each row, [row] how many such, how
    many were tokenized for it, and why rows can't be used. Before truncation, but for the labelled
    tokens: only those within max_length.
    """
    found, counts = np.zeros((len(rows), 3)), np.zeros(len(rows), np.int64)
    reasons = [row.reason for row in rows if isinstance(row, BadRow)]
    good = [(index, row) for index, row in enumerate(rows) if isinstance(row, Row)]
    if reader.understood is None:
        return found, counts, 0, reasons
    all_good, picked, stands_for, sizes = good, np.arange(0), None, np.arange(0)
    if objective_of(recipe.task).predicts_next and reader.understood.format in RENDERED:
        sizes = np.array([n_characters(row.value) for _, row in good])
        picked, stands_for = _strata(sizes, n_wanted)
        good = [good[i] for i in picked]
    n_encoded = 0
    texts: list[tuple[int, Text]] = []
    for index, row in good:
        try:
            texts += [(index, text) for text in reader.text(row).of_row]
        except Unusable as error:
            reasons.append(str(error))
    if texts:
        of_texts, n_encoded = _of_texts([text for _, text in texts], n_wanted, tokenizer, recipe)
        of_rows = [index for index, _ in texts]
        counts = np.bincount(of_rows, of_texts[:, 0] > 0, minlength=len(rows)).astype(np.int64)
        np.add.at(found, of_rows, of_texts)
        found /= np.maximum(counts, 1)[:, None]
    if stands_for is not None:
        of_picked = found[[index for index, _ in good]]
        found[[index for index, _ in all_good]] = _spread(
            of_picked, sizes[picked], sizes, stands_for
        )
        found[[index for index, _ in good]] = of_picked
        counts[[index for index, _ in all_good]] = counts[[index for index, _ in good]][stands_for]
    if not found[:, 0].any() and texts:
        reasons.append("every target is masked: prompts fill max_length")
    return found, counts, n_encoded, reasons


def _of_texts(
    texts: list[Text], n_wanted: int, tokenizer: Any, recipe: Recipe
) -> tuple[NDArray[np.float64], int]:
    """[text, (input, target, labelled tokens)]: some tokenized, the others by their characters; and
    how many were.
    """
    characters = np.zeros((len(texts), 2))
    for index, text in enumerate(texts):
        for sequence in text.sequences:
            for part, is_target in sequence.segments:
                if is_target or sequence is text:  # the prompt is computed once
                    characters[index, int(is_target)] += len(part)
    task = objective_of(recipe.task)
    if recipe.train_on_prompt and task.predicts_next:
        characters = np.column_stack([characters[:, 0] * 0, characters.sum(axis=1)])
    picked, stands_for = _strata(characters.sum(axis=1).astype(np.int64), n_wanted)
    found = np.zeros((len(texts), 3))
    encode = Encoder(tokenizer, recipe.task, _NO_LIMIT, _NO_LIMIT, recipe.train_on_prompt)
    encoded = encode([texts[index] for index in picked])
    shared = computed_once(encoded)
    for index, (ids, mask), n_shared in zip(picked, encoded.examples(), shared, strict=True):
        n_targets = int(mask.sum())
        if n_targets == 0 and task.scores_tokens:
            continue
        n_tokens = len(ids) - int(n_shared)
        found[index] = n_tokens - (n_targets if task.is_pair else 0), n_targets, n_targets
        if task.predicts_next:
            found[index, 2] = mask[: recipe.max_length * task.n_sequences].sum()
    of_source = characters[:, 0] if task.is_pair else characters.sum(axis=1)
    of_target = characters[:, 1]
    other = np.setdiff1d(np.arange(len(texts)), picked)
    if len(other):
        found[other, 0] = _spread(
            found[picked, :1], of_source[picked], of_source[other], stands_for[other]
        )[:, 0]
        # a token at the end of each, and as many a character as all that were tokenized have
        # together
        closed = found[picked, 1] > 0
        rate = np.maximum(found[picked, 1] - 1, 0)[closed].sum() / max(
            1.0, of_target[picked][closed].sum()
        )
        found[other, 1] = np.where(of_target[other] > 0, 1 + rate * of_target[other], 0)
        before = found[other, 0] - found[other, 1]  # of causal-lm, whose targets come last
        within = (
            recipe.max_length - np.maximum(before, 0) if task.predicts_next else found[other, 1]
        )
        found[other, 2] = np.clip(within, 0, found[other, 1])
    if not task.scores_tokens:
        found[:, 1:] = 0, 1
    elif task.predicts_next:
        found[found[:, 2] < 0.5] = 0
        found[:, 1] = 0
    return found, len(picked)


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
