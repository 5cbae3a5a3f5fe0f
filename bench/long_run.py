"""A run of a month, made up: how large its ledger is, what `farthing report` takes for it, and a
browser for its page.

    python bench/long_run.py --json

A million steps, ten thousand evaluations and a thousand attempts, each of which ended by a kill:
their ledger is written by the code that writes it in a run, their log line by line. A page's
seconds are those of chromium until it is drawn, less those of an empty page. Refuses to train
anything.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from farthing.report.training_log import keep_digest
from farthing.run.accounts import Account, Mark, as_line
from farthing.run.folder import LEDGER, LOG, RUN, keep
from farthing.run.ledger import SPANS, Ledger, Meter
from farthing.storage.logs import line_of

USD_PER_HOUR = 2.5


def make_run(
    folder: Path, n_steps: int, n_evaluations: int, n_attempts: int, seed: int = 0
) -> float:
    """Write the run folder; returns the dollars that its attempts have cost."""
    chance = random.Random(seed)
    folder.mkdir(parents=True)
    keep(folder / RUN, {"run_id": "made-up", "identity": {}, "machine": {}})
    kept_bytes = 0
    every = max(1, n_steps // max(1, n_evaluations))
    with open(folder / LOG, "w", encoding="utf-8") as log:
        for step in range(1, n_steps + 1):
            row: dict[str, Any] = {
                "step": step,
                "loss": 1 + chance.random(),
                "grad_norm": chance.random(),
                "lr": 1e-4,
            }
            row |= {"n_targets": chance.randrange(4000), "n_tokens": chance.randrange(4000, 9000)}
            row["examples"] = [chance.randrange(10**6) for _ in range(8)]
            log.write(line_of(row) + "\n")
            if step % every == 0:
                metrics = {"loss": 1 + chance.random(), "perplexity": 3 + chance.random()}
                log.write(line_of({"step": step, "metrics": metrics, "is_best": False}) + "\n")
                log.flush()
                kept_bytes = keep_digest(folder / LOG, kept_bytes)  # as the loop does when it saves
    return _make_ledger(folder, n_steps, n_attempts, chance)


def _make_ledger(folder: Path, n_steps: int, n_attempts: int, chance: random.Random) -> float:
    spent_s, lines = 0.0, []
    for number in range(1, n_attempts):
        first, last = n_steps * (number - 1) // n_attempts, n_steps * number // n_attempts
        spans = {name: round(chance.uniform(0, 300), 4) for name in SPANS if name != "lost"}
        account = Account(
            number, f"{number:012x}", 900, "running", 1e9 + spent_s, 1e9 + spent_s, USD_PER_HOUR
        )
        account.first_step, account.step, account.began, account.spans = first, last, True, spans
        account.past_s, account.past_usd = spent_s, spent_s / 3600 * USD_PER_HOUR
        account.facts = {
            "tokens_per_s": 1e4,
            "mfu": 0.4,
            "takes": {"start_s": 9.0, "step_s": 1.0, "save_s": 1.0},
        }
        account.marks = [Mark(last, last, 1, 9000.0, 100, spans)] * 2
        spent_s += account.wall_s
        lines.append(as_line(account))
    (folder / LEDGER).write_text("".join(lines), encoding="utf-8")
    ledger = Ledger(folder / LEDGER, Meter(already_s=100.0), USD_PER_HOUR)
    ledger.begin_at(n_steps - n_steps // n_attempts)
    ledger.at_step(n_steps, {"tokens_per_s": 1e4})
    ledger.close("finished")
    return ledger.spent_usd


def measure(n_steps: int, n_evaluations: int, n_attempts: int) -> dict[str, Any]:
    """Sizes of the files, and seconds and peak memory of a report in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        usd = make_run(folder, n_steps, n_evaluations, n_attempts)
        sizes = {name: (folder / name).stat().st_size for name in (LEDGER, LOG)}
        began, cpu = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "farthing", "report", str(folder), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        receipt = json.loads(done.stdout)
        assert receipt["steps"] == n_steps
        assert abs(receipt["usd"] - usd) < 0.01
        page, empty = Path(scratch) / "page.html", Path(scratch) / "empty.html"
        page_began = time.monotonic()
        subprocess.run([*command[:-1], "--html", str(page)], capture_output=True, check=True)
        page_s = time.monotonic() - page_began
        empty.write_text("<!doctype html><title>empty</title><p>empty</p>", encoding="utf-8")
        drawn_s = [min(_seconds_to_draw(each) for _ in range(2)) for each in (page, empty)]
        return {
            "n_steps": n_steps,
            "n_evaluations": n_evaluations,
            "n_attempts": n_attempts,
            "ledger_bytes": sizes[LEDGER],
            "ledger_lines": sum(1 for _ in open(folder / LEDGER, "rb")),
            "log_bytes": sizes[LOG],
            "report_s": round(page_began - began, 2),
            "report_cpu_s": round(after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime, 2),
            "report_peak_bytes": after.ru_maxrss * 1024,
            "receipt_bytes": len(done.stdout),
            "page_bytes": page.stat().st_size,
            "page_written_s": round(page_s, 2),
            "page_drawn_s": round(drawn_s[0] - drawn_s[1], 2) if drawn_s[1] else None,
        }


def _seconds_to_draw(page: Path) -> float:
    """From the start of a browser without a window to the picture of the page; 0 where there is no
    chromium.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        return 0.0
    began, picture = time.monotonic(), f"--screenshot={page.with_suffix('.png')}"
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1280,6000",
        picture,
    ]
    subprocess.run([browser, *options, page.as_uri()], capture_output=True, check=True, timeout=120)
    return time.monotonic() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--evaluations", type=int, default=10_000)
    parser.add_argument("--attempts", type=int, default=1_000)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    result = measure(arguments.steps, arguments.evaluations, arguments.attempts)
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        for name, value in result.items():
            print(f"{name:18} {value:,}" if value is not None else f"{name:18} no chromium here")


if __name__ == "__main__":
    main()
