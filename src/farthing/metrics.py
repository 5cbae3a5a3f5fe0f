"""Objective metrics from counts and texts. Pure functions of plain values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Metrics = dict[str, "float | dict[str, dict[str, float]] | list[list[int]] | None"]
"""What an evaluation has measured, by name: numbers, and of classes a table and the confusion
[true, predicted].
"""


def perplexity(loss: float) -> float | None:
    """exp(loss); None when it is too large for a float."""
    return math.exp(loss) if loss < 700 else None


def stderr_of_mean(sums: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Standard error of sums / weights [n], drawn as examples: of a ratio estimator (Cochran 1977,
    section 2.11). 0 for one example.
    """
    n, of_all = len(sums), float(weights.sum())
    if n < 2 or of_all <= 0:
        return 0.0
    residuals = sums - float(sums.sum()) / of_all * weights
    return math.sqrt(n / (n - 1) * float((residuals**2).sum())) / of_all


def classification_metrics(confusion: NDArray[np.int64], names: tuple[str, ...]) -> Metrics:
    """Accuracy, macro precision/recall/F1 and the same per class, from confusion[true, predicted].

    Macro is the mean over classes that occur in truth or prediction; a ratio with an empty
    denominator is 0 (the convention of scikit-learn's `zero_division=0`).
    """
    hits, n_true = np.diag(confusion).tolist(), confusion.sum(axis=1).tolist()
    n_predicted, n = confusion.sum(axis=0).tolist(), max(1, int(confusion.sum()))
    counts = list(zip(hits, n_predicted, n_true, strict=True))
    per_class = [_scores(*each) | {"n": each[2]} for each in counts]
    occurring = [row for row, each in zip(per_class, counts, strict=True) if sum(each)]
    return {
        "accuracy": sum(hits) / n,
        **_macro(occurring),
        "majority_accuracy": max(n_true) / n,
        "per_class": dict(zip(names, per_class, strict=True)),
        "confusion": confusion.tolist(),
    }


def _macro(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over classes."""
    names, n = ("precision", "recall", "f1"), max(1, len(rows))
    return {name: sum(row[name] for row in rows) / n for name in names}


def _scores(hits: float, n_predicted: float, n_true: float) -> dict[str, float]:
    """Precision, recall and F1; a ratio with an empty denominator is 0."""
    return {
        "precision": hits / n_predicted if n_predicted else 0.0,
        "recall": hits / n_true if n_true else 0.0,
        "f1": 2 * hits / (n_predicted + n_true) if n_predicted + n_true else 0.0,
    }


def multi_label_metrics(
    labels: NDArray[np.bool_], answers: NDArray[np.bool_], names: tuple[str, ...]
) -> Metrics:
    """Of labels and answers [n, classes]: the share of examples whose classes are all right, macro
    precision, recall and F1, F1 of all classes together, and the same of each class.
    """
    hits, n_predicted, n_true = (
        each.sum(0).tolist() for each in (labels & answers, answers, labels)
    )
    per_class = {
        name: _scores(*of_class) | {"n": of_class[2]}
        for name, *of_class in zip(names, hits, n_predicted, n_true, strict=True)
    }
    return {
        "accuracy": float((labels == answers).all(1).mean()),
        **_macro(list(per_class.values())),
        "f1_micro": _scores(sum(hits), sum(n_predicted), sum(n_true))["f1"],
        "per_class": per_class,
    }


def entity_metrics(
    labels: Sequence[set[tuple[str, int, int]]], answers: Sequence[set[tuple[str, int, int]]]
) -> Metrics:
    """Precision, recall and F1 of the entities (type, first word, last word) of texts, and the same
    of each type. An entity counts where type and words are right.
    """
    hits, n_predicted, n_true = Counter[str](), Counter[str](), Counter[str]()
    for wanted, found in zip(labels, answers, strict=True):
        hits.update(kind for kind, *_ in wanted & found)
        n_predicted.update(kind for kind, *_ in found)
        n_true.update(kind for kind, *_ in wanted)
    kinds = sorted({*n_true, *n_predicted})
    return {
        **_scores(hits.total(), n_predicted.total(), n_true.total()),
        "per_class": {
            kind: _scores(hits[kind], n_predicted[kind], n_true[kind]) | {"n": n_true[kind]}
            for kind in kinds
        },
    }


def text_metrics(predictions: list[str], references: list[str]) -> dict[str, float]:
    """Exact match, and ROUGE-1, -2 and -L F-measures (Lin 2004, by Google's `rouge-score`, with
    stemming), as means.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    totals = {"exact_match": 0.0, "rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0}
    for prediction, reference in zip(predictions, references, strict=True):
        totals["exact_match"] += prediction.strip() == reference.strip()
        for name, score in scorer.score(reference, prediction).items():
            totals[name] += score.fmeasure
    return {name: total / max(1, len(references)) for name, total in totals.items()}
