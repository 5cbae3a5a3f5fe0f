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

import errno
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import command, play, seeds_of
from farthing.run.group import Elastic
from forked import FULL, TASKS, Forked, apart, make_job, run_on, sha256_of, start_of

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
CALLS = {"step": 5, "sums": 4, "update": 4, "saving": 2, "writing": 3}
CALLS["between parts and commit"] = 2
"""At which of a part's calls a mishap happens, where it is not the first."""
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


def _send(case: dict[str, Any], place: Path) -> None:
    """The signal of a mishap, to its rank or to all."""
    what, victim = case["what"], case["victim"]
    while not (place / f"pid-{victim}").exists():
        time.sleep(0.01)
    if "all" in what or what == "Ctrl-C":
        os.kill(case["starter"], signal.SIGUSR1)
    else:
        os.kill(int((place / f"pid-{victim}").read_text()), getattr(signal, what.split()[0]))
    if victim == 0 or what in ("SIGTERM to all", "Ctrl-C"):
        time.sleep(0.2)


def arm(case: dict[str, Any], folder: str, rank: int, attempt: int) -> None:
    """In a rank, before it begins: let the mishap happen in its part, once in all attempts."""
    import torch

    from farthing.dist import reduce
    from farthing.run import checkpoint
    from farthing.train import build, evaluate, rank_setup, resolve, run, saver
    from farthing.train.memory import Steps
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
            _send(case, place)
        elif what != "slow":
            raise {
                "exception": ValueError("made up"),
                "out of memory": torch.OutOfMemoryError("made up"),
                "full disk": OSError(errno.ENOSPC, "No space left on device"),
            }[what]

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
            "step": (Step, "_backward"),
            "sums": (reducer, "finish"),
            "rehearsal": (Steps, "rehearse"),
            "writing": (checkpoint, "save_file"),
            "update": (Step, "clip"),
            "evaluation": (evaluate, "evaluate"),
            "saving": (checkpoint, "commit_folder"),
            "export": (saver, "export_model"),
        }[part]
        within(module, name)


def draw(seed: int) -> dict[str, Any]:
    """What happens, in which part, to which rank of how many."""
    drawn = random.Random(seed)
    while True:
        what, part, n, way = (drawn.choice(each) for each in (MISHAPS, PARTS, (2, 3, 4), WAYS))
        if can_happen(what, part, way):
            return case_of(what, part, n, way, drawn)


def case_of(what: str, part: str, n: int, way: str, drawn: random.Random) -> dict[str, Any]:
    victim = drawn.randrange(n)
    if part in BY_FIRST_ONLY and not what.startswith("SIG"):
        victim = 0
    elif (what, part) == ("full disk", "joining"):
        victim = max(1, victim)
    return {
        "way": way,
        "what": what,
        "part": part,
        "n": n,
        "victim": victim,
        "calls": CALLS.get(part, 1),
        "family": drawn.choice([*TASKS]),
        "same_bits": way == "replicated" and drawn.random() < 0.5,
    }


def make_job_of(folder: Path, case: dict[str, Any], **where: Any) -> None:
    """The job of a case; models are in folders beside it."""
    way, family = case["way"], case["family"]
    train = {"max_steps": N_STEPS, **({} if case["same_bits"] else {"learning_rate": 0.001})}
    train |= {"predict_with_generate": way == "replicated"} if family == "t5" else {}
    method = {} if case["same_bits"] else {"lora_dropout": 0.0}
    keys = {"method": FULL if way == "sharded" else method, "train": train}
    where = {"same_bits": case["same_bits"], **where}
    make_job(folder, folder.parent / f"base-{family}", 0, family, where=where, **keys)


def is_same(to_the_bit: bool, run: Path, alone: Path) -> bool:
    """Whether a run has come to what one process has, to the bit or to rounding."""
    if to_the_bit:
        return sha256_of(run, N_STEPS) == sha256_of(alone, N_STEPS)
    return apart(run, alone, N_STEPS) < 1e-3


def try_case(case: dict[str, Any], folder: Path, alone: Path) -> dict[str, Any]:
    """Run the job with the mishap, and once more where it has left as asked; what came of it."""
    strategy = {"strategy": "fsdp"} if case["way"] == "sharded" else {}
    make_job_of(folder, case, gpus=case["n"], patience_s=PATIENCE_S, **strategy)
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
        "told": said,
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
    parser = command(__doc__, n=12)
    parser.add_argument("--all", action="store_true", help="every pair of mishap and part")
    asked = parser.parse_args()
    cases = [draw(seed) for seed in seeds_of(asked)]
    if asked.all:
        drawn = random.Random(asked.first_seed)
        cases = [
            case_of(what, part, drawn.choice((2, 3, 4)), way, drawn)
            for way, what, part in itertools.product(WAYS, MISHAPS, PARTS)
            if can_happen(what, part, way)
        ]
    with tempfile.TemporaryDirectory(prefix="farthing-ranks-kill-") as top:

        def tried(case: dict[str, Any]) -> dict[str, Any]:
            alone = Path(top) / f"{case['way']}-{case['same_bits']}-{case['family']}"
            if not alone.exists():
                make_job_of(alone, case)
                run_on(1, alone)
            folder = Path(tempfile.mkdtemp(dir=top))
            found = try_case(case, folder, alone)
            words = "" if found["ok"] else (folder / "out.txt").read_text()[-3000:]
            return {**found, "said": f"{found} {words}"}

        return play(cases, tried, asked.json)


if __name__ == "__main__":
    sys.exit(main())
