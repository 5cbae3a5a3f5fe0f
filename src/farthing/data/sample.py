"""How long the rows of a file become, from a few of them: for a plan, which can't wait for all to
be tokenized.

The rows are ordered by their bytes and cut into strata; one row of each is read and tokenized as
for training, and the others are taken to have as many tokens a byte as the one that stands for
them. The longest rows are strata of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from farthing.arrays import Floats, Ints
from farthing.data.encode import PlainTokenizer
from farthing.data.lengths import Lengths, from_arrays
from farthing.data.parts import PartPlace, Tally, TokenPart
from farthing.data.read import Source
from farthing.data.rows import BadRow, Row, RowBlock
from farthing.data.token_set import LINE_BITS, TokenRecipe
from farthing.data.tokens import KnownFacts
from farthing.data.units import worth_sharing
from farthing.errors import DataError
from farthing.objectives.registry import objective_of

MOST_ROWS = 2000
_FEWEST_ROWS, _MOST_BYTES_OF_FEWEST = 250, 64 << 20
_MOST_SAMPLED_BYTES = 1_500_000  # what is tokenized in about half a second
_N_LONGEST = 16  # rows that are strata of their own
_MOST_READ_BYTES = 256 << 20


def sample_lengths(
    sources: list[Source], tokenizer: PlainTokenizer, recipe: TokenRecipe
) -> Lengths:
    """Estimated lengths of these files' rows after tokenization. Its notes say which columns nobody
    reads, and what of data of another kind the job has chosen. Raises `DataError` when no row can
    be used.
    """
    seen = [_seen(source) for source in sources]
    total_bytes = sum(float(each.sizes.sum()) for each in seen)
    n_seen = sum(len(each.sizes) for each in seen)
    if n_seen == 0:
        raise DataError("no rows", where=sources[0].name, to_do="check how the file was written")
    of_rows = n_seen / max(1.0, total_bytes)
    fewest = max(1, min(_FEWEST_ROWS, int(_MOST_BYTES_OF_FEWEST * of_rows)))
    n_wanted = min(MOST_ROWS, max(fewest, int(_MOST_SAMPLED_BYTES * of_rows)))
    if recipe.too_long == "error":
        recipe = replace(recipe, too_long="truncate")
    known = KnownFacts(sources, recipe)
    maker = known.maker(tokenizer)
    lengths, of_sources = [], list[float]()
    n_rows, n_tokenized = 0.0, 0
    for number, (blocks, sizes, share) in enumerate(seen):
        picked, stratum = _strata(sizes, max(1, round(n_wanted * len(sizes) / n_seen)))
        rows = _rows_at(blocks, picked)
        part = maker.make(PartPlace(number, [rows], 1.0))
        known.add(part)
        of_picked, counts = _lengths_of(part, [row.line for row in rows], recipe)
        scale = sizes / np.maximum(sizes[picked], 1)[stratum]
        lengths.append(np.repeat(of_picked[stratum] * scale[:, None], counts[stratum], axis=0))
        of_sources.append(len(lengths[-1]) / share)
        n_rows += len(sizes) / share
        n_tokenized += int(counts.sum())
    found = np.concatenate(lengths)
    if len(found) == 0:
        raise DataError(
            f"no usable row ({_why_none(known.tally, recipe)})",
            where=sources[0].name,
            to_do="correct them, or check `data:`",
        )
    task = objective_of(recipe.task)
    limits = recipe.max_length * task.n_sequences, recipe.max_target_length
    tokens, targets = np.clip(np.round(found), 1, limits).astype(np.int64).T
    n_labelled = float((targets if task.is_pair else found[:, 1]).sum())
    about = "" if all(each.share == 1.0 for each in seen) else "about "
    words = f"{n_tokenized:,} of {about}{round(n_rows):,} rows"
    sampled = from_arrays(
        tokens,
        targets if task.is_pair else None,
        n_examples=max(1, round(sum(of_sources))),
        n_target_tokens=n_labelled if task.scores_tokens else float(len(tokens)),
        is_exact=False,
        source=f"{words} tokenized"
        if tokenizer.is_exact
        else f"guessed from characters, no tokenizer was found here: {words}",
    )
    return replace(sampled, notes=tuple(known.notes), of_sources=tuple(of_sources))


def _why_none(tally: Tally, recipe: TokenRecipe) -> str:
    if tally.bad_rows:
        return str(tally.bad_rows[0][1])
    if tally.n_skipped_long:
        return f"all are longer than max_length {recipe.max_length}"
    return "every target is masked: prompts fill max_length"


def _strata(sizes: Ints, n_wanted: int) -> tuple[Ints, Ints]:
    """(rows to tokenize, index of the one that stands for each row): the middle of each stratum by
    size.
    """
    n, order = len(sizes), np.argsort(sizes, kind="stable")
    n_single = min(_N_LONGEST, n) if n > n_wanted else 0
    n_even = min(n - n_single, max(1, n_wanted - n_single))
    even = np.linspace(0, n - n_single, n_even, endpoint=False).round()
    edges = np.concatenate([even, np.arange(n - n_single, n + 1)]).astype(np.int64)
    stratum = np.empty(n, np.int64)
    stratum[order] = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    return order[(edges[:-1] + edges[1:]) // 2], stratum


def _lengths_of(part: TokenPart, lines: list[int], recipe: TokenRecipe) -> tuple[Floats, Ints]:
    """[row, (input, labelled tokens)] of a mean example of each row, and [row] how many it has."""
    found, counts = np.zeros((len(lines), 2)), np.zeros(len(lines), np.int64)
    columns = part.columns
    if "lengths" in columns:
        lengths, targets = columns["lengths"], columns["target_lengths"]
        n_apart = targets * objective_of(recipe.task).is_pair
        n_computed = lengths - worth_sharing(columns.get("shared"), len(lengths))
        index_of = {line: index for index, line in enumerate(lines)}
        rows = [index_of[line] for line in (columns["lines"] % (1 << LINE_BITS)).tolist()]
        np.add.at(found, rows, np.stack([n_computed - n_apart, targets], 1))
        np.add.at(counts, rows, 1)
    return found / np.maximum(counts, 1)[:, None], counts


# ---- the rows of a file ----


class _Seen(NamedTuple):
    """What was seen of a file: its rows unparsed, the bytes of each, and the share of it."""

    blocks: list[RowBlock]
    sizes: Ints
    share: float


def _seen(source: Source) -> _Seen:
    blocks = list(source.blocks(_MOST_READ_BYTES))
    sizes = np.concatenate([np.zeros(0, np.int64), *(block.sizes for block in blocks)])
    return _Seen(blocks, sizes, blocks[-1].share if blocks else 1.0)


def _rows_at(blocks: list[RowBlock], picked: Ints) -> list[Row | BadRow]:
    """The rows at these places, in this order."""
    starts = np.cumsum([0, *(len(block.sizes) for block in blocks)])
    numbers = np.searchsorted(starts, picked, side="right") - 1
    places = zip(numbers.tolist(), (picked - starts[numbers]).tolist(), strict=True)
    return [row for number, at in places for row in blocks[number].read([at])]
