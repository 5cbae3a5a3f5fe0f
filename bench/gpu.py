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
and waits with its libraries imported. What would end after `--minutes` is stopped or not begun, and
is listed as left out; so is a process that has nothing to show for a long time. Every row is in
OUT/rows.jsonl as soon as it is measured; the tables in OUT/tables.txt, with the targets at the end,
come last.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
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

from farthing.device_memory import ALLOCATOR_SETTING, ALLOCATOR_VARIABLES
from on_gpu import flash, table
from on_gpu.work import FULL, SHAPES, SMALL

BENCH = Path(__file__).resolve().parent
IN_ORDER = """farthing 1B, trl-tuned 1B, hf 1B, farthing 8B, farthing 3B, trl-tuned 8B, hf 8B,
farthing T5, farthing BERT, hf T5, hf BERT, farthing 0.5B, trl-tuned 3B, hf 3B, trl-tuned 0.5B,
hf 0.5B, variants 1B, farthing toy, hf toy, trl-tuned toy, variants toy"""
"""What is measured, the first first: what targets hang on, then what stands beside it."""
IMPORTS = {
    "prepare": ["on_gpu.clocks"],
    "farthing": ["on_gpu.ours"],
    "variants": ["on_gpu.ours"],
    "hf": ["on_gpu.others", "datasets", "peft", "transformers.trainer"],
    "trl-tuned": ["on_gpu.others", "datasets", "peft", "trl.trainer.sft_trainer"],
}
WHO = tuple(IMPORTS)[1:]
STALLED_S = {"variants": 240.0}
"""After so long without a row a process is stopped; layers are compiled and tuned for minutes."""
MOST_STALLED_S = 100.0
ROWS, TABLES, FLASH = "rows.jsonl", "tables.txt", "flash"
STARTING_S = 8.0  # of a process that waits, until its first step
TABLES_S = 2.0


def emit(out: Path, row: dict[str, Any]) -> None:
    """Add a row to the file, at once, and tell of it."""
    with open(out / ROWS, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    names = ("kind", "who", "shape", "method", "lengths", "group", "way", "what", "why", "seconds")
    words = [str(row[name]) for name in names if row.get(name)]
    words += [f"failed: {row['failed']}"] if "failed" in row else []
    words += [f"{row['tokens_per_s']:,.0f} tokens/s"] if "tokens_per_s" in row else []
    print("  " + " ".join(words), flush=True)


# ---- in a process of its own ----


def run_group(asked: argparse.Namespace) -> None:
    """One process's share of the rows, once a line says that its turn has come."""
    out, work, who = Path(asked.out), Path(asked.work), asked.group
    for name in IMPORTS[who]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if not sys.stdin.readline():
        return
    scale = SMALL if asked.smoke else FULL

    def told(row: dict[str, Any]) -> None:
        emit(out, row)

    if who == "prepare":
        prepare(asked, work, told)
    elif who in ("farthing", "variants"):
        from on_gpu import ours

        given = (asked.shape, work, scale, asked.usd_per_hour, told)
        ours.rows(*given) if who == "farthing" else ours.variants(*given, asked.smoke)
    else:
        from on_gpu import others

        others.rows(who, asked.shape, work, told)


def prepare(asked: argparse.Namespace, work: Path, told: Any) -> None:
    """Facts and ceilings of the machine; the folders of every shape."""
    from on_gpu import clocks
    from on_gpu import work as makes
    from on_gpu.ours import failing

    scale, facts = SMALL if asked.smoke else FULL, {"kind": "facts", **clocks.machine()}
    with failing({"kind": "left out", "what": "the ceilings", "why": "failed"}, told):
        facts |= clocks.ceilings(scale)  # the rows do not need them
    told(facts)
    for shape in [] if asked.only_ceilings else asked.shapes:
        makes.prepare(work, shape, scale)
        for lengths in SHAPES[shape]["lengths"]:
            flops = makes.facts_of(work / f"{shape}-{lengths}", "")["flops_per_token"]
            told({"kind": "work", "shape": shape, "lengths": lengths, "flops_per_token": flops})


# ---- all of it ----


def started(who: str, shape: str, asked: argparse.Namespace, work: Path) -> subprocess.Popen[str]:
    """The process of a group, which imports its libraries and waits for a line."""
    told = {**vars(asked), "group": who, "shape": shape, "work": work}
    has_flash = importlib.util.find_spec("flash_attn") is not None or asked.smoke
    paths = [] if has_flash or not who.endswith("-tuned") else [str(work / FLASH)]
    paths += [str(BENCH.parent / "src"), str(BENCH), os.environ.get("PYTHONPATH", "")]
    environment = {
        ALLOCATOR_VARIABLES[0]: ALLOCATOR_SETTING,  # what `farthing` sets, for all alike
        **os.environ,
        **({"CUDA_VISIBLE_DEVICES": ""} if asked.smoke else {}),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, __file__, "--child", json.dumps(told, default=str)]
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
        while process.poll() is None:
            now = rows.stat().st_size if rows.exists() else 0
            if now != size:
                size, since = now, time.time()
            if time.time() >= ends_at:
                return "stopped: no time left"
            if time.time() - since > stalled_s:
                return f"stopped: no row for {stalled_s:.0f} s"
            time.sleep(0.05)
        return f"its process ended with {process.returncode}" if process.returncode else ""
    finally:
        stop(process)


def stop(process: subprocess.Popen[str]) -> None:
    """Kill a process and the workers it has."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    """Run groups until the time is over, then draw what there is."""
    if sys.argv[1:2] == ["--child"]:
        run_group(argparse.Namespace(**json.loads(sys.argv[2])))
        return 0
    asked = arguments()
    ends_at = time.time() + asked.minutes * 60 - TABLES_S
    asked.out.mkdir(parents=True, exist_ok=True)
    wanted = [tuple(group.split()) for group in IN_ORDER.split(",")]
    groups = [("prepare", "")] + [
        (who, shape)
        for who, shape in wanted
        if who in asked.who and shape in asked.shapes and not asked.only_ceilings
    ]
    with tempfile.TemporaryDirectory(prefix="farthing-gpu-") as folder:
        work = flash.install(Path(folder) / FLASH).parent
        ahead = started(*groups[0], asked, work)
        for index, (who, shape) in enumerate(groups):
            process, what, began = ahead, f"{who} {shape}".strip(), time.time()
            if index + 1 < len(groups):
                ahead = started(*groups[index + 1], asked, work)
            if ends_at - began < (1.0 if asked.smoke else STARTING_S):
                stop(process)
                emit(asked.out, {"kind": "left out", "what": what, "why": "no time left"})
            elif why := finish(process, who, asked.out / ROWS, ends_at):
                emit(asked.out, {"kind": "left out", "what": f"the rest of {what}", "why": why})
            seconds = round(time.time() - began, 1)
            emit(asked.out, {"kind": "took", "what": what, "seconds": seconds})
    drawn = table.draw(table.read_rows(asked.out / ROWS), asked.usd_per_hour)
    (asked.out / TABLES).write_text(drawn, encoding="utf-8")
    print(f"\n{drawn}", flush=True)
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out", type=lambda name: Path(name).resolve(), metavar="OUT")
    add("--minutes", type=float, default=9.0, metavar="M", help="of everything")
    add("--shapes", nargs="+", choices=tuple(SHAPES), metavar="SHAPE", help="default: all")
    add("--who", nargs="+", choices=WHO, default=WHO)
    add("--usd-per-hour", type=float, default=3.0, help="of the machine")
    add("--smoke", action="store_true", help="toy sizes on the CPU")
    add("--only-ceilings", action="store_true", help="a copy and a matrix product, no training")
    asked = parser.parse_args()
    if not asked.shapes:
        all_of = [shape for shape in SHAPES if shape != "toy"]
        asked.shapes = ["toy", "T5", "BERT"] if asked.smoke else all_of
    return asked


if __name__ == "__main__":
    sys.exit(main())
