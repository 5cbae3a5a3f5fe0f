"""One class out of several for each text."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.errors import UnusableRowError
from farthing.metrics import Metrics, classification_metrics
from farthing.objectives.columns import TEXT_LABEL, Row, kind_of, parsed_list
from farthing.objectives.objective import IGNORED, EvaluationSums, Labels, Objective, Rows, Starter


def _read(row: Row, label_map: Mapping[str, str]) -> str:
    """The name of a class: text or a whole number. Raises `UnusableRowError`."""
    label = row.get("label")
    if label is None or label == "":
        raise UnusableRowError("no `label`")
    if isinstance(label, float) and label.is_integer():
        label = int(label)  # a table with empty cells has whole numbers so
    given = label if str(label) in label_map else _meant(label)
    if not isinstance(given, str | int):
        what = f"{label}, a number with a fraction" if isinstance(given, float) else kind_of(given)
        to_do = {
            float: "; task: regression learns numbers, and data.label_map names classes",
            list: "; task: multi-label-classification learns lists",
        }.get(type(given), "")
        raise UnusableRowError(f"`label` is {what}, not a class (text or a whole number){to_do}")
    name = str(label)
    if isinstance(label, bool):  # as JSON writes it, or as Python does
        return label_map.get(name, label_map.get(name.lower(), name))
    return label_map.get(name, name)


def _meant(label: Any) -> Any:
    """What a text of a table stands for, where that is a list or has a fraction."""
    if isinstance(label, str) and re.fullmatch(r"\s*[-+]?\d*\.\d*[1-9]\d*\s*", label):
        return float(label)
    found = parsed_list(label)
    return found if isinstance(found, list) else label


def in_order(names: Collection[str]) -> list[str]:
    """Whole numbers by size, else by name."""
    try:
        return sorted(names, key=int)
    except ValueError:
        return sorted(names)


def head_of(problem_type: str | None, *own: str) -> Callable[[Any, Sequence[str]], None]:
    """Says in a model's configuration that it scores these classes, or `own` ones."""

    def set_head(config: Any, names: Sequence[str]) -> None:
        found = dict(enumerate(own or names))
        config.num_labels, config.problem_type = len(found), problem_type
        config.id2label = found
        config.label2id = {name: index for index, name in found.items()}

    return set_head


def _loss(scores: Any, labels: Any, label_smoothing: float) -> Any:
    from torch.nn.functional import cross_entropy

    return cross_entropy(
        scores.flatten(0, -2).float(),
        labels.flatten(),
        reduction="sum",
        ignore_index=IGNORED,
        label_smoothing=label_smoothing,
    )


def confusion_of(seen: EvaluationSums) -> Metrics:

    confusion = np.zeros((len(seen.label_names),) * 2, dtype=np.int64)
    np.add.at(confusion, (seen.labels, seen.answers), 1)
    return classification_metrics(confusion, seen.label_names)


def _targets(rows: Rows) -> NDArray[Any]:
    """[N]"""
    assert rows.labels is not None
    return rows.labels.astype("float32" if rows.labels.dtype.kind == "f" else "int64")


LABELS = Labels(
    read=_read,
    names=in_order,
    number=lambda label, numbers: numbers[label],
    set_head=head_of("single_label_classification"),
    loss=_loss,
    answers=lambda scores: scores.argmax(-1),
)
CLASSIFICATION = Objective(
    name="classification",
    formats=(TEXT_LABEL,),
    example_columns="text: narrative, label: product",
    max_length=512,
    metrics={"loss": False, "accuracy": True, "f1": True, "precision": True, "recall": True},
    judge=confusion_of,
    targets=_targets,
    auto_class="AutoModelForSequenceClassification",
    peft_type="SEQ_CLS",
    pipeline_tag="text-classification",
    starter=Starter("FacebookAI/roberta-base", "2.0e-4", "f1", "text, label"),
    labels=LABELS,
)
