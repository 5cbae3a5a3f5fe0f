"""How quick farthing is on this GPU, beside its peers and its own promises: `bash bench/gpu.sh fast
OUT`, `... vary OUT`.

    python bench/gpu.py OUT [--minutes 9] [--shapes 1B 8B ...] [--who farthing hf trl-tuned ...]
    python bench/gpu.py OUT --smoke      # the whole program at toy sizes on a CPU: proves that it
    runs, and nothing else

Shapes of 0.5B to 8B, T5-base and BERT-base with random weights and random tokens, 40 % of them
labelled; chat lengths (lognormal, mean about 590, 1536 at most) and full ones (1536); LoRA of rank
16 on all linear layers and full fine-tuning. farthing, Hugging Face's Trainer as people run it
and TRL tuned each in a process of its own, so many steps by events of the GPU after a warm-up.
On the 1B shape one thing after the other is changed; every row of farthing stands beside what the
planner had said of it, and beside the share of time in which the GPU had nothing to do.

What the targets ask for comes first (`IN_ORDER`). The next process is started while one is at work,
and waits with its libraries imported. What would end after `--minutes` is not begun, or is stopped,
and is listed as left out; so is a process that has nothing to show for a long time. Every row is in
OUT/rows.jsonl as soon as it is measured; the tables in OUT/tables.txt, with the targets at the end,
come last. There was no GPU yet to run it on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from on_gpu import flash, table
from on_gpu.work import (
    FULL,
    LORA_R,
    SEED,
    SHAPES,
    SMALL,
    TARGETS,
    TASKS,
    Scale,
    lengths_of,
    methods_of,
    objective_of,
)

BENCH = Path(__file__).resolve().parent
WHO = ("farthing", "hf", "trl-tuned", "variants")
IN_ORDER = (
    "farthing 1B",
    "farthing 8B",
    "trl-tuned 1B",
    "hf 1B",
    "farthing 3B",
    "trl-tuned 8B",
    "hf 8B",
    "farthing T5",
    "farthing BERT",
    "hf T5",
    "hf BERT",
    "farthing 0.5B",
    "trl-tuned 3B",
    "hf 3B",
    "trl-tuned 0.5B",
    "hf 0.5B",
    "variants 1B",
)
"""What is measured, the first first: what targets hang on, then what stands beside it."""
CAUSAL_ONLY = ("trl-tuned",)
STALLED_S = {"variants": 240.0}
"""After so long without a row a process is stopped; layers are compiled and tuned for minutes."""
MOST_STALLED_S = 100.0
ROWS, TABLES = "rows.jsonl", "tables.txt"
STARTING_S = 8.0  # of a process that waits, until its first step
TABLES_S = 2.0
FLASH = "flash"


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
    names = ("kind", "who", "shape", "method", "lengths", "group", "way", "what", "why", "seconds")
    words = " ".join(str(row[name]) for name in names if row.get(name))
    if "failed" in row:
        return f"  {words}: failed: {row['failed']}"
    return (
        f"  {words}: {row['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in row else f"  {words}"
    )


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
    if asked.wait:
        preload(who)
        if not sys.stdin.readline():
            return
    if who == "prepare":
        prepare(asked, scale, rows)
        return
    if who == "farthing":
        from on_gpu import ours

        ours.rows(shape, asked.work, scale, asked.usd_per_hour, rows.emit, budget.has_time)
    elif who == "variants":
        from on_gpu import ours

        ours.variants(
            shape,
            asked.work,
            scale,
            asked.usd_per_hour,
            rows.emit,
            budget.has_time,
            is_smoke=asked.smoke,
        )
    else:
        from on_gpu import others

        given = assignments(who, shape, asked.work, scale)
        others.rows(given, others.device_bytes(), scale.warm_up, rows.emit, budget.has_time)


def preload(who: str) -> None:
    """Import what this process will want, and leave the GPU alone."""
    import torch  # noqa: F401

    if who in ("farthing", "variants"):
        from on_gpu import ours  # noqa: F401
    elif who != "prepare":
        from on_gpu import others

        if not others.missing(who):
            import datasets  # noqa: F401
            import peft  # noqa: F401
            import transformers.trainer  # noqa: F401

            if who.startswith("trl"):
                import trl.trainer.sft_trainer  # noqa: F401


def prepare(asked: argparse.Namespace, scale: Scale, rows: Rows) -> None:
    """Facts and ceilings of the machine; the folders of every shape, with the steps that the others
    take.
    """
    from on_gpu import clocks, work
    from peers.assignment import Examples

    facts: dict[str, Any] = {"kind": "facts", **clocks.machine()}
    try:
        facts |= clocks.ceilings(scale)
    except Exception as error:  # the rows do not need them
        rows.emit(
            {
                "kind": "left out",
                "what": "the ceilings",
                "why": f"{type(error).__name__}: {error}"[:300],
            }
        )
    rows.emit(facts)
    if asked.only_ceilings:
        return
    for shape in asked.shapes:
        n_steps = scale.warm_up + scale.n_timed(shape)
        work.prepare(asked.work, shape, scale)
        for lengths in lengths_of(shape):
            folder = asked.work / f"{shape}-{lengths}"
            order = work.order_of(
                Examples.load(folder / "train.npz"), scale.batch(lengths), n_steps
            )
            (folder / "order.json").write_text(json.dumps(order), encoding="utf-8")
            facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
            rows.emit({"kind": "work", "shape": shape, "lengths": lengths, **facts})


def assignments(
    who: str, shape: str, work: Path, scale: Scale
) -> list[tuple[dict[str, Any], Any, int]]:
    """(what it is, assignment, bytes that it takes at the least) of everything that a peer has to
    do: lengths that vary.
    """
    import torch

    from peers.assignment import Assignment

    found = []
    for method in methods_of(shape):
        for lengths in lengths_of(shape)[:1]:
            folder = work / f"{shape}-{lengths}"
            facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
            assignment = Assignment(
                contestant=who,
                folder=str(folder),
                out=str(work / f"{who}-{shape}-{method}-{lengths}"),
                task=objective_of(shape),
                method=method,
                precision="bf16" if torch.cuda.is_available() else "fp32",
                order=json.loads((folder / "order.json").read_text(encoding="utf-8")),
                epochs=1,
                seed=SEED,
                max_length=facts["longest"],
                max_target_length=facts["longest"],
                learning_rate=1e-5,
                targets=TARGETS,
                lora_r=LORA_R,
            )
            what = {"kind": "row", "who": who, "shape": shape, "method": method, "lengths": lengths}
            found.append((what, assignment, facts["state_bytes"][method]))
    return found


# ---- all of it ----


def groups_of(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The processes in their order; the toy has all of them."""
    toys = [(who, "toy") for who in WHO]
    return [
        {"who": who, "shape": shape}
        for who, shape in [*map(str.split, IN_ORDER), *toys]
        if who in asked.who and shape in asked.shapes
    ]


def started(
    group: dict[str, Any], asked: argparse.Namespace, ends_at: float
) -> subprocess.Popen[str]:
    """The process of a group, which imports its libraries and waits for a line."""
    who = group["who"]
    of_peers = who not in ("farthing", "variants", "prepare")
    command = [
        str(asked.peers_python if of_peers else sys.executable),
        str(BENCH / "gpu.py"),
        str(asked.out),
        "--wait",
    ]
    command += ["--group", json.dumps(group), "--until", str(ends_at), "--work", str(asked.work)]
    command += ["--usd-per-hour", str(asked.usd_per_hour), "--shapes", *asked.shapes]
    command += ["--smoke"] * asked.smoke + ["--only-ceilings"] * asked.only_ceilings
    has_flash = importlib.util.find_spec("flash_attn") is not None
    paths = [str(asked.work / FLASH)] * (
        who.endswith("-tuned") and not has_flash and not asked.smoke
    )
    paths += [str(BENCH.parent / "src"), str(BENCH), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HF_HUB_OFFLINE": "1",
    }
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if asked.smoke else {}
    return subprocess.Popen(
        command, env=environment, start_new_session=True, stdin=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str], who: str, rows: Path, ends_at: float) -> str:
    """Let a process that waits go on, to its end; returns what went wrong, in words."""
    assert process.stdin is not None
    stalled_s = STALLED_S.get(who, MOST_STALLED_S)
    size, since = -1, time.time()
    try:
        with contextlib.suppress(BrokenPipeError):  # it has ended while it imported
            process.stdin.write("\n")
            process.stdin.close()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(max(0.05, min(0.5, ends_at - time.time())))
                return "" if code == 0 else f"its process ended with {code}"
            now = rows.stat().st_size if rows.exists() else 0
            if now != size:
                size, since = now, time.time()
            if time.time() >= ends_at:
                return "stopped: no time left"
            if time.time() - since > stalled_s:
                return f"stopped: no row for {stalled_s:.0f} s"
    finally:
        stop(process)


def stop(process: subprocess.Popen[str]) -> None:
    """Kill a process and the workers it has."""
    with contextlib.suppress(ProcessLookupError):
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
        flash.install(asked.work / FLASH)
        groups = [
            {"who": "prepare", "shape": ""},
            *([] if asked.only_ceilings else groups_of(asked)),
        ]
        ahead = started(groups[0], asked, ends_at)
        for index, group in enumerate(groups):
            process, what = ahead, f"{group['who']} {group['shape']}".strip()
            if index + 1 < len(groups):
                ahead = started(groups[index + 1], asked, ends_at)
            began = time.time()
            if ends_at - time.time() < starting_s:
                stop(process)
                rows.emit({"kind": "left out", "what": what, "why": "no time left"})
            elif why := finish(process, group["who"], asked.out / ROWS, ends_at):
                rows.emit({"kind": "left out", "what": f"the rest of {what}", "why": why})
                if group["who"] == "prepare" and not any(asked.work.glob("*/order.json")):
                    stop(ahead)
                    return 1
            rows.emit({"kind": "took", "what": what, "seconds": round(time.time() - began, 1)})
    drawn = table.draw(table.read_rows(asked.out / ROWS), asked.usd_per_hour)
    (asked.out / TABLES).write_text(drawn, encoding="utf-8")
    print(f"\n{drawn}", flush=True)
    return 0


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="farthing on a GPU, beside its peers and its promises"
    )
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="folder for rows.jsonl and tables.txt")
    add(
        "--minutes",
        type=float,
        default=9.0,
        metavar="M",
        help="of everything; what would end later is left out",
    )
    add(
        "--shapes",
        nargs="+",
        choices=(*SHAPES, "toy"),
        metavar="SHAPE",
        help=f"of {', '.join(SHAPES)}; default: all",
    )
    add(
        "--who",
        nargs="+",
        choices=WHO,
        default=list(WHO),
        metavar="WHO",
        help=f"of {', '.join(WHO)}; default: all",
    )
    add(
        "--usd-per-hour",
        type=float,
        default=3.0,
        help="of the machine, for dollars a million tokens",
    )
    add(
        "--peers-python",
        type=Path,
        default=Path(sys.executable),
        help="where transformers and trl are, if elsewhere",
    )
    add(
        "--smoke",
        action="store_true",
        help="toy sizes on the CPU: whether the program runs, and nothing else",
    )
    add("--only-ceilings", action="store_true", help="a copy and a matrix product, no training")
    add("--wait", action="store_true", help=argparse.SUPPRESS)
    for name, kind in (("--group", str), ("--work", Path), ("--until", float)):
        add(name, type=kind, help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if not asked.shapes:
        asked.shapes = ["toy", *TASKS] if asked.smoke else list(SHAPES)
    return asked


if __name__ == "__main__":
    sys.exit(main())
