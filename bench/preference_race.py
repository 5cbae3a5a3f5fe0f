"""DPO by farthing and by TRL on one CPU: useful tokens a CPU-second, peak memory, loss.

    python bench/preference_race.py --data PAIRS.jsonl [--methods full lora] [--json]

Both train the same small Llama on the same rows (prompt, chosen and rejected as texts), with the
same batch, rate and three epochs, one thread each, one after the other. TRL is at its best here:
references precomputed, and the quickest of the micro-batches 1, 2 and 4. CPU-seconds are of the
process from the first reference on; useful tokens are those of both answers with their prompts.
TRL shuffles in another way, so losses of the last epoch are compared by their mean.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import lines_of, play, write_job

LIMIT = 0.02  # how far the mean losses of the last epoch may be apart, relative
EPOCHS, BATCH = 3, 8
RATES = {"full": 1e-5, "lora": 1e-4}
JOB = """
objective: {name: dpo, beta: 0.1}
data: {max_length: 512}
where: {device: cpu}
train: {num_train_epochs: 3, global_batch_size: 8, lr_scheduler_type: constant, warmup_ratio: 0.0}
output_dir: ./run
cache_dir: ./cache
"""


def ours(asked: dict[str, Any]) -> dict[str, Any]:
    """Train by farthing."""
    from farthing.config.load import load_job
    from farthing.events import Event, StepTaken, Working
    from farthing.train.run import train

    marks, losses = list[float](), list[float | None]()

    def emit(event: Event) -> None:
        if (isinstance(event, Working) and "scoring" in event.on) or isinstance(event, StepTaken):
            marks.append(time.process_time())
        if isinstance(event, StepTaken):
            losses.append(event.loss)

    train(load_job(Path(asked["job"])), emit)
    return {"cpu_s": marks[-1] - marks[0], "losses": losses}


def theirs(asked: dict[str, Any]) -> dict[str, Any]:
    """Train by TRL."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    torch.set_num_threads(1)
    peft = None
    if asked["method"] == "lora":
        from peft import LoraConfig

        peft = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    config = DPOConfig(
        output_dir=asked["out"],
        per_device_train_batch_size=asked["micro_batch"],
        gradient_accumulation_steps=BATCH // asked["micro_batch"],
        num_train_epochs=EPOCHS,
        learning_rate=RATES[asked["method"]],
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
    marks, precompute = list[float](), DPOTrainer._precompute_ref_logps

    def marked(*given: Any, **named: Any) -> Any:
        marks.append(time.process_time())
        return precompute(*given, **named)

    DPOTrainer._precompute_ref_logps = marked
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(lines_of(Path(asked["data"]))),
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
        peft_config=peft,
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {"cpu_s": time.process_time() - marks[0], "losses": losses}


def prepare(folder: Path, data: Path, method: str) -> int:
    """The job, and the model with its first weights; how many tokens the rows have."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from farthing.config.load import load_job
    from farthing.train.resolve import open_examples, resolve
    from small_models import make_model_folder

    texts = data.read_text(encoding="utf-8").splitlines()
    make_model_folder(folder / "model", texts, "llama", hidden=256, layers=6)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
    made.save_pretrained(folder / "model")
    its = {"model": "./model", "method": method, "train": {"learning_rate": RATES[method]}}
    job = write_job(folder, JOB, data={"train": str(data)}, **its)
    train, _ = open_examples(resolve(load_job(job)), lambda event: None)
    return int(train.tokens.lengths.sum())


def race(method: str, asked: argparse.Namespace) -> dict[str, Any]:
    """farthing, and TRL with each micro-batch; the quickest of TRL counts."""
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), asked.data.resolve()
        n_tokens = EPOCHS * prepare(folder, data, method)

        def run(python: str, micro_batch: int = 0) -> dict[str, Any]:
            told = {"job": folder / "job.yaml", "model": folder / "model", "out": folder / "trl"}
            told |= {"data": data, "method": method, "micro_batch": micro_batch}
            words = [python, __file__, "--work", json.dumps(told, default=str)]
            done = subprocess.run(words, check=True, stdout=subprocess.PIPE)
            return dict(json.loads(done.stdout.splitlines()[-1]))

        mine, *trl = run(sys.executable), *(run(str(asked.peers_python), n) for n in (1, 2, 4))
    best = min(trl, key=lambda one: one["cpu_s"])
    n_last = max(1, len(mine["losses"]) // EPOCHS)
    last = [sum(one["losses"][-n_last:]) / n_last for one in (mine, best)]
    memory = mine["peak_bytes"] / min(one["peak_bytes"] for one in trl)
    said = (
        f"{method}: {n_tokens / mine['cpu_s']:.0f} useful tokens a CPU-second,"
        f" {best['cpu_s'] / mine['cpu_s']:.2f} times TRL's, {memory:.2f} of its memory, losses"
        f" {last[0]:.4f} and {last[1]:.4f}"
    )
    is_same = abs(last[0] - last[1]) <= LIMIT * max(last)
    return {"method": method, "said": said, "ok": is_same, "farthing": mine, "trl": best}


def main() -> int:
    """Race, and print ratios."""
    if sys.argv[1:2] == ["--work"]:
        from peers.clock import peak_bytes

        asked = json.loads(sys.argv[2])
        found = theirs(asked) if asked["micro_batch"] else ours(asked)
        print(json.dumps({**found, "peak_bytes": peak_bytes()}))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, type=Path, metavar="FILE.jsonl")
    parser.add_argument("--methods", nargs="+", default=["lora", "full"], choices=tuple(RATES))
    parser.add_argument("--peers-python", type=Path, default=Path(".venv/peers/bin/python"))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    return play(given.methods, lambda method: race(method, given), given.json)


if __name__ == "__main__":
    sys.exit(main())
