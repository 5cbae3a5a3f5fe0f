"""The rows of one source as texts, and what there is to say of them: the same for training, for a
plan and for checks.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from farthing.data.arrow import class_names, without_missing
from farthing.data.foreign import Foreign, chosen_column, foreign_kind, say_ignored
from farthing.data.formats import (
    Converter,
    Understood,
    asked_columns,
    recognise,
    used_columns,
)
from farthing.data.read import Source
from farthing.data.rows import BadRow, Example, Row
from farthing.data.scored import expanded
from farthing.data.shown import Shown
from farthing.data.token_set import TokenRecipe
from farthing.errors import DataError, UnusableRowError
from farthing.storage.files import Json


class SourceReader:
    """A source's rows, a few at a time: `look` at them first, then take the text of each.

    The tokenizer is only needed for texts. `on_foreign` is told of a row of another kind that was
    not chosen, which is then passed over; without it such a row is an error. With `asks` rows are
    to be answered: what is learned of them may be missing, and is not read.
    """

    def __init__(
        self,
        source: Source,
        recipe: TokenRecipe,
        tokenizer: Any,
        understood: Understood | None = None,
        on_foreign: Callable[[Row, Foreign], None] | None = None,
        *,
        asks: bool = False,
    ) -> None:
        self.name, self.n_rows, self.shown = source.name, 0, Shown()
        self.understood = understood
        """Known once it has looked at a row with columns."""
        self._recipe, self._tokenizer, self._on_foreign = recipe, tokenizer, on_foreign
        self._lacks = asked_columns(recipe.task) if asks else set[str]()
        own = recipe.columns if source.columns is None else source.columns
        self._columns = {name: each for name, each in own.items() if name not in self._lacks}
        self._is_arrow = source.kind in ("parquet", "arrow")
        self._kind, self._paths = source.kind, source.paths
        self._shapes: Counter[tuple[str, ...]] = Counter()
        self._chosen: dict[str, str] = {}

    def look(self, rows: Iterable[Row | BadRow]) -> list[Row | BadRow]:
        """The rows that are not of another kind. Raises `DataError` for such a row, and for columns
        of no known format.
        """
        ours = [row for row in rows if isinstance(row, BadRow) or self._is_ours(row)]
        if self.understood is None and self._shapes:
            columns = self._lacks.union(*self._shapes)
            self.understood = recognise(columns, self._recipe.task, self._columns, self.name)
        return ours

    def _is_ours(self, row: Row) -> bool:
        value = row.value
        if self._recipe.scored:
            with contextlib.suppress(UnusableRowError):
                value = expanded(value, self._recipe.scored)[0]
        kind = foreign_kind(value, self._recipe.task, self._columns)
        own = chosen_column(self._columns)
        if kind is not None and own is not None:
            words = f"{kind.what}: `{own}` alone is learned, as data.columns says"
            self._chosen.setdefault(kind.column, words)
        elif kind is not None:
            if self._on_foreign is None:
                where = f"{self.name}:{row.line}"
                raise DataError(f"{kind.what}, {kind.why}", where=where, to_do=kind.to_do)
            self._on_foreign(row, kind)
            return False
        self.n_rows += 1
        self._shapes[tuple(value)] += 1
        return True

    def texts(
        self, rows: Iterable[Row | BadRow]
    ) -> Iterator[tuple[Row | BadRow, Example | UnusableRowError]]:
        """Each row with its text, or with why it can't be used; all are looked at first."""
        for row in self.look(rows):
            try:
                yield row, self.text(row)
            except UnusableRowError as error:
                yield row, error

    def text(self, row: Row | BadRow) -> Example:
        """Raises `UnusableRowError` with the reason."""
        if isinstance(row, BadRow):
            raise UnusableRowError(row.reason)
        value = without_missing(row.value) if self._is_arrow else row.value
        if not self._recipe.scored:
            return self._convert(value)
        answers = map(self._convert, expanded(value, self._recipe.scored))
        *earlier, last = (each for answer in answers for each in answer.of_row)
        return replace(last, earlier=tuple(earlier))

    @cached_property
    def _convert(self) -> Converter:
        assert self.understood is not None
        recipe, (name, columns, _) = self._recipe, self.understood
        labels, label = dict(recipe.label_map), name.rpartition("/")[2]
        column = columns.get(label, label)
        if self._is_arrow and self._paths and isinstance(column, str):
            for number, each in enumerate(class_names(self._paths[0], self._kind, column)):
                labels.setdefault(str(number), labels.get(each, each))
        given = (name, columns, labels, self._tokenizer, recipe.task)
        return Converter(*given, recipe.date, self.shown, bool(self._lacks))

    def state(self) -> Json:
        """What it has seen, in plain values; `merge` adds it to what another one has."""
        return {
            "n_rows": self.n_rows,
            "shapes": [[list(shape), n] for shape, n in self._shapes.items()],
            "chosen": self._chosen,
            "shown": self.shown.state(),
        }

    def merge(self, state: Json) -> None:
        """Add what another reader of the same source has seen of other rows."""
        self.n_rows += state["n_rows"]
        self._shapes.update({tuple(shape): n for shape, n in state["shapes"]})
        self._chosen = state["chosen"] | self._chosen
        self.shown.merge(state["shown"])

    @property
    def ignored(self) -> dict[str, int]:
        """Columns that nobody reads, with the rows that have them."""
        if self.understood is None:
            return {}
        used = used_columns(self.understood.format, self.understood.columns)
        found: Counter[str] = Counter()
        for shape, n in self._shapes.items():
            found.update({name: n for name in shape if name not in used})
        return dict(sorted(found.items()))

    @property
    def notes(self) -> list[str]:
        """What was guessed, what of another kind is learned all the same, and what a chat template
        leaves out.
        """
        guessed = () if self.understood is None else self.understood.notes
        return [*guessed, *self._chosen.values(), *self.shown.said()]

    def said(self) -> list[str]:
        """`ignored` and `notes` as sentences."""
        ignored = say_ignored(self.ignored, self.n_rows)
        return [f"columns that are not used: {ignored}"] * bool(ignored) + self.notes


def understood_reader(source: Source, recipe: TokenRecipe) -> SourceReader:
    """A reader that has looked at nothing and knows the format of its source, if the first rows
    have one. Raises `DataError`.
    """
    scout = SourceReader(source, recipe, None)
    for block in source.blocks():
        scout.look(block.rows())
        if scout.understood is not None:
            break
    return SourceReader(source, recipe, None, scout.understood)
