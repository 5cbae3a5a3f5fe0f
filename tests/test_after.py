"""`farthing eval` and `farthing chat`: the model of a run beside what it began with."""

from __future__ import annotations

import io
import json
import math
import sys
import time
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from farthing.after import evaluation
from farthing.after.held_out import held_out_of
from farthing.after.judge import judge
from farthing.after.quantized import export_as
from farthing.errors import InputError, RunDamagedError
from farthing.export.folders import trained_model, untrained_model
from farthing.report.receipt import build_receipt
from farthing.run.folder import trained_on_chats
from farthing.tiny import write_jsonl
from thinned import thinned
from workshop import as_tokens, change_facts, make_job, read_json, rows_of, train, trained


def run_of(folder: Path, family: str) -> Path:
    """A run that has learned its rows, on a price."""
    return trained(
        folder,
        family,
        n_rows=60,
        eval_rows=rows_of(family, 12, 3),
        pretrained=True,
        method="lora",
        max_steps=25,
    )


@pytest.mark.parametrize("family", thinned(["llama", "bert", "t5"], 3))
def test_base_and_tuned_are_measured_on_the_same_examples(family, tmp_path, cli, monkeypatch):
    run = run_of(tmp_path, family)
    others = cli.json("eval", run, "--data", tmp_path / "data.jsonl")
    assert others["examples"] == "60 examples of data.jsonl"
    assert "| metric | after |" in (run / "model/README.md").read_text()
    found = cli.json("eval", run, "--base")
    assert found["n_examples"] == 12
    last = read_json(run / "receipt.json")
    if last["metrics"]:
        assert math.isclose(found["tuned"]["loss"], last["metrics"]["loss"], rel_tol=1e-4)
    assert found["tuned"]["loss"] < found["base"]["loss"]
    assert 0 < found["usd"] < 1
    gain = found["gains"]["loss"]
    assert math.isclose(gain["usd_per_point"], last["usd"] / (100 * gain["gain"]), rel_tol=0.5)
    if family == "t5":
        assert "rougeL" in found["tuned"]
    assert cli.json("report", run)["evaluation"]["tuned"] == found["tuned"]
    assert "## Before and after" in (run / "model/README.md").read_text()
    assert "dollars a point" in cli.out("report", run)

    def again(*_, **__):
        raise AssertionError("what was measured is measured again")

    monkeypatch.setattr(evaluation, "trained_model", again)
    assert cli.json("eval", run, "--base") == found


def test_parts_are_kept_as_they_are_done_and_their_gains_have_a_price(tmp_path):
    run = trained(tmp_path, eval_rows=rows_of("llama", 9, 3), max_steps=1)
    whole, asked = held_out_of(run), []
    figures = {"one": iter([{"loss": 2.0, "n": 1.0}, {"loss": 1.5}, {"loss": 1.0}])}
    figures["two"] = iter([{"acc": 0.5}, {"acc": 0.25}, {"acc": 0.75}, {"acc": 0.75}])

    def measured(model, part, progress):
        asked.append(part)
        if asked == ["one", "two", "one", "two"]:
            raise KeyboardInterrupt
        time.sleep(0.01)
        return next(figures[part])

    tasks = {"parts": ("one", "two"), "better": {"loss": False, "acc": True}, "of_part": measured}
    by = replace(evaluation.on_examples(whole), **tasks, kept_in="standard_tasks.json")
    with pytest.raises(KeyboardInterrupt):
        evaluation.evaluate_run(run, by, with_base=True)
    found, spent_usd = evaluation.evaluate_run(run, by, with_base=True), build_receipt(run).usd
    assert asked == ["one", "two", "one", "two", "two"], "what was done is not done again"
    assert found["base"] == {"loss": 2.0, "n": 1.0, "acc": 0.5}
    assert found["tuned"] == {"loss": 1.5, "acc": 0.25}
    assert found["gains"] == {
        "loss": {"gain": 0.5, "usd_per_point": pytest.approx(spent_usd / 50)},
        "acc": {"gain": -0.25, "usd_per_point": None},
    }
    assert 4e-5 < found["usd"] == found["spent_usd"] < 1e-2  # 0.04 s at 3.60 an hour
    assert "## Before and after, by standard tasks" in (run / "model/README.md").read_text()
    others = replace(by, sha256="others")
    more = evaluation.evaluate_run(run, others, with_base=False)
    assert (more["tuned"], "base" in more) == ({"loss": 1.0, "acc": 0.75}, False)
    assert more["spent_usd"] == pytest.approx(found["usd"] + more["usd"])
    cap_usd = spent_usd + more["spent_usd"]
    job = whole.spec.job
    limits = job.limits.model_copy(update={"max_usd": cap_usd})
    capped = job.model_copy(update={"limits": limits})
    for here in ({"kept_in": "evaluation.json"}, {"what": "other tasks"}):
        with pytest.raises(InputError, match="all that its job allows"):
            evaluation.evaluate_run(run, replace(others, job=capped, **here), with_base=False)


def test_few_held_out_examples_are_spread_evenly_and_a_file_is_taken_whole(tmp_path):
    held_out = {"eval_rows": rows_of("llama", 9, 3), "data": {"max_eval_samples": 8}}
    run = trained(tmp_path, **held_out, max_steps=1)
    few, most, file = (
        held_out_of(run, data, n)
        for data, n in ((None, 3), (None, 8), (tmp_path / "data.jsonl", 99))
    )
    assert [few.examples.indices.tolist(), len(most.examples), len(file.examples)] == [
        [0, 4, 7],
        8,
        32,
    ]
    assert [few.what, file.what] == ["3 held-out examples", "32 examples of data.jsonl"]
    assert len({evaluation.on_examples(each).sha256 for each in (few, most, file)}) == 3
    model = trained_model(run)
    verdict = judge(model, untrained_model(run), few)
    total, agreed, n, losses = 0.0, 0, 0, []
    for row in (rows_of("llama", 9, 3)[at] for at in (0, 4, 7)):
        ids, labels = as_tokens(few.spec.tokenizer, row)
        with torch.no_grad():
            p, q = (
                each(ids).logits[0, :-1][labels[0, 1:] >= 0].double().log_softmax(-1)
                for each in (model, untrained_model(run))
            )
        total, n = total + float((p.exp() * (p - q)).sum()), n + len(p)
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        losses.append(-p.gather(1, ids[0, 1:][labels[0, 1:] >= 0, None])[:, 0])
    loss = float(torch.cat(losses).mean())
    found = few.measure(model)
    assert found.pop("loss_stderr") > 0
    assert found == {
        "loss": pytest.approx(loss, rel=1e-5),
        "perplexity": pytest.approx(math.exp(loss), rel=1e-4),
        "document_loss": pytest.approx(sum(float(x.mean()) for x in losses) / 3, rel=1e-5),
        "n_examples": 3,
    }
    assert verdict.mean_kl == pytest.approx(total / n, rel=1e-6)
    assert (verdict.top1_agreement, verdict.n_examples, verdict.n_targets) == (agreed / n, 3, n)
    assert verdict.merged["loss"] < verdict.compressed["loss"]
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    assert judge(untrained_model(run), model, few).mean_kl == math.inf


def test_a_cap_that_is_spent_is_kept(tmp_path, cli):
    run = trained(
        tmp_path, eval_rows=rows_of("llama", 4, 3), max_steps=2, limits={"max_usd": 1000.0}
    )
    values = read_json(run / "job.json")
    values["limits"]["max_usd"] = 1e-9
    values["where"]["device"] = "cuda"  # it may be measured where no GPU is
    (run / "job.json").write_text(json.dumps(values))
    change_facts(run, job_sha256=None)
    assert "all that its job allows" in cli.err("eval", run)
    assert not (run / "evaluation.json").exists()


def test_standard_tasks_need_lm_eval(tmp_path, monkeypatch, cli):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "farthing[eval]" in cli.err("eval", tmp_path, "--tasks", "arc_easy")


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
def test_tasks_of_lm_eval_have_its_own_figures(tmp_path, cli):
    lm_eval = pytest.importorskip("lm_eval", reason="pip install 'farthing[eval]'")
    from lm_eval.models.huggingface import HFLM

    run, folder = run_of(tmp_path, "llama"), tmp_path / "tasks"
    folder.mkdir()
    rows = write_jsonl(folder / "rows.jsonl", rows_of("llama", 12, 3))
    for name, values in LM_EVAL_TASKS.items():
        data = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(rows)}},
            "test_split": "test",
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **data, **values}))
    said = cli.out("eval", run, "--tasks", folder, "--base", "--json")
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
    assert "no task 'no_such_task'" in cli.err("eval", run, "--tasks", "no_such_task")


def test_a_chat_needs_words(tmp_path, monkeypatch, cli):
    cli("chat", tmp_path / "none", code=2)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    cli("chat", tmp_path, code=2)


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "is_chat"),
    [
        ({"messages": [USER, ANSWER]}, True),
        ({"prompt": "a", "completion": "b"}, False),
    ],
)
def test_a_model_is_asked_by_the_template_where_its_rows_were_rendered_by_it(
    row, is_chat, tmp_path
):
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}<s>{% endfor %}"
    asked = "{% if add_generation_prompt %}assistant: {% endif %}"
    (tmp_path / "turns.jinja").write_text(turns + asked)
    data = {"chat_template": "turns.jinja"}
    job = make_job(tmp_path, rows=[row] * 4, max_steps=1, data=data, method="lora")
    train(job)
    stops = read_json(Path(job.output_dir) / "model/generation_config.json")["eos_token_id"]
    assert stops == ([2, 1] if is_chat else 2)  # <s> ends a turn
    assert trained_model(Path(job.output_dir)).generation_config.eos_token_id == stops
    if find_spec("gguf"):
        export_as(Path(job.output_dir), tmp_path / "out", "gguf")
        fields = import_module("gguf").GGUFReader(tmp_path / "out/model.gguf").fields
        named = fields.get("tokenizer.ggml.eot_token_id")
        assert (named and named.contents()) == (1 if is_chat else None)
    for path in job.data.train:
        Path(path).unlink()
    assert trained_on_chats(Path(job.output_dir)) is is_chat
    (Path(job.output_dir) / "run.json").unlink()
    with pytest.raises(RunDamagedError, match="how the model is asked"):
        trained_on_chats(Path(job.output_dir))
