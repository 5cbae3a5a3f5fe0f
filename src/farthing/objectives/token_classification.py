"""A tag for each word of a text, which the model learns at the word's first token."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.errors import UnusableRowError
from farthing.metrics import Metrics, entity_metrics
from farthing.objectives.classification import CLASSIFICATION, LABELS, confusion_of, head_of
from farthing.objectives.columns import TOKENS_TAGS, Row, kind_of, list_of
from farthing.objectives.objective import IGNORED, EvaluationSums, Rows, Starter, filled

_OF_ENTITIES = re.compile(r"O|[BIESLUM]-.+")


def _of_words(row: Row, column: str, kinds: Any) -> list[Any]:
    """What a column has of each word. Raises `UnusableRowError`."""
    found = list_of(row, column)
    for each in found:
        if not isinstance(each, kinds) or isinstance(each, bool) or each == "":
            what = "an empty text" if each == "" else kind_of(each)
            raise UnusableRowError(f"`{column}` holds {what}, not {column[:-1]}s")
    return found


def _words(row: Row) -> tuple[str, ...]:
    words = tuple(_of_words(row, "tokens", str))
    if not words:
        raise UnusableRowError("`tokens` is empty")
    return words


def _read(row: Row, label_map: Mapping[str, str]) -> tuple[str, ...]:
    """The tag of each word: text or a whole number. Raises `UnusableRowError`."""
    words, tags = _words(row), _of_words(row, "tags", str | int)
    if len(words) != len(tags):
        raise UnusableRowError(f"{len(words):,} `tokens` and {len(tags):,} `tags`: each has one")
    return tuple(label_map.get(str(tag), str(tag)) for tag in tags)


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """(type, first word, last word) of each entity, by the rules of conlleval and seqeval: a word
    continues with the entity before it where the type is the same and neither mark parts them.
    """
    found: list[tuple[str, int, int]] = []
    may_go_on = False
    for place, tag in enumerate(tags):
        mark, _, kind = tag.partition("-")
        if mark == "O":
            may_go_on = False
            continue
        if may_go_on and mark in "IELM" and found[-1][0] == kind:
            found[-1] = kind, found[-1][1], place
        else:
            found.append((kind, place, place))
        may_go_on = mark in "BIM"
    return set(found)


def _judge(seen: EvaluationSums) -> Metrics:
    """Of entities where the tags mark these, else the means over the tags."""

    if not all(map(_OF_ENTITIES.fullmatch, seen.label_names)):
        return confusion_of(seen)
    ends, names = np.cumsum(seen.n_each)[:-1], np.array(seen.label_names)
    texts = [
        [entities(each.tolist()) for each in np.split(names[numbers.astype(np.int64)], ends)]
        for numbers in (seen.labels, seen.answers)
    ]
    accuracy = float((seen.labels == seen.answers).mean())
    return {"accuracy": accuracy, **entity_metrics(*texts)}


def _targets(rows: Rows) -> NDArray[Any]:
    """[T]"""
    assert rows.labels is not None
    return filled(rows.labels, rows.is_target, IGNORED)


TOKEN_CLASSIFICATION = CLASSIFICATION._replace(
    name="token-classification",
    formats=(TOKENS_TAGS,),
    example_columns="tokens: words, tags: ner_tags",
    judge=_judge,
    targets=_targets,
    auto_class="AutoModelForTokenClassification",
    peft_type="TOKEN_CLS",
    pipeline_tag="token-classification",
    starter=Starter("FacebookAI/roberta-base", "2.0e-4", "f1", "tokens, tags (or ner_tags)"),
    labels=LABELS._replace(read=_read, text=_words, set_head=head_of(None), per_word=True),
)
