"""Jobs of drawn lengths and speeds under drawn caps: no bill may pass its cap.

    python bench/caps.py --seeds 200 --first-seed 0 [--json]

A seed draws how many steps a job has, how long its texts are, how long its steps take, and within
them or beside them, and a cap of none to all of it. All run in this process, by a clock of what it
computes and of what steps are made to take: a machine that others use changes nothing.
`tests/test_watchdog.py` has runs that hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import command, seeds_of, write_job
from farthing.run.accounts import read_ledger
from farthing.run.guard import PIPE
from farthing.tiny import demo_rows, write_jsonl
from small_models import make_model_folder

USD_PER_HOUR = 3.6
JOB = """
task: causal-lm
model: {model_name_or_path: ./base, init: random}
data: {train: data.jsonl, eval_fraction: 0.2}
method: full
train: {eval_strategy: steps, eval_steps: 20, save_steps: 10, probe: false}
where: {device: cpu, usd_per_hour: 3.6, gpus: 1}
output_dir: ./run
cache_dir: ./cache
"""


def draw(seed: int) -> dict[str, Any]:
    """A job of some length and speed under some cap."""
    dice = random.Random(seed)
    n_steps, step_s = round(10 ** dice.uniform(0.5, 2.1)), 10 ** dice.uniform(-2, 0.5)
    return {
        "seed": seed,
        "cap_s": dice.uniform(0.1, 1.3) * (n_steps * (step_s + 0.03) + 3.0),
        "step_s": step_s,
        "is_within": dice.random() < 0.7,
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
    )


class OwnClock:
    """Seconds that this process has computed, and those that steps were made to take."""

    def __init__(self) -> None:
        self.added_s = 0.0

    def __call__(self) -> float:
        return time.process_time() + self.added_s


def play(case: dict[str, Any], clock: OwnClock) -> dict[str, Any]:
    """One job; what it has cost beside its cap."""
    import farthing  # here: what is imported before the clock is replaced keeps the old one
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
        accounts = read_ledger(Path(name) / "run" / "ledger.jsonl").accounts
        steps = max([account.step for account in accounts], default=0)
        over_s = sum(account.wall_s for account in accounts) - case["cap_s"]
        return {**case, "state": state, "steps": steps, "over_s": round(over_s, 4)}


def measure(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The jobs, in sum. Replaces this process's clock for good."""
    clock = OwnClock()
    time.monotonic = clock
    os.environ[PIPE] = str(os.open(os.devnull, os.O_WRONLY))  # nobody watches by another clock
    # what is imported once is no job's, nor is the age of this process
    play(draw(-1) | {"cap_s": 3600.0, "max_steps": 3}, clock)
    found = [play(case, clock) for case in cases]
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


if __name__ == "__main__":
    measured = measure([draw(seed) for seed in seeds_of(command(__doc__).parse_args())])
    print(json.dumps(measured, indent=1))
    sys.exit(1 if measured["bad"] else 0)
