"""farthing beside its peers: useful tokens a CPU-second, memory, dollars and final loss, side by
side in one run.

    make peers      # once: trl, accelerate ... in .venv/peers
    python bench/compare.py --workload chat --methods full --precision fp32 bf16 --seeds 3 --tune
    python bench/compare.py --workload chat --data FILE.jsonl ...

Every contestant runs in its own process on the same tokenized examples, from the same first
weights, with the same number of examples a step, optimizer and schedule, on `--threads` threads;
contestants take turns in a drawn order, a round for each seed. The final loss is judged by one
evaluator, and whatever a contestant says of its own speed is not looked at. `--tune` first looks
for the peers' best settings. Finished runs are kept in `--folder`: the same command, given again,
resumes where it stopped. What is fair and what the figures are: evidence/race.md.

farthing runs in this Python, the others in `--peers-python`. Where there is a
GPU, seconds are the GPU's and memory is what torch allocated; that path was never run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from common import command, seeds_of
from farthing.local.machine import local_cpu
from farthing.model.load import quiet_libraries
from peers import figures, judge, models, workloads
from peers.contestant import CAUSAL_ONLY, CONTESTANTS, IN_ORDER, REFERENCE, versions
from peers.race import Piece, Race


def table_of(asked: argparse.Namespace, race: Race, piece: Piece) -> dict[str, Any]:
    """Tune, then take turns, a round for each seed; then judge."""
    task = piece.facts["workload"]["task"]
    names = [one for one in asked.contestants if task == "causal-lm" or one not in CAUSAL_ONLY]
    settings: dict[str, Any] = {name: keys_of(asked.set, name) for name in names}
    for name in names:
        if asked.tune and name.endswith("-tuned") and not settings[name]:
            settings[name] = race.tuned(piece.entry(name, 0), compiles=asked.tune == "all")
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in seeds_of(asked):
        for name in random.Random(seed).sample(names, len(names)):
            records[name].append(race.run(piece.entry(name, seed, settings[name])))
    rows: figures.Table = {}
    for name, found in records.items():
        if failed := [each["failed"] for each in found if "failed" in each]:
            rows[name] = {"failed": failed[0], "void": True}
        else:
            rows[name] = {**figures.summary(found), "records": found}
    reference = rows.get(REFERENCE, {}).get("losses", {})
    for name, row in rows.items():
        if "records" in row:
            said = judge.verdict(reference, row["losses"], is_in_order=name in IN_ORDER)
            said = judge.Verdict("reference") if name == REFERENCE else said
            if not all(record["saw_all"] for record in row["records"]):
                said = judge.Verdict("other tokens")
            row |= {"verdict": said.as_dict(), "void": said.is_void}
    return {
        "workload": asked.workload,
        "method": piece.method,
        "precision": piece.precision,
        "batch": piece.batch,
        "facts": piece.facts,
        "rows": rows,
    }


def keys_of(pairs: list[str], name: str) -> dict[str, Any]:
    """What `NAME.key=value` says of a contestant; values are read as YAML."""
    its = [pair.removeprefix(f"{name}.").split("=", 1) for pair in pairs if pair.startswith(name)]
    return {key: yaml.safe_load(value) for key, value in its}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = command(__doc__, n=1, type=Path, metavar="FILE")
    add = parser.add_argument
    add("--workload", choices=tuple(workloads.WORKLOADS), default="chat")
    add("--methods", nargs="+", choices=("full", "lora"), default=["full"])
    add("--contestants", nargs="+", choices=tuple(CONTESTANTS), default=list(CONTESTANTS))
    add("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    add("--steps", type=int, default=12, metavar="N")
    add("--batch", type=int, default=8, metavar="N", help="examples of an optimizer step")
    add("--threads", type=int, default=1)
    add("--data", default="", metavar="FILE.jsonl", help="instead of drawn texts")
    add("--columns", nargs="+", default=[], metavar="NAME=COLUMN", help="as data.columns of a job")
    add("--tune", nargs="?", const="all", choices=("quick", "all"), help="quick: no compile")
    add("--set", action="append", default=[], metavar="CONTESTANT.KEY=VALUE", help="repeatable")
    add("--folder", type=Path, default=Path("build/compare"), help="where finished runs are kept")
    add("--peers-python", type=Path, default=Path(".venv/peers/bin/python"))
    asked = parser.parse_args()
    if set(asked.contestants) - {"farthing"} and not asked.peers_python.exists():
        parser.error(
            f"no {asked.peers_python}: `make peers` makes it, or ask for --contestants farthing"
        )
    return asked


def main() -> None:
    """Run, print, write."""
    asked = arguments()
    quiet_libraries()
    root = asked.folder.resolve()
    race = Race(root, asked.peers_python.absolute(), asked.threads)
    is_cpu = models.device().type == "cpu"
    shape = workloads.WORKLOADS[asked.workload]
    shape = shape.scaled(workloads.SCALES.get(asked.workload, 1.0) if is_cpu else 1.0)
    columns = dict(pair.split("=") for pair in asked.columns)
    place = workloads.prepare(
        root / "workloads", shape, asked.steps * asked.batch, 24, asked.data, columns
    )
    tables = []
    for method in asked.methods:
        for precision in asked.precision:
            out = root / "runs" / f"{place[0].name}-{method}-{precision}"
            piece = Piece(*place, method, precision, asked.batch, out)
            tables.append(table_of(asked, race, piece))
            print(figures.draw(tables[-1]), flush=True)
    if asked.json:
        machine = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "cpu": local_cpu().name,
            "platform": platform.platform(),
            "versions": versions(),
            "threads": asked.threads,
        }
        found = {"machine": machine, "tables": tables}
        asked.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
