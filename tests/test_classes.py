"""The classes of a classifier: their order, and what becomes of a head that was trained before."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from farthing.export.folders import trained_model, untrained_model
from workshop import Heard, make_job, metrics_of, read_json, rows_of, train

NAMES = ["weather", "food", "sport"]
"""Of the base's head, in no alphabetical order."""


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A folder with a job's base that tells its three classes apart, as `NAMES` has them."""
    folder = tmp_path_factory.mktemp("classifier")
    job = make_job(
        folder, "bert", rows=rows_of("bert", 60), pretrained=True, max_steps=60, learning_rate=1e-3
    )
    train(job)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "run/model")
    order = [model.config.label2id[name] for name in NAMES]
    with torch.no_grad():
        for weight in model.classifier.parameters():
            weight.copy_(weight[order].clone())
    model.config.id2label = dict(enumerate(NAMES))
    model.config.label2id = {name: number for number, name in enumerate(NAMES)}
    base = folder / "base"
    model.save_pretrained(base)
    return base


def trained(folder: Path, base: Path, rows: list[dict[str, Any]], **keys) -> tuple[Any, Heard]:
    """(the first evaluation of a step that changes next to nothing, what was said)."""
    shutil.copytree(base, folder / "base")
    keys = {"pretrained": True, "method": "full", "max_steps": 1, "learning_rate": 1e-6, **keys}
    heard = Heard()
    job = make_job(folder, "bert", rows=rows, eval_rows=rows[:30], **keys)
    train(job, heard)
    return metrics_of(job)[0], heard


def test_names_that_differ_in_capitals_are_the_same_classes(classifier, tmp_path):
    rows = [{**row, "label": row["label"].upper()} for row in rows_of("bert", 60)]
    metrics, _ = trained(tmp_path, classifier, rows, method="lora")
    assert metrics["accuracy"] == 1.0
    assert list(metrics["per_class"]) == ["WEATHER", "FOOD", "SPORT"]
    names = trained_model(tmp_path / "run").config.id2label
    assert names == {0: "WEATHER", 1: "FOOD", 2: "SPORT"}


def test_a_head_of_other_classes_begins_anew_and_it_is_said(classifier, tmp_path):
    """The same number of classes, so that the old layer would fit."""
    new = {"food": "angry", "sport": "glad", "weather": "sad"}
    rows = [{**row, "label": new[row["label"]]} for row in rows_of("bert", 60)]
    _, heard = trained(tmp_path, classifier, rows)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model")
    before = transformers.AutoModelForSequenceClassification.from_pretrained(classifier)
    assert (model.classifier.weight - before.classifier.weight).abs().max() > 0.01
    assert model.classifier.weight.std() < 0.05, "as BERT's are drawn: 0.02"
    began = untrained_model(tmp_path / "run").classifier.weight
    torch.testing.assert_close(began, model.classifier.weight, rtol=0, atol=1e-4)
    assert (
        "trained for 'weather', 'food', 'sport', the data has 'angry', 'glad', 'sad'"
        in heard.warnings
    )


def test_numbers_of_classes_are_no_names(classifier, tmp_path):
    """0 in the data need not be the model's class 0: of MNLI's heads it often is another."""
    numbers = {"food": 0, "sport": 1, "weather": 2}
    rows = [{**row, "label": numbers[row["label"]]} for row in rows_of("bert", 60)]
    _, heard = trained(tmp_path / "anew", classifier, rows)
    assert "begins anew" in heard.warnings
    label_map = {"label_map": {0: "food", 1: "sport", 2: "weather"}}
    metrics, heard = trained(tmp_path / "mapped", classifier, rows, data=label_map)
    assert metrics["accuracy"] == 1.0
    assert "begins anew" not in heard.warnings


@pytest.mark.parametrize("name_of", [int, "LABEL_{}".format])
def test_a_head_without_names_is_of_the_classes_by_their_numbers(name_of, classifier, tmp_path):
    shutil.copytree(classifier, tmp_path / "unnamed")
    path = tmp_path / "unnamed/config.json"
    config = read_json(path)
    config["id2label"] = {str(number): f"LABEL_{number}" for number in range(3)}
    del config["label2id"]
    path.write_text(json.dumps(config))
    rows = [{**row, "label": name_of(NAMES.index(row["label"]))} for row in rows_of("bert", 60)]
    metrics, heard = trained(tmp_path / "job", tmp_path / "unnamed", rows)
    assert metrics["accuracy"] == 1.0
    assert "begins anew" not in heard.warnings


def test_integer_labels_stay_in_numeric_order(tmp_path):
    rows = [{"text": f"{n} of them, {k}", "label": n} for k in range(4) for n in range(12)]
    job = make_job(tmp_path, "bert", rows=rows, max_steps=1)
    train(job)
    config = read_json(tmp_path / "run/model/config.json")
    assert config["id2label"] == {str(n): str(n) for n in range(12)}
