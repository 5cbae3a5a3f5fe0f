"""A run that begins from a checkpoint of another: its weights, and what it has cost.

The optimizer, the schedule and the order of the data begin anew. Refuses checkpoints that are
damaged or of another model, and to write anything into the ancestor's folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from farthing.config.job import Job
from farthing.errors import InputError
from farthing.report.receipt import build_receipt
from farthing.run.checkpoint import Part
from farthing.run.folder import CHECKPOINTS, RUN, kept
from farthing.run.parts import RowsOf, contents_of, read_part
from farthing.storage.files import DamagedFileError, read_manifest, verify_folder

KEY = "model.from_run (content)"
_WHERE = "model.from_run"


class Ancestor(NamedTuple):
    """A checkpoint of another run."""

    run: Path
    step: int
    folder: Path


def split_step(text: str) -> tuple[str, int | None]:
    """`RUN:STEP` as (RUN, STEP); `RUN` alone has no step."""
    match = re.fullmatch(r"(.+):(\d+)", text)
    return (match[1], int(match[2])) if match else (text, None)


def find_ancestor(job: Job) -> Ancestor | None:
    """The checkpoint that the job begins from; None where it names none. Raises `InputError`."""
    if job.model.from_run is None:
        return None
    name, step = split_step(job.model.from_run)
    run = Path(name)
    saves: dict[int, Path] = {}
    for folder in sorted(
        (run / CHECKPOINTS).glob("step-*")
    ):  # of two saves of a step the later one
        match = re.fullmatch(r"step-(\d+)-(\d+)", folder.name)
        if match:
            saves[int(match[1])] = folder
    if not saves:
        what = "has no checkpoint" if run.is_dir() else "no such run folder"
        raise InputError(
            what, where=f"{_WHERE}: {name}", to_do="name the output_dir of a run that has saved"
        )
    wanted = max(saves) if step is None else step
    if wanted not in saves:
        there = ", ".join(str(each) for each in sorted(saves))
        raise InputError(
            f"has no checkpoint of step {wanted}",
            where=f"{_WHERE}: {name}",
            to_do=f"there are: {there}",
        )
    return Ancestor(run, wanted, saves[wanted])


def ancestor_identity(job: Job) -> dict[str, str]:
    """What the beginning follows from, for the identity of a run; as it was noted, where the
    ancestor is gone meanwhile.
    """
    if job.model.from_run is None:
        return {}
    noted = (kept(Path(job.output_dir) / RUN) or {}).get("identity", {}).get(KEY)
    try:
        found = find_ancestor(job)
        assert found is not None
        return {KEY: _content(found)}
    except (InputError, DamagedFileError):
        if noted is None:
            raise
        return {KEY: noted}


def _content(found: Ancestor) -> str:
    try:
        files = {entry["name"]: entry["sha256"] for entry in read_manifest(found.folder)["files"]}
        model = contents_of(files, "model")
    except (KeyError, TypeError, OSError) as error:
        raise DamagedFileError("its manifest can't be read") from error
    return hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()


def begin_from(found: Ancestor, model: Part, rows_of: RowsOf) -> dict[str, Any]:
    """Put the ancestor's trained weights, or rows of them, into `model`; returns what the receipt
    says of it.

    Raises `InputError`, `ModelError`.
    """
    try:
        verify_folder(found.folder)
        tensors = read_part(found.folder, "model", rows_of)
    except (DamagedFileError, OSError) as error:
        raise InputError(
            f"the checkpoint of step {found.step} is damaged ({error})",
            where=f"{_WHERE}: {found.run}",
            to_do="choose another step: RUN:STEP",
        ) from error
    model.restore(tensors, {})
    receipt = build_receipt(found.run)
    before = receipt.ancestor or {}
    return {
        "run": str(found.run),
        "run_id": (kept(found.run / RUN) or {}).get("run_id"),
        "step": found.step,
        "wall_s": receipt.wall_s + before.get("wall_s", 0.0),
        "usd": receipt.usd + before.get("usd", 0.0),
        "usd_is_known": receipt.usd_is_known,
    }
