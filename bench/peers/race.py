"""Runs contestants, each in its own process, and keeps what came out, so that a race that was cut
short goes on.

A record is kept under a hash of all it follows from: what was assigned, the harness's own code and,
for farthing, its code.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from farthing.data.batches import Batches
from farthing.model.load import quiet_libraries
from peers import figures, judge
from peers.assignment import Assignment
from peers.hugging import rows_a_step

BENCH = Path(__file__).resolve().parent.parent
LEARNING_RATES = {"full": 1e-3, "lora": 5e-3}
MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
"""glibc keeps what it has, as torch's own allocator does on a GPU: for all contestants alike."""
TUNABLE = ("hf-tuned", "trl", "trl-tuned")
WARM_UP = 2
"""Steps left out of the steady state; they are part of the dollars."""


class Failed(Exception):
    """A contestant's process ended badly; the message has its last words."""


@dataclass
class Race:
    """Where things are, and how long there still is."""

    root: Path
    peers_python: Path
    threads: int = 1
    usd_per_hour: float = 0.1
    use_malloc: bool = True
    ends_at: float = float("inf")
    """On `time.monotonic`: nothing is begun that would probably end later."""
    say: Callable[[str], None] = lambda text: None
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        quiet_libraries()
        self.took_s: dict[str, float] = {}
        (self.root / "records").mkdir(parents=True, exist_ok=True)

    # ---- one process ----

    def environment(self, is_own: bool) -> dict[str, str]:
        """Of a contestant's process: one number of threads, one way to allocate, no network."""
        paths = [
            str(BENCH),
            *([os.environ["PYTHONPATH"]] if is_own and "PYTHONPATH" in os.environ else []),
        ]
        keep = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        more = {
            "PYTHONPATH": os.pathsep.join(paths),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
        }
        more |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        return keep | more | (MALLOC if self.use_malloc else {})

    def spawn(self, assignments: list[Assignment]) -> list[dict[str, Any]]:
        """Run these in one process of the contestant's environment; their results, with the seconds
        of the process.
        """
        name = assignments[0].contestant
        is_own = name == "farthing"
        python = sys.executable if is_own else str(self.peers_python)
        out = Path(assignments[0].out)
        shutil.rmtree(out, ignore_errors=True)
        paths = []
        for number, assignment in enumerate(assignments):
            Path(assignment.out).mkdir(parents=True, exist_ok=True)
            paths.append(assignment.write(out / f"assignment-{number}.json"))
        started = time.perf_counter()
        with open(out / "said.txt", "wb") as said:
            process = subprocess.Popen(
                [python, "-m", "peers.contestant", *map(str, paths)],
                stdout=said,
                stderr=subprocess.STDOUT,
                env=self.environment(is_own),
                cwd=out,
            )
            timer = threading.Timer(self.timeout_s, process.kill)
            timer.start()
            try:
                _, status, used = os.wait4(process.pid, 0)
            finally:
                timer.cancel()
            process.returncode = os.waitstatus_to_exitcode(status)  # it has been waited for
        wall_s = time.perf_counter() - started
        results = [path.with_suffix(".result.json") for path in paths]
        if process.returncode != 0 or not all(path.exists() for path in results):
            words = (
                (out / "said.txt")
                .read_text(encoding="utf-8", errors="replace")
                .strip()
                .splitlines()
            )
            raise Failed(f"{name} ended with {process.returncode}:\n" + "\n".join(words[-15:]))
        of_process = {"process_wall_s": wall_s, "process_cpu_s": used.ru_utime + used.ru_stime}
        return [json.loads(path.read_text(encoding="utf-8")) | of_process for path in results]

    # ---- one run, kept ----

    def run(self, assignment: Assignment, *, is_trial: bool = False) -> dict[str, Any] | None:
        """The record of this run: kept from before, or run and judged now; None when there is no
        time left.

        The loss of a trial is not judged.
        """
        key = self.key(assignment)
        path = self.root / "records" / f"{'trial-' * is_trial}{key}.json"
        if path.exists():
            return dict(json.loads(path.read_text(encoding="utf-8")))
        kind = f"{assignment.contestant}{' compiled' * bool(assignment.settings.get('compile'))}"
        if not self.has_time(kind):
            return None
        started = time.monotonic()
        folder = Path(assignment.out) / key
        try:
            result = self.spawn([replace(assignment, out=str(folder))])[0]
        except Failed as error:
            record: dict[str, Any] = {"failed": str(error)}
        else:
            record = self._record(assignment, result)
            if not is_trial:
                held_out, trained = assignment.examples("eval"), Path(result["model"])
                record["eval_loss"] = judge.loss_of_folder(
                    assignment.model, trained, held_out, assignment.task
                )
            shutil.rmtree(folder, ignore_errors=True)
            path.write_text(json.dumps(record), encoding="utf-8")
        self.took_s[kind] = time.monotonic() - started
        speed = record.get("steady", {}).get("tokens_per_device_s")
        words = (
            f"{speed:9.0f} useful tokens a device-second" if speed else "FAILED " + record["failed"]
        )
        self.say(
            f"  {assignment.contestant:10} seed {assignment.seed} {words} "
            f" {assignment.settings or ''}"
        )
        return record

    def _record(self, assignment: Assignment, result: dict[str, Any]) -> dict[str, Any]:
        n_steps, n_examples = len(result["useful"]), assignment.n_steps * assignment.batch
        per_epoch = n_steps // assignment.epochs
        due = int(assignment.examples("train").lengths.sum()) * assignment.epochs
        return {
            "contestant": assignment.contestant,
            "seed": assignment.seed,
            "settings": assignment.settings,
            "versions": result["versions"],
            "process_wall_s": result["process_wall_s"],
            "process_cpu_s": result["process_cpu_s"],
            "usd": result["process_wall_s"] / 3600 * self.usd_per_hour,
            "peak_bytes": result.get("gpu_peak_bytes", result["peak_bytes"]),
            "n_steps": n_steps,
            "examples_per_step": n_examples / n_steps,
            "first_loss": result["first_loss"],
            "said": result.get("said", {}),
            "epoch": figures.rates(result, 0, per_epoch),
            "steady": figures.rates(result, min(WARM_UP, n_steps - 1), n_steps),
            "saw_all": sum(result["useful"]) == due,
            "marks": {name: result[name] for name in ("wall", "cpu", "useful", "computed")},
        }

    def has_time(self, kind: str) -> bool:
        """Whether another run of this kind would end in time: as long as its last, else as the
        longest of all.
        """
        needed_s = self.took_s.get(kind, max(self.took_s.values(), default=0.0))
        return time.monotonic() + needed_s <= self.ends_at

    def key(self, assignment: Assignment) -> str:
        """What a record is kept under."""
        values = asdict(assignment) | {"folder": Path(assignment.folder).name, "out": ""}
        runner = "ours.py" if assignment.contestant == "farthing" else "hugging.py"
        files = ["assignment.py", "clock.py", "models.py", "contestant.py", runner]
        code = hashlib.sha256(
            b"".join((Path(__file__).parent / name).read_bytes() for name in files)
        )
        if assignment.contestant == "farthing":
            code.update(farthing_code())
        values |= {"code": code.hexdigest(), "malloc": self.use_malloc}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    # ---- tuning ----

    def tuned(self, assignment: Assignment, n_steps: int, compiles: bool) -> dict[str, Any] | None:
        """The best settings of a contestant that can be tuned, by useful tokens a device-second;
        None: no time left.

        The micro-batch first, then one other thing at a time with the best of those; `compiles`:
        torch.compile too.
        """
        short = replace(assignment, order=assignment.order[:n_steps], epochs=1)
        best, of_best = {}, 0.0
        for stage in (micro_batches(assignment), None):
            for settings in stage or others(assignment, best, compiles):
                record = self.run(replace(short, settings=settings), is_trial=True)
                if record is None:
                    return None
                speed = record.get("steady", {}).get("tokens_per_device_s", 0.0)
                if speed > of_best:
                    best, of_best = settings, speed
        return best


def farthing_code() -> bytes:
    """Identity of farthing as it is installed here."""
    import farthing

    files = sorted(Path(farthing.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).digest()


@dataclass(frozen=True)
class Piece:
    """A workload, a method and a precision: one table of contestants."""

    folder: Path
    facts: dict[str, Any]
    """Of the workload folder."""
    method: str
    precision: str
    epochs: int
    batch: int
    threads: int
    usd_per_hour: float
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
            order=[
                batches.examples_of(step).tolist() for step in range(n // self.batch * self.epochs)
            ],
            epochs=self.epochs,
            seed=seed,
            max_length=shape["max_length"],
            max_target_length=shape["max_target_length"],
            learning_rate=LEARNING_RATES[self.method],
            targets=self.facts["targets"][self.method],
            threads=self.threads,
            columns=dict(self.facts["given"]["columns"]),
            settings=settings or {},
            usd_per_hour=self.usd_per_hour,
        )


def micro_batches(assignment: Assignment) -> list[dict[str, Any]]:
    """What to try first: rows in a forward pass."""
    if assignment.contestant == "hf-tuned":
        return [{"micro_batch": n} for n in (1, 2, 4, 8, 16, 32, 64) if assignment.batch % n == 0]
    a_step = rows_a_step(assignment)
    return [{"rows": n} for n in (1, 2, 4, 8, 16) if a_step % n == 0]


def others(assignment: Assignment, best: dict[str, Any], compiles: bool) -> list[dict[str, Any]]:
    """What to try then, beside the best so far."""
    if assignment.contestant == "trl":  # defaults, but for the micro-batch
        return []
    more = [{**best, "workers": 2}, {**best, "checkpointing": True}]
    more += [{**best, "compile": True}] if compiles else []
    if assignment.contestant == "hf-tuned":
        more += [
            {"micro_batch": n, "sampling": "batch_rebalance"}
            for n in (2, 4)
            if assignment.batch % n == 0
        ]
    else:
        more += [{"packing": False, "rows": n} for n in (1, 2, 4, 8) if assignment.batch % n == 0]
    return more


def shuffled(names: list[str], seed: int) -> list[str]:
    """The order in which contestants take their turns in a round."""
    names = list(names)
    random.Random(seed).shuffle(names)
    return names
