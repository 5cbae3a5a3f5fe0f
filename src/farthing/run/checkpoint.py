"""Checkpoints: a kill at any instant loses nothing already saved.

`step-00000042-0003/` (step, serial number of the save) holds one safetensors file a part, or one of
each rank that has rows of it (see `parts`), `state.json` and a manifest, committed by the protocol
of `files`. Everything is verified against the manifest before any byte is parsed; a damaged
checkpoint is set aside with a warning and the one before it is used. Saving takes a snapshot, then
writes in the background, one at a time.
"""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import safetensors
from safetensors.torch import save_file
from torch import Tensor

from farthing.device_memory import in_words, is_out_of_memory
from farthing.errors import RunChangedError, RunDamagedError, SaveError
from farthing.run.folder import Save, saves_in
from farthing.run.parts import ALONE, Shared, files_of, read_part
from farthing.run.snapshot import CudaLane, Later, can_wait
from farthing.storage.files import (
    DamagedFileError,
    FileEntry,
    Json,
    Warn,
    commit_folder,
    discard,
    make_private,
    parse_json,
    read_manifest,
    refuse_other,
    seal_file,
    set_aside,
    small_text,
    sweep_drafts,
    verify_folder,
)

SCHEMA = 1
MAX_FAILED_SAVES = 3
MAX_STATE_BYTES = 64 << 20
_PART = re.compile(r"[a-z_]+")

State = tuple[dict[str, Tensor], Json]
Fill = Callable[[Path], list[Path]]
"""Writes what a process has of a checkpoint into a draft, and returns the files."""


class CheckpointPart(Protocol):
    """Something that has to be saved to continue exactly."""

    def state(self) -> State:
        """Tensors and JSON values that say all about it now."""

    def restore(self, tensors: dict[str, Tensor], values: Json) -> None:
        """Become what `state` said."""


@dataclass
class SaveResult:
    step: int
    n_bytes: int = 0
    seconds: float = 0.0
    """Until it was on the disk."""
    error: Exception | None = None
    left_over: OSError | None = None
    """Why an older checkpoint could not be removed: it is in nobody's way but the disk's."""


class Checkpoints:
    """The checkpoints of one run, in `folder`."""

    def __init__(
        self,
        folder: Path,
        run_id: str,
        keep: int,
        *,
        warn: Warn,
        facts: Callable[[], Mapping[str, Any]] = dict,
        copy: Callable[[int, list[Path]], None] | None = None,
        shared: Shared | None = None,
    ) -> None:
        self._shared = shared or ALONE
        self.folder = make_private(folder)
        self._run_id, self._keep, self._warn = run_id, keep, warn
        self._facts = facts  # asked at each save, for its manifest
        # gets a step and the folders to continue from there, in the writing thread; must not raise
        self._copy = copy
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[SaveResult] | None = None
        self._later: Later | None = None
        self._n_failed = 0
        sweep_drafts(folder)

    # ---- saving ----

    def save(
        self, step: int, parts: Mapping[str, CheckpointPart], best_step: int | None
    ) -> SaveResult | None:
        """Snapshot every part now and commit it in the background. Returns an earlier save's
        result.

        A host without room for the snapshot is a save that failed, as a disk without room is.
        """
        earlier = self.wait()
        later: Later | None = None
        try:
            snapshot, later = _snapshot(parts, self._shared)
            fill = partial(_fill, snapshot, later, self._shared)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fill = partial(_give_up, error)
        self._later = later
        more = dict(self._facts())
        self._saving = self._writer.submit(self._write, step, fill, later, best_step, more)
        return earlier

    @property
    def is_copying(self) -> bool:
        """Whether tensors that training will change are still being copied."""
        return self._later is not None and not self._later.is_copied

    def wait_until_copied(self) -> None:
        """Until training may change weights and state; they are written behind it."""
        if self._later is not None:
            self._later.wait()
            self._later = None

    def finished_save(self) -> SaveResult | None:
        """The result of the background save if it has ended. Raises `SaveError`."""
        return self.wait() if self._saving is not None and self._saving.done() else None

    def wait(self) -> SaveResult | None:
        """Wait for the background save. Raises `SaveError` after several failures in a row."""
        if self._saving is None:
            return None
        saving, self._saving = self._saving, None
        result = saving.result()
        if result.left_over is not None:
            self._warn(
                f"an older checkpoint could not be removed ({result.left_over}), and stays until"
                " it can"
            )
        if result.error is None:
            self._n_failed = 0
            return result
        self._n_failed += 1
        self._warn(
            f"the checkpoint of step {result.step} could not be written ({result.error}); training"
            " continues"
        )
        if self._n_failed >= MAX_FAILED_SAVES:
            raise SaveError(
                f"{self._n_failed} checkpoints in a row could not be written: {result.error}",
                where=str(self.folder),
                to_do="make room or repair the disk, then run the same command again",
            ) from result.error
        return result

    def _write(
        self, step: int, fill: Fill, later: Later | None, best_step: int | None, more: Json
    ) -> SaveResult:
        result, began_s = SaveResult(step), time.monotonic()
        try:
            if later is not None:
                later.fetch()
            facts = {
                "kind": "farthing checkpoint",
                "schema": SCHEMA,
                "run_id": self._run_id,
                "step": step,
                **more,
            }
            if not self._shared.is_first:
                fill_along(self._shared, fill)
            else:
                serial = 1 + max((save.serial for save in saves_in(self.folder)), default=0)
                folder = self.folder / f"step-{step:08d}-{serial:04d}"
                manifest = commit_together(self._shared, folder, fill, facts)
                result.n_bytes = sum(entry["size"] for entry in manifest["files"])
                if self._copy is not None:
                    self._copy(step, self.to_go_on(step, best_step))
                try:
                    self._rotate(best_step)
                except OSError as error:
                    result.left_over = error
        except (
            OSError,
            safetensors.SafetensorError,
            ValueError,
            RuntimeError,
            MemoryError,
        ) as error:
            result.error = error
        finally:
            if later is not None:
                later.release()
        result.seconds = time.monotonic() - began_s
        return result

    def _rotate(self, best_step: int | None) -> None:
        """Remove all but the newest `keep` steps and the best, and earlier saves of a step."""
        kept: set[int] = set()
        for step, _, folder in saves_in(self.folder):
            if step in kept or (len(kept) >= self._keep and step != best_step):
                discard(folder)
            else:
                kept.add(step)

    # ---- restoring ----

    def steps(self) -> list[int]:
        """Steps that have a committed checkpoint, newest first (not yet verified)."""
        return sorted({save.step for save in saves_in(self.folder)}, reverse=True)

    def newest_valid(self) -> int | None:
        """The newest step whose checkpoint is whole; None when there never was one.

        Damaged ones are renamed to `.bad`, with a warning. Raises `RunDamagedError` when there were
        some and none is whole,
        `RunChangedError` when one was written by another version of farthing.
        """
        saves = saves_in(self.folder)
        for save in saves:
            try:
                self._verify(save)
                return save.step
            except DamagedFileError as error:
                aside = set_aside(save.folder)
                self._warn(
                    f"the checkpoint of step {save.step} is damaged ({error}); "
                    f"set aside as {aside.name}, trying the one before"
                )
        if saves:
            raise RunDamagedError(
                f"none of the {len(saves)} checkpoints is whole",
                where=str(self.folder),
                to_do="bring one back from a copy, or start from step 0 with --allow-restart",
            )
        return None

    def verify(self, step: int) -> None:
        """Check the checkpoint of a step byte for byte. Raises `DamagedFileError`."""
        self._verify(self._newest_of(step))

    def folder_of(self, step: int) -> Path:
        """The newest checkpoint of a step. Raises `DamagedFileError` where there is none."""
        return self._newest_of(step).folder

    def restore(self, folder: Path, parts: Mapping[str, CheckpointPart]) -> None:
        """Put every part back to what a verified checkpoint says. Raises `RunChangedError`, and
        `RunDamagedError` where a part can't take what was saved."""
        step, values = folder.name, _values_of(folder)
        if set(values) != set(parts):
            raise RunChangedError(
                f"the checkpoint holds {sorted(values)}, this run {sorted(parts)}", where=step
            )
        for name, part in parts.items():
            try:
                part.restore(read_part(folder, name, self._shared.rows_of), values[name])
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                if in_words(error):  # of the device: nothing is wrong with the checkpoint
                    raise
                raise RunDamagedError(
                    f"the {name} of {step} is not a checkpoint of this run ({type(error).__name__}:"
                    f" {error})",
                    where=str(folder.parent),
                    to_do="bring one back from a copy, or start from step 0 with --allow-restart",
                ) from error

    def forget_all(self) -> None:
        """Set every checkpoint aside: the run starts from zero on purpose."""
        for save in saves_in(self.folder):
            set_aside(save.folder)

    def to_go_on(self, step: int, best_step: int | None) -> list[Path]:
        """The folders that resume a run at `step`: its checkpoint and the best one."""
        newest = {save.step: save.folder for save in reversed(saves_in(self.folder))}
        return [newest[wanted] for wanted in sorted({step, best_step or step}) if wanted in newest]

    def _newest_of(self, step: int) -> Save:
        found = [save for save in saves_in(self.folder) if save.step == step]
        if not found:
            raise DamagedFileError(f"there is no checkpoint of step {step}")
        return found[0]

    def _verify(self, save: Save) -> None:
        folder, manifest = save.folder, read_manifest(save.folder)
        refuse_other(manifest, SCHEMA, str(self.folder))
        if manifest.get("step") != save.step:
            raise DamagedFileError(f"its manifest is of step {manifest.get('step')}")
        if manifest.get("run_id") != self._run_id:
            raise DamagedFileError("it belongs to another run")
        verify_folder(folder)
        for part in _values_of(folder):
            files_of(folder, part)
        for path in folder.glob("*.safetensors"):
            try:  # its header, shapes and offsets are those of the bytes that are there
                with safetensors.safe_open(path, framework="pt"):
                    pass
            except safetensors.SafetensorError as error:
                raise DamagedFileError(f"{path.name} is no file of tensors: {error}") from error


def _values_of(folder: Path) -> dict[str, Json]:
    """The values of each part of a checkpoint, their form checked. Raises `DamagedFileError`."""
    path = folder / "state.json"
    try:
        values = parse_json(small_text(path, MAX_STATE_BYTES))
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"{path.name} can't be read: {error}") from error
    is_whole = isinstance(values, dict) and all(
        _PART.fullmatch(name) and isinstance(of_part, dict) for name, of_part in values.items()
    )
    if not is_whole:
        raise DamagedFileError(f"{path.name} does not hold the parts of a run")
    return dict(values)


def _fill(
    snapshot: dict[str, State], later: Later | None, shared: Shared, draft: Path
) -> list[Path]:
    """Write what this process has of a checkpoint; returns the files."""
    paths = []
    for name, (tensors, _) in snapshot.items():
        own = later.copies(name) if later is not None else {}
        path = draft / shared.name_of(name)
        if later is not None and own and not later.keeps_in_memory:
            later.write(name, tensors, path)
        elif tensors or own:
            save_file({**tensors, **own}, path)
        else:
            continue
        paths.append(path)
    if later is not None:
        later.release()
    if shared.is_first:
        values = {name: values for name, (_, values) in snapshot.items()}
        with open(draft / "state.json", "w", encoding="utf-8") as file:
            json.dump(values, file)
        paths.append(draft / "state.json")
    return paths


def _give_up(error: Exception, draft: Path) -> list[Path]:
    raise error


def commit_together(shared: Shared, final: Path, fill: Fill, facts: Json) -> Json:
    """On the first rank: `commit_folder` of all ranks' files; fails for all. Raises `OSError`."""
    was_told, why = False, "it was not committed"

    def fill_all(draft: Path) -> list[FileEntry]:
        nonlocal was_told
        was_told = True
        shared.gather(str(draft))
        found = shared.gather(_sealed_by(fill, draft))
        if errors := [each for each in found if isinstance(each, str)]:
            raise OSError(errors[0])
        return [entry for each in found for entry in each]

    try:
        manifest = commit_folder(final, fill_all, facts)
        why = ""
        return manifest
    except BaseException as error:
        why = str(error) or type(error).__name__
        raise
    finally:
        if not was_told:
            shared.gather(None)
        shared.gather(why)


def fill_along(shared: Shared, fill: Fill) -> None:
    """On another rank: write where the first one says. Raises `OSError` if any has failed."""
    draft = shared.gather(None)[0]
    if draft is not None:
        shared.gather(_sealed_by(fill, Path(draft)))
    if why := shared.gather(None)[0]:
        raise OSError(why)


def _sealed_by(fill: Fill, draft: Path) -> list[FileEntry] | str:
    """Entries of the files that this process has written, or why it could not."""
    try:
        return [seal_file(path) for path in fill(draft)]
    except (OSError, safetensors.SafetensorError, ValueError, RuntimeError, MemoryError) as error:
        return str(error) or type(error).__name__


def _snapshot(
    parts: Mapping[str, CheckpointPart], shared: Shared
) -> tuple[dict[str, State], Later | None]:
    """(every part apart from what training will change next, what of it is fetched from a GPU
    later).

    Of `shared` checkpoints what this rank writes.

    Memory that runs out is tried once more, with cycles gone.
    """
    for is_last in (False, True):
        try:
            now: dict[str, State] = {}
            waiting: dict[str, dict[str, Tensor]] = {}
            for name, part in parts.items():
                tensors, values = part.state()
                own = {key: tensor for key, tensor in tensors.items() if shared.writes(key)}
                waiting[name] = {key: tensor for key, tensor in own.items() if can_wait(tensor)}
                at_once = {key: own[key] for key in own if key not in waiting[name]}
                now[name] = copied((at_once, values))
            on_device = [tensor for of_part in waiting.values() for tensor in of_part.values()]
            return now, Later(waiting, CudaLane(on_device[0].device)) if on_device else None
        except Exception as error:
            if is_last or not is_out_of_memory(error):
                raise
        gc.collect()
    raise AssertionError


def copied(state: State) -> State:
    """The state, copied: tensors to the CPU, values through JSON."""
    tensors, values = state
    copies = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }
    return copies, json.loads(json.dumps(values, allow_nan=False))


def n_bytes_of(parts: Mapping[str, CheckpointPart]) -> int:
    """Bytes a checkpoint of these parts takes, nearly."""
    return sum(
        t.numel() * t.element_size() for part in parts.values() for t in part.state()[0].values()
    )
