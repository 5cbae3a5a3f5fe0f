"""Runs contestants, each in its own process, and keeps what came out, so that a race that was cut
short resumes.

A record is kept under a hash of all it follows from: what was assigned, the harness's own code and,
for farthing, its code.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import farthing
from farthing.data.batches import Batches
from peers import figures, judge
from peers.assignment import USD_PER_HOUR, Assignment
from peers.hugging import rows_a_step

BENCH = Path(__file__).resolve().parent.parent
LEARNING_RATES = {"full": 1e-3, "lora": 5e-3}
MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
"""glibc keeps what it has, as torch's own allocator does on a GPU: for all contestants alike."""
WARM_UP = 2
"""Steps left out of the steady state; they are part of the dollars."""
TIMEOUT_S = 3600


@dataclass
class Race:
    """Where things are, and how contestants run."""

    root: Path
    peers_python: Path
    threads: int = 1

    def spawn(self, assignment: Assignment) -> dict[str, Any]:
        """Run it in a process of the contestant's environment: one number of threads, one way to
        allocate, no network. Its result, with the seconds of the process; `failed` with its last
        words where it ended badly.
        """
        is_own, out = assignment.contestant == "farthing", Path(assignment.out)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        paths = [str(BENCH), os.environ.get("PYTHONPATH", "") if is_own else ""]
        environment = {
            **{name: value for name, value in os.environ.items() if "MALLOC" not in name},
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads)),
            **MALLOC,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
        }
        path = out / "assignment.json"
        assignment.write(path)
        python = sys.executable if is_own else str(self.peers_python)
        command = [python, "-m", "peers.contestant", str(path)]
        started = time.perf_counter()
        with open(out / "said.txt", "wb") as said:
            done = subprocess.run(
                command, stdout=said, stderr=said, env=environment, cwd=out, timeout=TIMEOUT_S
            )
        wall_s = time.perf_counter() - started
        if done.returncode:
            words = (out / "said.txt").read_text(encoding="utf-8", errors="replace").strip()
            last = "\n".join(words.splitlines()[-15:])
            return {"failed": f"{assignment.contestant} ended with {done.returncode}:\n{last}"}
        result = json.loads(path.with_suffix(".result.json").read_text(encoding="utf-8"))
        return {**result, "process_s": wall_s}

    def run(self, assignment: Assignment, *, is_trial: bool = False) -> dict[str, Any]:
        """The record of this run: kept from before, or run and judged now. The loss of a trial is
        not judged.
        """
        key, who = self.key(assignment), assignment.contestant
        path = self.root / "records" / f"{'trial-' * is_trial}{key}.json"
        if path.exists():
            return dict(json.loads(path.read_text(encoding="utf-8")))
        folder = Path(assignment.out) / key
        record = self.spawn(replace(assignment, out=str(folder)))
        if "failed" not in record:
            examples, trained = assignment.examples("train"), Path(record["model"])
            n_steps, order = len(record["useful"]), assignment.order
            due = int(sum(examples.lengths[step].sum() for step in order))
            record |= {
                "seed": assignment.seed,
                "settings": assignment.settings,
                "usd": record["process_s"] / 3600 * USD_PER_HOUR,
                "examples_per_step": len(order) * assignment.batch / n_steps,
                "whole": figures.rates(record, 0, n_steps),
                "steady": figures.rates(record, min(WARM_UP, n_steps - 1), n_steps),
                "saw_all": sum(record["useful"]) == due,
            }
            if not is_trial:
                record["eval_loss"] = judge.loss_of_folder(
                    assignment.model, trained, assignment.examples("eval"), assignment.task
                )
            shutil.rmtree(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record), encoding="utf-8")
        speed = record.get("steady", {}).get("tokens_per_device_s", 0)
        words = record.get("failed") or f"{speed:9.0f} useful tokens a device-second"
        said = f"  {who:10} seed {assignment.seed} {words}  {assignment.settings or ''}"
        print(said, file=sys.stderr, flush=True)
        return record

    def key(self, assignment: Assignment) -> str:
        """What a record is kept under."""
        values = asdict(assignment) | {"folder": Path(assignment.folder).name, "out": ""}
        folders = [Path(__file__).parent]
        if assignment.contestant == "farthing":
            folders.append(Path(farthing.__file__).parent)
        code = hashlib.sha256(json.dumps([values, self.threads], sort_keys=True).encode())
        for folder in folders:
            for path in sorted(folder.rglob("*.py")):
                code.update(path.read_bytes())
        return code.hexdigest()[:16]

    def tuned(self, assignment: Assignment, compiles: bool) -> dict[str, Any]:
        """The best settings of a contestant that can be tuned, by useful tokens a device-second.

        The micro-batch first, then one other thing at a time with the best of those; `compiles`:
        torch.compile too.
        """
        short = replace(assignment, order=assignment.order[:6])
        best, of_best = dict[str, Any](), 0.0
        for stage in (micro_batches(assignment), None):
            for settings in stage or others(assignment, best, compiles):
                record = self.run(replace(short, settings=settings), is_trial=True)
                speed = record.get("steady", {}).get("tokens_per_device_s", 0.0)
                if speed > of_best:
                    best, of_best = settings, speed
        return best


@dataclass(frozen=True)
class Piece:
    """A workload, a method and a precision: one table of contestants."""

    folder: Path
    facts: dict[str, Any]
    """Of the workload folder."""
    method: str
    precision: str
    batch: int
    out: Path

    def entry(
        self, contestant: str, seed: int, settings: dict[str, Any] | None = None
    ) -> Assignment:
        """A contestant's run over all examples, in farthing's order for the seed."""
        n, shape = self.facts["train"]["examples"], self.facts["workload"]
        batches = Batches(np.arange(n), self.batch, seed)
        return Assignment(
            contestant=contestant,
            folder=str(self.folder),
            out=str(self.out / contestant),
            task=shape["task"],
            method=self.method,
            precision=self.precision,
            order=[batches.examples_of(step).tolist() for step in range(n // self.batch)],
            seed=seed,
            max_length=shape["max_length"],
            max_target_length=shape["max_target_length"],
            learning_rate=LEARNING_RATES[self.method],
            targets=self.facts["targets"] if self.method == "lora" else [],
            columns=self.facts["columns"],
            settings=settings or {},
        )


def micro_batches(assignment: Assignment) -> list[dict[str, Any]]:
    """What to try first: rows in a forward pass."""
    if assignment.contestant == "hf-tuned":
        return [{"micro_batch": n} for n in (1, 2, 4, 8, 16, 32, 64) if assignment.batch % n == 0]
    a_step = rows_a_step(assignment)
    return [{"rows": n} for n in (1, 2, 4, 8, 16) if a_step % n == 0]


def others(assignment: Assignment, best: dict[str, Any], compiles: bool) -> list[dict[str, Any]]:
    """What to try then, beside the best so far."""
    more = [{**best, "workers": 2}, {**best, "checkpointing": True}]
    more += [{**best, "compile": True}] if compiles else []
    counts = [n for n in (1, 2, 4, 8) if assignment.batch % n == 0]
    if assignment.contestant == "hf-tuned":
        return more + [{"micro_batch": n, "sampling": "batch_rebalance"} for n in counts]
    return more + [{"packing": False, "rows": n} for n in counts]
