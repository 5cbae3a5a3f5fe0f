"""A run that has come to its end, recognized without torch: the same command answers at once, and
adds nothing to the bill.

What identifies a run is hashed when it is trained. Here the job's settings are compared, and of its
local files the sizes and times that they had then; where anything differs, or was never noted, the
whole check is left to `train`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from farthing.config.job import Job
from farthing.errors import FarthingError
from farthing.events import Emit, Note, Working
from farthing.export.publish import Publication, noted, publish, wanted_at
from farthing.report.receipt import build_receipt, leave_receipt
from farthing.report.receipt_types import RunReceipt
from farthing.report.training_log import read_log
from farthing.run.exported import CARD, damage_of
from farthing.run.folder import (
    LOG,
    MODEL,
    RECEIPT,
    RUN,
    is_damaged,
    is_finished,
    kept,
)
from farthing.storage.files import DamagedFileError

FORM = "trained"
MOST_FILES = 10_000
FOLLOWS_FROM = "follows_from"


def follows_from(job: Job) -> str | None:
    """A digest of the settings that a run follows from, and of size and times of every local file
    that the job names, itself or by its folder; None where these are too many.
    """
    named = [*job.data.train, *(job.data.eval or ()), job.model.model_name_or_path]
    named += [text for text in (job.model.tokenizer_name_or_path, job.data.chat_template) if text]
    stamps: dict[str, list[int]] = {}
    for name in named:
        try:
            path = Path(name)
            files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
            for file in files if path.exists() else ():
                if len(stamps) >= MOST_FILES:
                    return None
                status = file.stat()
                stamps[str(file)] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        except (OSError, ValueError):  # too long for a path: a template, an address
            continue
    settings = job.model_dump(mode="json", include={"task", "data", "model", "method", "train"})
    content = json.dumps([settings, job.identity(), stamps], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def receipt_of_finished(job: Job) -> RunReceipt | None:
    """The receipt of the job's run if it is finished, and nothing that it follows from has changed
    since; else None.
    """
    folder = Path(job.output_dir)
    if not is_finished(folder) or to_publish(job) is not None:
        return None
    try:
        before = (kept(folder / RUN) or {}).get(FOLLOWS_FROM)
        is_same = before is not None and before == follows_from(job)
        is_whole = not is_damaged(folder) and damage_of(folder) is None
        if not (is_same and is_whole and (folder / MODEL / CARD).is_file()):
            return None
        log = read_log(folder / LOG, whole=True)
        is_written = (folder / RECEIPT).exists()
        return build_receipt(folder, log) if is_written else leave_receipt(folder, log)
    except (DamagedFileError, OSError, ValueError, KeyError, TypeError, FarthingError):
        return None


def to_publish(job: Job) -> Publication | None:
    """Where the model of a run is still to be sent; None where it stays here, or is there already.
    Raises `InputError` where there is no token.
    """
    train = job.train
    if not train.push_to_hub:
        return None
    run = Path(job.output_dir)
    name = train.hub_model_id or run.resolve().name
    note = noted(run, run / MODEL, FORM)
    if (
        note is not None
        and note.commit
        and name in (note.to, note.to.rpartition("/")[2])
        and note.is_private == train.hub_private_repo
    ):
        return None
    return wanted_at(
        name, run / MODEL, FORM, is_private=train.hub_private_repo, where="train.push_to_hub"
    )


def publish_finished(job: Job, emit: Emit) -> None:
    """Send the model of a finished run where the job asks for it and the Hub has it not. Raises
    `PublishError`.
    """
    if (wanted := to_publish(job)) is not None:
        emit(Working("publishing the model"))
        sent = publish(Path(job.output_dir), wanted)
        emit(Note(f"published as hub:{sent.to}, commit {sent.commit}"))
