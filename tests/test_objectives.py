"""Tasks: those that there are, and one that a package from outside brings."""

import math
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from farthing.config.job import Job
from farthing.config.load import load_job
from farthing.errors import InputError, JobError
from farthing.launch.prepare import Wishes, prepare
from farthing.objectives import registry
from farthing.objectives.registry import (
    code_sha256,
    find_objective,
    objective_names,
    objective_of,
    register,
)
from farthing.train.resolve import open_examples, resolve
from workshop import Heard, as_tokens, job_file, make_job, read_rows, steps_of, train

PACKAGE = '''
"""Tasks that are not farthing's: stars as ordered classes, and pairs of texts."""

from farthing.objectives.classification import CLASSIFICATION
from farthing.objectives.columns import Format, text_of
from farthing.errors import UnusableRowError

MOST = 5


def read(row, label_map):
    stars = row.get("stars")
    if isinstance(stars, bool) or not isinstance(stars, int) or not 1 <= stars <= MOST:
        raise UnusableRowError(f"`stars` is no whole number from 1 to {MOST}")
    return stars


def set_head(config, names):
    """One score for each step between stars (Cao et al. 2020)."""
    config.num_labels = MOST - 1
    config.id2label = {i: f"more than {i + 1}" for i in range(MOST - 1)}
    config.label2id = {name: i for i, name in config.id2label.items()}
    config.problem_type = "multi_label_classification"


def loss(scores, labels, label_smoothing):
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    steps = torch.arange(1, MOST, device=scores.device)
    is_above = (labels[:, None] > steps).float()
    return binary_cross_entropy_with_logits(scores.float(), is_above, reduction="sum")


def judge(seen):
    return {"mean_error": float(abs(seen.answers - seen.labels).mean())}


STARS = CLASSIFICATION._replace(
    name="stars",
    formats=(Format("text/stars", ("text", "stars")),),
    example_columns="text: review, stars: rating",
    metrics={"loss": False, "mean_error": False},
    judge=judge,
    same_head_as=CLASSIFICATION.name,
    labels=CLASSIFICATION.labels._replace(
        read=read,
        names=lambda labels: [],
        number=lambda label, numbers: label,
        set_head=set_head,
        loss=loss,
        answers=lambda scores: 1 + (scores > 0).sum(-1),
        smooths=False,
        shares=lambda scores: scores.sigmoid(),
        predict=lambda shares, names: [1 + sum(share > 0.5 for share in shares)],
    ),
)


def read_pair(row, label_map):
    follows = row.get("follows")
    if not isinstance(follows, bool):
        raise UnusableRowError("`follows` is not true or false")
    return str(follows)


def both(row):
    return f"{text_of(row, 'premise')} => {text_of(row, 'conclusion')}"


COLUMNS = ("premise", "conclusion", "follows")
FOLLOWS = CLASSIFICATION._replace(
    name="follows",
    formats=(Format("/".join(COLUMNS), COLUMNS),),
    same_head_as=CLASSIFICATION.name,
    labels=CLASSIFICATION.labels._replace(read=read_pair, text=both),
)
NO_TASK = 3
'''
ENTRIES = """
[farthing.objectives]
stars = tasks_of_ours:STARS
even-words = tasks_of_ours:EVEN_WORDS
follows = tasks_of_ours:FOLLOWS
broken = tasks_of_ours:NO_TASK
gone = nowhere_at_all:TASK
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder with an installed package that brings the task `stars`; forgotten afterwards."""
    folder = tmp_path / "site"
    (folder / "tasks_of_ours-1.dist-info").mkdir(parents=True)
    (folder / "tasks_of_ours.py").write_text(PACKAGE)
    (folder / "tasks_of_ours-1.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: tasks_of_ours\nVersion: 1\n"
    )
    (folder / "tasks_of_ours-1.dist-info/entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(registry, "_OBJECTIVES", dict(registry._OBJECTIVES))
    yield folder
    sys.modules.pop("tasks_of_ours", None)


def test_an_objective_of_a_package_is_rented_for_only_where_the_package_will_be(package, tmp_path):
    job = Job.model_validate(
        {
            "task": "stars",
            "model": "org/model",
            "data": "org/data",
            "output_dir": str(tmp_path),
            "output_store": "s3://bucket/run",
            "limits": {"max_usd": 2},
            "where": {"usd_per_hour": 1.0},
        }
    )
    now = datetime(2026, 11, 22, tzinfo=UTC)
    with pytest.raises(InputError, match="in the package tasks_of_ours, which does not travel"):
        prepare(job, Wishes(on="ssh:host"), now)
    assert prepare(job, Wishes(on="ssh:host", image="us/ours"), now).offers
    assert prepare(job, Wishes(on="local"), now).offers


def rows_of(n: int) -> list[dict[str, Any]]:
    """Texts with stars by how good their words are."""
    names = ["awful", "dull", "fine", "grand"]
    return [
        {
            "text": f"the {names[i % 4]} and the {names[i // 4 % 4]} number {i}",
            "stars": 1 + (i % 4) + (i // 4 % 4 > 1),
        }
        for i in range(n)
    ]


def write_job(folder: Path, **keys) -> Path:
    """A small job of the task `stars`."""
    keys = {"task": "stars", "rows": rows_of(40), "eval_rows": rows_of(8), **keys}
    return job_file(folder, "bert", pretrained=True, max_steps=8, **keys)


def test_a_foreign_task_of_two_texts_is_asked_with_both(package, tmp_path, cli):
    rows = [
        {"premise": f"rain {i}", "conclusion": "wet" if i % 2 else "dry", "follows": i % 2 == 1}
        for i in range(16)
    ]
    train(make_job(tmp_path, "bert", task="follows", rows=rows, pretrained=True, max_steps=1))
    asked, found = tmp_path / "asked.jsonl", tmp_path / "found.jsonl"
    asked.write_text(
        '{"premise": "rain 3", "conclusion": "wet"}\n{"premise": "x", "conclusion": "so dry"}\n'
    )
    cli("predict", tmp_path / "run", asked, "-o", found)
    one, other = read_rows(found)
    assert one["prediction"] in ("True", "False")
    assert one["scores"] != other["scores"]
    asked.write_text('{"premise": "rain 3"}\n')
    found.unlink()
    cli("predict", tmp_path / "run", asked, "-o", found, code=2)


EVEN_WORDS = """
import numpy as np

from farthing.objectives.causal_lm import CAUSAL_LM


def targets(rows):
    return np.where(rows.is_target & (rows.ids % 2 == 0), rows.ids, -100)


EVEN_WORDS = CAUSAL_LM._replace(name="even-words", targets=targets, same_head_as="causal-lm")
"""


def test_the_loss_of_a_foreign_language_task_is_divided_by_the_targets_that_it_chooses(
    package, tmp_path
):
    (package / "tasks_of_ours.py").write_text(EVEN_WORDS)
    shared = "the very same beginning of " * 8
    rows = [{"prompt": f"{shared}{i}", "completion": f" the answer {i}"} for i in range(8)]
    keys = {"pretrained": True, "max_steps": 1, "global_batch_size": 8}
    keys |= {"task": "even-words", "rows": rows, "eval_rows": rows, "eval_steps": 1}
    job = make_job(tmp_path, **keys)
    train(job)
    tokenizer = transformers.AutoTokenizer.from_pretrained(job.model.model_name_or_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(job.model.model_name_or_path)
    total, n = 0.0, 0
    for row in rows:
        ids, labels = as_tokens(tokenizer, row)
        wanted = labels.where(ids % 2 == 0, -100)[0, 1:]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
        n += int((wanted != -100).sum())
    (first,) = steps_of(job)
    assert first["n_targets"] == n
    assert first["loss"] == pytest.approx(total / n, rel=1e-4)

    def n_token_sets():
        return len(list((tmp_path / "cache/tokens").glob("*/*.json")))

    n_sets = n_token_sets()
    open_examples(resolve(make_job(tmp_path, **keys)), Heard())
    assert n_token_sets() == n_sets > 0
    with open(package / "tasks_of_ours.py", "a") as file:
        file.write("# another version\n")
    open_examples(resolve(make_job(tmp_path, **keys)), Heard())
    assert n_token_sets() == 2 * n_sets, "tokens of another version are not taken"


def test_versions_of_a_task_differ_by_any_file_of_its_package(package):
    (package / "tasks_of_ours.py").unlink()
    folder = package / "tasks_of_ours"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner/words.py").write_text("STEP = 2\n")
    text = "from tasks_of_ours.inner.words import STEP\n" + EVEN_WORDS.replace("% 2", "% STEP")
    (folder / "__init__.py").write_text(text)
    before = code_sha256("even-words")
    assert code_sha256("even-words") == before
    (folder / "inner/words.py").write_text("STEP = 3\n")
    assert code_sha256("even-words") != before
    assert code_sha256("causal-lm") == ""


def test_rows_of_a_foreign_task_that_it_can_not_read_are_named(package, tmp_path):
    path = write_job(tmp_path, data={"max_bad_rows": 0})
    text = (tmp_path / "data.jsonl").read_text()
    (tmp_path / "data.jsonl").write_text(text + '{"text": "no number", "stars": "four"}\n')
    with pytest.raises(InputError, match=r"data.jsonl:41: `stars` is no whole number from 1 to 5"):
        train(load_job(path))


def test_a_package_whose_task_can_not_be_used_is_named(package, tmp_path):
    for name, why in (("broken", "no farthing Objective"), ("gone", "ModuleNotFoundError")):
        with pytest.raises(InputError, match=why):
            find_objective(name)
    path = write_job(tmp_path)
    path.write_text(path.read_text().replace("task: stars", "task: starz"))
    with pytest.raises(JobError, match="`task` can't be 'starz'"):
        load_job(path)
    assert find_objective("nothing") is None
    with pytest.raises(InputError, match="there is no task `nothing`"):
        objective_of("nothing")


def test_a_task_says_nothing_that_is_not_read_and_its_name_is_its_own():
    ours, pairs = objective_of("causal-lm"), objective_of("dpo")
    register(ours)
    with pytest.raises(ValueError, match="another task"):
        register(ours._replace(max_length=3))
    with pytest.raises(ValueError, match="`figures` is not read"):
        register(ours._replace(name="other", figures=("margin",)))
    with pytest.raises(ValueError, match="`targets` is not read"):
        register(pairs._replace(name="other", targets=lambda rows: rows.ids))
    with pytest.raises(ValueError, match="`text` is not read"):
        register(pairs._replace(name="other", formats=ours.formats[-1:]))
    assert objective_names()[:3] == ("causal-lm", "seq2seq", "classification")


def test_labels_are_read_and_judged_as_their_tasks_say():
    classes, several, number = (
        objective_of(task).labels
        for task in ("classification", "multi-label-classification", "regression")
    )
    assert classes.read({"text": "a", "label": True}, {"true": "yes"}) == "yes"
    assert number.read({"text": "a", "score": "good"}, {"good": "4.5"}) == 4.5
    assert several.answers(torch.tensor([0.2, -0.2])).tolist() == [True, False]
    found = several.said(torch.tensor([0.0, 0.1]), ["a", "b"], [])
    shares = {"a": 0.5, "b": pytest.approx(1 / (1 + math.exp(-0.1)))}
    assert found == {"prediction": ["b"], "scores": shares}
    found = classes.said(torch.tensor([0.0, 0.1]), ["a", "b"], [])
    assert (found["prediction"], found["score"]) == ("b", shares["b"])
    assert number.said(torch.tensor([1.5]), ["LABEL_0"], []) == {"prediction": 1.5}
    for labels, problem in (
        (classes, "single_label_classification"),
        (several, "multi_label_classification"),
        (number, "regression"),
    ):
        config = transformers.BertConfig()
        labels.set_head(config, ["x", "y", "z"])
        names = ["LABEL_0"] if labels is number else ["x", "y", "z"]
        assert (config.problem_type, list(config.id2label.values())) == (problem, names)
        assert config.num_labels == len(config.label2id) == len(names)
    scores, wanted = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, -100])
    low, high = math.log1p(math.exp(-2)), math.log1p(math.exp(2))
    assert float(classes.loss(scores, wanted, 0.0)) == pytest.approx(low)
    assert float(classes.loss(scores, wanted, 0.2)) == pytest.approx(0.9 * low + 0.1 * high)
    both = several.loss(scores[:1], torch.tensor([[1, 1]]), 0.0)
    assert float(both) == pytest.approx((low + math.log(2)) / 2)
    assert float(number.loss(scores, torch.tensor([0.0, 3.0]), 0.0)) == 4 + 9
