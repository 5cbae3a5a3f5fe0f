"""A number for each text: mean squared error, as transformers' heads of one output learn it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.errors import UnusableRowError
from farthing.metrics import Metrics
from farthing.objectives.classification import CLASSIFICATION, LABELS, head_of
from farthing.objectives.columns import TEXT_LABEL, TEXT_SCORE, Row, kind_of
from farthing.objectives.objective import EvaluationSums, Starter


def _read(row: Row, label_map: Mapping[str, str]) -> float:
    column = "score" if row.get("score") is not None else "label"
    value = row.get(column)
    if value is None or value == "":
        raise UnusableRowError("no `label` or `score`")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UnusableRowError(f"`{column}` is {kind_of(value)}, not a number")
    try:
        number = float(label_map.get(str(value), value))
    except ValueError:
        raise UnusableRowError(f"`{column}` is {str(value)[:40]!r}, not a number") from None
    if not math.isfinite(number):
        raise UnusableRowError(f"`{column}` is {number}, which can't be learned")
    return number


def _loss(scores: Any, labels: Any, _: float) -> Any:
    return (scores[:, 0].float() - labels).square().sum()


def _ranks(values: NDArray[Any]) -> NDArray[Any]:
    """[n]: the place of each in order; equal values share the mean of theirs."""

    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]


def _correlation(one: NDArray[Any], other: NDArray[Any]) -> float | None:
    """Pearson's; None where one of both is constant."""
    return float(np.corrcoef(one, other)[0, 1]) if one.std() and other.std() else None


def _judge(seen: EvaluationSums) -> Metrics:

    labels, answers = seen.labels.astype(np.float64), seen.answers.astype(np.float64)
    return {
        "mse": float(((labels - answers) ** 2).mean()),
        "mae": float(abs(labels - answers).mean()),
        "pearson": _correlation(labels, answers),
        "spearman": _correlation(_ranks(labels), _ranks(answers)),
    }


REGRESSION = CLASSIFICATION._replace(
    name="regression",
    formats=(TEXT_SCORE, TEXT_LABEL),
    example_columns="text: review, score: stars",
    metrics={"loss": False, "mse": False, "mae": False, "pearson": True, "spearman": True},
    judge=_judge,
    same_head_as=CLASSIFICATION.name,
    starter=Starter("FacebookAI/roberta-base", "2.0e-4", "spearman", "text, score"),
    labels=LABELS._replace(
        read=_read,
        names=lambda labels: [],
        number=lambda label, numbers: label,
        set_head=head_of("regression", "LABEL_0"),
        loss=_loss,
        answers=lambda scores: scores[:, 0],
        dtype="float32",
        smooths=False,
    ),
)
