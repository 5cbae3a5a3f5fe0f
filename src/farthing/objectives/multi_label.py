"""Any number of classes for each text: each class is a yes or a no by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farthing.errors import UnusableRowError
from farthing.metrics import Metrics, multi_label_metrics
from farthing.objectives.classification import CLASSIFICATION, LABELS, head_of, in_order
from farthing.objectives.columns import TEXT_LABELS, Row, kind_of, list_of
from farthing.objectives.objective import EvaluationSums, Starter

Names = tuple[str, ...]


def _read(row: Row, label_map: Mapping[str, str]) -> Names:
    """The names of a text's classes: of a list of texts or whole numbers, or of one of
    fractions or truths, 1 at the place of each class. Raises `UnusableRowError`.
    """
    given = list_of(row, "labels")
    if given and all(isinstance(each, bool | float) for each in given):
        if set(given) - {0.0, 1.0}:
            raise UnusableRowError("`labels` has fractions: a class is there (1) or not (0)")
        given = [place for place, is_there in enumerate(given) if is_there]
    for each in given:
        if isinstance(each, bool) or not isinstance(each, str | int) or each == "":
            raise UnusableRowError(
                f"`labels` holds {kind_of(each)}, not a class (text or a whole number)"
            )
    if len(set(given)) < len(given):
        raise UnusableRowError(
            "`labels` has a class twice; zeros and ones at the place of each class are written"
            " as 0.0 and 1.0, or as true and false"
        )
    return tuple(sorted({label_map.get(str(each), str(each)) for each in given}))


def _names(labels: set[Names]) -> list[str]:
    return in_order({name for each in labels for name in each})


def _number(label: Names, numbers: Mapping[str, int]) -> list[int]:
    """1 at the place of each class that is there."""
    there = {numbers[name] for name in label}
    return [int(place in there) for place in range(len(numbers))]


def _loss(scores: Any, labels: Any, _: float) -> Any:
    """Of each example the mean over the classes, as in transformers."""
    from torch.nn.functional import binary_cross_entropy_with_logits

    scores = scores.float()
    whole = binary_cross_entropy_with_logits(scores, labels.to(scores.dtype), reduction="sum")
    return whole / scores.shape[1]


def _judge(seen: EvaluationSums) -> Metrics:

    return multi_label_metrics(seen.labels > 0.5, seen.answers, seen.label_names)


def _predict(shares: Sequence[float], names: Sequence[str]) -> list[str]:
    return [name for name, share in zip(names, shares, strict=True) if share > 0.5]


MULTI_LABEL = CLASSIFICATION._replace(
    name="multi-label-classification",
    formats=(TEXT_LABELS,),
    example_columns="text: comment, labels: topics",
    metrics={**CLASSIFICATION.metrics, "f1_micro": True},
    judge=_judge,
    same_head_as=CLASSIFICATION.name,
    starter=Starter("FacebookAI/roberta-base", "2.0e-4", "f1", "text, labels"),
    labels=LABELS._replace(
        read=_read,
        names=_names,
        number=_number,
        set_head=head_of("multi_label_classification"),
        loss=_loss,
        answers=lambda scores: scores > 0,
        dtype="uint8",
        smooths=False,
        shares=lambda scores: scores.sigmoid(),
        predict=_predict,
    ),
)
