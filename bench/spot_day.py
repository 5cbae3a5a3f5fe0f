"""A day of measured spot capacity in minutes: the real trainer is begun, asked to leave and killed
as machines came and went.

    python bench/spot_day.py --traces DIR [--trace NAME] [--hours 24] [--seconds 600] [--notice
    0.67] [--grace 2] [--json]

Of one zone's trace the day with most interruptions is taken and its clock made faster, so that it
passes in `--seconds`; hours without capacity are skipped. When there is capacity a process trains a
small model in a folder that did not exist, on a cache that is empty: all it has is the store. When
capacity ends, a share of the machines (`--notice`) is told so
`--grace` seconds before (of real time: processes are no faster than ever), the others are killed
without a word, and what was on the disk is gone. Checkpoints come at the interval that
`farthing.planner.spot` finds best for the faster zone.

At the end the run is held against one that was left alone: log, weights, optimizer and exported
model to the bit. Goodput is the share of billed time that was neither spent on saving, nor on
starting again, nor on work that was lost. Dollars are of the day: a real second costs as much as
the virtual ones it stands for. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

import survive
from farthing.planner.spot import SaveSchedule, Trace, best_interval_s, fit, read_traces, spells_of
from farthing.run import mirror as mirror
from farthing.run.accounts import WORK
from farthing.tiny import demo_rows, make_model_folder, write_jsonl
from spot_replay import replay

WORK_SHARE = 0.25  # of the time with capacity, that the work would take without interruptions
TRIAL_STEPS = 60


class Spell(NamedTuple):
    """A stretch of capacity, in real seconds since the day began."""

    begin_s: float
    end_s: float


@dataclass
class Day:
    """What happened."""

    zone: str
    hours: float
    times_faster: float
    up_hours: float
    n_steps: int
    interval_s: float
    """Real seconds between checkpoints."""
    n_machines: int = 0
    n_noticed: int = 0
    n_left_in_time: int = 0
    n_killed: int = 0
    finished_at_hour: float | None = None
    billed_hours: float = 0.0
    """Of machines, from their begin to their end, in hours of the day."""
    on_ledger_hours: float = 0.0
    alone_hours: float = 0.0
    redone_hours: float = 0.0
    restart_hours: float = 0.0
    checkpoint_hours: float = 0.0
    goodput: float = 0.0
    usd: float = 0.0
    alone_usd: float = 0.0
    hours_of: dict[str, float] = field(default_factory=dict)
    """What the ledger says of all machines together, by span."""
    replayed_billed_hours: float = 0.0
    """What arithmetic alone makes of that day: see `spot_replay`."""
    odd_ends: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def worst_window(trace: Trace, hours: float) -> Trace:
    """The stretch of so many hours in which capacity was lost most often."""
    up, n = np.asarray(trace.available) >= 1, round(hours * 3600 / trace.gap_s)
    if n > len(up):
        raise SystemExit(f"{trace.name} is of {len(up) * trace.gap_s / 3600:.0f} h")
    losses = np.r_[0, np.cumsum(np.diff(up.astype(int)) == -1)]
    begin = int(np.argmax(losses[n - 1 :] - losses[: len(losses) - n + 1]))
    return Trace(trace.name, trace.gap_s, trace.available[begin : begin + n])


def spells_in(trace: Trace, times_faster: float) -> list[Spell]:
    """When there is capacity, in real seconds."""
    up = np.r_[False, np.asarray(trace.available) >= 1, False].astype(int)
    edges = np.flatnonzero(np.diff(up)) * trace.gap_s / times_faster
    return [
        Spell(float(begin), float(end)) for begin, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def job_in(
    folder: Path, name: str, n_steps: int, usd_per_hour: float, minutes: float, store: Path | None
) -> Path:
    """The job of one machine: its folder and cache are its own."""
    job = {
        "task": "causal-lm",
        "model": {"model_name_or_path": str(folder / "model"), "init": "random"},
        "data": {
            "train": str(folder / "data.jsonl"),
            "eval_fraction": 0.1,
            "max_length": 128,
            "max_eval_samples": 8,
        },
        "method": {"name": "full"},
        "train": {
            "max_steps": n_steps,
            "global_batch_size": 8,
            "per_device_train_batch_size": 4,
            "learning_rate": 3e-3,
            "save_minutes": minutes,
            "eval_steps": max(1, n_steps // 4),
        },
        "where": {"usd_per_hour": usd_per_hour, "device": "cpu"},
        "output_dir": str(folder / name / "run"),
        "output_store": store and str(store),
        "cache_dir": str(folder / name / "cache"),
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


class Machine:
    """`farthing train` in a child forked from this process, which has the libraries already and no
    threads.
    """

    def __init__(self, job: Path) -> None:
        self.job = job
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                said = os.open(job.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(said, 1)
                os.dup2(said, 2)
                import torch

                from farthing.cli import main

                torch.set_num_threads(1)
                code = main(["train", str(job)])
                sys.stdout.flush()
            except BaseException as error:
                os.write(2, repr(error).encode())
            finally:
                os._exit(code)

    def has_ended(self) -> bool:
        """Whether it has; then `code` is known."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def wait_until(self, moment: float) -> bool:
        """Wait for a moment of the monotonic clock; whether it has ended before."""
        while time.monotonic() < moment and not self.has_ended():
            time.sleep(0.005)
        return self.has_ended()

    def last_words(self) -> str:
        """How it ended."""
        out = self.job.with_suffix(".out")
        said = (
            out.read_text("utf-8", errors="replace")[-500:] if out.exists() else "nothing was said"
        )
        return f"{self.job.stem} exited with {self.code}: {said}"


def in_a_child(work: Callable[[], object]) -> None:
    """Do something that leaves files behind, and threads only there."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(pid, 0)[1] != 0:
        raise SystemExit("the inputs could not be made")


def import_everything() -> None:
    """What every machine would import by itself."""
    for module in (
        "farthing.train.run",
        "peft",
        "transformers.integrations.peft",
        "transformers.models.llama.modeling_llama",
    ):
        importlib.import_module(module)


def finish(job: Path) -> None:
    """Run a job to its end."""
    machine = Machine(job)
    machine.wait_until(math.inf)
    if machine.code != 0:
        raise SystemExit(machine.last_words())


def receipt_of(run: Path) -> dict[str, Any]:
    """What a run has left."""
    receipt: dict[str, Any] = json.loads((run / "receipt.json").read_text(encoding="utf-8"))
    return receipt


def seconds_of(receipt: dict[str, Any], names: Sequence[str]) -> float:
    """Of some spans of all attempts."""
    return float(sum(span["seconds"] for span in receipt["spans"] if span["name"] in names))


def live(
    day: Day,
    spells: Sequence[Spell],
    folder: Path,
    jobs: Sequence[Path],
    notice: float,
    grace_s: float,
) -> Path:
    """Begin a machine with each spell and take it away at its end; the folder of the run that
    finished, or the last one.
    """
    chance = random.Random(day.zone)
    for spell, job in zip(spells, jobs, strict=True):
        day.n_machines += 1
        began = time.monotonic()
        machine = Machine(job)
        is_noticed = chance.random() < notice
        end = began + spell.end_s - spell.begin_s
        has_ended = machine.wait_until(max(began, end - grace_s) if is_noticed else end)
        if not has_ended and is_noticed:
            day.n_noticed += 1
            os.kill(machine.pid, signal.SIGTERM)
            has_ended = machine.wait_until(end)
        ended = time.monotonic()
        if not has_ended:
            day.n_killed += 1
            os.kill(machine.pid, signal.SIGKILL)
            machine.wait_until(math.inf)
        day.billed_hours += (ended - began) * day.times_faster / 3600
        if machine.code == 0:
            day.finished_at_hour = (spell.begin_s + ended - began) * day.times_faster / 3600
            return folder / job.stem / "run"
        if has_ended and machine.code in (75, -signal.SIGTERM):  # the latter before it could begin
            day.n_left_in_time += 1
        elif has_ended:
            day.odd_ends.append(machine.last_words())
        if job is not jobs[-1]:
            shutil.rmtree(folder / job.stem, ignore_errors=True)
    return folder / jobs[-1].stem / "run"


def live_through(
    trace: Trace, folder: Path, seconds: float, usd_per_hour: float, notice: float, grace_s: float
) -> Day:
    """The whole of it, in `folder`."""
    import_everything()
    in_a_child(lambda: make_inputs(folder))
    length_s = len(trace.available) * trace.gap_s
    faster = length_s / seconds
    price = usd_per_hour * faster
    spells = spells_in(trace, faster)
    up_s = sum(end - begin for begin, end in spells)
    mirror.PACE = mirror.Pace(
        renew_s=max(0.5, 20 / faster), lease_s=max(1.5, 60 / faster), pause_s=0.05, again_s=0.5
    )

    trial = job_in(folder, "trial", TRIAL_STEPS, price, 60, None)
    finish(trial)
    tried = receipt_of(folder / "trial" / "run")
    step_s = seconds_of(tried, WORK) / TRIAL_STEPS
    save_s = max(0.02, seconds_of(tried, ["checkpoint"]))
    restart_s = seconds_of(tried, ["start_up", "tokenize", "load_model", "restore"])
    n_steps = max(TRIAL_STEPS, round(WORK_SHARE * up_s / step_s))
    zone = fit(*spells_of(trace.available, trace.gap_s / faster))
    interval_s = best_interval_s(save_s, restart_s, zone)

    day = Day(trace.name, length_s / 3600, faster, up_s * faster / 3600, n_steps, interval_s)
    alone = job_in(folder, "alone", n_steps, price, interval_s / 60, None)
    finish(alone)
    jobs = [
        job_in(folder, f"machine-{i}", n_steps, price, interval_s / 60, folder / "store")
        for i in range(len(spells))
    ]
    run = live(day, spells, folder, jobs, notice, grace_s)
    if day.finished_at_hour is None:
        day.differences.append("it was not finished when the day ended")
        return day
    day.differences += survive.differences(
        survive.result_of(folder / "alone" / "run"), survive.result_of(run)
    )

    receipt, of_alone, hour_s = receipt_of(run), receipt_of(folder / "alone" / "run"), 3600 / faster
    day.on_ledger_hours, day.alone_hours = receipt["wall_s"] / hour_s, of_alone["wall_s"] / hour_s
    day.redone_hours, day.restart_hours = (
        receipt["redone_s"] / hour_s,
        receipt["restart_s"] / hour_s,
    )
    day.checkpoint_hours = seconds_of(receipt, ["checkpoint"]) / hour_s
    day.hours_of = {span["name"]: round(span["seconds"] / hour_s, 3) for span in receipt["spans"]}
    lost = (
        day.redone_hours
        + day.restart_hours
        + day.checkpoint_hours
        + day.billed_hours
        - day.on_ledger_hours
    )
    day.goodput = 1 - lost / day.billed_hours
    day.usd, day.alone_usd = day.billed_hours * usd_per_hour, of_alone["usd"]
    work_s = of_alone["wall_s"] - restart_s
    replayed = replay(
        Trace(trace.name, trace.gap_s, trace.available),
        work_s * faster,
        SaveSchedule(interval_s * faster, save_s * faster, restart_s * faster),
        [0],
    )
    day.replayed_billed_hours = float(replayed.billed_s[0]) / 3600
    return day


def make_inputs(folder: Path) -> None:
    """Model and data, which every machine finds where it is."""
    rows = demo_rows(200, seed=7)
    make_model_folder(
        folder / "model",
        (r["prompt"] + r["completion"] for r in rows),
        hidden=32,
        layers=2,
        dropout=0.1,
    )
    write_jsonl(folder / "data.jsonl", rows)


def say(day: Day) -> None:
    """In words."""
    fast, minutes = day.times_faster, day.interval_s * day.times_faster / 60
    print(
        f"{day.zone}: {day.hours:.0f} h at {fast:.0f} times their speed, {day.up_hours:.1f} h of"
        " them with capacity"
    )
    print(
        f"  {day.n_steps:,} steps, a checkpoint every {day.interval_s:.1f} s ({minutes:.0f} min of"
        " that day)"
    )
    told = f"{day.n_noticed} were told ({day.n_left_in_time} left in time)"
    print(f"  {day.n_machines} machines: {told}, {day.n_killed} were killed")
    if day.finished_at_hour is not None:
        print(
            f"  finished at hour {day.finished_at_hour:.1f}; alone it takes {day.alone_hours:.2f}"
            f" h, ${day.alone_usd:.2f}"
        )
        known = day.on_ledger_hours / day.billed_hours
        print(
            f"  billed {day.billed_hours:.2f} h, ${day.usd:.2f}; {known:.1%} of it is on the ledger"
        )
        print(
            f"  lost: work {day.redone_hours:.2f} h, starts {day.restart_hours:.2f} h, saving"
            f" {day.checkpoint_hours:.2f} h; goodput {day.goodput:.0%}; replayed by arithmetic"
            f" {day.replayed_billed_hours:.2f} h are billed"
        )
    for text in day.odd_ends:
        print(f"  odd: {text}")
    print(
        "  bit-identical to the run that was left alone"
        if not day.differences
        else f"  DIFFERS: {day.differences}"
    )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--traces", type=Path, required=True, help="a folder of traces, see farthing/traces.py"
    )
    parser.add_argument("--trace", default="us-east-2a_v100_1", help="how the name of one ends")
    parser.add_argument("--hours", type=float, default=24)
    parser.add_argument(
        "--seconds",
        type=float,
        default=600,
        help="that these hours take, but for those without capacity",
    )
    parser.add_argument(
        "--notice", type=float, default=0.67, help="share of machines that are told before they go"
    )
    parser.add_argument(
        "--grace", type=float, default=2.0, help="real seconds that are left to them then"
    )
    parser.add_argument("--usd-per-hour", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = [trace for trace in read_traces(asked.traces) if trace.name.endswith(asked.trace)]
    if not found:
        raise SystemExit(f"no trace in {asked.traces} ends with {asked.trace}")
    with tempfile.TemporaryDirectory(prefix="farthing-spot-day-") as folder:
        trace = worst_window(found[0], asked.hours)
        day = live_through(
            trace, Path(folder), asked.seconds, asked.usd_per_hour, asked.notice, asked.grace
        )
    if asked.json:
        print(json.dumps(asdict(day), indent=1))
    else:
        say(day)
    return 1 if day.differences or day.odd_ends else 0


if __name__ == "__main__":
    sys.exit(main())
