"""`farthing eval` and `farthing chat`: the model of a run beside what it began with."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import workshop
from farthing.after import evaluation
from farthing.cli import main
from farthing.errors import InputError, RunDamagedError
from farthing.report.receipt import build_receipt
from farthing.run.folder import kept, trained_on_chats
from thinned import thinned


def run_of(folder: Path, family: str) -> Path:
    """A run that has learned its rows, on a price."""
    job = workshop.make_job(
        folder,
        family,
        n_rows=60,
        eval_rows=workshop.rows_of(family, 12, 3),
        pretrained=True,
        method="lora",
        max_steps=25,
    )
    workshop.train(job)
    return Path(job.output_dir)


@pytest.mark.parametrize("family", thinned(["llama", "bert", "t5"], 3))
def test_base_and_tuned_are_measured_on_the_same_examples(family, tmp_path, capsys, monkeypatch):
    run = run_of(tmp_path, family)
    assert main(["eval", str(run), "--base", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["n_examples"] == 12
    last = json.loads((run / "receipt.json").read_text())
    if last["metrics"]:
        assert math.isclose(found["tuned"]["loss"], last["metrics"]["loss"], rel_tol=1e-4)
    assert found["tuned"]["loss"] < found["base"]["loss"]
    gain = found["gains"]["loss"]
    assert math.isclose(gain["usd_per_point"], last["usd"] / (100 * gain["gain"]), rel_tol=0.5)
    if family == "t5":
        assert "rougeL" in found["tuned"]
    assert main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["evaluation"]["tuned"] == found["tuned"]
    assert "## Before and after" in (run / "model/README.md").read_text()
    assert main(["report", str(run)]) == 0
    assert "dollars a point" in capsys.readouterr().out

    def again(*_, **__):
        raise AssertionError("what was measured is measured again")

    monkeypatch.setattr(evaluation, "trained_model", again)
    assert main(["eval", str(run), "--base", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert main(["export", str(run), "--output", str(tmp_path / "out"), "--format", "adapter"]) == 0


def evaluation_set(run: Path) -> evaluation.Measure:
    """The held-out examples of a run."""
    from farthing.after.held_out import held_out_of

    return evaluation.on_examples(held_out_of(run))


def two_tasks(
    run: Path, asked: list[str], *, is_torn: bool = False, **others: Any
) -> evaluation.Measure:
    """The same examples as two tasks, of which the second can be torn; `asked` becomes what was
    measured.
    """
    whole = evaluation_set(run)

    def measured(model: Any, part: str, progress: Any) -> dict[str, Any]:
        asked.append(part)
        if part == "two" and is_torn:
            raise KeyboardInterrupt
        return {f"{part} loss": whole.of_part(model, part, progress)["loss"]}

    better = {"one loss": False, "two loss": False}
    tasks = {"parts": ("one", "two"), "better": better, "of_part": measured}
    return replace(whole, **{**tasks, "kept_in": "standard_tasks.json", **others})


@pytest.mark.slow
def test_tasks_are_kept_one_by_one_beside_the_examples_and_shown(tmp_path, capsys):
    run = run_of(tmp_path, "llama")
    assert main(["eval", str(run), "--base"]) == 0
    with pytest.raises(KeyboardInterrupt):
        evaluation.evaluate_run(run, two_tasks(run, [], is_torn=True), with_base=False)
    asked: list[str] = []
    found = evaluation.evaluate_run(run, two_tasks(run, asked), with_base=True)
    assert asked == ["one", "two", "two"], "of the tuned model one was done"
    assert found["gains"]["two loss"]["gain"] == pytest.approx(
        found["base"]["two loss"] - found["tuned"]["two loss"]
    )
    receipt = build_receipt(run)
    assert receipt.evaluation is not None
    assert receipt.standard_tasks is not None
    card = (run / "model" / "README.md").read_text()
    assert card.index("## Before and after\n") < card.index(
        "## Before and after, by standard tasks"
    )
    others = two_tasks(run, [], what="other tasks")
    more = evaluation.evaluate_run(run, others, with_base=False)
    spent = (kept(run / "standard_tasks.json") or {})["spent_usd"]
    assert spent == pytest.approx(found["usd"] + more["usd"]), (
        "what others have cost counts for the cap"
    )
    values = json.loads((run / "job.json").read_text())
    values["limits"]["max_usd"] = receipt.usd + receipt.evaluation["usd"] + found["usd"]
    (run / "job.json").write_text(json.dumps(values))
    workshop.change_facts(run, job_sha256=None)
    again = two_tasks(run, [], what="three tasks", parts=("one", "two", "three"))
    with pytest.raises(InputError, match="all that its job allows"):
        evaluation.evaluate_run(run, again, with_base=False)


def test_a_cap_that_is_spent_is_kept(tmp_path, capsys):
    job = workshop.make_job(
        tmp_path, eval_rows=workshop.rows_of("llama", 4, 3), max_steps=2, limits={"max_usd": 1000.0}
    )
    workshop.train(job)
    run = Path(job.output_dir)
    values = json.loads((run / "job.json").read_text())
    values["limits"]["max_usd"] = 1e-9
    (run / "job.json").write_text(json.dumps(values))
    workshop.change_facts(run, job_sha256=None)
    assert main(["eval", str(run)]) == 2
    assert "all that its job allows" in capsys.readouterr().err
    assert not (run / "evaluation.json").exists()


@pytest.mark.slow
def test_data_of_ones_own_is_measured_instead(tmp_path, capsys):
    run = run_of(tmp_path, "bert")
    other = workshop.write_jsonl(tmp_path / "other.jsonl", workshop.rows_of("bert", 7, 1))
    assert main(["eval", str(run), "--data", str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["n_examples"], found["examples"]) == (7, "7 examples of other.jsonl")
    assert main(["eval", str(run), "--data", str(tmp_path / "none.jsonl")]) == 2


def test_standard_tasks_need_lm_eval(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    assert main(["eval", str(tmp_path), "--tasks", "arc_easy"]) == 2
    assert "farthing[eval]" in capsys.readouterr().err


LM_EVAL_TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": 0,
        "doc_to_choice": "{{[completion, completion[::-1]]}}",
        "metric_list": [
            {"metric": each, "aggregation": "mean", "higher_is_better": True}
            for each in ("acc", "acc_norm")
        ],
    },
    "writing": {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{completion}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "surprise": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{completion}}",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}
        ],
    },
}


@pytest.mark.slow
def test_tasks_of_lm_eval_have_its_own_figures(tmp_path, capsys):
    lm_eval = pytest.importorskip("lm_eval", reason="pip install 'farthing[eval]'")
    from lm_eval.models.huggingface import HFLM

    run, folder = run_of(tmp_path, "llama"), tmp_path / "tasks"
    folder.mkdir()
    rows = workshop.write_jsonl(folder / "rows.jsonl", workshop.rows_of("llama", 12, 3))
    for name, values in LM_EVAL_TASKS.items():
        data = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(rows)}},
            "test_split": "test",
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **data, **values}))
    assert main(["eval", str(run), "--tasks", str(folder), "--base", "--json"]) == 0
    said = capsys.readouterr().out
    found = json.loads(said[said.index("{") :])
    manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
    for side, more in (("base", {}), ("tuned", {"peft": str(run / "model")})):
        asked = HFLM(pretrained=str(tmp_path / "base"), dtype="float32", device="cpu", **more)
        own = lm_eval.simple_evaluate(model=asked, tasks=list(LM_EVAL_TASKS), task_manager=manager)[
            "results"
        ]
        for name, metric in (
            ("choice", "acc"),
            ("choice", "acc_norm"),
            ("writing", "exact_match"),
            ("surprise", "perplexity"),
        ):
            assert found[side][f"{name} {metric}"] == own[name][f"{metric},none"], (
                side,
                name,
                metric,
            )
    assert found["tuned"]["surprise perplexity"] < found["base"]["surprise perplexity"]
    assert main(["eval", str(run), "--tasks", "no_such_task"]) == 2
    assert "no task 'no_such_task'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_a_model_answers_in_its_own_way(family, tmp_path, capsys):
    run = run_of(tmp_path, family)
    row = workshop.rows_of(family, 1)[0]
    prompt = row.get("prompt") or row.get("input") or row["text"]
    assert (
        main(["chat", str(run), "--prompt", prompt, "--base", "--json", "--max-tokens", "24"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["prompt"] == prompt
    if family == "bert":
        assert found["tuned"]["label"] == row["label"]
        assert math.isclose(sum(found["tuned"]["probabilities"].values()), 1, rel_tol=1e-5)
    else:
        assert found["tuned"]["text"] != found["base"]["text"]
        assert "<s>" not in found["tuned"]["text"]
    if family == "llama":
        assert found["tuned"]["text"].startswith(" ")
        assert "serves" in found["tuned"]["text"]
    assert main(["chat", str(run), "--prompt", prompt, "--max-tokens", "24"]) == 0
    said = capsys.readouterr().out
    assert (found["tuned"].get("text") or found["tuned"]["label"]) in said


def test_a_chat_needs_words(tmp_path, monkeypatch):
    import io
    import sys

    assert main(["chat", str(tmp_path / "none")]) == 2
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert main(["chat", str(tmp_path)]) == 2


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "is_chat"),
    [
        ({"messages": [USER, ANSWER]}, True),
        ({"prompt": "a", "completion": "b"}, False),
        pytest.param({"instruction": "a", "output": "b"}, True, marks=pytest.mark.slow),
        pytest.param({"prompt": [USER], "completion": [ANSWER]}, True, marks=pytest.mark.slow),
        pytest.param({"text": "a"}, False, marks=pytest.mark.slow),
    ],
)
def test_a_model_is_asked_by_the_template_where_its_rows_were_rendered_by_it(
    row, is_chat, tmp_path
):
    job = workshop.make_job(tmp_path, rows=[row] * 4, max_steps=1)
    workshop.train(job)
    for path in job.data.train:
        Path(path).unlink()
    assert trained_on_chats(Path(job.output_dir)) is is_chat
    (Path(job.output_dir) / "run.json").unlink()
    with pytest.raises(RunDamagedError, match="how the model is asked"):
        trained_on_chats(Path(job.output_dir))
