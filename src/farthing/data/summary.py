"""What a file of examples is, before anything is trained: its format, rows, tokens, turns, learned
share, repeats, oddities.

Every row is read and converted as for training; tokens are counted for as many of the first as fit
a few seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from farthing.data.chat_rows import of_usual_role
from farthing.data.encode import Encoder
from farthing.data.foreign import LEARNED, foreign_kind, say_ignored
from farthing.data.formats import Understood, converter, hash_of_input, recognise
from farthing.data.read import Source
from farthing.data.reader import SourceReader
from farthing.data.rows import BadRow, Row, Text
from farthing.data.token_set import Recipe
from farthing.errors import DataError
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.objectives.classification import CLASSIFICATION
from farthing.objectives.columns import Unusable
from farthing.objectives.multi_label import MULTI_LABEL
from farthing.objectives.registry import objective_of
from farthing.objectives.regression import REGRESSION
from farthing.objectives.seq2seq import SEQ2SEQ
from farthing.objectives.token_classification import TOKEN_CLASSIFICATION

MOST_CHARACTERS = 8_000_000  # that are tokenized: some seconds
N_EXAMPLES = 3
TASKS = (CLASSIFICATION, MULTI_LABEL, REGRESSION, TOKEN_CLASSIFICATION, CAUSAL_LM, SEQ2SEQ)
_NO_LIMIT = 1 << 40
_AT_ONCE = 1024  # rows in memory
_MOST_NAMED = 100
_USUAL_ROLES = {
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
    "human",
    "gpt",
    "observation",
    "function_call",
    "function_response",
}


@dataclass
class Summary:
    """What was seen of a file. Counts are of rows where nothing else is said."""

    name: str
    task: str
    format: str = ""
    columns: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    n_rows: int = 0
    n_usable: int = 0
    n_bad: int = 0
    bad: list[str] = field(default_factory=list)
    """The first reasons why rows can't be used, with their line."""
    foreign: dict[str, list[Any]] = field(default_factory=dict)
    """Rows of other kinds of training: what -> [rows, first line, what to do]."""
    n_equal_rows: int = 0
    n_equal_inputs: int = 0
    n_tokenized: int = 0
    tokens: dict[str, float] = field(default_factory=dict)
    """mean, median, of nine in ten, longest, all; and the share that is learned."""
    n_too_long: int = 0
    max_length: int = 0
    is_exact: bool = True
    turns: dict[str, float] = field(default_factory=dict)
    roles: dict[str, int] = field(default_factory=dict)
    odd_roles: dict[str, int] = field(default_factory=dict)
    n_unlearned_turns: int = 0
    labels: dict[str, int] = field(default_factory=dict)
    ignored: str = ""
    left_out: list[str] = field(default_factory=list)
    """What of chats the template does not write."""
    examples: list[list[tuple[str, bool]]] = field(default_factory=list)
    """Rendered: (text, is_learned) in order."""

    def reject(self, line: int, reason: str) -> None:
        """Count a row that can't be used."""
        self.n_bad += 1
        if len(self.bad) < _MOST_NAMED:
            self.bad.append(f"line {line}: {reason}")


def summarize(source: Source, tokenizer: Any, recipe: Recipe, task: str | None) -> Summary:
    """Look at every row of a source. `task`: None takes the one that its columns fit. Raises
    `DataError`.
    """
    recipe = recipe if source.columns is None else replace(recipe, columns=source.columns)
    rows = source.rows()
    first = list(itertools.islice(rows, _AT_ONCE))
    good = [row for row in first if isinstance(row, Row)]
    found = Summary(source.name, task or _task_of(good, recipe), max_length=recipe.max_length)
    recipe = replace(recipe, task=found.task)
    found.is_exact = bool(getattr(tokenizer, "is_exact", True))
    reader, turns, tokens = SourceReader(source, recipe, tokenizer), _Turns(), _Kept()
    equal, inputs = set[bytes](), set[int]()
    n_good = 0
    while first:
        for each in first:
            if isinstance(each, BadRow):
                found.reject(each.line, each.reason)
        found.n_rows += len(first)
        good = [row for row in first if isinstance(row, Row)]
        n_good += len(good)
        equal.update(_hash(row.value) for row in good)
        ours = _not_foreign(good, found, recipe)
        for row, text in reader.texts(ours):
            if isinstance(text, Unusable):
                found.reject(row.line, str(text))
                continue
            found.n_usable += 1
            inputs.add(hash_of_input(text.given))
            found.n_unlearned_turns += sum(each.n_unlearned for each in text.of_row)
            tokens.add(text)
        if reader.understood is not None:
            turns.count(ours, reader.understood)
        first = list(itertools.islice(rows, _AT_ONCE))
    found.n_equal_rows = n_good - len(equal)
    if reader.understood is None:
        return found
    found.format, found.columns, notes = reader.understood
    found.notes, found.ignored = list(notes), say_ignored(reader.ignored, reader.n_rows)
    found.n_equal_inputs = found.n_usable - len(inputs)
    found.left_out = reader.shown.said() if found.is_exact else []
    turns.say(found)
    tokens.say(tokenizer, recipe, found)
    return found


def _task_of(rows: list[Row], recipe: Recipe) -> str:
    """The first task that can read these rows by their columns, and their labels."""
    columns: set[str] = set().union(*(row.value.keys() for row in rows))
    for task in TASKS:
        try:
            name, own, _ = recognise(columns, task.name, recipe.columns, "")
        except DataError:
            continue
        if task.scores_tokens:
            return task.name
        if "text" not in columns or {"label", "labels", "score"} & columns:
            convert = converter(name, own, {}, None, task.name)
            for row in rows[:_MOST_NAMED]:
                with contextlib.suppress(Unusable):
                    convert(row.value)
                    return task.name
    return CLASSIFICATION.name if "label" in columns else CAUSAL_LM.name


def _hash(value: Any) -> bytes:
    return hashlib.blake2b(
        json.dumps(value, sort_keys=True, default=str).encode(errors="surrogatepass"),
        digest_size=16,
    ).digest()


def _not_foreign(rows: list[Row], found: Summary, recipe: Recipe) -> list[Row]:
    """The rows that are of our kind, or chosen by data.columns; the others are counted."""
    ours = []
    for row in rows:
        kind = foreign_kind(row.value, found.task, recipe.columns)
        if kind is None or (kind.can_be_chosen and set(LEARNED) & set(recipe.columns)):
            ours.append(row)
        else:
            entry = found.foreign.setdefault(
                kind.what.partition(", which")[0], [0, row.line, kind.to_do]
            )
            entry[0] += 1
    return ours


class _Turns:
    """Turns and roles of chats; odd: roles that are not usual, and chats whose order is not."""

    def __init__(self) -> None:
        self._roles, self._odd = Counter[str](), Counter[str]()
        self._n_chats = self._most = 0

    def count(self, rows: list[Row], understood: Understood) -> None:
        """Those of some rows."""
        if understood.format not in ("messages", "conversations"):
            return
        for row in rows:
            turns = row.value.get(str(understood.columns.get(understood.format, understood.format)))
            turns = turns if isinstance(turns, list) else []
            said = [
                str(of_usual_role({"role": str(turn.get("role", turn.get("from")))})["role"])
                for turn in turns
                if isinstance(turn, dict)
            ]
            self._roles.update(said)
            self._n_chats, self._most = self._n_chats + 1, max(self._most, len(said))
            odd = self._odd
            odd.update({f"role `{role}`": 1 for role in set(said) - _USUAL_ROLES})
            if said and said[-1] not in ("assistant", "gpt", "function_call"):
                odd["ends without an answer"] += 1
            if any(
                a == b and a in ("user", "human", "assistant", "gpt")
                for a, b in itertools.pairwise(said)
            ):
                odd["two turns in a row with the same role"] += 1
            if any(role in ("system", "developer") for role in said[1:]):
                odd["a system turn that is not the first"] += 1

    def say(self, found: Summary) -> None:
        """What was counted."""
        found.roles, found.odd_roles = (
            dict(self._roles.most_common()),
            dict(self._odd.most_common()),
        )
        if self._n_chats:
            mean = self._roles.total() / self._n_chats
            found.turns = {"mean": mean, "most": float(self._most)}


class _Kept:
    """The first texts, which are tokenized, and the labels of all."""

    def __init__(self) -> None:
        self._texts: list[Text] = []
        self._n_texts = self._n_characters = 0
        self._labels = Counter[Any]()

    def add(self, row: Text) -> None:
        """A row that is a text, or several."""
        for text in row.of_row:
            self._n_texts += 1
            self._labels.update(text.label if isinstance(text.label, tuple) else (text.label,))
            self._n_characters += sum(len(part) for part, _ in text.segments)
            if not self._texts or self._n_characters <= MOST_CHARACTERS:
                self._texts.append(text)

    def say(self, tokenizer: Any, recipe: Recipe, found: Summary) -> None:
        """Tokenize, and say what was found."""
        kept, task = self._texts, objective_of(found.task)
        if not kept:
            return
        encode = Encoder(tokenizer, found.task, _NO_LIMIT, _NO_LIMIT, recipe.train_on_prompt)
        encoded = encode(kept)
        lengths, targets = encoded.lengths, encoded.n_targets()
        found.n_tokenized = len(kept)
        found.tokens = {
            "mean": float(lengths.mean()),
            "median": float(np.median(lengths)),
            "nine_in_ten": float(np.quantile(lengths, 0.9)),
            "longest": float(lengths.max()),
            "all": float(lengths.sum()) * self._n_texts / len(kept),
            "learned_share": float(targets.sum() / max(1, lengths.sum())),
        }
        found.n_too_long = int((lengths > recipe.max_length).sum())
        if task.reads_labels and not any(isinstance(each, float) for each in self._labels):
            found.labels = {str(label): n for label, n in self._labels.most_common(50)}
        found.examples = [list(text.segments) for text in kept[:N_EXAMPLES]]
        if recipe.train_on_prompt and task.predicts_next:
            found.examples = [[(part, True) for part, _ in example] for example in found.examples]
