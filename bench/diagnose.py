"""Is the diagnosis right? Eight causes of waste, each made real in a run on this machine: named,
and the saving foretold.

    python bench/diagnose.py --json

Each cause is trained with and without: what `report.diagnosis` says of the first run is held
against the seconds that the second one spares. The second run does what the diagnosis says where it
names a key and a value; what was slowed down on purpose is as it was. Runs are timed by the
processor time of the thread that trains, so that other programs on the machine don't count, nor
checkpoints that are written meanwhile; those that wait for a disk by the clock on the wall. Refuses
to train for long: sizes are chosen so that the cause shows.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

import farthing.train.run
from farthing.config.load import load_job
from farthing.data.loader import micro_batches
from farthing.events import ignore
from farthing.report.receipt_types import Finding, Receipt
from farthing.run.ledger import Meter
from farthing.tiny import demo_rows, make_model_folder, write_jsonl

TOLERANCE = 0.25


def long_rows(n: int, words: int, seed: int = 0, long_every: int = 0) -> list[dict[str, str]]:
    """Rows of so many words; every so many are thirty times as long."""
    chance = random.Random(seed)
    vocabulary = [
        "bread",
        "cheese",
        "soup",
        "apple",
        "rice",
        "goal",
        "match",
        "race",
        "team",
        "ball",
    ]
    return [
        {
            "prompt": f"number {i}:",
            "completion": (
                " "
                + " ".join(
                    chance.choices(
                        vocabulary, k=words * (30 if long_every and i % long_every == 0 else 1)
                    )
                )
            ),
        }
        for i in range(n)
    ]


class Case:
    """A run that wastes something, and the same run without."""

    def __init__(
        self,
        area: str,
        cause: str,
        *,
        rows: list[dict[str, str]],
        size: dict[str, int],
        **keys: Any,
    ) -> None:
        self.area, self.cause, self.rows, self.size, self.keys = area, cause, rows, size, keys
        self.slowed: Callable[[], Any] | None = None
        self.keeps_cache = self.waits = False


def cases() -> Iterator[Case]:
    """The eight."""
    small, middle, wide = (
        {"hidden": 64, "layers": 2},
        {"hidden": 192, "layers": 6},
        {"hidden": 384, "layers": 4},
    )
    short = demo_rows(200, 0)
    case = Case("data", "slow storage", rows=short, size=small, max_steps=40)
    case.waits = True
    case.slowed = lambda: patch("farthing.train.step.micro_batches", _slowly_read)
    yield case
    case = Case("data", "slow tokenizer", rows=long_rows(40_000, 60), size=small, max_steps=20)
    case.keeps_cache = case.waits = True  # tokenizers work in threads of their own
    yield case
    yield Case(
        "memory",
        "checkpointing not needed",
        rows=long_rows(200, 30),
        size=middle,
        max_steps=40,
        gradient_checkpointing=True,
    )
    yield Case(
        "memory",
        "micro-batches too small",
        rows=short,
        size=small,
        max_steps=80,
        micro_batch_tokens=24,
    )
    yield Case(
        "compute",
        "max_length too long",
        rows=long_rows(240, 12, long_every=25),
        size=middle,
        max_steps=45,
    )
    yield Case(
        "evaluation",
        "evaluation too often",
        rows=short,
        size=middle,
        max_steps=60,
        eval_steps=2,
        eval_fraction=0.3,
    )
    case = Case(
        "checkpoints",
        "saves too often",
        rows=short,
        size=wide,
        max_steps=40,
        save_steps=1,
        global_batch_size=1,
    )
    case.waits = True
    yield case
    case = Case("start-up", "start-up", rows=short, size=small, max_steps=30)
    case.waits = True
    case.slowed = lambda: patch("farthing.train.run.build_model", _slowly_loaded)
    yield case


def _slowly_read(*arguments: Any) -> Iterator[Any]:
    """Batches from a disk that takes 0.25 s for each."""
    for each in micro_batches(*arguments):
        time.sleep(0.25)
        yield each


_build_model = farthing.train.run.build_model


def _slowly_loaded(*arguments: Any, **keys: Any) -> Any:
    """A model from a disk that takes 12 s for it."""
    time.sleep(12)
    return _build_model(*arguments, **keys)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def run(case: Case, folder: Path, name: str, fixed: dict[str, Any], *, is_slowed: bool) -> Receipt:
    """Train the case in `folder`, with other keys where it is `fixed`."""
    if not (folder / "base").exists():
        make_model_folder(
            folder / "base", [" ".join(row.values()) for row in case.rows[:200]], **case.size
        )
        write_jsonl(folder / "data.jsonl", case.rows)
    keys = dict(case.keys)
    values: dict[str, Any] = {
        "task": "causal-lm",
        "model": {"model_name_or_path": "./base", "init": "random"},
        "data": {"train": "data.jsonl", "eval_fraction": keys.pop("eval_fraction", 0.0)},
        "method": "full",
        "where": {"device": "cpu", "usd_per_hour": 3.6},
        "output_dir": f"./{name}",
        "cache_dir": "./cache" if case.keeps_cache else f"./cache-{name}",
        "train": {
            "global_batch_size": 8,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "probe": False,
            **keys,
        },
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    slowed = case.slowed if is_slowed else None
    timed = functools.partial(Meter, clock=time.monotonic if case.waits else time.thread_time)
    with (slowed or _as_it_is)(), patch("farthing.run.opening.Meter", timed):
        return farthing.train.run.train(
            load_job(path, [f"{k}={v}" for k, v in fixed.items()]), ignore
        ).receipt


def seconds_of(receipt: Receipt) -> float:
    """Seconds of a run without what the import of libraries takes, which only the first run in a
    process pays.
    """
    return receipt.wall_s - sum(span.seconds for span in receipt.spans if span.name == "start_up")


def measure(case: Case) -> dict[str, Any]:
    """One case: what was said of it, and what was spared."""
    with tempfile.TemporaryDirectory() as scratch:
        wasteful = run(case, Path(scratch), "wasteful", {}, is_slowed=True)
        assert wasteful.diagnosis is not None
        found: Finding | None = next(
            (f for f in wasteful.diagnosis.findings if f.cause == case.cause), None
        )
        fix = dict([found.fix.split("=", 1)]) if found and "=" in found.fix else {}
        thrifty = run(case, Path(scratch), "thrifty", fix, is_slowed=False)
    assert thrifty.diagnosis is not None
    others = [f.cause for f in thrifty.diagnosis.findings]
    saved_s = seconds_of(wasteful) - seconds_of(thrifty)
    ratio = found.saves_s / saved_s if found and saved_s > 0 else None
    return {
        "cause": case.cause,
        "named": found is not None and found.area == case.area,
        "is_largest": wasteful.diagnosis.largest == case.cause,
        "named_without_cause": case.cause in others,
        "fix": found.fix if found else None,
        "wasteful_s": round(seconds_of(wasteful), 2),
        "thrifty_s": round(seconds_of(thrifty), 2),
        "foretold_s": round(found.saves_s, 2) if found else None,
        "saved_s": round(saved_s, 2),
        "ratio": round(ratio, 3) if ratio else None,
        "within": ratio is not None and 1 - TOLERANCE <= ratio <= 1 + TOLERANCE,
    }


def main() -> None:
    """Measure and print; 1 where a cause is not named or its saving is off by more than a quarter."""  # noqa: E501
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="one cause")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:  # what a process pays once
        warm = Case(
            "",
            "",
            rows=demo_rows(60, 0),
            size={"hidden": 64, "layers": 2},
            max_steps=4,
            eval_fraction=0.2,
        )
        run(warm, Path(scratch), "warm", {}, is_slowed=False)
    results = []
    for case in cases():
        if arguments.only in (None, case.cause):
            results.append(measure(case))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    good = [row for row in results if row["named"] and row["within"]]
    if arguments.json:
        print(json.dumps({"n": len(results), "n_good": len(good), "causes": results}, indent=1))
    else:
        for row in results:
            verdict = "named" if row["named"] else "not named"
            print(
                f"{row['cause']:26} {verdict:10} foretold {row['foretold_s']} s, saved"
                f" {row['saved_s']} s, {row['fix']}"
            )
    sys.exit(len(good) < len(results))


if __name__ == "__main__":
    main()
