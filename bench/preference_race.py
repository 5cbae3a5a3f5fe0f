"""DPO by farthing and by TRL: useful tokens a second, peak memory, loss.

    python bench/preference_race.py --data PAIRS.jsonl [--methods full lora] [--json]
    python bench/preference_race.py --model meta-llama/Llama-3.2-1B [--rows 96]     on a GPU

Both train the same Llama on the same rows (prompt, chosen and rejected as texts), with the same
batch, rate and three epochs, one after the other: a small one on a CPU, in fp32 and CPU-seconds of
one thread, or with `--model` one of these sizes on a GPU, random, in bf16 and seconds. Without
`--data` rows are drawn. TRL is at its best here: references precomputed, and the quickest of some
micro-batches. Time begins with the first reference, and once more after the first epoch, when
everything is warm. Useful tokens are those of both answers with their prompts. TRL shuffles in
another way, so losses of the last epoch are compared by their mean.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import lines_of, play, write_job
from farthing.tiny import demo_rows, write_jsonl

LIMIT = 0.02  # how far the mean losses of the last epoch may be apart, relative
EPOCHS, BATCH = 3, 8
RATES = {"full": 1e-5, "lora": 1e-4}
MICRO_BATCHES = {"cpu": (1, 2, 4), "cuda": (4, 8)}
MEAN_WORDS = {"prompt": 300, "chosen": 150, "rejected": 150}
JOB = """
objective: {name: dpo, beta: 0.1}
data: {max_length: 2048}
train: {num_train_epochs: 3, global_batch_size: 8, lr_scheduler_type: constant, warmup_ratio: 0.0}
output_dir: ./run
cache_dir: ./cache
"""


class Marks:
    """When the work began and when each step had ended, by the clock of the device."""

    def __init__(self, device: str) -> None:
        self._is_cpu, self.at = device == "cpu", list[float]()

    def add(self) -> None:
        """Now."""
        import torch

        if not self._is_cpu:
            torch.cuda.synchronize()
        self.at.append(time.process_time() if self._is_cpu else time.perf_counter())

    def facts(self, losses: list[Any]) -> dict[str, Any]:
        """Seconds of everything and of what follows the first epoch; the most memory."""
        import torch

        from peers.clock import peak_bytes

        peak = peak_bytes() if self._is_cpu else torch.cuda.max_memory_allocated()
        warm = self.at[-1] - self.at[len(losses) // EPOCHS]
        whole = self.at[-1] - self.at[0]
        return {"whole_s": whole, "warm_s": warm, "losses": losses, "peak_bytes": peak}


def ours(asked: dict[str, Any]) -> dict[str, Any]:
    """Train by farthing."""
    from farthing.config.load import load_job
    from farthing.events import Event, StepTaken, Working
    from farthing.train.run import train

    marks, losses = Marks(asked["device"]), list[float | None]()

    def emit(event: Event) -> None:
        is_reference = isinstance(event, Working) and "scoring" in event.on
        if (is_reference and not marks.at) or isinstance(event, StepTaken):
            marks.add()
        if isinstance(event, StepTaken):
            losses.append(event.loss)

    train(load_job(Path(asked["job"])), emit)
    return marks.facts(losses)


def theirs(asked: dict[str, Any]) -> dict[str, Any]:
    """Train by TRL."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    is_cpu = asked["device"] == "cpu"
    if is_cpu:
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
        bf16=not is_cpu,
        gradient_checkpointing=False,
        use_cpu=is_cpu,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        optim="adamw_torch_fused",
    )
    marks, precompute = Marks(asked["device"]), DPOTrainer._precompute_ref_logps

    def marked(*given: Any, **named: Any) -> Any:
        if not marks.at:
            marks.add()
        return precompute(*given, **named)

    class Steps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.add()

    DPOTrainer._precompute_ref_logps = marked
    dtype = torch.bfloat16 if asked["method"] == "lora" and not is_cpu else torch.float32
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(asked["model"], dtype=dtype),
        args=config,
        train_dataset=Dataset.from_list(lines_of(Path(asked["data"]))),
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
        peft_config=peft,
        callbacks=[Steps()],
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return marks.facts(losses)


def draw_rows(path: Path, n: int) -> Path:
    """Pairs of random words; lengths are lognormal."""
    draw = random.Random(1)
    words = sorted({word for row in demo_rows(400) for word in row["completion"].split()})
    middles = {name: math.log(mean) - 0.18 for name, mean in MEAN_WORDS.items()}
    rows = [
        {
            name: " ".join(draw.choices(words, k=min(800, int(draw.lognormvariate(middle, 0.6)))))
            for name, middle in middles.items()
        }
        for _ in range(n)
    ]
    return write_jsonl(path, rows)


def prepare(folder: Path, data: Path, method: str, of: str) -> int:
    """The job, and the model with its first weights; how many tokens the rows have."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from farthing.config.load import load_job
    from farthing.models.model_config import known_config
    from farthing.train.resolve import open_examples, resolve
    from small_models import make_model_folder

    texts = data.read_text(encoding="utf-8").splitlines()
    make_model_folder(folder / "model", texts, "llama", hidden=256, layers=6)
    if of:
        ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = (known_config(of) or {}) | {"architectures": ["LlamaForCausalLM"]} | ends
        (folder / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.manual_seed(0)
    with torch.device("cuda" if of else "cpu"):
        made = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder / "model"),
            dtype=torch.bfloat16 if of else torch.float32,
        )
    made.save_pretrained(folder / "model")
    del made
    device = {"device": "cuda" if of else "cpu"}
    its = {"model": "./model", "method": method, "train": {"learning_rate": RATES[method]}}
    job = write_job(folder, JOB, data={"train": str(data)}, where=device, **its)
    train, _ = open_examples(resolve(load_job(job)), lambda event: None)
    return int(train.tokens.lengths.sum())


def race(method: str, asked: argparse.Namespace) -> dict[str, Any]:
    """farthing, and TRL with each micro-batch; the quickest of TRL counts."""
    device = "cuda" if asked.model else "cpu"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = (
            asked.data.resolve() if asked.data else draw_rows(folder / "pairs.jsonl", asked.rows)
        )

        def run(python: str, **more: Any) -> dict[str, Any]:
            told = {"job": folder / "job.yaml", "model": folder / "model", "out": folder / "trl"}
            told |= {"data": given, "method": method, "of": asked.model, "device": device, **more}
            words = [python, __file__, "--work", json.dumps(told, default=str)]
            done = subprocess.run(words, check=True, stdout=subprocess.PIPE)
            return dict(json.loads(done.stdout.splitlines()[-1]))

        prepared = run(sys.executable, folder=folder)
        mine, trl = run(sys.executable), list[dict[str, Any]]()
        for n in MICRO_BATCHES[device]:
            with contextlib.suppress(subprocess.CalledProcessError):  # it may not fit
                trl.append({**run(str(asked.peers_python), micro_batch=n), "micro_batch": n})
    if not trl:
        raise SystemExit("TRL failed with every micro-batch")
    best = min(trl, key=lambda one: one["whole_s"])
    n_last = max(1, len(mine["losses"]) // EPOCHS)
    last = [sum(one["losses"][-n_last:]) / n_last for one in (mine, best)]
    memory = mine["peak_bytes"] / min(one["peak_bytes"] for one in trl)
    n_tokens = prepared["n_tokens"]
    said = (
        f"{method}: {EPOCHS * n_tokens / mine['whole_s']:.0f} useful tokens a second,"
        f" {best['whole_s'] / mine['whole_s']:.2f} times TRL's; after the first epoch"
        f" {(EPOCHS - 1) * n_tokens / mine['warm_s']:.0f},"
        f" {min(one['warm_s'] for one in trl) / mine['warm_s']:.2f} times; {memory:.2f} of its"
        f" memory, losses {last[0]:.4f} and {last[1]:.4f}"
    )
    is_same = abs(last[0] - last[1]) <= LIMIT * max(last)
    return {"method": method, "said": said, "ok": is_same, "farthing": mine, "trl": trl}


def main() -> int:
    """Race, and print ratios."""
    if sys.argv[1:2] == ["--work"]:
        asked = json.loads(sys.argv[2])
        if "folder" in asked:
            n_tokens = prepare(
                Path(asked["folder"]), Path(asked["data"]), asked["method"], asked["of"]
            )
            print(json.dumps({"n_tokens": n_tokens}))
        else:
            print(json.dumps(theirs(asked) if "micro_batch" in asked else ours(asked)))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, metavar="FILE.jsonl", help="default: drawn rows")
    parser.add_argument("--rows", type=int, default=96, help="of drawn rows")
    parser.add_argument("--model", default="", metavar="NAME", help="a Llama's sizes, on a GPU")
    parser.add_argument("--methods", nargs="+", default=["lora", "full"], choices=tuple(RATES))
    parser.add_argument("--peers-python", type=Path, default=Path(".venv/peers/bin/python"))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    return play(given.methods, lambda method: race(method, given), given.json)


if __name__ == "__main__":
    sys.exit(main())
