"""A run that begins from a checkpoint of another: its weights, and what it has cost.

The optimizer, the schedule and the order of the data begin anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from farthing.config.job import Job
from farthing.errors import InputError, RunDamagedError
from farthing.objectives.registry import find_objective, objective_of
from farthing.report.receipt import build_receipt
from farthing.run.checkpoint import CheckpointPart
from farthing.run.folder import CHECKPOINTS, LABEL_NAMES, RUN, kept, kept_job, saves_in
from farthing.run.parts import RowsOf, contents_of, read_part
from farthing.storage.files import DamagedFileError, read_manifest, verify_folder

KEY = "model.from_run (content)"
_WHERE = "model.from_run"
_OF_ADAPTER = ("method.lora_r", "method.lora_alpha", "method.use_rslora", "method.use_dora")
_MEANING = (
    *("task", "method.name", *_OF_ADAPTER, "model.init", "model.rope_scaling", "model.new_tokens"),
    *("model (content)", "tokenizer (content)", "train.seed"),
)
"""Keys of an identity without which tensors of the same names and shapes compute something else."""


class Ancestor(NamedTuple):
    run: Path
    step: int
    folder: Path


def find_ancestor(from_run: str) -> Ancestor:
    """The checkpoint that a job begins from: of `RUN:STEP`, or that of `RUN`'s model, where it has
    none the last one. Raises `InputError`.
    """
    match = re.fullmatch(r"(.+):(\d+)", from_run)
    run = Path(match[1] if match else from_run)
    saves = {save.step: save.folder for save in reversed(saves_in(run / CHECKPOINTS))}
    if not saves:
        what = "has no checkpoint" if run.is_dir() else "no such run folder"
        to_do = "name the output_dir of a run that has saved"
        raise InputError(what, where=f"{_WHERE}: {run}", to_do=to_do)
    exported = build_receipt(run).exported_step
    wanted = int(match[2]) if match else exported if exported in saves else max(saves)
    if wanted not in saves:
        raise InputError(
            f"has no checkpoint of step {wanted}",
            where=f"{_WHERE}: {run}",
            to_do=f"there are: {', '.join(str(each) for each in sorted(saves))}",
        )
    return Ancestor(run, wanted, saves[wanted])


def ancestor_identity(job: Job, identity: Mapping[str, object]) -> dict[str, str]:
    """What the beginning follows from, for the identity of a run that is else `identity`; as it
    was noted, where the ancestor is gone meanwhile. Raises `InputError` where the ancestor's
    weights mean something else in this run.
    """
    if job.model.from_run is None:
        return {}
    noted = (kept(Path(job.output_dir) / RUN) or {}).get("identity", {}).get(KEY)
    try:
        found = find_ancestor(job.model.from_run)
        content = {KEY: _content(found)}
    except (InputError, DamagedFileError):
        if noted is None:
            raise
        return {KEY: noted}
    if noted is None:
        _refuse_other_meaning(job, found, identity)
    return content


def _refuse_other_meaning(job: Job, found: Ancestor, identity: Mapping[str, object]) -> None:
    before = dict((kept(found.run / RUN) or {}).get("identity", {}))
    task = find_objective(str(before.get("task")))
    if task is not None and task.head == objective_of(job.task).head:
        before["task"] = job.task  # the same outputs may learn something else
    beside = set[str]()
    if job.method.name == "full":
        beside |= set(_OF_ADAPTER)
    if job.method.name == "full" or job.model.init != "random":
        beside.add("train.seed")  # else the frozen weights are drawn from it
    with contextlib.suppress(RunDamagedError):
        if kept_job(found.run)["data"]["chat_template"] != job.data.chat_template:
            beside.add("tokenizer (content)")  # which the template is a part of
    for key in _MEANING:
        if key not in beside and before.get(key) != identity.get(key):
            _refuse(found, f"{key} is", before.get(key), identity.get(key))


def _refuse(found: Ancestor, what: str, there: object, here: object) -> None:
    words = [json.dumps(value) for value in (there, here)]
    there, here = (text if len(text) <= 60 else f"{text[:24]}..." for text in words)
    raise InputError(
        f"the weights of step {found.step} mean something else in this job: {what} {there} there"
        f" and {here} here",
        where=f"{_WHERE}: {found.run}",
        to_do="use the settings of that run, or export its model and name that folder as model:",
    )


def _content(found: Ancestor) -> str:
    try:
        files = {entry["name"]: entry["sha256"] for entry in read_manifest(found.folder)["files"]}
        model = contents_of(files, "model")
    except (KeyError, TypeError, OSError) as error:
        raise DamagedFileError("its manifest can't be read") from error
    return hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()


def begin_from(
    from_run: str, model: CheckpointPart, rows_of: RowsOf, label_names: Sequence[str]
) -> dict[str, Any]:
    """Put the trained weights of the ancestor, or rows of them, into `model`; returns what the
    receipt says of it. `label_names` are this run's classes.

    Raises `InputError`, `ModelError`.
    """
    found = find_ancestor(from_run)
    facts = kept(found.run / RUN) or {}
    classes = facts.get(LABEL_NAMES, [])
    if classes != list(label_names):
        _refuse(found, "the classes are", classes, list(label_names))
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
        "run_id": facts.get("run_id"),
        "step": found.step,
        "wall_s": receipt.wall_s + before.get("wall_s", 0.0),
        "usd": receipt.usd + before.get("usd", 0.0),
        "usd_is_known": receipt.usd_is_known,
    }
