"""What a file of examples is, before anything is trained: its format, rows, tokens, turns, learned
share, repeats, oddities.

Every row is read and converted as for training; tokens are counted for as many of the first as fit
a few seconds. Refuses to change rows, and to decide whether they will do.
"""

from __future__ import annotations

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
from farthing.data.formats import hash_of_input, recognise
from farthing.data.read import Source
from farthing.data.reader import SourceReader
from farthing.data.rows import BadRow, Row, Text
from farthing.data.token_set import Recipe
from farthing.errors import DataError
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.objectives.classification import CLASSIFICATION
from farthing.objectives.columns import Unusable
from farthing.objectives.registry import objective_of
from farthing.objectives.seq2seq import SEQ2SEQ

MOST_CHARACTERS = 8_000_000  # that are tokenized: some seconds
N_EXAMPLES = 3
TASKS = (CLASSIFICATION, CAUSAL_LM, SEQ2SEQ)
_NO_LIMIT = 1 << 40
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
    """What of chats the template does not write, in words."""
    examples: list[list[tuple[str, bool]]] = field(default_factory=list)
    """Rendered: (text, is_learned) in order."""


def summarize(source: Source, tokenizer: Any, recipe: Recipe, task: str | None) -> Summary:
    """Look at every row of a source. `task`: None takes the one that its columns fit. Raises
    `DataError`.
    """
    recipe = replace(recipe, columns=source.columns_or(recipe.columns))
    rows = list(source.rows())
    good = [row for row in rows if isinstance(row, Row)]
    columns: set[str] = set().union(*(row.value.keys() for row in good))
    found = Summary(
        source.name,
        task or _task_of(columns, recipe),
        n_rows=len(rows),
        max_length=recipe.max_length,
    )
    recipe = replace(recipe, task=found.task)
    found.bad = [f"line {row.line}: {row.reason}" for row in rows if isinstance(row, BadRow)]
    found.is_exact = bool(getattr(tokenizer, "is_exact", True))
    ours = _not_foreign(good, found, recipe)
    found.n_equal_rows = len(good) - len({_hash(row.value) for row in good})
    if not ours:
        return found
    reader = SourceReader(source, recipe, tokenizer)
    reader.look(ours)
    assert reader.understood is not None
    found.format, found.columns, notes = reader.understood
    found.notes, found.ignored = list(notes), say_ignored(reader.ignored, reader.n_rows)
    texts: list[Text] = []
    inputs: set[int] = set()
    for row in ours:
        try:
            text = reader.text(row)
        except Unusable as error:
            found.bad.append(f"line {row.line}: {error}")
            continue
        found.n_usable += 1
        inputs.add(hash_of_input(text.given))
        texts += text.of_row
    found.n_equal_inputs = found.n_usable - len(inputs)
    found.n_unlearned_turns = sum(text.n_unlearned for text in texts)
    found.left_out = reader.shown.said() if found.is_exact else []
    _count_turns(ours, found)
    _count_tokens(texts, tokenizer, recipe, found)
    return found


def _task_of(columns: set[str], recipe: Recipe) -> str:
    for task in (each.name for each in TASKS):
        try:
            recognise(columns, task, recipe.columns, "")
        except DataError:
            continue
        if objective_of(task).labels is None or "label" in columns or "text" not in columns:
            return task
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


def _count_turns(rows: list[Row], found: Summary) -> None:
    """Turns and roles of chats; odd: roles that are not usual, and chats whose order is not."""
    if found.format not in ("messages", "conversations"):
        return
    roles: Counter[str] = Counter()
    lengths, odd = [], Counter[str]()
    for row in rows:
        turns = row.value.get(str(found.columns.get(found.format, found.format)))
        turns = turns if isinstance(turns, list) else []
        said = [
            str(of_usual_role({"role": str(turn.get("role", turn.get("from")))})["role"])
            for turn in turns
            if isinstance(turn, dict)
        ]
        roles.update(said)
        lengths.append(len(said))
        odd.update({f"role `{role}`": 1 for role in set(said) - _USUAL_ROLES})
        if said and said[-1] not in ("assistant", "gpt", "function_call"):
            odd["ends without an answer"] += 1
        if any(
            a == b and a in ("user", "human", "assistant", "gpt")
            for a, b in itertools.pairwise(said)
        ):
            odd["two turns of the same role in a row"] += 1
        if any(role in ("system", "developer") for role in said[1:]):
            odd["a system turn that is not the first"] += 1
    found.roles, found.odd_roles = dict(roles.most_common()), dict(odd.most_common())
    if lengths:
        found.turns = {"mean": float(np.mean(lengths)), "most": float(max(lengths))}


def _count_tokens(texts: list[Text], tokenizer: Any, recipe: Recipe, found: Summary) -> None:
    n_characters = 0
    kept: list[Text] = []
    for text in texts:
        n_characters += sum(len(part) for part, _ in text.segments)
        if kept and n_characters > MOST_CHARACTERS:
            break
        kept.append(text)
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
        "all": float(lengths.sum()) * len(texts) / len(kept),
        "learned_share": float(targets.sum() / max(1, lengths.sum())),
    }
    found.n_too_long = int((lengths > recipe.max_length).sum())
    if (of := objective_of(found.task).labels) is not None and of.names(
        {text.label for text in texts}
    ):
        labels = [text.label for text in texts]
        of_all = itertools.chain.from_iterable(
            each if isinstance(each, tuple) else (each,) for each in labels
        )
        found.labels = dict(Counter(map(str, of_all)).most_common(50))
    found.examples = [list(text.segments) for text in kept[:N_EXAMPLES]]
    if recipe.train_on_prompt and objective_of(found.task).predicts_next:
        found.examples = [[(part, True) for part, _ in example] for example in found.examples]
