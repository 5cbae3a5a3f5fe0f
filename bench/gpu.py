"""How quick farthing is on this GPU, beside its peers and its own promises: `bash bench/gpu.sh fast OUT`.

    python bench/gpu.py OUT [--minutes 9] [--shapes 0.5B 1B 3B 8B] [--who farthing hf-tuned trl-tuned variants]
    python bench/gpu.py OUT --smoke      # the whole program at toy sizes on a CPU: proves that it runs, and nothing else

Shapes of 0.5B to 8B with random weights and random tokens, 40 % of them labelled; chat lengths (lognormal, mean about 660, 2048
at most) and full ones (2048); LoRA of rank 16 on all linear layers and full fine-tuning. farthing, Hugging Face's Trainer and
TRL each in a process of its own, so many steps by events of the GPU after a warm-up. On the 1B shape one thing after the other
is changed; every row of farthing stands beside what the planner had said of it.

Smallest shapes first, farthing before its peers. What would end after `--minutes` is not begun, or is stopped, and is listed as
left out. Every row is in OUT/rows.jsonl as soon as it is measured; the tables in OUT/tables.txt come last. There was no GPU yet
to run it on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from on_gpu import table
from on_gpu.work import FULL, LENGTHS, LORA_R, METHODS, SEED, SHAPES, SMALL, TARGETS, Scale

BENCH = Path(__file__).resolve().parent
WHO = ("farthing", "hf-tuned", "trl-tuned", "variants")
VARIED = "1B"
ROWS, TABLES = "rows.jsonl", "tables.txt"
STARTING_S = 15.0  # of a process, until its first step
TABLES_S = 2.0


class Rows:
    """The file of rows, one line each, written at once."""

    def __init__(self, path: Path, say: bool = True) -> None:
        self._path, self._say = path, say

    def emit(self, row: dict[str, Any]) -> None:
        """Add a row."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self._say:
            print(in_words(row), flush=True)


def in_words(row: dict[str, Any]) -> str:
    """A row as one line."""
    names = ("kind", "who", "shape", "method", "lengths", "group", "way", "what", "why")
    words = " ".join(str(row[name]) for name in names if row.get(name))
    if "failed" in row:
        return f"  {words}: failed: {row['failed']}"
    return f"  {words}: {row['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in row else f"  {words}"


class Budget:
    """How long there is. A thing is begun where as long as the longest of its like is left."""

    def __init__(self, ends_at: float, rows: Rows) -> None:
        self._ends_at, self._rows = ends_at, rows
        self._began: tuple[str, float] | None = None
        self._longest: dict[str, float] = {}

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self._ends_at - time.time()

    def has_time(self, what: str) -> bool:
        """Whether to begin this; what is not begun is put on record. Ends what was begun before."""
        if self._began is not None:
            kind, began = self._began
            self._longest[kind] = max(self._longest.get(kind, 0.0), time.time() - began)
        kind = what.replace(",", " ").split()[0]
        if self.left_s < max(1.0, self._longest.get(kind, 0.0)):
            self._began = None
            self._rows.emit({"kind": "left out", "what": what, "why": "no time left"})
            return False
        self._began = kind, time.time()
        return True


# ---- in a process of its own ----


def run_group(group: dict[str, Any], asked: argparse.Namespace) -> None:
    """One process's share of the rows."""
    scale, rows = SMALL if asked.smoke else FULL, Rows(asked.out / ROWS)
    budget = Budget(asked.until, rows)
    who, shape = group["who"], group["shape"]
    if who == "prepare":
        prepare(asked, scale, rows)
        return
    if who == "farthing":
        from on_gpu import ours

        ours.rows(shape, asked.work, scale, asked.usd_per_hour, rows.emit, budget.has_time)
    elif who == "variants":
        from on_gpu import ours

        ours.variants(shape, asked.work, scale, asked.usd_per_hour, rows.emit, budget.has_time, is_smoke=asked.smoke)
    else:
        from on_gpu import others

        given = assignments(who, shape, asked.work, scale)
        others.rows(given, others.device_bytes(), scale.warm_up, rows.emit, budget.has_time)


def prepare(asked: argparse.Namespace, scale: Scale, rows: Rows) -> None:
    """Facts and ceilings of the machine; the folders of every shape, with the steps that the others take."""
    from on_gpu import clocks, work
    from peers.assignment import Examples

    facts: dict[str, Any] = {"kind": "facts", **clocks.machine()}
    try:
        facts |= clocks.ceilings(scale)
    except Exception as error:  # the rows do not need them
        rows.emit({"kind": "left out", "what": "the ceilings", "why": f"{type(error).__name__}: {error}"[:300]})
    rows.emit(facts)
    if asked.only_ceilings:
        return
    for shape in asked.shapes:
        n_steps = scale.warm_up + scale.n_timed(shape)
        work.prepare(asked.work, shape, scale)
        for lengths in LENGTHS:
            folder = asked.work / f"{shape}-{lengths}"
            order = work.order_of(Examples.load(folder / "train.npz"), scale.batch(lengths), n_steps)
            (folder / "order.json").write_text(json.dumps(order), encoding="utf-8")
            facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
            rows.emit({"kind": "work", "shape": shape, "lengths": lengths, **facts})


def assignments(who: str, shape: str, work: Path, scale: Scale) -> list[tuple[dict[str, Any], Any, int]]:
    """(what it is, assignment, bytes that it takes at the least) of everything that a peer has to do."""
    import torch

    from peers.assignment import Assignment

    found = []
    for method in METHODS:
        for lengths in LENGTHS:
            folder = work / f"{shape}-{lengths}"
            facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
            assignment = Assignment(
                contestant=who,
                folder=str(folder),
                out=str(work / f"{who}-{shape}-{method}-{lengths}"),
                task="causal-lm",
                method=method,
                precision="bf16" if torch.cuda.is_available() else "fp32",
                order=json.loads((folder / "order.json").read_text(encoding="utf-8")),
                epochs=1,
                seed=SEED,
                max_length=facts["longest"],
                max_target_length=0,
                learning_rate=1e-5,
                targets=TARGETS,
                lora_r=LORA_R,
            )
            what = {"kind": "row", "who": who, "shape": shape, "method": method, "lengths": lengths}
            found.append((what, assignment, facts["state_bytes"][method]))
    return found


# ---- all of it ----


def groups_of(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The processes in their order: farthing on all shapes, then its peers, on the 1B shape (or the toy) also the variants."""
    first = [("farthing", shape) for shape in asked.shapes]
    then = [(who, shape) for shape in asked.shapes for who in WHO[1:] if who != "variants" or shape in (VARIED, "toy")]
    return [{"who": who, "shape": shape} for who, shape in [*first, *then] if who in asked.who]


def spawn(group: dict[str, Any], asked: argparse.Namespace, ends_at: float) -> str:
    """Run a group in its process; returns what went wrong, in words."""
    python = asked.peers_python if group["who"] in ("hf-tuned", "trl-tuned") else sys.executable
    command = [
        str(python),
        str(BENCH / "gpu.py"),
        str(asked.out),
        "--group",
        json.dumps(group),
        "--until",
        str(ends_at),
    ]
    command += ["--work", str(asked.work), "--usd-per-hour", str(asked.usd_per_hour), "--shapes", *asked.shapes]
    command += ["--smoke"] * asked.smoke + ["--only-ceilings"] * asked.only_ceilings
    paths = [str(BENCH.parent / "src"), str(BENCH), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "HF_HUB_OFFLINE": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if asked.smoke else {}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        code = process.wait(max(1.0, ends_at - time.time()))
        return "" if code == 0 else f"its process ended with {code}"
    except subprocess.TimeoutExpired:
        return "stopped: no time left"
    finally:
        with contextlib.suppress(ProcessLookupError):  # workers of its own, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(words: list[str] | None = None) -> int:
    """Run groups until the time is over, then draw what there is."""
    asked = arguments(words)
    if asked.group:
        run_group(json.loads(asked.group), asked)
        return 0
    ends_at = time.time() + asked.minutes * 60 - TABLES_S
    asked.out = asked.out.resolve()
    asked.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(asked.out / ROWS)
    starting_s = 1.0 if asked.smoke else STARTING_S
    with tempfile.TemporaryDirectory(prefix="farthing-gpu-") as work:
        asked.work = Path(work)
        if why := spawn({"who": "prepare", "shape": ""}, asked, ends_at):
            rows.emit({"kind": "left out", "what": "everything", "why": why})
            return 1
        for group in [] if asked.only_ceilings else groups_of(asked):
            what = f"{group['who']} {group['shape']}"
            if ends_at - time.time() < starting_s:
                rows.emit({"kind": "left out", "what": what, "why": "no time left"})
            elif why := spawn(group, asked, ends_at):
                rows.emit({"kind": "left out", "what": f"the rest of {what}", "why": why})
    drawn = table.draw(table.read_rows(asked.out / ROWS), asked.usd_per_hour)
    (asked.out / TABLES).write_text(drawn, encoding="utf-8")
    print(f"\n{drawn}", flush=True)
    return 0


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="farthing on a GPU, beside its peers and its promises")
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="folder for rows.jsonl and tables.txt")
    add("--minutes", type=float, default=9.0, metavar="M", help="of everything; what would end later is left out")
    add("--shapes", nargs="+", choices=(*SHAPES, "toy"), metavar="SHAPE", help=f"of {', '.join(SHAPES)}; default: all")
    add("--who", nargs="+", choices=WHO, default=list(WHO), metavar="WHO", help=f"of {', '.join(WHO)}; default: all")
    add("--usd-per-hour", type=float, default=3.0, help="of the machine, for dollars a million tokens")
    add("--peers-python", type=Path, default=Path(sys.executable), help="where transformers and trl are, if elsewhere")
    add("--smoke", action="store_true", help="toy sizes on the CPU: whether the program runs, and nothing else")
    add("--only-ceilings", action="store_true", help="a copy and a matrix product, no training")
    for name, kind in (("--group", str), ("--work", Path), ("--until", float)):
        add(name, type=kind, help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if not asked.shapes:
        asked.shapes = ["toy"] if asked.smoke else list(SHAPES)
    return asked


if __name__ == "__main__":
    sys.exit(main())
