"""What a start costs: seconds and CPU-seconds from the beginning of the process to the first step,
over `import torch`.

    python bench/startup.py --json
    python bench/startup.py --job job.yaml --repeats 5

A small job is made on the spot, its token set cached; then it is begun in a fresh folder, asked to
leave after a checkpoint, and begun again, several times. The least of each is taken: other programs
on the machine only ever add. The end of the first step is when its line is in log.jsonl. Linux
only, as it reads /proc.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import farthing

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PATIENCE_S = 300.0


def cpu_s(pid: int) -> float:
    """CPU-seconds of a process so far, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def import_torch() -> tuple[float, float]:
    """(seconds, CPU-seconds) of a process that imports torch and ends at once."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", "import os, torch; os._exit(0)"])
    _, _, used = os.wait4(process.pid, 0)
    process.returncode = 0
    return time.monotonic() - began, used.ru_utime + used.ru_stime


def n_steps(run: Path) -> int:
    """Steps that log.jsonl has whole lines of."""
    log = run / "log.jsonl"
    return log.read_text(encoding="utf-8").count('"lr"') if log.exists() else 0


def to_first_step(job: Path, words: list[str], run: Path) -> tuple[float, float]:
    """(seconds, CPU-seconds) until one more step is in the log; the process is then asked to leave,
    and saves.
    """
    n_before, began = n_steps(run), time.monotonic()
    command = [
        sys.executable,
        "-m",
        "farthing",
        "train",
        str(job),
        *words,
        "--set",
        f"output_dir={run}",
        "--json",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while n_steps(run) <= n_before:
            if process.poll() is not None or time.monotonic() - began > PATIENCE_S:
                raise SystemExit(
                    f"no step was taken: {' '.join(command)} ended with {process.poll()}"
                )
            time.sleep(0.005)
        measured = time.monotonic() - began, cpu_s(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return measured


def measure(job: Path, words: list[str], folder: Path, repeats: int) -> dict[str, object]:
    """The least of `repeats` of each kind of start, and their ratios to importing torch."""
    to_first_step(
        job, words, folder / "warm"
    )  # the token set, the plan's measurements, the files in memory
    import_torch()
    found: dict[str, list[tuple[float, float]]] = {"import_torch": [], "cold": [], "resume": []}
    for number in range(repeats):
        found["import_torch"].append(import_torch())
        for kind in ("cold", "resume"):
            found[kind].append(to_first_step(job, words, folder / f"run-{number}"))
    least = {
        kind: [round(min(times), 3) for times in zip(*each, strict=True)]
        for kind, each in found.items()
    }
    report: dict[str, object] = {kind: {"s": s, "cpu_s": cpu} for kind, (s, cpu) in least.items()}
    for kind in ("cold", "resume"):
        over = [
            round(mine / torch_s, 2)
            for mine, torch_s in zip(least[kind], least["import_torch"], strict=True)
        ]
        report[f"{kind}_over_import_torch"] = {"s": over[0], "cpu_s": over[1]}
    return {**report, "repeats": repeats}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", type=Path, help="a job file of your own; else a small one is made")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="as `farthing train --set`"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    compileall.compile_dir(
        Path(farthing.__file__).parent, quiet=1
    )  # as pip does where it installs farthing
    with tempfile.TemporaryDirectory() as name:
        folder, job = Path(name), arguments.job
        words = [word for each in arguments.set for word in ("--set", each)]
        if job is None:
            job = folder / "demo" / "job.yaml"
            subprocess.run(
                [sys.executable, "-m", "farthing", "init", "--demo", str(job.parent)],
                check=True,
                capture_output=True,
            )
            words = ["--set", "train.max_steps=100000", "--set", "train.probe=false", *words]
        report = measure(job, words, folder, arguments.repeats)
    if arguments.json:
        print(json.dumps(report))
        return 0
    for kind, values in report.items():
        print(f"{kind:26} {values}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
