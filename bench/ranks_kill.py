"""Several processes share a run, and one of them is killed, stopped, slowed or fails: everything
must end or go on in time.

    python bench/ranks_kill.py --json [--seeds 12] [--first-seed 0] [--all]

A seed draws what happens, to which rank of how many, and in which part of the run; `--all` goes
through every pair of mishap and part instead. The processes are started and ended by what `farthing
train` uses. After each mishap: how long until all processes of the attempt had ended, whether any
is left, whether the run came to its end by itself, and whether weights, moments and losses are
those of one process that nothing happened to: to the bit with `where.same_bits`; weights alone,
to rounding, where `all_reduce` adds up or full training is spread over them. These have no dropout:
without `where.same_bits` its masks depend on the number of processes. CPU only.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from farthing.run.group import Elastic
from farthing.tiny import write_jsonl
from forked import Forked, make_job, sha256_of, start_of
from ranks import TASKS, rows_for
from small_models import make_model_folder

PATIENCE_S, MARGIN_S = 6.0, 10.0
N_STEPS = 9
WAYS = ("replicated", "sharded")
PARTS = (
    "joining",
    "tokenizing",
    "loading",
    "restoring",
    "rehearsal",
    "step",
    "sums",
    "update",
    "evaluation",
    "saving",
    "writing",
    "between parts and commit",
    "export",
)
FAMILIES = ("llama", "t5", "bert")
SHARDED_ONLY = ("rehearsal", "writing")
REPLICATED_ONLY = ("sums",)
BY_FIRST_ONLY = ("tokenizing", "saving", "between parts and commit", "export")
MISHAPS = (
    "SIGKILL",
    "SIGSTOP",
    "SIGSTOP 5 s",
    "SIGTERM to one",
    "SIGTERM to all",
    "Ctrl-C",
    "exception",
    "out of memory",
    "full disk",
    "slow",
)


def can_happen(what: str, part: str, way: str) -> bool:
    """Whether a mishap belongs to a part of a run."""
    if (part in SHARDED_ONLY and way != "sharded") or (
        part in REPLICATED_ONLY and way == "sharded"
    ):
        return False
    if what == "full disk":
        return part in ("joining", "tokenizing", "restoring", "saving", "writing", "export")
    if what in ("out of memory", "slow"):
        return part in ("rehearsal", "step", "evaluation")
    return not (what == "exception" and part in ("saving", "writing", "between parts and commit"))


def arm(case: dict[str, Any], folder: str, rank: int, attempt: int) -> None:
    """In a rank, before it begins: let the mishap happen in its part, once in all attempts."""
    import torch

    from farthing.dist import reduce
    from farthing.run import checkpoint
    from farthing.train import build, evaluate, rank_setup, resolve, run, saver
    from farthing.train.room import Steps
    from farthing.train.step import Step

    place, what, victim = Path(folder), case["what"], case["victim"]
    (place / f"pid-{rank}.draft").write_text(str(os.getpid()))
    (place / f"pid-{rank}.draft").rename(place / f"pid-{rank}")
    if attempt > 1:
        return
    calls = 0

    def fire() -> None:
        nonlocal calls
        by_signal = what.startswith(("SIG", "Ctrl"))
        calls += 1
        if (
            calls < case["calls"]
            or rank != (0 if by_signal else victim)
            or (place / "fired").exists()
        ):
            if what == "slow" and rank == victim and (place / "fired").exists():
                time.sleep(0.3)
            return
        (place / "fired").write_text(str(time.monotonic()))
        if by_signal:
            while not (place / f"pid-{victim}").exists():
                time.sleep(0.01)
            target = int((place / f"pid-{victim}").read_text())
            if "all" in what or what == "Ctrl-C":
                os.kill(case["starter"], signal.SIGUSR1)
            else:
                os.kill(target, getattr(signal, what.split()[0]))
            if victim == 0 or what in ("SIGTERM to all", "Ctrl-C"):
                time.sleep(0.2)
        elif what == "exception":
            raise ValueError("made up")
        elif what == "out of memory":
            raise torch.OutOfMemoryError("made up")
        elif what == "full disk":
            raise OSError(errno.ENOSPC, "No space left on device")

    def within(module: Any, name: str) -> None:
        before = getattr(module, name)

        def armed(*arguments: Any, **more: Any) -> Any:
            fire()
            return before(*arguments, **more)

        setattr(module, name, armed)

    def between(folder: Path, fill: Any, facts: Any) -> Any:
        def filled(draft: Path) -> Any:
            found = fill(draft)
            fire()
            return found

        return commit(folder, filled, facts)

    part, commit = case["part"], checkpoint.commit_folder
    reducer = reduce.FixedOrder if case["same_bits"] else reduce.AllReduce
    if part == "between parts and commit":
        checkpoint.commit_folder = between
    else:
        module, name = {
            "joining": (rank_setup, "own_folder" if what == "full disk" else "Ranks"),
            "restoring": (run, "take_over"),
            "tokenizing": (resolve, "tokenize"),
            "loading": (build, "build_model"),
            "step": (Step, "_gradient_scale"),
            "sums": (reducer, "finish"),
            "rehearsal": (Steps, "rehearse"),
            "writing": (checkpoint, "save_file"),
            "update": (Step, "update"),
            "evaluation": (evaluate, "evaluate"),
            "saving": (checkpoint, "commit_folder"),
            "export": (saver, "export_model"),
        }[part]
        within(module, name)


def draw(seed: int) -> dict[str, Any]:
    """What happens, in which part, to which rank of how many."""
    drawn = random.Random(seed)
    while True:
        what, part, n, way = (
            drawn.choice(MISHAPS),
            drawn.choice(PARTS),
            drawn.choice((2, 3, 4)),
            drawn.choice(WAYS),
        )
        if can_happen(what, part, way):
            return case_of(what, part, n, way, drawn)


def case_of(what: str, part: str, n: int, way: str, drawn: random.Random) -> dict[str, Any]:
    by_first = part in BY_FIRST_ONLY and not what.startswith("SIG")
    calls = {
        "step": 5,
        "sums": 4,
        "update": 4,
        "saving": 2,
        "writing": 3,
        "between parts and commit": 2,
    }.get(part, 1)
    return {
        "way": way,
        "what": what,
        "part": part,
        "n": n,
        "victim": 0
        if by_first
        else 1 + drawn.randrange(n - 1)
        if (what, part) == ("full disk", "joining")
        else drawn.randrange(n),
        "calls": calls,
        "family": drawn.choice(FAMILIES),
        "same_bits": way == "replicated" and drawn.random() < 0.5,
    }


def make_job_of(
    folder: Path, base: Path, case: dict[str, Any], where: dict[str, Any] | None = None
) -> None:
    """The job of a case; the folder of its family of models is in `base`."""
    way, family = case["way"], case["family"]
    where = {"same_bits": case["same_bits"], **(where or {})}
    rows = rows_for(family, 60, 0)
    if not (base / family).exists():
        make_model_folder(
            base / family, (" ".join(row.values()) for row in rows), family, hidden=32, layers=2
        )
    train = {"max_steps": N_STEPS, **({} if case["same_bits"] else {"learning_rate": 0.001})}
    train |= {"predict_with_generate": way == "replicated"} if family == "t5" else {}
    method: dict[str, Any] = {} if case["same_bits"] else {"lora_dropout": 0.0}
    if way == "sharded":
        method = {"name": "full", "lora_r": None, "lora_dropout": None}
    make_job(folder, base / family, where=where, train=train, task=TASKS[family], method=method)
    write_jsonl(folder / "data.jsonl", rows[:45])
    write_jsonl(folder / "eval.jsonl", rows[45:])


def is_same(to_the_bit: bool, run: Path, alone: Path) -> bool:
    """Whether a run has come to what one process has, to the bit or to rounding."""
    if to_the_bit:
        return sha256_of(run, N_STEPS) == sha256_of(alone, N_STEPS)
    from farthing.run.parts import read_part

    one, other = (
        read_part(sorted((each / "checkpoints").glob(f"step-{N_STEPS:08d}-*[0-9]"))[-1], "model")
        for each in (alone, run)
    )
    least = 1e-3 * max(
        float(each.abs().max()) for each in one.values()
    )  # below are sums that should be 0: biases of keys
    scales = {name: max(float(each.abs().max()), least) for name, each in one.items()}
    return all(
        float((one[name] - other[name]).abs().max()) < 1e-3 * scale
        for name, scale in scales.items()
    )


def try_case(case: dict[str, Any], folder: Path, base: Path, alone: Path) -> dict[str, Any]:
    """Run the job with the mishap, and once more where it has left as asked; what came of it."""
    where = {
        "gpus": case["n"],
        "patience_s": PATIENCE_S,
        **({"strategy": "fsdp"} if case["way"] == "sharded" else {}),
    }
    make_job_of(folder, base, case, where)
    case = {**case, "starter": os.getpid()}
    began, children, said = [], [], []
    start = start_of(folder, arm, case, str(folder))

    def noted(seat: Any, slot: int, attempt: int) -> Forked:
        began.append((attempt, time.monotonic()))
        children.append(start(seat, slot, attempt))
        return children[-1]

    attempt = Elastic(case["n"], noted, said.append)
    asked = signal.SIGINT if case["what"] == "Ctrl-C" else signal.SIGTERM
    signal.signal(signal.SIGUSR1, lambda *_: attempt.send_signal(asked))
    if case["what"] == "SIGSTOP 5 s":
        _continue_later(folder, children)
        signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
    code = attempt.wait()
    ended_at = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0)
    fired = (folder / "fired").exists()
    fired_at = float((folder / "fired").read_text()) if fired else ended_at
    next_at = min([at for number, at in began if number == 2], default=ended_at)
    codes = [code]
    if code in (75, 2):  # as it was asked to; the same command resumes
        again = Elastic(1, start_of(folder), said.append)
        codes.append(again.wait())
    lives = [child.pid for child in children if child.poll() is None]
    same = codes[-1] == 0 and is_same(
        case["same_bits"] and case["what"] != "out of memory", folder / "run", alone / "run"
    )
    is_lossless = case["way"] == "replicated" and case["what"] == "out of memory"
    ends = not is_lossless and case["what"] not in ("SIGSTOP 5 s", "slow", "full disk")
    end_s = next_at - fired_at if fired and ends else 0.0
    return {
        **{key: case[key] for key in ("way", "same_bits", "family", "what", "part", "n", "victim")},
        "happened": fired,
        "codes": codes,
        "end_s": round(end_s, 2),
        "n_left": len(lives),
        "went_on_by_itself": code == 0,
        "same": same,
        "said": said,
        "ok": fired and not lives and codes[-1] == 0 and end_s <= PATIENCE_S + MARGIN_S and same,
    }


def _continue_later(folder: Path, children: list[Any]) -> None:
    """Wake the stopped process 5 s (within the patience) after it was stopped."""

    def look(*_: Any) -> None:
        if (folder / "fired").exists() and time.monotonic() - float(
            (folder / "fired").read_text() or 0
        ) > 5.0:
            for child in children:
                if child.poll() is None:
                    child.send_signal(signal.SIGCONT)

    signal.signal(signal.SIGALRM, look)


def main() -> int:
    """Every case that was asked for; 1 where one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="every pair of mishap and part")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cases = [
        draw(seed) for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    ]
    if arguments.all:
        drawn = random.Random(arguments.first_seed)
        cases = [
            case_of(what, part, drawn.choice((2, 3, 4)), way, drawn)
            for way in WAYS
            for what in MISHAPS
            for part in PARTS
            if can_happen(what, part, way)
        ]
    found = []
    with tempfile.TemporaryDirectory(prefix="farthing-ranks-kill-") as top:
        folder, base = Path(top), Path(top) / "base"
        for number, case in enumerate(cases):
            alone = folder / f"{case['way']}-{case['same_bits']}-{case['family']}"
            if not alone.exists():
                make_job_of(alone, base, case)
                assert Elastic(1, start_of(alone), print).wait() == 0, (
                    alone / "out.txt"
                ).read_text()
            found.append(try_case(case, folder / f"case-{number}", base, alone))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
            if not found[-1]["ok"]:
                print((folder / f"case-{number}" / "out.txt").read_text()[-3000:], file=sys.stderr)
    n_failed = sum(not each["ok"] for each in found)
    longest = max((each["end_s"] for each in found), default=0.0)
    result = {
        "n_cases": len(found),
        "n_failed": n_failed,
        "longest_end_s": longest,
        "bound_s": PATIENCE_S + MARGIN_S,
        "cases": found,
    }
    print(
        json.dumps(result)
        if arguments.json
        else f"{len(found)} cases, {n_failed} failed, longest end {longest:.1f} s"
    )
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
