"""Metrics against numbers worked by hand, and what hangs on them: the best checkpoint and the early
stop.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from farthing.errors import DataError
from farthing.events import Exported, Warned
from farthing.metrics import classification_metrics, perplexity, text_metrics
from farthing.model.forward import Forward
from farthing.model.hardware import choose_numerics
from farthing.objectives.registry import objective_names, objective_of
from farthing.train.ancestor import find_ancestor
from farthing.train.evaluate import Sweep, evaluate
from farthing.train.loop import Due
from farthing.train.resolve import open_examples, resolve
from thinned import thinned
from workshop import (
    Heard,
    Watched,
    are_same,
    log_of,
    make_job,
    opened,
    rows_of,
    train,
    weights_of,
)

# ---- numbers ----


def test_classification_metrics_are_those_worked_by_hand():
    # true a: 3 right, 1 taken for b; true b: 1 right, 1 taken for a; true c: never right, twice
    # taken for a
    confusion = [[3, 1, 0], [1, 1, 0], [2, 0, 0]]
    found = classification_metrics(np.array(confusion), ("a", "b", "c"))
    assert found.pop("per_class") == {
        "a": {"precision": 3 / 6, "recall": 3 / 4, "f1": pytest.approx(0.6), "n": 4},
        "b": {"precision": 1 / 2, "recall": 1 / 2, "f1": 0.5, "n": 2},
        "c": {"precision": 0, "recall": 0, "f1": 0, "n": 2},
    }
    assert found.pop("confusion") == confusion
    assert found == pytest.approx(
        {
            "accuracy": 4 / 8,
            "precision": (0.5 + 0.5 + 0) / 3,
            "recall": (0.75 + 0.5 + 0) / 3,
            "f1": (0.6 + 0.5 + 0) / 3,
            "majority_accuracy": 4 / 8,
        }
    )


@pytest.mark.parametrize(
    ("confusion", "accuracy", "f1"),
    [
        ([[2, 0, 0], [0, 3, 0], [0, 0, 0]], 1, 1),
        ([[1, 1], [0, 0]], 0.5, (2 / 3 + 0) / 2),
        ([[0, 0], [0, 0]], 0, 0),
    ],
)
def test_the_macro_mean_is_over_classes_that_occur(confusion, accuracy, f1):
    found = classification_metrics(np.array(confusion), tuple("abc"[: len(confusion)]))
    assert (found["accuracy"], found["f1"]) == pytest.approx((accuracy, f1))


def test_identical_texts_score_one_and_disjoint_ones_nothing():
    same = ["the mill serves soup", "a b c"]
    assert text_metrics(same, same) == {"exact_match": 1, "rouge1": 1, "rouge2": 1, "rougeL": 1}
    other = ["one two", "four five six"]
    assert text_metrics(other, same) == {"exact_match": 0, "rouge1": 0, "rouge2": 0, "rougeL": 0}


def test_rouge_is_the_f_measure_of_shared_words():
    found = text_metrics(["the cats sat"], ["the cat sat on the mat"])  # stems
    assert found["rouge1"] == pytest.approx(2 * (3 / 3) * (3 / 6) / (3 / 3 + 3 / 6))
    assert found["rouge2"] == pytest.approx(2 * (2 / 2) * (2 / 5) / (2 / 2 + 2 / 5))
    assert found["exact_match"] == 0


def test_exact_match_looks_past_outer_spaces_alone():
    assert text_metrics([" yes\n", "Yes", "y es"], ["yes", "yes", "yes"])[
        "exact_match"
    ] == pytest.approx(1 / 3)


def test_perplexity_is_the_exponential_of_the_loss_and_never_infinite():
    assert perplexity(0) == 1
    assert perplexity(math.log(50)) == pytest.approx(50)
    assert perplexity(1e4) is None


def test_every_metric_of_a_task_has_a_direction():
    directions = {
        name: greater
        for task in objective_names()
        for name, greater in objective_of(task).metrics.items()
    }
    assert {name for name, greater in directions.items() if not greater} == {
        "loss",
        "perplexity",
        "document_loss",
        "rewards/rejected",
        "mse",
        "mae",
    }
    assert all(objective_of(task).metrics["loss"] is False for task in objective_names())


# ---- measured on models ----


def evaluations(job) -> list[dict[str, Any]]:
    return [row for row in log_of(job) if "metrics" in row]


@pytest.mark.slow
def test_a_seq2seq_run_may_spare_the_generation(tmp_path):
    rows = rows_of("t5", 4)
    job = make_job(
        tmp_path, "t5", rows=rows, eval_rows=rows, max_steps=1, predict_with_generate=False
    )
    train(job)
    assert set(evaluations(job)[-1]["metrics"]) == {
        "loss",
        "loss_stderr",
        "n_examples",
        "document_loss",
    }


@pytest.mark.parametrize("family", thinned(["llama", "t5", "bert"], 3))
def test_evaluating_changes_no_bit_of_the_training(family, tmp_path):
    ends = []
    for name, keys in (
        ("without", {}),
        ("with", {"eval_rows": rows_of(family, 6), "eval_steps": 1}),
    ):
        job = make_job(
            tmp_path / name, family, size={"dropout": 0.1}, load_best_model_at_end=False, **keys
        )
        train(job)
        ends.append(weights_of(tmp_path / name))
    assert len(evaluations(make_job(tmp_path / "with", family, eval_rows=rows_of(family, 6)))) == 6
    assert are_same(*ends)
    with opened(make_job(tmp_path / "again", family, size={"dropout": 0.1}, **keys)) as run:
        assert run.evaluator.measure({}) == run.evaluator.measure({}), "without dropout"
        assert run.model.training


# ---- what hangs on them ----


def set_metrics(monkeypatch: pytest.MonkeyPatch, *values: float | None, name: str = "loss"):
    """Let the next evaluations measure `values`."""
    measured = iter(values)
    monkeypatch.setattr(
        "farthing.train.evaluate.evaluate",
        lambda *args, **kwargs: {name: next(measured), "n_examples": 1},
    )


def judged_job(tmp_path: Path, **keys):
    return make_job(tmp_path, n_rows=16, eval_rows=rows_of("llama", 2), eval_steps=1, **keys)


def checkpoint_weights(job, step: int) -> dict[str, torch.Tensor]:
    (folder,) = Path(job.output_dir, "checkpoints").glob(f"step-{step:08d}-*")
    return load_file(folder / "model.safetensors")


def test_the_best_checkpoint_is_the_one_exported(tmp_path, monkeypatch):
    set_metrics(monkeypatch, *[3.0, 1.0, 2.0, 2.0, 2.0, 2.0] * 2)
    job, heard = judged_job(tmp_path, save_steps=5), Heard()
    outcome = train(job, heard)
    assert outcome.receipt.best_step == 2
    assert [row["is_best"] for row in evaluations(job)] == [True, True, False, False, False, False]
    assert are_same(weights_of(tmp_path), checkpoint_weights(job, 2))
    assert heard.of(Exported)[0].step == 2
    assert find_ancestor(job.output_dir).step == 2
    assert "| step | 2 of 6 |" in (tmp_path / "run/model/README.md").read_text()
    train(judged_job(tmp_path, save_steps=5, load_best_model_at_end=False))
    assert are_same(weights_of(tmp_path), checkpoint_weights(job, 6))
    os.truncate(next(Path(job.output_dir).glob("checkpoints/step-00000002-*/model.*")), 9)
    assert train(job, heard).receipt.exported_step == 6
    assert "(step 2) is damaged" in heard.warnings

    def due(run):
        return Due(0, run.progress.step == 4, run.saver.is_due)

    monkeypatch.setattr("farthing.train.loop.what_is_due", due)
    early = judged_job(tmp_path / "early", save_steps=5)
    train(early)
    last = [checkpoint_weights(each, 6) for each in (early, job)]
    assert are_same(*last), "training goes on from where it was"


def test_patience_counts_evaluations_without_a_gain_above_the_threshold(tmp_path, monkeypatch):
    """As EarlyStoppingCallback of transformers does."""
    set_metrics(monkeypatch, 3.0, 2.8, 2.4, 2.3, 2.25, 1.75, 1.5, 1.375, 1.375, 1.3, 0.1)
    keys = {"early_stopping_patience": 3, "early_stopping_threshold": 0.25, "max_steps": 20}
    job = judged_job(tmp_path, **keys)
    outcome = train(job)
    assert (outcome.state, outcome.reason) == ("finished", "stopped early")
    assert (outcome.receipt.steps, outcome.receipt.best_step) == (9, 8)
    assert train(job).receipt.steps == 9  # the same command trains nothing more


def test_more_is_better_where_the_metric_has_it(tmp_path, monkeypatch):
    set_metrics(monkeypatch, 0.1, 0.9, 0.5, name="f1")
    keys = {"max_steps": 3, "eval_steps": 1, "metric_for_best_model": "eval_f1"}
    job = make_job(tmp_path, "bert", eval_rows=rows_of("bert", 3), **keys)
    assert train(job).receipt.best_step == 2


def test_labels_that_seem_to_be_one_class_are_named_and_a_single_class_is_refused(tmp_path):
    def examples_of(*labels, **label_map):
        folder = tmp_path / str(len(labels) + len(label_map))
        job = make_job(folder, "bert", max_steps=1, data={"label_map": label_map})
        rows = [
            {"text": f"{number} apples", "label": labels[number % len(labels)]}
            for number in range(20)
        ]
        Path(job.data.train[0]).write_text("".join(json.dumps(row) + "\n" for row in rows))
        heard = []
        open_examples(resolve(job), heard.append)
        return [event.text for event in heard if isinstance(event, Warned)]

    assert examples_of("spam", "ham", "eggs") == []
    assert examples_of("spam", "ham", "eggs", spam="bad", eggs="bad") == []
    (said,) = examples_of("spam", "ham", "eggs", spam="bad", hams="good", egg="spam")
    assert (
        said == "data.label_map names values that no row has: 'egg' ('spam'), 'hams' ('good'); the"
        " classes are 'bad', 'eggs', 'ham'"
    )
    (said,) = examples_of("spam", "ham", "Spam ", "HAM")
    assert "'HAM' and 'ham', 'Spam ' and 'spam'; make them one with data.label_map" in said
    with pytest.raises(DataError, match="every training example has the same label, 'spam'"):
        examples_of("spam")


def test_a_model_that_computes_no_numbers_is_measured_as_none(tmp_path, monkeypatch):
    watched = Watched(monkeypatch)
    job = make_job(tmp_path, "bert", max_steps=1, metric_for_best_model="accuracy")
    train(job)
    spec = resolve(job)
    examples, _ = open_examples(spec, Heard())
    with torch.no_grad():
        watched.model.classifier.weight.fill_(torch.nan)
    numerics = choose_numerics("cpu", None, None)
    forward = Forward(watched.model, "classification", spec.pad_id, numerics)
    found = evaluate(Sweep(forward, examples.tokens, examples.indices, 100))
    assert found["loss"] is None
    assert "accuracy" not in found  # the class that argmax names for such scores means nothing


@pytest.mark.parametrize("family", thinned(["llama", "t5", "bert"], 3))
def test_an_evaluation_batch_has_no_more_tokens_than_training_had(family, tmp_path, monkeypatch):
    asked = []
    honest = Forward.to_device

    def place(forward, arrays):
        if not torch.is_grad_enabled():
            asked.append(forward.n_computed(arrays))
        return honest(forward, arrays)

    monkeypatch.setattr(Forward, "to_device", place)
    for keys in ({"micro_batch_tokens": 70}, {"per_device_eval_batch_size": 1}):
        keys |= {"max_steps": 1, "eval_rows": rows_of(family, 12, 9)}
        train(make_job(tmp_path / str(len(asked)), family, **keys))
        assert len(asked) > 1
    assert max(asked) <= 70
