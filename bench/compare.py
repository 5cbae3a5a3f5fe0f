"""farthing beside its peers: useful tokens a CPU-second, memory, dollars and final loss, side by
side in one run.

    make peers      # once: trl, accelerate ... in .venv/peers
    python bench/compare.py --workload chat --methods full --precision fp32 bf16 --seeds 3 --tune
    python bench/compare.py --workload chat --data FILE.jsonl ...

Every contestant runs in its own process on the same tokenized examples, from the same first
weights, with the same number of examples a step, optimizer and schedule, on `--threads` threads;
contestants take turns in a drawn order, a round for each seed. The final loss is judged by one
evaluator, and whatever a contestant says of its own speed is not looked at. `--tune` first looks
for the peers' best settings. Finished runs are kept in `--folder`;
with
`--minutes M` the same command, given again, goes on where it stopped. What is fair and what the
figures are: evidence/race.md.

farthing runs in this Python, the others in `--peers-python`. Where there is a
GPU, seconds are the GPU's and memory is what torch allocated; that path was never run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from peers import figures, judge, models, workloads
from peers.contestant import CAUSAL_ONLY, CONTESTANTS, IN_ORDER, REFERENCE, versions
from peers.race import MALLOC, TUNABLE, WARM_UP, Piece, Race, shuffled
from peers.table import draw

METHODS = ("full", "lora")


def compare(asked: argparse.Namespace, race: Race) -> dict[str, Any]:
    """Every table asked for, as far as there was time."""
    tables: list[dict[str, Any]] = []
    for name in asked.workload:
        usual = workloads.SCALES.get(name, 1.0) if models.device().type == "cpu" else 1.0
        shape = workloads.WORKLOADS[name].scaled(asked.scale or usual)
        for method in asked.methods:
            n_train = max(1, round(asked.steps / asked.epochs)) * asked.batch
            size = workloads.Size(asked.hidden, asked.layers, asked.words)
            given = workloads.Given(
                asked.data, asked.model, tuple(tuple(pair.split("=")) for pair in asked.columns)
            )
            place = workloads.prepare(
                race.root / "workloads", shape, size, n_train, asked.eval_examples, given
            )
            for precision in asked.precision:
                out = race.root / "runs" / f"{place[0].name}-{method}-{precision}"
                piece = Piece(
                    *place,
                    method,
                    precision,
                    asked.epochs,
                    asked.batch,
                    asked.threads,
                    asked.usd_per_hour,
                    out,
                )
                race.say(f"{name}, {method}, {precision}")
                tables.append(table_of(asked, race, piece, name))
    return {"is_whole": all(table.get("is_whole", True) for table in tables), "tables": tables}


def table_of(asked: argparse.Namespace, race: Race, piece: Piece, workload: str) -> dict[str, Any]:
    """Tune, then take turns, a round for each seed; then judge."""
    task = piece.facts["workload"]["task"]
    names = [one for one in asked.contestants if task == "causal-lm" or one not in CAUSAL_ONLY]
    settings: dict[str, Any] = {name: keys_of(asked.peer_set, f"{name}.") for name in names}
    settings["farthing"] = keys_of(asked.set)
    swept: set[str] = set()
    is_whole = True
    for name in names if asked.tune else []:
        if name in TUNABLE and not settings[name]:
            best = race.tuned(
                piece.entry(name, seed=0), asked.tune_steps, compiles=asked.tune == "all"
            )
            is_whole = is_whole and best is not None
            settings[name] = best
            swept |= {name}
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for seed in range(asked.seeds):
        for name in shuffled(names, seed):
            if name in failed or settings[name] is None:
                continue
            record = race.run(piece.entry(name, seed, settings[name]))
            if record is None:
                is_whole = False
            elif "failed" in record:
                failed[name] = record["failed"]
            else:
                records[name].append(record)
    rows: figures.Table = {name: figures.summary(records[name]) for name in names if records[name]}
    reference = rows.get(REFERENCE, {}).get("losses", {})
    for name, row in rows.items():
        said = judge.verdict(reference, row["losses"], is_in_order=name in IN_ORDER)
        if name == REFERENCE:
            said = judge.Verdict("reference")
        if not all(record["saw_all"] for record in records[name]):
            said = judge.Verdict("other tokens")
        row |= {
            "verdict": said.as_dict(),
            "void": said.is_void,
            "swept": name in swept,
            "records": records[name],
        }
    rows |= {name: {"failed": why, "void": True} for name, why in failed.items()}
    return {
        "workload": workload,
        "method": piece.method,
        "precision": piece.precision,
        "task": task,
        "epochs": piece.epochs,
        "batch": piece.batch,
        "facts": piece.facts,
        "rows": rows,
        "targets": figures.against_targets(rows, workload, piece.method, task),
        "is_whole": is_whole,
    }


def keys_of(pairs: list[str], prefix: str = "") -> dict[str, Any]:
    """`key=value` strings that begin with `prefix`, without it; values are read as YAML."""
    found: dict[str, Any] = {}
    for pair in pairs:
        if not pair.startswith(prefix):
            continue
        key, _, value = pair.removeprefix(prefix).partition("=")
        found[key] = yaml.safe_load(value)
    return found


def without_places(found: Any) -> Any:
    """Results with the last part of every absolute path alone: they are read on other machines."""
    if isinstance(found, dict):
        return {key: without_places(value) for key, value in found.items()}
    if isinstance(found, list):
        return [without_places(value) for value in found]
    return Path(found).name if isinstance(found, str) and Path(found).is_absolute() else found


def machine(asked: argparse.Namespace) -> dict[str, Any]:
    """What it was run on, and how."""
    from farthing.local.machine import local_cpu

    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": local_cpu().name,
        "platform": platform.platform(),
        "versions": versions(),
        "threads": asked.threads,
        "malloc": MALLOC if asked.malloc else {},
        "warm_up_steps": WARM_UP,
        "asked": {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(asked).items()
        },
    }


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="farthing beside its peers", epilog="see evidence/race.md"
    )
    add = parser.add_argument
    add("--workload", nargs="+", choices=tuple(workloads.WORKLOADS), default=["chat"])
    add("--methods", nargs="+", choices=METHODS, default=["full"])
    add("--contestants", nargs="+", choices=tuple(CONTESTANTS), default=list(CONTESTANTS))
    add("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    add(
        "--seeds", type=int, default=1, metavar="N", help="rounds; the loss is judged from three on"
    )
    add("--steps", type=int, default=12, metavar="N", help="optimizer steps of all epochs")
    add("--epochs", type=int, default=1, metavar="N")
    add("--batch", type=int, default=8, metavar="N", help="examples of an optimizer step")
    add("--threads", type=int, default=1)
    add(
        "--data",
        default="",
        metavar="FILE.jsonl",
        help="texts in any format of farthing, instead of drawn ones",
    )
    add(
        "--columns",
        nargs="+",
        default=[],
        metavar="NAME=COLUMN",
        help="as data.columns of a job: label=product",
    )
    add(
        "--model",
        default="",
        metavar="DIR",
        help="configuration and tokenizer, with or without weights",
    )
    add(
        "--hidden",
        type=int,
        default=256,
        help="width of the model that is made where none is given",
    )
    add("--layers", type=int, default=6)
    add("--words", type=int, default=16000, help="its vocabulary")
    add(
        "--scale",
        type=float,
        metavar="X",
        help="multiplies the lengths (default on a CPU: chat 1/3, full 1/4, shared 0.4)",
    )
    add("--eval-examples", type=int, default=24, metavar="N")
    add(
        "--tune",
        nargs="?",
        const="all",
        choices=("quick", "all"),
        help="find the peers' best settings first; quick: without torch.compile",
    )
    add("--tune-steps", type=int, default=6, metavar="N")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of farthing's job (repeatable)",
    )
    add(
        "--peer-set",
        action="append",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="a peer's setting, as a sweep found it elsewhere: hf-tuned.micro_batch=2 (repeatable)",
    )
    add("--usd-per-hour", type=float, default=0.10)
    add(
        "--plain-malloc",
        dest="malloc",
        action="store_false",
        help="glibc's own thresholds, for all",
    )
    add(
        "--minutes",
        type=float,
        default=1e9,
        metavar="M",
        help="begin nothing that would end later; go on when called again",
    )
    add("--folder", type=Path, default=Path("build/compare"), help="where finished runs are kept")
    add("--peers-python", type=Path, default=Path(".venv/peers/bin/python"))
    add("--json", type=Path, metavar="FILE", help="write everything")
    asked = parser.parse_args(words)
    if set(asked.contestants) - {"farthing"} and not asked.peers_python.exists():
        parser.error(
            f"no {asked.peers_python}: `make peers` makes it, or ask for --contestants farthing"
        )
    if asked.data and len(asked.workload) > 1:
        parser.error("--data is of one --workload")
    return asked


def main(words: list[str] | None = None) -> int:
    """Run, print, write. Exit code 1: there was no time for all of it, call again."""
    words = sys.argv[1:] if words is None else words
    if words[:2] == ["--workload", "preference"]:
        import preference_race

        return preference_race.main(words[2:])
    asked = arguments(words)
    race = Race(
        asked.folder.resolve(),
        asked.peers_python.absolute(),
        threads=asked.threads,
        usd_per_hour=asked.usd_per_hour,
        use_malloc=asked.malloc,
        ends_at=time.monotonic() + asked.minutes * 60,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    found = {"machine": machine(asked), **compare(asked, race)}
    for table in found["tables"]:
        print(draw(table))
    if asked.json:
        asked.json.write_text(json.dumps(without_places(found), indent=1), encoding="utf-8")
    if not found["is_whole"]:
        print("not finished: give the same command again")
    return 0 if found["is_whole"] else 1


if __name__ == "__main__":
    sys.exit(main())
