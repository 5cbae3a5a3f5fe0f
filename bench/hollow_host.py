"""What the host does for a step: launches, waits and CPU time of farthing, Hugging Face's Trainer
and TRL, side by side on a hollow GPU.

    .venv/rehearse/bin/python bench/hollow_host.py OUT.json [--only WORD ...] [--rounds 2]

Every row is a micro-batch of about `TOKENS` tokens of a real model's shapes in bf16: chats for
language models, pairs for T5, short texts for BERT; LoRA of rank 16 on all linear layers. Trainer
and TRL have Liger's kernels, a fused AdamW, and grouping by length or packing. Nothing is computed,
so this is the host's side alone: a GPU is kept busy where it needs longer for a micro-batch than
the host. CPU time is that of all threads of the process, in its quickest step of all rounds, which
take turns. Figures mean something beside each other only. Peers do without cuDNN's attention and
flash-attn, whose libraries are not there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from hollow_gpu import counted, environment
from hollow_memory import write_weights
from on_gpu.work import (
    FULL,
    LORA_R,
    SEED,
    TARGETS,
    Drawn,
    job_values,
    objective_of,
    opened,
    order_of,
    prepare,
)

ROWS = ("0.5B lora", "1B lora", "8B lora", "1B full", "8B qlora", "BERT full", "T5 full")
WHO = ("farthing", "hf-tuned", "trl-tuned")
LENGTHS = {"BERT": "classes", "T5": "seq2seq"}
BATCHES = {"BERT": 592, "T5": 800}
"""Examples of a step, 96 of other shapes: enough to fill several micro-batches."""
TOKENS, ROW_TOKENS, N_WARM, N_TIMED = 8192, 2048, 2, 3
HALF = ("8B",)
"""Shapes whose micro-batches have half as many tokens, to fit without checkpointing."""


class Marks:
    """Counts at the end of every step; the clock that the peers' trainers are given."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.tokens = 0.0

    def begin(self) -> None:
        """The first step begins now."""
        self.step_done()

    def count(self, useful: Any, _: Any) -> None:
        """A micro-batch of so many tokens of the data."""
        self.tokens += float(useful)

    def step_done(self) -> None:
        """An optimizer step has ended."""
        self.rows.append({**counted(), "cpu_s": time.process_time(), "tokens": self.tokens})

    def a_thousand(self) -> dict[str, float]:
        """Of 1,000 tokens: launches, and CPU time of the quickest step; waits of a step."""
        steps = [
            {name: after[name] - before[name] for name in after}
            for before, after in zip(self.rows[N_WARM:], self.rows[N_WARM + 1 :], strict=False)
        ]
        thousands = sum(step["tokens"] for step in steps) / 1000
        return {
            "launches": sum(step["launches"] for step in steps) / thousands,
            "cpu_ms": min(1e6 * step["cpu_s"] / step["tokens"] for step in steps),
            "waits": sum(step["waits"] + step["waits_for_copies"] for step in steps) / len(steps),
        }


def of_farthing(folder: Path, method: str, batch: int, n_tokens: int) -> Marks:
    """The steps of farthing's own loop."""
    from farthing.train.loop import rare_collections, take_step
    from farthing.train.step_log import settle

    drawn, marks = Drawn.load(folder / "train.npz"), Marks()
    values = job_values(
        folder, folder / "ours", method, batch, 1000, 1.0, micro_batch_tokens=n_tokens
    )
    with opened(values, drawn) as run, rare_collections():
        marks.begin()
        for step in range(N_WARM + N_TIMED):
            take_step(run)
            marks.count(drawn.lengths[run.batches.examples_of(step)].sum(), 0)
            marks.step_done()
        settle(run)
    return marks


def of_peer(who: str, folder: Path, method: str, batch: int, n_tokens: int) -> Marks:
    """The steps of a trainer of Hugging Face."""
    import torch

    from on_gpu import others
    from peers.assignment import Assignment

    torch.backends.cuda.enable_cudnn_sdp(False)  # there is no hollow cuDNN
    drawn, marks = Drawn.load(folder / "train.npz"), Marks()
    mean = float(drawn.lengths.mean())
    own: dict[str, Any] = {"micro_batch": max(1, round(n_tokens / mean))}
    if who == "trl-tuned":
        own = {"packing": True, "rows": n_tokens // ROW_TOKENS}
    assignment = Assignment(
        contestant=who,
        folder=str(folder),
        out=str(folder / who),
        task=objective_of(folder.name.partition("-")[0]),
        method=method,
        precision="bf16",
        order=order_of(drawn, batch, N_WARM + N_TIMED),
        epochs=1,
        seed=SEED,
        max_length=ROW_TOKENS,
        max_target_length=128,
        learning_rate=1e-5,
        targets=TARGETS,
        lora_r=LORA_R,
        settings=own,
    )

    def tokens_of(inputs: dict[str, Any], _: str) -> tuple[float, int]:
        # packed rows are full but for their last tokens
        ids = inputs["input_ids"]
        return (ids.numel() if who == "trl-tuned" else len(ids) * mean), 0

    with (
        mock.patch.object(others, "Watching", return_value=marks),
        mock.patch.object(others, "row_of", return_value={}),
        mock.patch.object(marks, "facts", dict, create=True),
        mock.patch("peers.hugging.tokens_of", tokens_of),
        in_four_bits(folder) if method == "qlora" else contextlib.nullcontext(),
    ):
        others.trained(assignment, N_WARM)
    return marks


@contextlib.contextmanager
def in_four_bits(folder: Path) -> Any:
    """Peers' models are read from a file and quantized, as their guides have it."""
    import peft
    import torch
    import transformers

    from on_gpu.others import RandomWeights

    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )

    def read(*_: Any, **__: Any) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "model", quantization_config=how, dtype=torch.bfloat16, device_map={"": 0}
        )
        return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)

    with mock.patch.object(RandomWeights, "from_pretrained", read):
        yield


def measured(row: str, who: str) -> dict[str, Any]:
    """One contestant, in this process."""
    shape, method = row.split()
    batch = BATCHES.get(shape, 96)
    n_tokens = TOKENS // 2 if shape in HALF else TOKENS
    with tempfile.TemporaryDirectory(prefix="hollow-host-") as work:
        prepare(Path(work), shape, FULL)
        folder = Path(work) / f"{shape}-{LENGTHS.get(shape, 'chat')}"
        if method == "qlora":
            write_weights(folder / "model", objective_of(shape), "BF16")
        marks = (
            of_farthing(folder, method, batch, n_tokens)
            if who == "farthing"
            else of_peer(who, folder, method, batch, n_tokens)
        )
    return marks.a_thousand()


def main() -> int:
    """Each contestant in a process of its own, in turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--only", nargs="*", default=[], help="words that a row must have")
    parser.add_argument("--who", nargs="+", default=WHO, choices=WHO)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measured(*asked.one)))
        return 0
    rows = [row for row in ROWS if all(word in row.split() for word in asked.only)]
    found: dict[str, dict[str, dict[str, float]]] = {row: {} for row in rows}
    places = [
        (row, who)
        for row in rows
        for who in asked.who
        if who != "trl-tuned" or row.split()[0] not in LENGTHS
    ]
    for row, who in places * asked.rounds:
        done = subprocess.run(
            [sys.executable, __file__, "--one", row, who],
            env={**os.environ, **environment("H100", copy_mib=1), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            print(f"{row} {who}: failed", flush=True)
            continue
        figures = json.loads(done.stdout.splitlines()[-1])
        known = found[row].setdefault(who, figures)
        known["cpu_ms"] = min(known["cpu_ms"], figures["cpu_ms"])
        said = "".join(f"  {name} {value:8,.2f}" for name, value in known.items())
        print(f"{row:10}{who:10}{said}", flush=True)
        if asked.out is not None:
            asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    ok = True
    for row, by in found.items():
        for who in [who for who in by if who != "farthing" and "farthing" in by]:
            ratios = {name: by["farthing"][name] / by[who][name] for name in ("launches", "cpu_ms")}
            ok = ok and max(ratios.values()) <= 0.9
            said = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
            print(f"{row}: farthing by {who}: {said}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
