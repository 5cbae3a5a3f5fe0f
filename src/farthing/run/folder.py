"""What a run folder holds, and whose run it is. A folder belongs to one run for good.

- job.json: the job as it was read, every default spelled out
- run.json: the run's id, what identifies it (settings, data, tokenizer, model), where and on which
  date it began
- log.jsonl: one line a step (loss, gradient norm, examples), one line an evaluation
- log.digest.json: a summary of a long log up to a place in it, from which readers continue
- ledger.jsonl: seconds and dollars of every attempt
- checkpoints/: see checkpoint.py
- model/: the trained model for others, with a manifest, see exported.py
- receipt.json: written when an attempt ends; report.html draws it
- measurements.json: what each attempt took, see measurements.py
- plan.json: the estimate before the first attempt and its recipe; never written again
- settings.json: how the run is computed since its first step, see settings.py
- schedule.json: how many steps the budget buys, where the schedule is fitted to it

run.json, plan.json, settings.json and schedule.json decide the result. Each carries the sha256 of
its own content, and each checkpoint's manifest a copy of all: one that is damaged or gone is
written again from there, or the run is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

import farthing
from farthing.clock import today
from farthing.errors import RunChangedError, RunDamagedError
from farthing.run.accounts import Witness, read_ledger
from farthing.storage.files import (
    DamagedFileError,
    Json,
    Warn,
    make_private,
    parse_json,
    read_manifest,
    seal,
    unseal,
    write_text,
)

DATA_NOTES = "data_notes.json"  # columns that are not used, and the like
JOB, RUN, PLAN, SCHEDULE, SETTINGS = (
    "job.json",
    "run.json",
    "plan.json",
    "schedule.json",
    "settings.json",
)
LOG, LEDGER, RECEIPT, CHECKPOINTS, MODEL = (
    "log.jsonl",
    "ledger.jsonl",
    "receipt.json",
    "checkpoints",
    "model",
)
PAGE = "report.html"
DECIDING = (RUN, PLAN, SETTINGS, SCHEDULE)
"""The files that decide the result."""
SEARCH_LOG = "search.jsonl"
"""In the folder of a search: what was decided and came out."""
EVALUATION, STANDARD_TASKS = "evaluation.json", "standard_tasks.json"
"""What `farthing eval` has measured: on held-out examples, and by lm-eval."""
PUBLISHED = "published.json"
"""What of the run was sent to the Hub, and what is still to be."""
COPIES = "run_files"
"""Under this name a checkpoint's manifest has a copy of each, None where there is no such file."""
CHECKPOINT_NAME = re.compile(r"step-(\d{8,})-(\d{4,})")
EXAMPLES, LABEL_NAMES, ARE_CHATS = "examples_sha256", "label_names", "are_chats"
"""In run.json once an attempt knew the run's examples; the last: a chat template wrote some."""
_OF_ATTEMPTS = ("steps_per_epoch", EXAMPLES, LABEL_NAMES, ARE_CHATS, "finished")
MORE_STEPS = ("max_steps", "num_train_epochs", "load_best_model_at_end")
"""Keys of `train` with which a finished run resumes. Its identity has those that change the steps
it has taken."""
_NAME, _SEAL = "file", "sha256"
_WITNESSED = ("attempt", "step", "spent_s", "spent_usd", "attempt_id")

T = TypeVar("T")


# ---- files that decide ----


def keep(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file that decides the result, with its name and checksum, in one step. Raises
    `OSError`."""
    write_text(path, seal({**value, _NAME: path.name}))


def kept(path: Path) -> Json | None:
    """What `keep` wrote; None where there is no such file. Raises `DamagedFileError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"{path.name} can't be read ({type(error).__name__})") from error
    values = unseal(text, path.name)
    if values.pop(_NAME, "") != path.name:
        raise DamagedFileError(f"{path.name} holds another file")
    return {key: item for key, item in values.items() if key != _SEAL}


def kept_as(path: Path, read: Callable[[Json], T], warn: Warn) -> T | None:
    """What `read` makes of a deciding file; None where there is none, or where nothing was saved by
    one that is damaged.

    Raises `RunDamagedError`.
    """
    try:
        values = kept(path)
        return None if values is None else read(values)
    except DamagedFileError as error:
        why = str(error)
    except (ValueError, KeyError, TypeError):
        why = f"{path.name} holds something else"
    if has_committed(path.parent):
        to_do = "restore it from a copy, or give the job another output_dir"
        raise RunDamagedError(why, where=str(path), to_do=to_do)
    warn(f"{why}; it had saved nothing, so it is made anew")
    return None


def copies_of(folder: Path, before: Mapping[str, Any] | None = None) -> Json:
    """For the manifest of a checkpoint. What is damaged or gone is as it was `before`."""
    copies: Json = {}
    for name in DECIDING:
        copies[name] = (before or {}).get(name)
        with contextlib.suppress(DamagedFileError):
            value = kept(folder / name)
            copies[name] = copies[name] if value is None else value
    return copies


def mend(folder: Path, warn: Warn) -> None:
    """Write deciding files that are damaged or gone again from a checkpoint. Raises `OSError`."""
    manifest = newest_with_copies(folder)
    if manifest is None:
        return
    for name in DECIDING:
        path, copy = folder / name, manifest[COPIES].get(name)
        try:
            if kept(path) is not None or copy is None:
                continue
            why = f"{name} is gone"
        except DamagedFileError as error:
            why = str(error)
        if copy is None:
            path.unlink(missing_ok=True)
            warn(f"{why}: removed, the run had none at its checkpoint of step {manifest['step']}")
        else:
            keep(path, copy)
            warn(f"{why}: written again from the checkpoint of step {manifest['step']}")


def newest_with_copies(folder: Path) -> Json | None:
    """The newest manifest with copies of the deciding files, of this run if known."""
    run_id = run_id_of(folder)
    for save in saves_in(folder / CHECKPOINTS):
        with contextlib.suppress(DamagedFileError, OSError):
            manifest = read_manifest(save.folder)
            copies = manifest.get(COPIES)
            is_ours = run_id is None or manifest.get("run_id") == run_id
            if is_ours and isinstance(copies, dict) and isinstance(copies.get(RUN), dict):
                return manifest
    return None


class Save(NamedTuple):
    """A committed checkpoint, whole or not, by its name."""

    step: int
    serial: int
    folder: Path


def saves_in(checkpoints: Path) -> list[Save]:
    """Every committed checkpoint in a folder that need not be there, newest first."""
    paths = (
        [path for path in checkpoints.iterdir() if path.is_dir()] if checkpoints.is_dir() else []
    )
    matches = ((CHECKPOINT_NAME.fullmatch(path.name), path) for path in paths)
    return sorted(
        (Save(int(match[1]), int(match[2]), path) for match, path in matches if match), reverse=True
    )


def is_damaged(folder: Path) -> bool:
    try:
        for name in DECIDING:
            kept(folder / name)
    except DamagedFileError:
        return True
    return False


def has_committed(folder: Path) -> bool:
    """Whether a step was ever saved, by checkpoints, model or ledger."""
    return (
        bool(saves_in(folder / CHECKPOINTS))
        or (folder / MODEL).exists()
        or any(account.committed > 0 for account in read_ledger(folder / LEDGER).accounts)
    )


def _known_facts(folder: Path) -> Json:
    """What run.json says; empty where it can't be read."""
    with contextlib.suppress(DamagedFileError):
        return kept(folder / RUN) or {}
    return {}


def run_id_of(folder: Path) -> str | None:
    """None where it can't be read."""
    return _known_facts(folder).get("run_id")


def is_finished(folder: Path) -> bool:
    return bool(_known_facts(folder).get("finished")) and (folder / MODEL).is_dir()


# ---- the job as it was read ----


def keep_job(folder: Path, job: Mapping[str, Any], facts: Json) -> None:
    """Write the job beside the run, and its digest with the run's `facts`. Raises `OSError`."""
    text = json.dumps(job, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    if facts.get("job_sha256") != digest:
        facts["job_sha256"] = digest
        keep(folder / RUN, facts)
    write_text(folder / JOB, text)


def kept_job(folder: Path) -> Json:
    """Raises `RunDamagedError` where it is not what was written."""
    try:
        text = (folder / JOB).read_text(encoding="utf-8")
        digest, job = (kept(folder / RUN) or {}).get("job_sha256"), parse_json(text)
        is_whole = digest in (None, hashlib.sha256(text.encode()).hexdigest())
        if is_whole and isinstance(job, dict):
            return job
        why = f"{JOB} differs from the file that was written (sha256)"
    except DamagedFileError as error:
        why = str(error)
    except (OSError, ValueError) as error:
        why = f"{JOB} can't be read ({type(error).__name__})"
    to_do = "run `farthing train` with the job once more: it writes the file again"
    raise RunDamagedError(why, where=str(folder), to_do=to_do)


# ---- whose run it is ----

FORMAT = 1
"""Of the files of a run and of what they mean. A run of another format is refused."""


def began(folder: Path) -> str:
    """The ISO date on which the run began, today where none has: templates render on it."""
    with contextlib.suppress(ValueError, KeyError, TypeError):  # damaged: `claim` refuses it
        return date.fromisoformat(_known_facts(folder)["date"]).isoformat()
    return today().isoformat()


def trained_on_chats(folder: Path) -> bool:
    """Whether a chat template wrote examples of the run. Raises `RunDamagedError` where nobody
    knows.
    """
    found = _known_facts(folder).get(ARE_CHATS)
    if found is None:
        why, to_do = f"{RUN} does not say how the model is asked", "restore it from a copy"
        raise RunDamagedError(why, where=str(folder / RUN), to_do=to_do)
    return bool(found)


def same_examples(
    folder: Path, facts: Json, sha256: str, label_names: Sequence[str], *, are_chats: bool
) -> Json:
    """Note examples and classes of the run, or check them. Raises `RunChangedError`."""
    before = facts.get(EXAMPLES)
    if before is None:
        found = {EXAMPLES: sha256, LABEL_NAMES: list(label_names), ARE_CHATS: are_chats}
        facts = {**facts, **found}
        keep(folder / RUN, facts)
    elif before != sha256:
        raise RunChangedError(
            "this run began with other examples: the same rows gave other tokens, or were split in"
            " another way",
            where=str(folder),
            to_do=(
                "continue it with the versions of farthing, transformers and tokenizers that it"
                " began with, or give the job another output_dir"
            ),
        )
    return facts


def claim(
    folder: Path,
    identity: Json,
    machine: dict[str, str],
    warn: Warn,
    *,
    allow_restart: bool = False,
) -> Json:
    """Write what this run is, or check that the folder's run is this one, and return its facts.

    A run that has saved nothing yet follows the job as it is now. Raises `RunChangedError`,
    `RunDamagedError`.
    """
    facts = _facts_of(folder, warn, allow_restart=allow_restart)
    if facts is None:
        for name in (PLAN, SETTINGS, SCHEDULE):
            (folder / name).unlink(missing_ok=True)  # of a run that is not known
        facts = {
            "run_id": uuid.uuid4().hex,
            "farthing": farthing.__version__,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "date": identity.get("tokenization.date") or today().isoformat(),
            "identity": identity,
            "machine": machine,
            "format": FORMAT,
        }
        keep(make_private(folder) / RUN, facts)
        return facts
    now = json.loads(json.dumps(identity))
    changed = changes_of(facts["identity"], now)
    if changed and has_committed(folder):
        further = (
            " (to train its weights further: farthing train JOB"
            f" --from {folder} --set output_dir=ANOTHER)"
        )
        raise RunChangedError(
            "this folder holds a run of something else:\n    " + "\n    ".join(changed),
            where=str(folder),
            to_do=f"undo the change to continue it, or give the job another output_dir{further}",
        )
    if changed:
        warn(
            "the run in this folder has no checkpoint yet, so it uses the job as it is now"
            f" ({'; '.join(changed)})"
        )
        for name in (PLAN, SETTINGS, SCHEDULE):
            (folder / name).unlink(missing_ok=True)
        facts = {key: value for key, value in facts.items() if key not in _OF_ATTEMPTS}
        facts["machine"] = machine
    was = facts["machine"]
    moved = [
        f"{key} {was.get(key)} -> {here}" for key, here in machine.items() if here != was.get(key)
    ]
    if moved and not facts.get("finished"):
        warn(
            f"resumed under other conditions ({'; '.join(moved)}): equal to rounding, not to"
            " the bit; dropout may draw other masks"
        )
    if facts["identity"] != now or changed:
        facts["identity"] = now
        keep(folder / RUN, facts)
    return facts


def unclaim(folder: Path) -> None:
    """Take back what a run that saved nothing says of itself. Raises `OSError`."""
    if not has_committed(folder):
        for name in (*DECIDING, JOB):
            (folder / name).unlink(missing_ok=True)


def facts_there(folder: Path) -> Json:
    """What `claim` will find, with nothing changed; empty for a new run. Raises `RunChangedError`,
    `RunDamagedError`.
    """
    manifest = None if _known_facts(folder) else newest_with_copies(folder)
    if manifest is not None:  # by which it will be mended
        return dict(manifest[COPIES][RUN])
    return _facts_of(folder, lambda text: None, allow_restart=False) or {}


def _facts_of(folder: Path, warn: Warn, *, allow_restart: bool) -> Json | None:
    """None where there is no run. Raises `RunDamagedError` where steps would be lost."""
    why = f"{RUN} is gone"
    try:
        facts = kept(folder / RUN)
        if facts is not None:
            if facts.get("format") != FORMAT:
                raise RunChangedError(
                    f"another version of farthing began this run ({facts.get('farthing')})",
                    where=str(folder),
                    to_do="finish it with that version, or give the job another output_dir",
                )
            kinds = {"identity": dict, "machine": dict, "run_id": str}
            if all(isinstance(facts.get(name), kind) for name, kind in kinds.items()):
                return facts
            why = f"{RUN} holds something else"
    except DamagedFileError as error:
        why = str(error)
    if not has_committed(folder) and not (folder / RUN).exists():
        return None
    if has_committed(folder) and not allow_restart:
        raise RunDamagedError(
            f"{why}: it is not known which run this is",
            where=str(folder / RUN),
            to_do=(
                "restore it from a copy, give the job another output_dir, or start again with"
                " --allow-restart"
            ),
        )
    warn(f"{why}, and no checkpoint is left: the run begins again")
    return None


def changes_of(before: Json, now: Json) -> list[str]:
    """A line for each key of an identity that differs."""
    return [
        f"{key}: {_brief(before.get(key))} -> {_brief(now.get(key))}"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    ]


def witnesses_of(folder: Path) -> list[Witness]:
    """What the checkpoints know of the money spent; all count where the run is unknown."""
    run_id, found = run_id_of(folder), []
    for save in saves_in(folder / CHECKPOINTS):
        with contextlib.suppress(DamagedFileError, OSError, ValidationError):
            manifest = read_manifest(save.folder)
            known = [manifest.get(name) for name in _WITNESSED]
            if run_id in (None, manifest.get("run_id")):
                found.append(_witnesses().validate_python(known))
    return found


@cache
def _witnesses() -> TypeAdapter[Witness]:
    return TypeAdapter(Witness)


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:18]}...{text[-6:]}"
