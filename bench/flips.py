"""Flip a bit in a file of a run folder, run the same command, and look whether anybody noticed.

    python bench/flips.py --flips 200 --first-seed 0 [--json]

A run is stopped half-way, and another one is finished. Each seed draws one of the two, a file of
its folder, a byte and a bit. The same job then goes on in a copy. A flip is silent where the result
(log, weights, optimizer state, exported model) or the bill differs from that of a whole run, with
exit code 0 and without a warning.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["FARTHING_METADATA"] = "http://127.0.0.1:9"

from farthing.config.load import load_job
from farthing.errors import FarthingError
from farthing.events import Event, StepTaken, Warned
from farthing.run.accounts import read_ledger
from farthing.tiny import demo_rows, write_jsonl
from farthing.train.run import train
from small_models import make_model_folder
from survive import differences, result_of

OF_THE_MOMENT = (".lock", "report.html", "receipt.json", "log.digest.json")
"""Written anew by every attempt, and read by none."""


def job_in(folder: Path) -> Path:
    """A small job with evaluations and checkpoints."""
    rows = demo_rows(48, 0)
    make_model_folder(folder / "base", [" ".join(row.values()) for row in rows], "llama")
    write_jsonl(folder / "data.jsonl", rows)
    values = {
        "task": "causal-lm",
        "model": {"model_name_or_path": "./base", "init": "random"},
        "data": {"train": "data.jsonl", "eval_fraction": 0.2},
        "method": "full",
        "train": {
            "max_steps": 8,
            "global_batch_size": 8,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "save_steps": 2,
            "probe": False,
        },
        "where": {"device": "cpu", "usd_per_hour": 3.6},
        "output_dir": "./run",
        "cache_dir": "./cache",
    }
    (folder / "job.yaml").write_text(json.dumps(values), encoding="utf-8")
    return folder / "job.yaml"


class Ear(list[str]):
    """Hears warnings; asks the run to leave after a step where it is told to."""

    def __init__(self, leave_after: int | None = None) -> None:
        self.leave_after = leave_after

    def __call__(self, event: Event) -> None:
        if isinstance(event, Warned):
            self.append(event.text)
        if isinstance(event, StepTaken) and event.step == self.leave_after:
            os.kill(os.getpid(), signal.SIGTERM)


def play(seed: int, job: Path, bases: dict[str, Path], whole: dict[str, Any]) -> dict[str, Any]:
    """One flip; whether it was noticed, and what came of it."""
    dice = random.Random(seed)
    kind = dice.choice(sorted(bases))
    run = job.parent / "flipped"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(bases[kind], run)
    files = sorted(
        path for path in run.rglob("*") if path.is_file() and path.name not in OF_THE_MOMENT
    )
    path = dice.choice([each for each in files if each.stat().st_size])
    at, bit = dice.randrange(path.stat().st_size), dice.randrange(8)
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
    before_usd = sum(account.usd for account in read_ledger(bases[kind] / "ledger.jsonl").ordered)
    ear, said, differs = Ear(), "", list[str]()
    try:
        outcome = train(load_job(job, [f"output_dir={run}"]), ear)
        said = "; ".join(ear)
        if outcome.receipt.ledger or outcome.receipt.damaged_log_lines:
            said = said or "on the receipt"
        differs = differences(whole, result_of(run))
        if outcome.receipt.usd < before_usd * 0.999:
            differs.append("the bill")
    except FarthingError as error:
        said = str(error)
    return {
        "seed": seed,
        "run": kind,
        "file": path.relative_to(run).as_posix(),
        "byte": at,
        "bit": bit,
        "said": said[:200],
        "differs": differs,
        "is_silent": bool(differs) and not said,
    }


def main() -> int:
    """Play the flips; 1 where one is silent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="farthing-flips-") as name:
        folder = Path(name)
        job = job_in(folder)
        train(load_job(job, [f"output_dir={folder / 'stopped'}"]), Ear(leave_after=5))
        train(load_job(job, [f"output_dir={folder / 'finished'}"]), Ear())
        bases = {each: folder / each for each in ("stopped", "finished")}
        train(load_job(job, [f"output_dir={folder / 'flipped'}"]), Ear())
        whole = result_of(folder / "flipped")
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.flips)
        found = [play(seed, job, bases, whole) for seed in seeds]
    silent = [each for each in found if each["is_silent"]]
    figures = {
        "flips": len(found),
        "noticed": sum(bool(each["said"]) for each in found),
        "without_effect": sum(not each["said"] and not each["differs"] for each in found),
        "silent": len(silent),
    }
    if arguments.json:
        print(json.dumps({**figures, "cases": found}, indent=1))
    else:
        for each in silent:
            print(f"{each['seed']}: silent: {each['file']} byte {each['byte']}: {each['differs']}")
        print(figures)
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
