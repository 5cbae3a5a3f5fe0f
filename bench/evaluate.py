"""An evaluation by farthing beside that of transformers on the same rows, in CPU-seconds: loss,
classes, written texts.

    python bench/evaluate.py --json evaluation.json            # all three tasks, drawn texts, two
    rounds
    python bench/evaluate.py --tasks seq2seq --data FILE.jsonl # real texts

`transformers` is `Trainer.evaluate` as it comes (8 rows at a time), for seq2seq
`Seq2SeqTrainer.evaluate` with
`predict_with_generate`; `--peer-batch` gives it another number of rows. Each is a process of its
own with the model loaded and one small evaluation done before the clock runs; they take turns. The
losses must agree to 1e-3, else nothing is reported: transformers takes the mean of its batches'
means.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from peers import models, workloads
from peers.assignment import Assignment, Examples
from peers.race import MALLOC

WORKLOADS = {"causal": "short", "classes": "classes", "seq2seq": "seq2seq"}
N_WARM = 4  # rows of the evaluation before the clock runs
N_TRAIN = 96  # not used, but for the names of the classes


def ours(folder: Path, asked: argparse.Namespace, task: str) -> dict[str, Any]:
    """farthing's evaluation: metrics, and the CPU-seconds it took."""
    import transformers

    from farthing.config.load import load_job
    from farthing.model.forward import Forward
    from farthing.model.hardware import Numerics
    from farthing.train.evaluate import Writing, evaluate
    from farthing.train.setup import open_examples, open_inputs
    from peers.ours import job_values, write_job

    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    shape = facts["workload"]
    assignment = Assignment(
        contestant="farthing",
        folder=str(folder),
        out=str(folder / "evaluating"),
        task=task,
        method="full",
        precision="fp32",
        order=[[0] * facts["train"]["examples"]],
        epochs=1,
        seed=0,
        max_length=shape["max_length"],
        max_target_length=shape["max_target_length"],
        learning_rate=1e-3,
        targets=[],
        columns=dict(facts["given"]["columns"]),
    )
    values = job_values(assignment, cache_dir=str(folder / "cache"))
    values["data"] |= {"eval": str(folder / "eval.jsonl"), "max_eval_samples": asked.examples}
    job = load_job(write_job(Path(assignment.out), values))
    _, held_out = open_examples(job, open_inputs(job), lambda event: None, lambda: False)
    assert held_out is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    forward = Forward(
        models.load(assignment), task, tokenizer.pad_token_id, Numerics(torch.device("cpu"), None)
    )
    writing = Writing(tokenizer, asked.new_tokens) if asked.new_tokens else None

    def once(n: int) -> dict[str, Any]:
        return evaluate(
            forward, held_out.tokens, held_out.indices[:n], micro_batch_tokens=2048, writing=writing
        )

    once(N_WARM)
    started = time.process_time()
    metrics = once(len(held_out.indices))
    return {
        "cpu_s": time.process_time() - started,
        "loss": metrics["loss"],
        "n": len(held_out.indices),
    }


def theirs(folder: Path, asked: argparse.Namespace, task: str) -> dict[str, Any]:
    """The evaluation of transformers' trainers: the same."""
    import datasets
    import transformers

    logging.disable(logging.WARNING)
    rows = Examples.load(folder / "eval.npz")
    n = min(len(rows), asked.examples)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model = models.auto_class(task).from_pretrained(folder / "model", dtype=torch.float32)
    options: dict[str, Any] = {
        "output_dir": str(folder / "evaluating"),
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "per_device_eval_batch_size": asked.peer_batch,
    }
    judges: dict[str, Any] = {}
    kind, arguments = transformers.Trainer, transformers.TrainingArguments
    collator: Any = transformers.DataCollatorForSeq2Seq(tokenizer, model=model, padding=True)
    if task == "classification":
        collator = transformers.DataCollatorWithPadding(tokenizer)
    if task == "seq2seq" and asked.new_tokens:
        kind, arguments = transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments
        options |= {"predict_with_generate": True}
        model.generation_config.max_new_tokens = asked.new_tokens
        judges["compute_metrics"] = (
            lambda found: {}
        )  # without any it takes the loss alone, and writes nothing
    trainer = kind(
        model=model,
        args=arguments(**options),
        data_collator=collator,
        processing_class=tokenizer,
        **judges,
    )
    data = datasets.Dataset.from_list(rows.rows(list(range(n))))
    trainer.evaluate(data.select(range(N_WARM)))
    started = time.process_time()
    metrics = trainer.evaluate(data)
    return {"cpu_s": time.process_time() - started, "loss": metrics["eval_loss"], "n": n}


def measured(folder: Path, asked: argparse.Namespace, task: str, who: str) -> dict[str, Any]:
    """What a process of this contestant has found."""
    python = sys.executable if who == "ours" else str(asked.peers_python)
    words = [python, __file__, "--child", who, "--folder", str(folder), "--tasks", task]
    words += [
        "--examples",
        str(asked.examples),
        "--new-tokens",
        str(asked.new_tokens),
        "--peer-batch",
        str(asked.peer_batch),
    ]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = os.environ | MALLOC | threads | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{who} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(asked: argparse.Namespace, task: str, new_tokens: int) -> dict[str, Any]:
    """Both on the rows of a task, in turns; medians and their ratio."""
    shape = workloads.WORKLOADS[WORKLOADS[task]]
    given = workloads.Given(asked.data)
    folder, _ = workloads.prepare(
        asked.folder.resolve(), shape, workloads.Size(), N_TRAIN, asked.examples, given
    )
    asked.new_tokens = new_tokens
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "transformers": []}
    for _ in range(asked.rounds):
        for who, found in runs.items():
            found.append(measured(folder, asked, shape.task, who))
    losses = [found[-1]["loss"] for found in runs.values()]
    if abs(losses[0] - losses[1]) > 1e-3 * abs(losses[1]):
        raise SystemExit(
            f"{task}: the losses are {losses[0]} and {losses[1]}: not the same rows or not the same"
            " model"
        )
    seconds = {who: median(run["cpu_s"] for run in found) for who, found in runs.items()}
    return {
        "task": task,
        "written_tokens": new_tokens,
        "rows": runs["ours"][0]["n"],
        "losses": losses,
        "cpu_s": seconds,
        "ratio": seconds["ours"] / seconds["transformers"],
        "runs": runs,
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description="an evaluation beside that of transformers")
    parser.add_argument("--tasks", nargs="+", default=list(WORKLOADS), metavar="TASK")
    parser.add_argument(
        "--data", default="", metavar="FILE.jsonl", help="texts of one task instead of drawn ones"
    )
    parser.add_argument("--examples", type=int, default=96)
    parser.add_argument(
        "--new-tokens", type=int, default=16, help="written for each row of seq2seq"
    )
    parser.add_argument("--peer-batch", type=int, default=8, help="rows at a time of transformers")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("build/evaluate"))
    parser.add_argument("--peers-python", type=Path, default=Path(".venv/peers/bin/python"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", choices=("ours", "transformers"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        torch.set_num_threads(1)
        run = ours if asked.child == "ours" else theirs
        print(json.dumps(run(asked.folder, asked, asked.tasks[0])))
        return
    wanted = [(task, 0) for task in asked.tasks]
    wanted += (
        [("seq2seq", asked.new_tokens)] if "seq2seq" in asked.tasks and asked.new_tokens else []
    )
    found = [compare(asked, task, n) for task, n in wanted]
    for row in found:
        ours_s, theirs_s = row["cpu_s"].values()
        words = (
            f"{row['task']}, {row['rows']} rows"
            + f", {row['written_tokens']} tokens written" * bool(row["written_tokens"])
        )
        print(
            f"{words:40} {ours_s:7.2f} s, transformers {theirs_s:7.2f} s: {row['ratio']:.2f}  "
            f" losses {row['losses']}"
        )
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
