"""Run folders without a run, and their copies in a store: nothing here needs torch."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import TypeVar

from farthing.run.accounts import Account, as_line
from farthing.run.folder import COPIES, copies_of, keep
from farthing.run.mirror import Mirror, Pace
from farthing.storage.files import commit_folder
from farthing.storage.logs import line_of
from farthing.storage.objects import Store, open_store

Kind = TypeVar("Kind", bound=Store)
QUICK = Pace(
    renew_s=0.05,
    lease_s=0.4,
    answer_s=1.0,
    deliver_s=0.3,
    pause_s=0.01,
    again_s=0.05,
    finish_s=120.0,
    give_up_s=1.0,
    leave_s=60.0,
)
"""Of whole runs: faults are given up soon, and a store without faults may be as slow as a machine
that others use.
"""
PATIENT = Pace(
    renew_s=60, lease_s=0.3, answer_s=60, deliver_s=60, pause_s=0.05, again_s=0.2, give_up_s=60
)
IN_TROUBLE = Pace(renew_s=0.5, lease_s=5, pause_s=0.02, again_s=0.2, give_up_s=60, leave_s=300)
STILL = Pace(renew_s=60.0, lease_s=0.3, answer_s=0.5, deliver_s=1.0, pause_s=0.001, again_s=0.02)


def folder_of_run(folder: Path, run_id: str = "run-1") -> Path:
    """What a run leaves before its first step."""
    folder.mkdir(parents=True, exist_ok=True)
    keep(folder / "run.json", {"run_id": run_id, "identity": {}, "format": 1})
    keep(folder / "plan.json", {"wall_s": 1})
    return folder


def step_done(folder: Path, step: int, attempt: int = 1) -> Path:
    """A step's line in log and ledger, and its checkpoint."""
    with open(folder / "log.jsonl", "a") as log, open(folder / "ledger.jsonl", "a") as ledger:
        log.write(line_of({"step": step}) + "\n")
        account = Account(
            attempt,
            f"{folder.name}-{attempt}",
            line=step,
            state="running",
            at=1000.0 * attempt + step,
            spans={"compute": float(step)},
            step=step,
            usd_per_hour=1.0,
        )
        ledger.write(as_line(account))

    def fill(draft: Path) -> None:
        (draft / "model.safetensors").write_bytes(random.Random(step).randbytes(5000))
        (draft / "state.json").write_text(json.dumps({"step": step}))

    final = folder / "checkpoints" / f"step-{step:08d}-{attempt:04d}"
    facts = {"kind": "farthing checkpoint", "step": step, "run_id": "run-1"}
    commit_folder(final, fill, {**facts, COPIES: copies_of(folder)})
    return final


def mirror_of(
    store: Store, folder: Path, said: list[str] | None = None, pace: Pace = STILL, keep: int = 2
) -> Mirror:
    folder.mkdir(parents=True, exist_ok=True)
    return Mirror(store, folder, keep, (said if said is not None else []).append, pace)


def delivered(mirror: Mirror, step: int, *checkpoints: Path, seconds: float = 60.0) -> bool:
    mirror.offer(step, checkpoints)
    return mirror.wait(seconds)


def with_copies(store: Kind, run: Path, *steps: int, keep: int = 2) -> Kind:
    """A store that a run has brought these steps to."""
    mirror = mirror_of(store, run, keep=keep)
    mirror.bring_back()
    for step in steps:
        assert delivered(mirror, step, step_done(run, step))
    mirror.close(1)
    return store


def upload(address: str, folder: str, environment: dict[str, str]) -> None:
    """In a process of its own: take the run and bring two checkpoints to the store."""
    os.environ.update(environment)
    run = Path(folder)
    mirror = mirror_of(open_store(address), run, pace=PATIENT)
    mirror.bring_back()
    assert delivered(mirror, 1, step_done(run, 1))
    assert delivered(mirror, 2, step_done(run, 2))
    mirror.close(2)
