"""A part of a token set: some blocks of a source, tokenized, in a file that is whole once it is
there. It follows from its place in the sources and from what chose the tokens, so any process may
make it.
"""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farthing.arrays import Arrays, Bools, Ints
from farthing.data.encode import Encoded, Encoder, sums_of
from farthing.data.formats import Understood, hash_of_input
from farthing.data.read import Source
from farthing.data.reader import SourceReader
from farthing.data.rows import BadRow, Example, Row, RowBlock
from farthing.data.token_set import LINE_BITS, TokenRecipe
from farthing.data.units import n_shared
from farthing.errors import DataError
from farthing.objectives.objective import Rows
from farthing.objectives.registry import objective_of
from farthing.storage.files import Json, draft_of

PART_BLOCKS = 4
CHUNK_CHARACTERS = 1 << 18
"""Encoded together: enough for the threads of many cores, and few for their caches."""
MOST_NAMED = 1000
"""Bad rows that a set names."""


@dataclass
class Tally:
    """What became of the rows, as the manifest of a set says it."""

    n_rows: int = 0
    n_bad: int = 0
    n_too_long: int = 0
    n_skipped_long: int = 0
    n_without_target: int = 0
    n_unlearned_turns: int = 0
    n_unrolled: int = 0
    n_rendered: int = 0
    n_tokens: int = 0
    n_targets: int = 0
    bad_rows: list[Sequence[str]] = field(default_factory=list)
    """(place, reason) of the first thousand."""

    def add(self, other: Json) -> None:
        """The same of other rows, as `asdict` has it."""
        for name, value in other.items():
            setattr(self, name, getattr(self, name) + value)
        del self.bad_rows[MOST_NAMED:]


class TokenPart(NamedTuple):
    """Some columns of a token set and what is known of the rows.

    In place of offsets there are `lengths`; `classes` are indices into the labels of `facts`, and
    `seen` the distinct inputs.
    """

    columns: Arrays
    facts: Json

    def write(self, path: Path) -> None:
        """The sha256 of a NumPy archive, and that. Raises `OSError`."""
        content = io.BytesIO()
        facts = np.frombuffer(json.dumps(self.facts).encode(), np.uint8)
        np.savez(content, facts=facts, **self.columns)  # type: ignore[arg-type]
        draft = draft_of(path)
        draft.write_bytes(hashlib.sha256(content.getbuffer()).digest() + content.getbuffer())
        os.replace(draft, path)


def read_part(path: Path) -> TokenPart:
    """Raises `OSError` where it is damaged or absent."""
    content = path.read_bytes()
    digest, archive = content[:32], memoryview(content)[32:]
    if hashlib.sha256(archive).digest() != digest:
        raise OSError(errno.EIO, "a part is damaged", str(path))
    columns = dict(np.load(io.BytesIO(archive), allow_pickle=False))
    return TokenPart(columns, json.loads(columns.pop("facts").tobytes()))


def path_of_part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06d}"


class PartPlace(NamedTuple):
    """Where a part stands: the number of its source, its rows a block at a time, which are parsed
    as they are taken, and the share of that source that was read when they end.
    """

    source: int
    rows: Iterable[Iterable[Row | BadRow]]
    share: float


def places(sources: Sequence[Source]) -> Iterator[PartPlace]:
    """The places of all parts, in order. Raises `DataError`."""
    for number, source in enumerate(sources):
        pending: list[RowBlock] = []
        failed: DataError | None = None
        try:
            for block in source.blocks():
                pending.append(block)
                if len(pending) == PART_BLOCKS:
                    yield PartPlace(number, map(RowBlock.rows, pending), block.share)
                    pending = []
        except DataError as error:  # behind the rows that were read
            failed = error
        if pending:
            yield PartPlace(number, map(RowBlock.rows, pending), 1.0)
        if failed is not None:
            raise failed


class PartMaker:
    """Makes parts of some sources. `tokenizer` is what `Encoder` takes."""

    def __init__(
        self,
        sources: Sequence[Source],
        understood: Sequence[Understood | None],
        tokenizer: Any,
        recipe: TokenRecipe,
    ) -> None:
        self._sources, self._understood = sources, understood
        self._tokenizer, self._recipe = tokenizer, recipe
        limits = recipe.max_length, recipe.max_target_length
        self._encode = Encoder(tokenizer, recipe.task, *limits, recipe.train_on_prompt)

    def make(self, place: PartPlace) -> TokenPart:
        """Raises `DataError` for rows that may not be there."""
        source = self._sources[place.source]
        reader = SourceReader(source, self._recipe, self._tokenizer, self._understood[place.source])
        made = _Making(place.source, source.name, self._recipe, self._encode)
        for rows in place.rows:
            made.add(reader, rows)
        columns = made.finish()
        facts = {"source": place.source, "share": place.share, "tally": asdict(made.tally)}
        return TokenPart(columns, facts | {"reader": reader.state(), "labels": list(made.labels)})


class _Making:
    """The examples of a part, encoded a chunk at a time."""

    def __init__(self, number: int, name: str, recipe: TokenRecipe, encode: Encoder) -> None:
        self.tally, self.labels = Tally(), dict[Any, int]()
        self._number, self._name, self._recipe, self._encode = number, name, recipe, encode
        self._objective = objective_of(recipe.task)
        self._known = {label: index for index, label in enumerate(recipe.label_names)}
        self._texts: list[Example] = []
        self._lines: list[int] = []
        self._n_characters = 0
        self._inputs: list[int] = []
        self._columns: dict[str, list[NDArray[Any]]] = {}

    def add(self, reader: SourceReader, rows: Iterable[Row | BadRow]) -> None:
        for row, text in reader.texts(rows):
            self.tally.n_rows += 1
            if not isinstance(text, Example):
                self._reject(row.line, str(text))
                if text.given:  # its input counts among the inputs
                    self._inputs.append(hash_of_input(text.given))
                continue
            for each in text.of_row:
                self._texts.append(each)
                self._lines.append(row.line)
                pieces = itertools.chain(each.segments, *each.beside)
                self._n_characters += sum([len(part) for part, _ in pieces])
            self.tally.n_unrolled += 0 if self._recipe.scored else len(text.earlier)
            if self._n_characters > CHUNK_CHARACTERS:
                self._flush()

    def _reject(self, line: int, reason: str) -> None:
        self.tally.n_bad += 1
        if len(self.tally.bad_rows) < MOST_NAMED:
            self.tally.bad_rows.append((f"{self._name}:{line}", reason))

    def finish(self) -> Arrays:
        """The columns."""
        if self._texts:
            self._flush()
        columns = {name: np.concatenate(pieces) for name, pieces in self._columns.items()}
        return columns | {"seen": np.unique(np.array(self._inputs, np.uint64))}

    def _flush(self) -> None:
        texts, lines = self._texts, np.array(self._lines, np.int64)
        self._texts, self._lines, self._n_characters = [], [], 0
        encoded = self._encode(texts)
        n_targets = self._n_targets(encoded)
        kept = self._usable(encoded, lines, n_targets)
        groups = np.array([hash_of_input(text.given) for text in texts], np.uint64)
        self._inputs += groups.tolist()
        labels = self._numbered(texts, lines, kept, encoded)
        tally, encoded = self.tally, encoded.only(kept)
        tally.n_unlearned_turns += sum(texts[at].n_unlearned for at in np.flatnonzero(kept))
        tally.n_rendered += sum(not text.is_raw for text in texts)
        columns: Arrays = {
            "ids": encoded.ids,
            "targets": encoded.is_target,
            "lengths": encoded.lengths,
            "target_lengths": n_targets[kept],
            "lines": (self._number << LINE_BITS) + lines[kept],
            "groups": groups[kept],
        }
        if encoded.sequences is not None:
            columns["sequences"] = encoded.sequences.astype(np.int32)
            columns["shared"] = n_shared(encoded.ids, encoded.sequences).astype(np.int32)
        if self._objective.value is not None:
            columns["values"] = np.array([text.value for text in texts], np.float32)[kept]
        if labels is not None:
            columns["classes"] = labels
        tally.n_tokens += len(encoded.ids)
        tally.n_targets += int(columns["target_lengths"].sum()) if labels is None else len(labels)
        for name, column in columns.items():
            self._columns.setdefault(name, []).append(column)

    def _n_targets(self, encoded: Encoded) -> Ints:
        """[n]: tokens of each example that its objective learns."""
        rows = Rows(encoded.ids, encoded.is_target.astype(bool), encoded.lengths, None)
        return sums_of(self._objective.is_learned(rows), encoded.lengths)

    def _usable(self, encoded: Encoded, lines: Ints, n_targets: Ints) -> Bools:
        """Which examples become some of the set [n]; the others are counted. Raises `DataError`."""
        recipe, tally = self._recipe, self.tally
        tally.n_too_long += int(encoded.was_cut.sum())
        if recipe.too_long == "error" and encoded.was_cut.any():
            limits = f"max_length {recipe.max_length}"
            if self._objective.is_pair:
                limits += f" or max_target_length {recipe.max_target_length}"
            raise DataError(
                f"longer than {limits}",
                where=f"{self._name}:{lines[int(encoded.was_cut.argmax())]}",
                to_do="raise data.max_length, or set data.too_long to truncate or skip",
            )
        kept = np.ones(len(lines), bool)
        if recipe.too_long == "skip":
            kept = ~encoded.was_cut
            tally.n_skipped_long += int(encoded.was_cut.sum())
        if self._objective.scores_tokens or self._objective.scores_words:
            has_target = n_targets > 0
            tally.n_without_target += int((kept & ~has_target).sum())
            kept &= has_target
        return kept

    def _numbered(
        self,
        texts: list[Example],
        lines: Ints,
        kept: Bools,
        encoded: Encoded,
    ) -> NDArray[np.int32] | None:
        """The labels of the kept examples, or of their words, by their place in `labels`; one that
        is not known is a bad row, and not kept.
        """
        of = self._objective.labels
        if of is None or not self._objective.reads_labels:
            return None
        found = []
        stops = np.cumsum(encoded.n_targets())
        for index in np.flatnonzero(kept).tolist():
            label = texts[index].label
            own = [label]
            if encoded.words is not None:
                start = stops[index - 1] if index else 0
                own = [label[word] for word in encoded.words[start : stops[index]].tolist()]
            try:
                for each in own if self._known else ():
                    label = each
                    of.number(each, self._known)
                found += [self.labels.setdefault(each, len(self.labels)) for each in own]
            except KeyError:
                self._reject(lines[index], f"label {label!r} is never seen in training")
                kept[index] = False
        return np.array(found, np.int32)
