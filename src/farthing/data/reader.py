"""The rows of one source as texts, and what there is to say of them: the same for training, for a plan and for checks.

Refuses rows made for other kinds of training (see `foreign`), to read files, and to tokenize.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from farthing.data.foreign import Watch, say_ignored
from farthing.data.formats import Text, Understood, converter, recognise, used_columns
from farthing.data.read import Source
from farthing.data.rows import BadRow, Row, RowValue
from farthing.data.shown import Shown
from farthing.data.token_set import Recipe
from farthing.tasks.columns import Unusable


def converter_by(
    understood: Understood, recipe: Recipe, tokenizer: Any, shown: Shown | None = None
) -> Callable[[RowValue], Text]:
    """`converter` as a recipe has it."""
    name, columns, _ = understood
    given = (name, columns, recipe.label_map, tokenizer, recipe.task)
    return converter(*given, on=recipe.date, version=recipe.version, shown=shown)


class SourceReader:
    """A source's rows, a few at a time: `look` at them first, then take the text of each."""

    def __init__(self, source: Source, recipe: Recipe, tokenizer: Any) -> None:
        self.name = source.name
        self._recipe, self._tokenizer, self._columns = recipe, tokenizer, source.columns_or(recipe.columns)
        self._watch = Watch(recipe.task, self._columns, source.name)
        self.understood: Understood | None = None
        """Known once it has looked at a row with columns."""
        self._convert: Callable[[RowValue], Text] | None = None

    def look(self, rows: Sequence[Row | BadRow]) -> None:
        """Raises `DataError` for rows of another kind, or of no known format."""
        self._watch(rows)
        if self.understood is None and self._watch.n_rows:
            self.understood = recognise(
                self._watch.columns, self._recipe.task, self._columns, self.name, self._recipe.version
            )
            self._convert = converter_by(self.understood, self._recipe, self._tokenizer, self._watch.shown)

    def text(self, row: Row | BadRow) -> Text:
        """Raises `Unusable` with the reason."""
        if isinstance(row, BadRow):
            raise Unusable(row.reason)
        assert self._convert is not None
        return self._convert(row.value)

    @property
    def ignored(self) -> tuple[dict[str, int], int]:
        """(columns that nobody reads, with the rows that have them; rows in all)."""
        if self.understood is None:
            return {}, 0
        return self._watch.ignored(used_columns(self.understood.format, self.understood.columns)), self._watch.n_rows

    @property
    def notes(self) -> list[str]:
        """What was guessed, what of another kind is learned all the same, and what a chat template leaves out."""
        return [] if self.understood is None else [*self.understood.notes, *self._watch.chosen()]

    def said(self) -> list[str]:
        """`ignored` and `notes` in words."""
        ignored = say_ignored(*self.ignored)
        return [f"columns that are not used: {ignored}"] * bool(ignored) + self.notes
