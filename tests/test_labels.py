"""Tasks of numbers, of several classes and of tags for words, held against transformers."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from farthing.config.load import load_job
from farthing.data.encode import Encoder
from farthing.data.rows import Example
from farthing.errors import DataError, JobError
from farthing.metrics import entity_metrics, multi_label_metrics
from farthing.model.load import ModelChoice, load_tokenizer
from farthing.objectives.objective import EvaluationSums
from farthing.objectives.registry import objective_of
from farthing.objectives.token_classification import entities
from farthing.tiny import write_jsonl
from farthing.train.evaluate import Sweep, evaluate
from farthing.train.resolve import open_examples, resolve
from thinned import thinned
from workshop import (
    Heard,
    job_file,
    losses_of,
    metrics_of,
    opened,
    read_json,
    read_rows,
    steps_of,
    train,
)

NUMBERS, SEVERAL, TAGS = "regression", "multi-label-classification", "token-classification"
TASKS = [NUMBERS, SEVERAL, TAGS]
KINDS = {"FOOD": ["bread", "cheese"], "SPORT": ["goal", "match"], "WEATHER": ["rain", "storm"]}
AUTO = {
    NUMBERS: transformers.AutoModelForSequenceClassification,
    SEVERAL: transformers.AutoModelForSequenceClassification,
    TAGS: transformers.AutoModelForTokenClassification,
}
PROBLEM = {NUMBERS: "regression", SEVERAL: "multi_label_classification", TAGS: None}


def rows_of(task: str, n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Texts of one to eight words, some of which are of a kind; of numbers in two halves."""
    draw = np.random.default_rng(seed)
    words = ["the", "and", "numbers", *(word for each in KINDS.values() for word in each)]
    rows = []
    for _ in range(n):
        text = draw.choice(words, size=draw.integers(1, 9)).tolist()
        kinds = [next((k for k, own in KINDS.items() if word in own), "") for word in text]
        there = sorted(set(kinds) - {""})
        if task == NUMBERS:
            halves = {"sentence1": "the " + " ".join(text[:3]), "sentence2": " ".join(text)}
            rows.append({**halves, "score": len(there) - 0.5})
        elif task == SEVERAL:
            rows.append({"text": " ".join(text), "labels": there})
        else:
            before = ["", *kinds]
            tags = [
                f"{'I' if kind == last else 'B'}-{kind}" if kind else "O"
                for kind, last in zip(kinds, before, strict=False)
            ]
            rows.append({"tokens": text, "ner_tags": tags})
    return rows


def names_of(task: str) -> list[str]:
    """The classes of `rows_of`, in farthing's order."""
    tags = sorted(f"{mark}-{kind}" for kind in KINDS for mark in "BI")
    return {NUMBERS: [], SEVERAL: sorted(KINDS), TAGS: [*tags, "O"]}[task]


def write_job(folder: Path, task: str, family: str = "bert", **keys) -> Path:
    """A job of the task, its base with a trained body and head."""
    keys = {"rows": rows_of(task, 48), "eval_rows": rows_of(task, 12, 1), **keys}
    model = {"init": "pretrained"}
    path = job_file(folder, family, task=task, model=model, **keys)
    names = names_of(task) or ["LABEL_0"]
    config = transformers.AutoConfig.from_pretrained(
        folder / "base",
        id2label=dict(enumerate(names)),
        label2id={n: i for i, n in enumerate(names)},
    )
    config.classifier_dropout = 0.0
    torch.manual_seed(0)
    AUTO[task].from_config(config).save_pretrained(folder / "base")
    if family == "bert":
        settings = folder / "base" / "tokenizer_config.json"
        names = ["input_ids", "token_type_ids", "attention_mask"]
        said = read_json(settings) | {"model_input_names": names}
        settings.write_text(json.dumps(said))
    return path


def plain_loss(task: str, model, tokenizer, rows: list[dict[str, Any]]) -> torch.Tensor:
    """transformers' own loss of a padded batch."""
    names = names_of(task)
    options = {"is_split_into_words": task == TAGS, "padding": True, "return_tensors": "pt"}
    columns = {NUMBERS: ["sentence1", "sentence2"], SEVERAL: ["text"], TAGS: ["tokens"]}[task]
    batch = tokenizer(*([row[name] for row in rows] for name in columns), **options)
    if task == NUMBERS:
        labels = torch.tensor([row["score"] for row in rows])
    elif task == SEVERAL:
        labels = torch.tensor([[float(name in row["labels"]) for name in names] for row in rows])
    else:
        labels = torch.full(batch["input_ids"].shape, -100)
        for index, row in enumerate(rows):
            last = None
            for place, word in enumerate(batch.word_ids(index)):
                if word is not None and word != last:
                    labels[index, place] = names.index(row["ner_tags"][word])
                last = word
    model.config.problem_type = PROBLEM[task]
    return model(**batch, labels=labels).loss


@pytest.mark.parametrize("family", thinned(["bert", "llama"], 2))
@pytest.mark.parametrize("task", TASKS)
def test_losses_are_those_of_a_plain_loop_of_transformers(task, family, tmp_path):
    if task == NUMBERS and family == "llama":
        pytest.skip("one decoder is enough for heads that read one token")
    job = load_job(write_job(tmp_path, task, family, optim="sgd", max_grad_norm=0, max_steps=3))
    heard = Heard()
    model = AUTO[task].from_pretrained(tmp_path / "base").train()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
    train(job, heard)
    assert "padd" not in heard.warnings, "documents are laid end to end"
    optimizer, plain = torch.optim.SGD(model.parameters(), lr=0.01), []
    rows = rows_of(task, 48)
    for step in steps_of(job):
        loss = plain_loss(task, model, tokenizer, [rows[index] for index in step["examples"]])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.append(loss.item())
    assert losses_of(job) == pytest.approx(plain, rel=1e-5)
    evaluated = metrics_of(job)[-1]
    with torch.no_grad():
        held_out = plain_loss(task, model.eval(), tokenizer, rows_of(task, 12, 1))
    assert evaluated["loss"] == pytest.approx(held_out.item(), rel=1e-5)


@pytest.mark.parametrize(
    "name", thinned(["bert-base-uncased", "roberta-base", "gpt2", "mistral-7b-v0.1"], 2)
)
def test_words_become_the_tokens_of_transformers(name, data_dir):
    folder = data_dir / "tokenizers" / name
    rows = [["John", "lives", "in", "New", "York", "!"], ["U.N.", "", "Überraschung", "東京", "’s"]]
    texts = [Example(((" ".join(row), False),), words=tuple(row)) for row in rows]
    ours = load_tokenizer(ModelChoice(str(folder)), None, of_words=True)
    encoded = Encoder(ours, TAGS, 512, 1)(texts)
    options = {"add_prefix_space": True} if name in ("roberta-base", "gpt2") else {}
    theirs = transformers.AutoTokenizer.from_pretrained(folder, **options)
    expected = theirs(rows, is_split_into_words=True)
    assert encoded.ids.tolist() == [*itertools.chain(*expected["input_ids"])]
    first = []
    for index in range(2):
        words = expected.word_ids(index)
        first += [
            word
            for place, word in enumerate(words)
            if word is not None and (place == 0 or words[place - 1] != word)
        ]
    assert encoded.words.tolist() == first
    assert encoded.n_targets().sum() == len(first)


def test_a_word_behind_the_limit_is_neither_learned_nor_predicted(tmp_path, cli):
    path = write_job(tmp_path, TAGS, data={"max_length": 4}, max_steps=1)
    train(load_job(path))
    rows = [{"tokens": ["the", "rain", "and", "the", "storm"]}]
    asked, out = write_jsonl(tmp_path / "asked.jsonl", rows), tmp_path / "out.jsonl"
    cli("predict", tmp_path / "run", asked, "-o", out)
    (said,) = read_rows(out)
    assert [tag is None for tag in said["prediction"]] == [False, False, True, True, True]
    assert "farthing predict" in cli.err("chat", tmp_path / "run", "--prompt", "the rain")


@pytest.mark.parametrize(
    ("task", "row", "why"),
    [
        (NUMBERS, {"text": "a", "score": "four"}, "'four', not a number"),
        (NUMBERS, {"text": "a", "score": True}, "true/false, not a number"),
        (NUMBERS, {"text": "a", "score": float("nan")}, "can't be learned"),
        (SEVERAL, {"text": "a", "labels": "FOOD"}, "is text, not a list"),
        (SEVERAL, {"text": "a", "labels": [0, 1, 0]}, "a class twice"),
        (SEVERAL, {"text": "a", "labels": [0.5, 1.0]}, "fractions"),
        (SEVERAL, {"text": "a", "labels": [["FOOD"]]}, "holds a list"),
        (TAGS, {"tokens": ["a", "b"], "tags": ["O"]}, "2 `tokens` and 1 `tags`"),
        (TAGS, {"tokens": "a b", "tags": "O O"}, "`tokens` is text, not a list"),
        (TAGS, {"tokens": ["a"], "tags": [None]}, "holds nothing, not tags"),
        (NUMBERS, {"text": "a", "label": ""}, "no `label` or `score`"),
        ("classification", {"text": "a", "label": ""}, "no `label`"),
        ("classification", {"text": "a", "label": 0.5}, "task: regression"),
        ("classification", {"text": "a", "label": ["x"]}, "task: multi-label-classification"),
        ("classification", {"text": "a", "label": "0.143"}, "task: regression"),
        ("classification", {"text": "a", "label": "['x']"}, "task: multi-label-classification"),
    ],
)
def test_rows_that_are_no_labels_are_named(task, row, why):
    labels = objective_of(task).labels
    with pytest.raises(Exception, match=why):
        labels.read(row, {})


def test_a_whole_number_is_a_class_however_a_table_has_it():
    read = objective_of("classification").labels.read
    row = {"text": "a", "label": 3.0}
    assert [read(row, names) for names in ({}, {"3": "x"})] == ["3", "x"]


@pytest.mark.parametrize(
    ("labels", "label_map", "expected"),
    [
        ('["x", "y"]', {}, ("x", "y")),
        ("['x']", {}, ("x",)),
        ([3, 11], {"3": "joy"}, ("11", "joy")),
        ([0.0, 1.0, 1.0], {}, ("1", "2")),
        ([False, True], {}, ("1",)),
        ([], {}, ()),
    ],
)
def test_labels_are_read_as_tables_and_hubs_write_them(labels, label_map, expected):
    assert objective_of(SEVERAL).labels.read({"text": "a", "labels": labels}, label_map) == expected


def test_tags_are_read_by_their_names():
    row, names = {"tokens": ["a", "b"], "tags": [0, 3]}, {"0": "O", "3": "B-ORG"}
    assert objective_of(TAGS).labels.read(row, names) == ("O", "B-ORG")


@pytest.mark.parametrize(
    ("rows", "held_out", "why"),
    [
        ([{"text": f"number {i}", "labels": ["FOOD"]} for i in range(20)], None, "nothing to"),
        (
            rows_of(SEVERAL, 48),
            [*rows_of(SEVERAL, 11, 1), {"text": "the", "labels": ["FOOD", "MUSIC"]}],
            "MUSIC",
        ),
    ],
)
def test_labels_that_are_all_alike_or_not_in_the_training_data_are_refused(
    rows, held_out, why, tmp_path
):
    path = write_job(tmp_path, SEVERAL, rows=rows, eval_rows=held_out or rows)
    with pytest.raises(DataError, match=why):
        open_examples(resolve(load_job(path)), Heard())


def test_one_class_that_is_there_or_not_can_be_learned(tmp_path):
    rows = [{"text": f"number {i}", "labels": ["FOOD"][: i % 2]} for i in range(20)]
    job = load_job(write_job(tmp_path, SEVERAL, rows=rows, eval_rows=rows, max_steps=1))
    train(job)
    (metrics,) = metrics_of(job)
    assert metrics["per_class"].keys() == {"FOOD"}


@pytest.mark.parametrize("task", TASKS)
def test_what_each_example_adds_is_what_it_has_alone(task, tmp_path):
    with opened(load_job(write_job(tmp_path, task, per_device_eval_batch_size=2))) as run:
        each: dict[str, Any] = {}
        together, held = run.evaluator.measure(each), run.eval_examples
        alone = [
            evaluate(Sweep(run.forward, held.tokens, held.indices[at : at + 1], 99))
            for at in range(len(held))
        ]
    assert each.keys() == {"loss", *({"accuracy"} if task != NUMBERS else ())}
    for name, (values, weights) in each.items():
        assert values == pytest.approx([a[name] * n for a, n in zip(alone, weights, strict=True)])
        assert sum(values) / sum(weights) == pytest.approx(together[name])


@pytest.mark.parametrize("task", [NUMBERS, SEVERAL])
def test_label_smoothing_that_means_nothing_is_refused(task, tmp_path):
    with pytest.raises(JobError, match="no probabilities of targets to smooth"):
        load_job(write_job(tmp_path, task, label_smoothing_factor=0.1))


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        (["B-PER", "I-PER", "O", "B-LOC"], {("PER", 0, 1), ("LOC", 3, 3)}),
        (["I-PER", "I-LOC", "I-LOC"], {("PER", 0, 0), ("LOC", 1, 2)}),
        (["B-PER", "B-PER", "I-ORG"], {("PER", 0, 0), ("PER", 1, 1), ("ORG", 2, 2)}),
        (["B-A", "E-A", "I-A", "S-A"], {("A", 0, 1), ("A", 2, 2), ("A", 3, 3)}),
        (["B-A", "M-A", "I-A", "O", "I-A"], {("A", 0, 2), ("A", 4, 4)}),
    ],
)
def test_entities_are_those_of_seqeval(tags, found):
    assert entities(tags) == found


def test_entities_count_where_type_and_words_are_right():
    wanted = [{("PER", 0, 1), ("LOC", 3, 3)}, {("PER", 0, 0)}]
    found = [{("PER", 0, 1), ("LOC", 2, 3)}, set[tuple[str, int, int]]()]
    metrics = entity_metrics(wanted, found)
    assert metrics["precision"] == 0.5
    assert metrics["recall"] == pytest.approx(1 / 3)
    assert metrics["f1"] == pytest.approx(0.4)
    assert metrics["per_class"] == {
        "LOC": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "n": 1},
        "PER": {"precision": 1.0, "recall": 0.5, "f1": pytest.approx(2 / 3), "n": 2},
    }


def test_f1_of_several_labels_is_of_each_class_and_of_all():
    labels = np.array([[1, 0], [1, 1], [0, 0]], bool)
    answers = np.array([[1, 0], [0, 1], [0, 1]], bool)
    metrics = multi_label_metrics(labels, answers, ("x", "y"))
    assert metrics["accuracy"] == pytest.approx(1 / 3)
    assert metrics["f1"] == pytest.approx(2 / 3)
    assert metrics["f1_micro"] == pytest.approx(2 / 3)
    assert metrics["precision"] == 0.75


def judged(*answers: float) -> dict[str, Any]:
    """The metrics of four numbers."""
    labels = np.array([1.0, 2, 2, 5])
    seen = EvaluationSums(0.0, 0.0, labels, np.array(answers), (), [], [], np.ones(4))
    return objective_of(NUMBERS).judge(seen)


def test_correlations_are_those_of_the_books():
    metrics = judged(0.0, 1, 3, 2)
    assert metrics["mse"] == pytest.approx(3.0)
    assert metrics["pearson"] == pytest.approx(3 / 45**0.5)
    assert metrics["spearman"] == pytest.approx(3 / 22.5**0.5)
    assert judged(0.0, 0, 0, 0)["pearson"] is None
