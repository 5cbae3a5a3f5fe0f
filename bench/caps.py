"""Runs that hang or are slow in some phase, under a small cap: each must end within it, and soon.

    python bench/caps.py --seeds 20 --first-seed 0 [--json]
    python bench/caps.py --lengths --seeds 200 [--json]

A seed draws a phase, what happens there (the main thread sleeps, Python's lock is held, the process
is stopped, a file or a file system never answers, the phase is slow), one process or two ranks, and
a cap. `farthing train` runs as a command, or `farthing.fine_tune` in a Python program. Reported:
the exit code, seconds past the cap, what the bill says, whether processes are left, and whether
anything untrained was exported.

With `--lengths` nothing hangs: a seed draws how many steps a job has, how long its texts are, how
long its steps take, and within them or beside them, and a cap of none to all of it. A step that
would pass the cap may not begin, so the bill may not pass it. All run in this process, by a clock
of what it computes and of what steps are made to take: a machine that others use changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from common import command, seeds_of, write_job
from farthing.run.accounts import read_ledger
from farthing.run.guard import PIPE
from farthing.tiny import demo_rows, write_jsonl
from hangs import hanging, stuck_file_system
from small_models import make_model_folder

PHASES = {
    "reading": "farthing.train.resolve:open_sources",
    "tokenizing": "farthing.train.resolve:tokenize",
    "loading": "farthing.train.build:build_model",
    "restoring": "farthing.train.run:refer",
    "step": "farthing.train.loop:take_step",
    "evaluation": "farthing.train.evaluate:evaluate",
    "saving": "farthing.run.checkpoint:commit_folder",
    "export": "farthing.train.saver:export_model",
    "receipt": "farthing.train.run:leave_receipt",
}
WAYS = ("sleep", "lock", "stop", "fifo", "stuck", "slow")
IN_PYTHON = """
import sys, farthing
sys.exit({"limit": 3}.get(farthing.fine_tune(sys.argv[1], quiet=True).state, 0))
"""
USD_PER_HOUR = 3.6
JOB = """
task: causal-lm
model: {model_name_or_path: ./base, init: random}
data: {train: data.jsonl, eval_fraction: 0.2}
method: full
train: {eval_strategy: steps, eval_steps: 20, save_steps: 10, probe: false}
where: {device: cpu, usd_per_hour: 3.6}
output_dir: ./run
cache_dir: ./cache
"""
LATE_S = 10.0
"""On a machine with nothing else to do; longer by as much as others slow the bench down."""
SPIN_S = 0.01


def draw(seed: int) -> dict[str, Any]:
    """What happens in which phase, on how many ranks, under which cap."""
    dice = random.Random(seed)
    case = {
        "seed": seed,
        "phase": dice.choice(sorted(PHASES)),
        "way": dice.choice(WAYS),
        "n_ranks": dice.choice((1, 1, 1, 2)),
        "cap_s": dice.uniform(20, 30),
        "slow_s": dice.choice((5.0, 15.0, 60.0)),
        "patience_s": dice.choice((3.0, 60.0)),
        "max_steps": 1_000_000,
        "batch": 8,
        "n_repeats": 1,
    }
    # nothing ends a Python program that waits for a stuck file system
    may_be_called = case["n_ranks"] == 1 and case["way"] != "stuck"
    return case | {"in_python": may_be_called and dice.random() < 0.3}


def draw_lengths(seed: int) -> dict[str, Any]:
    """A job of some length and speed under some cap."""
    dice = random.Random(seed)
    n_steps, step_s = round(10 ** dice.uniform(0.5, 2.1)), 10 ** dice.uniform(-2, 0.5)
    return {
        "seed": seed,
        "n_ranks": 1,
        "cap_s": dice.uniform(0.1, 1.3) * (n_steps * (step_s + 0.03) + 3.0),
        "step_s": step_s,
        "is_within": dice.random() < 0.7,
        "patience_s": 60.0,
        "max_steps": n_steps,
        "batch": dice.choice((1, 2, 4, 8)),
        "n_repeats": dice.choice((1, 4, 16)),
    }


def job_in(folder: Path, case: dict[str, Any]) -> Path:
    """The job of a case."""
    rows = [
        {name: " ".join([text] * case["n_repeats"]) for name, text in row.items()}
        for row in demo_rows(64, 0)
    ]
    make_model_folder(folder / "base", [" ".join(row.values()) for row in rows], "llama")
    write_jsonl(folder / "data.jsonl", rows)
    return write_job(
        folder,
        JOB,
        train={"max_steps": case["max_steps"], "global_batch_size": case["batch"]},
        limits={"max_usd": case["cap_s"] / 3600 * USD_PER_HOUR},
        where={"gpus": case["n_ranks"], "patience_s": case["patience_s"]},
    )


def play(case: dict[str, Any]) -> dict[str, Any]:
    """One case; its outcome beside what was drawn."""
    with (
        tempfile.TemporaryDirectory(prefix="farthing-caps-") as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        if case["way"] == "stuck":
            stack.enter_context(stuck_file_system(folder / "stuck"))
        job = job_in(folder, case)
        environ = hanging(folder, PHASES[case["phase"]], case["way"], slow_s=case["slow_s"])
        how = ["-c", IN_PYTHON] if case["in_python"] else ["-m", "farthing", "train"]
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *how, str(job)],
            env={**os.environ, **environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        seen: set[psutil.Process] = set()
        spins = [_spin()]
        while process.poll() is None and time.monotonic() - began < case["cap_s"] + 60:
            try:
                seen |= set(psutil.Process(process.pid).children(recursive=True))
            except psutil.Error:
                break
            spins.append(_spin())
            time.sleep(0.2)
        wall_s = time.monotonic() - began
        process.kill()
        stack.close()  # what waits for a file system ends only now
        words = process.communicate()[1].decode(errors="replace").strip().splitlines()
        psutil.wait_procs(seen, timeout=2 if case["way"] == "stuck" else 0)
        left = [each.pid for each in seen if _is_there(each)]
        accounts = read_ledger(folder / "run" / "ledger.jsonl").ordered
        exported = folder / "run" / "model"
        steps = max([account.step for account in accounts], default=0)
        return {
            **case,
            "hung": (folder / "hung").exists(),
            "code": process.returncode,
            "late_s": round(wall_s - case["cap_s"], 2),
            "slowdown": round(max(1.0, sum(spins) / len(spins) / SPIN_S), 2),
            "billed_late_s": round(sum(each.wall_s for each in accounts) - case["cap_s"], 4),
            "steps": steps,
            "processes_left": len(left),
            "exported_untrained": exported.exists() and steps == 0,
            "words": words[-1][:160] if words else "",
        }


def _spin() -> float:
    """Seconds that `SPIN_S` of a CPU take: more where others want it."""
    began, began_cpu = time.monotonic(), time.thread_time()
    while time.thread_time() - began_cpu < SPIN_S:
        pass
    return time.monotonic() - began


def _is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def faults_of(found: dict[str, Any]) -> list[str]:
    """What is wrong with an outcome."""
    wrong = []
    # a Python program of somebody's is killed, where the command has a guard that ends with 3
    is_killed = found["in_python"] and found["way"] in ("lock", "stop")
    # ranks that no start brings further give up by themselves, perhaps before the cap
    gives_up = found["n_ranks"] > 1
    if found["code"] not in (3, *[-signal.SIGKILL] * is_killed, *[75] * gives_up):
        wrong.append(f"exit code {found['code']}")
    late_s = LATE_S * found["slowdown"]
    if found["late_s"] > late_s:
        wrong.append(f"ended {found['late_s']:.1f} s after the cap")
    if found["billed_late_s"] > late_s:
        wrong.append(f"billed {found['billed_late_s']:.1f} s more than the cap")
    if found["processes_left"]:
        wrong.append(f"{found['processes_left']} processes left")
    if found["exported_untrained"]:
        wrong.append("exported what was not trained")
    return wrong


class OwnClock:
    """Seconds that this process has computed, and those that steps were made to take."""

    def __init__(self) -> None:
        self.added_s = 0.0

    def __call__(self) -> float:
        return time.process_time() + self.added_s


def play_lengths(case: dict[str, Any], clock: OwnClock) -> dict[str, Any]:
    """One job; what it has cost beside its cap."""
    import farthing
    from farthing.train import loop, step_result

    dice = random.Random(case["seed"])

    def slow(call: Any) -> Any:
        def slowly(*arguments: Any) -> Any:
            clock.added_s += case["step_s"] * dice.uniform(0.95, 1.05)
            return call(*arguments)

        return slowly

    with (
        tempfile.TemporaryDirectory(prefix="farthing-caps-") as name,
        contextlib.ExitStack() as stack,
    ):
        owner, what = (step_result.StepResult, "read") if case["is_within"] else (loop, "take_step")
        honest = getattr(owner, what)
        setattr(owner, what, slow(honest))
        stack.callback(setattr, owner, what, honest)
        state = farthing.fine_tune(job_in(Path(name), case), quiet=True).state
        accounts = read_ledger(Path(name) / "run" / "ledger.jsonl").ordered
        steps = max([account.step for account in accounts], default=0)
        over_s = sum(account.wall_s for account in accounts) - case["cap_s"]
        return {**case, "state": state, "steps": steps, "over_s": round(over_s, 4)}


def measure_lengths(seeds: range) -> dict[str, Any]:
    """The jobs of `--lengths`, in sum."""
    clock = OwnClock()
    time.monotonic = clock
    os.environ[PIPE] = str(os.open(os.devnull, os.O_WRONLY))  # nobody watches by another clock
    # what is imported once is no job's, nor is the age of this process
    play_lengths(draw_lengths(-1) | {"cap_s": 3600.0, "max_steps": 3}, clock)
    found = [play_lengths(draw_lengths(seed), clock) for seed in seeds]
    # what a first step takes is not known before it
    known = [one for one in found if one["steps"] > 1]
    return {
        "kind": "farthing caps of drawn lengths",
        "n": len(found),
        "n_at_cap": sum(one["state"] == "limit" for one in found),
        "n_finished": sum(one["state"] == "finished" for one in found),
        "n_past_cap": sum(one["over_s"] > 0 for one in known),
        "n_past_cap_in_first_step": sum(one["over_s"] > 0 for one in found if one["steps"] < 2),
        "most_over_s": max((one["over_s"] for one in known), default=0.0),
        "bad": [one for one in known if one["over_s"] > 0],
        "outcomes": found,
    }


def main() -> int:
    """Play the seeds; 1 where one has a fault."""
    parser = command(__doc__)
    parser.add_argument("--lengths", action="store_true", help="jobs that nothing disturbs")
    arguments = parser.parse_args()
    if arguments.lengths:
        measured = measure_lengths(seeds_of(arguments))
        print(json.dumps(measured, indent=1))
        return 1 if measured["bad"] else 0
    outcomes = []
    for seed in seeds_of(arguments):
        found = play(draw(seed))
        found["faults"] = faults_of(found)
        outcomes.append(found)
        if not arguments.json:
            what = f"{found['way']} in {found['phase']}, {found['n_ranks']} rank(s)"
            verdict = "; ".join(found["faults"]) or f"ended {found['late_s']:+.1f} s from the cap"
            print(f"{seed}: {what}: {verdict}", flush=True)
    bad = [found for found in outcomes if found["faults"]]
    worst = max(found["late_s"] for found in outcomes)
    if arguments.json:
        result = {"kind": "farthing caps", "n": len(outcomes), "n_bad": len(bad)}
        result |= {"most_late_s": worst, "bad": bad, "outcomes": outcomes}
        print(json.dumps(result, indent=1))
    else:
        print(f"{len(outcomes)} runs, {len(bad)} with a fault, latest {worst:+.1f} s from the cap")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
