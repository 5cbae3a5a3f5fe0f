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

from farthing.data.chat_rows import usual_role
from farthing.data.encode import Encoder
from farthing.data.foreign import Foreign, say_ignored
from farthing.data.formats import Converter, hash_of_input, recognise
from farthing.data.read import Source
from farthing.data.reader import SourceReader
from farthing.data.rows import BadRow, Example, Row
from farthing.data.token_set import TokenRecipe
from farthing.errors import DataError, UnusableRowError
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.objectives.classification import CLASSIFICATION
from farthing.objectives.multi_label import MULTI_LABEL
from farthing.objectives.registry import objective_of
from farthing.objectives.regression import REGRESSION
from farthing.objectives.seq2seq import SEQ2SEQ
from farthing.objectives.token_classification import TOKEN_CLASSIFICATION

MOST_CHARACTERS = 8_000_000  # that are tokenized: some seconds
N_EXAMPLES = 3
TASKS = (CLASSIFICATION, MULTI_LABEL, REGRESSION, TOKEN_CLASSIFICATION, CAUSAL_LM, SEQ2SEQ)
_NO_LIMIT = 1 << 40
_MOST_NAMED = 100
_USER, _ASSISTANT, _SYSTEM = ("user", "human"), ("assistant", "gpt"), ("system", "developer")
_USUAL_ROLES = {
    *(*_USER, *_ASSISTANT, *_SYSTEM),
    *("tool", "function", "observation", "function_call", "function_response"),
}


@dataclass
class Summary:
    """What was seen of a file. Counts are of rows unless a field names another unit."""

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
    roles: Counter[str] = field(default_factory=Counter)
    odd_roles: Counter[str] = field(default_factory=Counter)
    n_unlearned_turns: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    ignored: str = ""
    left_out: list[str] = field(default_factory=list)
    """What of chats the template does not write."""
    examples: list[list[tuple[str, bool]]] = field(default_factory=list)
    """Rendered: (text, is_learned) in order."""

    def see_foreign(self, row: Row, kind: Foreign) -> None:
        """Count a row of another kind of training."""
        self.foreign.setdefault(kind.what, [0, row.line, kind.to_do])[0] += 1


def summarize(source: Source, tokenizer: Any, recipe: TokenRecipe, task: str | None) -> Summary:
    """Look at every row of a source. `task`: None takes the one that its columns fit. Raises
    `DataError`.
    """
    recipe = recipe if source.columns is None else replace(recipe, columns=source.columns)
    blocks = (list(block.rows()) for block in source.blocks())
    first = next(blocks, [])
    recipe = replace(recipe, task=task or _task_of(first, recipe))
    found = Summary(source.name, recipe.task, max_length=recipe.max_length)
    found.is_exact = bool(getattr(tokenizer, "is_exact", True))
    reader = SourceReader(source, recipe, tokenizer, on_foreign=found.see_foreign)
    equal, inputs, labels = set[bytes](), set[int](), Counter[Any]()
    kept: list[Example] = []
    n_good = n_texts = n_characters = 0
    n_turns: list[int] = []
    for rows in itertools.chain([first], blocks):
        found.n_rows += len(rows)
        good = [row.value for row in rows if isinstance(row, Row)]
        n_good += len(good)
        equal.update(map(_hash, good))
        for row, text in reader.texts(rows):
            if isinstance(row, Row) and reader.understood is not None:
                form, columns, _ = reader.understood
                n_turns += _count_turns(row.value.get(str(columns.get(form, form))), found)
            if isinstance(text, UnusableRowError):
                found.n_bad += 1
                found.bad += [f"line {row.line}: {text}"] * (len(found.bad) < _MOST_NAMED)
                continue
            found.n_usable += 1
            inputs.add(hash_of_input(text.given))
            for each in text.of_row:
                found.n_unlearned_turns += each.n_unlearned
                n_texts += 1
                labels.update(each.label if isinstance(each.label, tuple) else (each.label,))
                n_characters += sum(len(part) for part, _ in each.segments)
                kept += [each] * (not kept or n_characters <= MOST_CHARACTERS)
    found.n_equal_rows = n_good - len(equal)
    if reader.understood is None:
        return found
    found.format, found.columns, notes = reader.understood
    found.notes, found.ignored = list(notes), say_ignored(reader.ignored, reader.n_rows)
    found.n_equal_inputs = found.n_usable - len(inputs)
    found.left_out = reader.shown.said() if found.is_exact else []
    if n_turns:
        found.turns = {"mean": sum(n_turns) / len(n_turns), "most": float(max(n_turns))}
    found.roles, found.odd_roles = _ordered(found.roles), _ordered(found.odd_roles)
    if kept:
        _count_tokens(kept, n_texts, tokenizer, recipe, found)
    is_class = objective_of(found.task).reads_labels
    if is_class and not any(isinstance(each, float) for each in labels):
        found.labels = Counter({str(label): n for label, n in labels.most_common(50)})
    return found


def _ordered(counts: Counter[str]) -> Counter[str]:
    return Counter(dict(counts.most_common()))


def _task_of(rows: list[Row | BadRow], recipe: TokenRecipe) -> str:
    """The first task that can read these rows by their columns, and their labels."""
    values = [row.value for row in rows if isinstance(row, Row)]
    columns: set[str] = set().union(*values)
    for task in TASKS:
        try:
            name, own, _ = recognise(columns, task.name, recipe.columns, "")
        except DataError:
            continue
        if task.scores_tokens:
            return task.name
        if "text" not in columns or {"label", "labels", "score"} & columns:
            convert = Converter(name, own, {}, None, task.name)
            for value in values[:_MOST_NAMED]:
                with contextlib.suppress(UnusableRowError):
                    convert(value)
                    return task.name
    return CLASSIFICATION.name if "label" in columns else CAUSAL_LM.name


def _hash(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, default=str).encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


def _count_turns(turns: Any, found: Summary) -> list[int]:
    """Count roles, and what is odd about them; how many turns a chat has, nothing for no chat."""
    if not isinstance(turns, list):
        return []
    said = [
        usual_role(str(turn.get("role", turn.get("from", turn.get("sender")))))
        for turn in turns
        if isinstance(turn, dict)
    ]
    odd = {f"role `{role}`" for role in set(said) - _USUAL_ROLES}
    if said and said[-1] not in (*_ASSISTANT, "function_call"):
        odd.add("ends without an answer")
    if any(a == b and a in (*_USER, *_ASSISTANT) for a, b in itertools.pairwise(said)):
        odd.add("two turns in a row with the same role")
    if set(said[1:]) & set(_SYSTEM):
        odd.add("a system turn that is not the first")
    found.roles.update(said)
    found.odd_roles.update(odd)
    return [len(said)]


def _count_tokens(
    kept: list[Example], n_texts: int, tokenizer: Any, recipe: TokenRecipe, found: Summary
) -> None:
    """Tokenize the first of `n_texts` texts, and say what was found."""
    encode = Encoder(tokenizer, found.task, _NO_LIMIT, _NO_LIMIT, recipe.train_on_prompt)
    encoded = encode(kept)
    lengths = encoded.lengths
    found.n_tokenized = len(kept)
    found.tokens = {
        "mean": float(lengths.mean()),
        "median": float(np.median(lengths)),
        "nine_in_ten": float(np.quantile(lengths, 0.9)),
        "longest": float(lengths.max()),
        "all": float(lengths.sum()) * n_texts / len(kept),
        "learned_share": float(encoded.n_targets().sum() / max(1, lengths.sum())),
    }
    found.n_too_long = int((lengths > recipe.max_length).sum())
    objective = objective_of(found.task)
    is_all_learned = recipe.train_on_prompt and objective.predicts_next
    between = "\n" if objective.reads_labels else ""  # of two texts
    found.examples = [
        [
            (between * (n > 0) + part, is_learned or is_all_learned)
            for n, (part, is_learned) in enumerate(text.segments)
        ]
        for text in kept[:N_EXAMPLES]
    ]
