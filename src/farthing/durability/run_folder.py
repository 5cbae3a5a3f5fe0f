"""What a run folder holds, and whose run it is. A folder belongs to one run for good.

job.json          the job as it was read, every default spelled out
run.json          the run's id, what identifies it (settings, data, tokenizer, model), where and on which date it began
log.jsonl         one line a step: loss, gradient norm, examples; one line an evaluation
ledger.jsonl      seconds and dollars of every attempt
checkpoints/      see checkpoint.py
model/            the trained model for others
receipt.json      written when an attempt ends
measurements.json what each attempt took, see measurements.py
plan.json         what the planner promised before the first attempt, and how it would have it run
schedule.json     how many steps the budget buys, where the schedule is fitted to it
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, NamedTuple

import farthing
from farthing.clock import today
from farthing.durability.accounts import Witness, witnesses_in
from farthing.durability.files import parse_json, write_json
from farthing.errors import RunChanged, RunDamaged

JOB, RUN, PLAN, LOG, LEDGER, CHECKPOINTS, MODEL, RECEIPT, SCHEDULE = (
    "job.json",
    "run.json",
    "plan.json",
    "log.jsonl",
    "ledger.jsonl",
    "checkpoints",
    "model",
    "receipt.json",
    "schedule.json",
)


class Began(NamedTuple):
    """When a run began, and how it makes tokens of rows: what later attempts, plans and other machines go by."""

    date: str
    """ISO date."""
    text_version: int


def began(folder: Path, text_version: int) -> Began:
    """As `run.json` says; of a run that is yet to begin: today, with `text_version`.

    A run from before dates were noted began on the day its run.json was made, and has text version 1 unless it says so.
    """
    try:
        facts = parse_json((folder / RUN).read_text(encoding="utf-8"))
        version = int(facts["identity"].get("tokenization.version", 1))
        day = facts.get("date") or datetime.fromisoformat(facts["started"]).astimezone().date().isoformat()
        return Began(str(date.fromisoformat(day)), version)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # damaged: `claim` says so
    return Began(today().isoformat(), text_version)


def same_examples(folder: Path, facts: dict[str, Any], sha256: str) -> dict[str, Any]:
    """Note which examples the run has, or check that they are those it began with. Raises `RunChanged`."""
    before = facts.get("examples_sha256")
    if before is None:
        facts = {**facts, "examples_sha256": sha256}
        write_json(folder / RUN, facts)
    elif before != sha256:
        raise RunChanged(
            "this run began with other examples: the same rows were made into other tokens, or split in another way",
            where=str(folder),
            to_do="continue it with the versions of farthing, transformers and tokenizers that it began with, or give the"
            " job another output_dir",
        )
    return facts


def claim(
    folder: Path, identity: dict[str, Any], machine: dict[str, str], warn: Callable[[str], None]
) -> dict[str, Any]:
    """Write what this run is, or check that the folder's run is this one. Raises `RunChanged`, `RunDamaged`."""
    path = folder / RUN
    if not path.exists():
        facts = {
            "run_id": uuid.uuid4().hex,
            "farthing": farthing.__version__,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "date": identity.get("tokenization.date") or today().isoformat(),
            "identity": identity,
            "machine": machine,
        }
        write_json(path, facts)
        return facts
    try:
        facts = parse_json(path.read_text(encoding="utf-8"))
        before = facts["identity"]
        facts["run_id"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise RunDamaged(
            f"{RUN} can't be read ({type(error).__name__})",
            where=str(path),
            to_do="bring it back from a copy, or give the job another output_dir",
        ) from error
    now = json.loads(json.dumps(identity))
    changed = [f"{key}: {_brief(before.get(key))} -> {_brief(now.get(key))}" for key in {**before, **now}
               if before.get(key) != now.get(key)]  # fmt: skip
    if changed:
        raise RunChanged(
            "this folder holds a run of something else:\n    " + "\n    ".join(changed),
            where=str(folder),
            to_do="undo the change to continue it, or give the job another output_dir"
            f" (to train its result further: model: {folder / MODEL})",
        )
    moved = [f"{key} {facts['machine'].get(key)} -> {value}" for key, value in machine.items()
             if facts["machine"].get(key) != value]  # fmt: skip
    if moved and not facts.get("finished"):
        warn(f"resumed under other conditions ({'; '.join(moved)}): equal to rounding, not to the bit")
    return dict(facts)


def is_finished(folder: Path) -> bool:
    """Whether the run in `folder` has come to its end, and its model is there."""
    try:
        return (
            bool(parse_json((folder / RUN).read_text(encoding="utf-8")).get("finished")) and (folder / MODEL).is_dir()
        )
    except (OSError, ValueError, AttributeError):
        return False


def witnesses_of(folder: Path) -> list[Witness]:
    """What the checkpoints of the run in `folder` know of the money that was spent."""
    try:
        run_id = str(parse_json((folder / RUN).read_text(encoding="utf-8"))["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        run_id = None
    return witnesses_in(folder / CHECKPOINTS, run_id)


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:18]}...{text[-6:]}"
