"""DPO by farthing and by TRL on one CPU: useful tokens a CPU-second, peak memory, loss.

    python bench/compare.py --workload preference --data PAIRS.jsonl [--methods full lora]
    [--epochs 3] [--batch 8] [--json FILE]

Both train the same small Llama (or `--model`) on the same rows, with the same batch, rate and
epochs, one thread each, one after the other. TRL is at its best here: references precomputed, and
the quickest of the micro-batches `--trl-batches`. CPU-seconds are of the process from the first
reference on; useful tokens are those of both answers with their prompts.
TRL shuffles in another way, so losses of the last epoch are compared by their mean.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMIT = 0.02  # how far the mean losses of the last epoch may be apart, relative


def ours(asked: dict[str, Any]) -> dict[str, Any]:
    """Train by farthing."""
    import torch
    import yaml

    from farthing.config.load import load_job
    from farthing.events import Event, StepTaken, Working
    from farthing.train.run import train

    torch.set_num_threads(1)
    folder, marks, losses = Path(asked["folder"]), {}, []

    def emit(event: Event) -> None:
        if isinstance(event, Working) and "scoring" in event.on:
            marks.setdefault("began", time.process_time())
        if isinstance(event, StepTaken):
            marks["ended"] = time.process_time()
            marks["tokens"] = marks.get("tokens", 0) + event.n_tokens
            losses.append(event.loss)

    job = {
        "objective": {"name": "dpo", "beta": 0.1},
        "model": asked["model"],
        "data": {"train": asked["data"], "max_length": asked["max_length"]},
        "method": asked["method"],
        "where": {"device": "cpu"},
        "train": {
            "num_train_epochs": asked["epochs"],
            "global_batch_size": asked["batch"],
            "learning_rate": asked["rate"],
            "lr_scheduler_type": "constant",
            "warmup_ratio": 0.0,
        },
        "output_dir": str(folder / "run"),
        "cache_dir": str(folder / "cache"),
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    train(load_job(folder / "job.yaml"), emit)
    return {"cpu_s": marks["ended"] - marks["began"], "tokens": marks["tokens"], "losses": losses}


def theirs(asked: dict[str, Any]) -> dict[str, Any]:
    """Train by TRL, of rows with the columns prompt, chosen and rejected as texts."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    torch.set_num_threads(1)
    folder = Path(asked["folder"])
    rows = [json.loads(line) for line in Path(asked["data"]).read_text("utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    peft = None
    if asked["method"] == "lora":
        from peft import LoraConfig

        peft = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    losses: list[float] = []

    class Note(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in (logs or {}):
                losses.append(float(logs["loss"]))

    config = DPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=asked["micro_batch"],
        gradient_accumulation_steps=asked["batch"] // asked["micro_batch"],
        num_train_epochs=asked["epochs"],
        learning_rate=asked["rate"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_grad_norm=1.0,
        weight_decay=0.0,
        beta=0.1,
        max_length=None,
        precompute_ref_log_probs=True,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        optim="adamw_torch_fused",
    )
    marks: dict[str, float] = {}
    precompute = DPOTrainer._precompute_ref_logps

    def marked(*given: Any, **named: Any) -> Any:
        marks.setdefault("began", time.process_time())
        return precompute(*given, **named)

    DPOTrainer._precompute_ref_logps = marked
    trainer = DPOTrainer(
        model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=peft,
        callbacks=[Note()],
    )
    trainer.train()
    ended = time.process_time()
    tokens = asked["epochs"] * asked["n_tokens"]
    return {"cpu_s": ended - marks["began"], "tokens": tokens, "losses": losses}


def work(path: str) -> None:
    """One contestant in its own process."""
    asked = json.loads(Path(path).read_text())
    found = (ours if asked["by"] == "farthing" else theirs)(asked)
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    Path(path).with_suffix(".result.json").write_text(json.dumps(found))


def prepare(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """The model with its first weights, and how many tokens the rows have."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from farthing.config.load import load_job
    from farthing.train.resolve import open_examples, resolve
    from small_models import make_model_folder

    model = Path(asked.model) if asked.model else folder / "model"
    if not asked.model:
        texts = Path(asked.data).read_text(encoding="utf-8").splitlines()
        make_model_folder(model, texts, "llama", hidden=asked.hidden, layers=asked.layers)
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        made.save_pretrained(model)
    (folder / "job.yaml").write_text(
        json.dumps(
            {
                "objective": "dpo",
                "model": str(model),
                "data": {"train": str(Path(asked.data).resolve()), "max_length": asked.max_length},
                "output_dir": str(folder / "none"),
                "cache_dir": str(folder / "cache"),
            }
        )
    )
    job = load_job(folder / "job.yaml")
    train, _ = open_examples(resolve(job), lambda event: None)
    return {
        "model": str(model),
        "data": str(Path(asked.data).resolve()),
        "n_tokens": int(train.tokens.lengths.sum()),
    }


def race(folder: Path, asked: argparse.Namespace, method: str) -> dict[str, Any]:
    """farthing, and TRL with each micro-batch; the quickest of TRL counts."""
    common = {
        **prepare(folder, asked),
        "method": method,
        "epochs": asked.epochs,
        "batch": asked.batch,
        "max_length": asked.max_length,
        "rate": 1e-5 if method == "full" else 1e-4,
    }

    def run(by: str, python: str, **more: Any) -> dict[str, Any]:
        place = folder / f"{method}-{by}-{more.get('micro_batch', 0)}"
        place.mkdir()
        path = place / "asked.json"
        path.write_text(json.dumps({**common, "by": by, "folder": str(place), **more}))
        subprocess.run([python, __file__, "--work", str(path)], check=True, stdout=sys.stderr)
        found = json.loads(path.with_suffix(".result.json").read_text())
        return {**found, **more, "tokens_per_cpu_s": found["tokens"] / found["cpu_s"]}

    mine = run("farthing", sys.executable)
    batches = [n for n in asked.trl_batches if asked.batch % n == 0]
    trl = [run("trl", str(asked.peers_python), micro_batch=n) for n in batches]
    best = max(trl, key=lambda one: one["tokens_per_cpu_s"])
    n_last = max(1, len(mine["losses"]) // asked.epochs)
    last = [sum(one["losses"][-n_last:]) / n_last for one in (mine, best)]
    return {
        "method": method,
        "speed": mine["tokens_per_cpu_s"] / best["tokens_per_cpu_s"],
        "memory": mine["peak_bytes"] / min(one["peak_bytes"] for one in trl),
        "losses": last,
        "is_same_loss": abs(last[0] - last[1]) <= LIMIT * max(last),
        "farthing": {key: mine[key] for key in ("cpu_s", "tokens", "peak_bytes")},
        "trl": {key: best[key] for key in ("cpu_s", "tokens", "peak_bytes", "micro_batch")},
    }


def main(words: list[str]) -> int:
    """Race, and print ratios."""
    parser = argparse.ArgumentParser(description="DPO by farthing and by TRL")
    parser.add_argument("--data", required=True, metavar="FILE.jsonl")
    parser.add_argument("--model", default="")
    parser.add_argument("--methods", nargs="+", default=["lora", "full"], choices=("lora", "full"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--trl-batches", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--peers-python", type=Path, default=Path(".venv/peers/bin/python"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args(words)
    found = []
    for method in asked.methods:
        with tempfile.TemporaryDirectory() as folder:
            found.append(race(Path(folder), asked, method))
        one = found[-1]
        print(
            f"{method}: {one['speed']:.2f} times TRL's useful tokens a CPU-second,"
            f" {one['memory']:.2f} of its memory, losses {one['losses'][0]:.4f} and"
            f" {one['losses'][1]:.4f}",
            flush=True,
        )
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))
    return 0 if all(one["is_same_loss"] for one in found) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1:]))
