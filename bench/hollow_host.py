"""What the host does for a step: launches, waits and CPU time of farthing, Hugging Face's Trainer
and TRL side by side.

    python bench/hollow_gpu.py --copy-mib 1 -- python bench/hollow_host.py [--shapes 0.5B 1B]
    [--methods lora full]
        [--tokens 8192] [--rounds 1] [--json FILE]

On a hollow GPU, which computes nothing: this is the host's side alone. A real GPU is kept busy
where it needs longer for a micro-batch than the host for its launches. Shapes, tokens and settings
are those of bench/gpu.py (chat lengths, LoRA of rank 16 on all linear layers or full fine-tuning,
bf16), peers tuned as there, with Liger's kernels; each has about as many tokens in a micro-batch.
CPU time is that of all threads of the process, loaders' processes are left out, and of the quickest
step. Rounds take turns. Peers do without cuDNN's attention, as there is no hollow cuDNN. Its
figures mean something beside each other only.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from on_gpu.work import FULL, LORA_R, METHODS, SEED, SHAPES, TARGETS

WHO = ("farthing", "hf-tuned", "trl-tuned")
BATCH, N_WARM, N_TIMED = 48, 2, 4
ROW_TOKENS = 2048
COUNTS = (
    *(
        "launches",
        "waits",
        "copies_up",
        "copies_down",
        "bytes_up",
        "bytes_down",
        "waits_for_copies",
        "products",
    ),
    "allocations",
)


class Counts(ctypes.Structure):
    """What the hollow GPU has counted so far in this process (`struct counts` of hollow/cudart.c)."""  # noqa: E501

    _fields_ = [(name, ctypes.c_uint64) for name in COUNTS]


def counted() -> dict[str, int]:
    """The counts now. Raises `ValueError` where there is no hollow GPU."""
    counts = Counts.in_dll(ctypes.CDLL(None), "hollow_counts")
    return {name: int(getattr(counts, name)) for name in COUNTS}


class Marks:
    """Counts, CPU time, tokens and micro-batches at the end of every step; the clock that the
    peers' trainers are given.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._n_tokens = self._n = 0

    def begin(self) -> None:
        """The first step begins now."""
        self.step_done()

    def count(self, _: Any, computed: Any) -> None:
        """A micro-batch of so many tokens, padding among them."""
        self._n_tokens, self._n = self._n_tokens + int(computed), self._n + 1

    def step_done(self) -> None:
        """An optimizer step has ended."""
        self.rows.append(
            {
                **counted(),
                "cpu_s": time.process_time(),
                "tokens": self._n_tokens,
                "micro_batches": self._n,
            }
        )

    def per_step(self) -> dict[str, float]:
        """Means of the timed steps; of CPU time the least."""
        steps = [
            {name: after[name] - before[name] for name in after}
            for before, after in zip(self.rows[N_WARM:], self.rows[N_WARM + 1 :], strict=False)
        ]
        found = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
        quickest = min(steps, key=lambda step: step["cpu_s"] / step["micro_batches"])
        return found | {
            "cpu_ms_a_micro_batch": 1000 * quickest["cpu_s"] / quickest["micro_batches"]
        }


def of_farthing(folder: Path, method: str, n_tokens: int) -> Marks:
    """The steps of farthing's own loop."""
    from farthing.train.loop import rare_collections, take_step
    from farthing.train.step_log import settle
    from on_gpu.work import Drawn, job_values, opened

    drawn, marks = Drawn.load(folder / "train.npz"), Marks()
    values = job_values(
        folder, folder / "ours", method, BATCH, 1000, 1.0, micro_batch_tokens=n_tokens
    )
    with opened(values, drawn) as run, rare_collections():
        marks.begin()
        for _ in range(N_WARM + N_TIMED):
            before = run.progress.n_padded_tokens
            take_step(run)
            n = len(
                run.steps.table_of(run.batches.examples_of(run.progress.step - 1), n_tokens).cells
            )
            for each in range(n):
                marks.count(0, (run.progress.n_padded_tokens - before) if each == 0 else 0)
            marks.step_done()
        settle(run)
    return marks


def of_peer(who: str, folder: Path, method: str, n_tokens: int) -> Marks:
    """The steps of a trainer of Hugging Face, by bench/on_gpu/others.py."""
    import torch

    from on_gpu import others
    from on_gpu.work import Drawn, order_of
    from peers import hugging
    from peers.assignment import Assignment

    torch.backends.cuda.enable_cudnn_sdp(False)  # there is no hollow cuDNN
    drawn, marks = Drawn.load(folder / "train.npz"), Marks()
    own: dict[str, Any] = {"micro_batch": max(1, round(n_tokens / float(drawn.lengths.mean())))}
    if who == "trl-tuned":
        own = {"packing": True, "rows": max(1, n_tokens // ROW_TOKENS)}
    assignment = Assignment(
        contestant=who,
        folder=str(folder),
        out=str(folder / who),
        task="causal-lm",
        method=method,
        precision="bf16",
        order=order_of(drawn, BATCH, N_WARM + N_TIMED),
        epochs=1,
        seed=SEED,
        max_length=ROW_TOKENS,
        max_target_length=0,
        learning_rate=1e-5,
        targets=TARGETS,
        lora_r=LORA_R,
        settings=own,
    )

    def tokens_of(inputs: dict[str, Any], _: str) -> tuple[int, int]:
        return 0, inputs["input_ids"].numel()

    with (
        mock.patch.object(others, "Watching", return_value=marks),
        mock.patch.object(others, "row_of", return_value={}),
        mock.patch.object(marks, "facts", dict, create=True),
        mock.patch.object(hugging, "tokens_of", tokens_of),
    ):
        others.trained(assignment, N_WARM)
    return marks


def measured(who: str, shape: str, method: str, n_tokens: int) -> dict[str, Any]:
    """One contestant, in this process."""
    from on_gpu.work import Drawn, prepare

    folder = Path(tempfile.mkdtemp())
    try:
        prepare(folder, shape, FULL)
        data = folder / f"{shape}-chat"
        marks = (
            of_farthing(data, method, n_tokens)
            if who == "farthing"
            else of_peer(who, data, method, n_tokens)
        )
        found = marks.per_step()
        useful = BATCH * float(Drawn.load(data / "train.npz").lengths.mean())
        # TRL's packed rows are full but for their last tokens; the others' steps are of the same
        # examples
        tokens = found["tokens"] if who == "trl-tuned" else min(useful, found["tokens"])
        return {"who": who, "shape": shape, "method": method, **found, "useful_tokens": tokens}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def in_words(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    names = (
        "launches/mb",
        "tokens/mb",
        "CPU ms/mb",
        "launches/1k",
        "CPU ms/1k",
        "waits",
        "copies waited",
    )
    lines = [
        "mb: micro-batch; 1k: 1,000 useful tokens; waits: a step",
        f"{'':25}" + "".join(f"{name:>14}" for name in names),
    ]
    for row in rows:
        n, thousands, ms = (
            row["micro_batches"],
            row["useful_tokens"] / 1000,
            row["cpu_ms_a_micro_batch"],
        )
        figures = (
            row["launches"] / n,
            row["tokens"] / n,
            ms,
            row["launches"] / thousands,
            ms * n / thousands,
        )
        waits = row["waits"], row["waits_for_copies"]
        lines.append(
            f"{row['shape']:6}{row['method']:6}{row['who']:13}"
            + "".join(f"{x:14,.1f}" for x in (*figures, *waits))
        )
    return "\n".join(lines)


def main() -> int:
    """Each contestant in a process of its own, in turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, "toy"], default=["0.5B", "1B"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--who", nargs="+", choices=WHO, default=list(WHO))
    parser.add_argument("--tokens", type=int, default=4 * ROW_TOKENS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    counted()
    if asked.one:
        print(json.dumps(measured(asked.who[0], asked.shapes[0], asked.methods[0], asked.tokens)))
        return 0
    best: dict[tuple[str, str, str], dict[str, Any]] = {}
    for _ in range(asked.rounds):
        for place in [
            (shape, method, who)
            for shape in asked.shapes
            for method in asked.methods
            for who in asked.who
        ]:
            shape, method, who = place
            command = [
                sys.executable,
                __file__,
                "--one",
                "--shapes",
                shape,
                "--methods",
                method,
                "--who",
                who,
            ]
            done = subprocess.run(
                [*command, "--tokens", str(asked.tokens)],
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            if done.returncode:
                print(f"{shape} {method} {who}: failed", flush=True)
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            print(in_words([row]).splitlines()[-1], flush=True)
            known = best.get(place)
            if known is None or row["cpu_ms_a_micro_batch"] < known["cpu_ms_a_micro_batch"]:
                best[place] = row
    print(in_words(list(best.values())))
    if asked.json is not None:
        facts = {
            "gpu": os.environ.get("HOLLOW_NAME"),
            "tokens": asked.tokens,
            "examples_a_step": BATCH,
            "rounds": asked.rounds,
        }
        asked.json.write_text(
            json.dumps({**facts, "rows": list(best.values())}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
