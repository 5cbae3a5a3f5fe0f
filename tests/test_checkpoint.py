"""Checkpoints under every injected fault: a kill at each file operation, damage to each file, a
full disk.
"""

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoints import Weights, newest, restored, save
from checkpoints import checkpoints as checkpoints
from checkpoints import said as said
from farthing.errors import RunChangedError, RunDamagedError, SaveError
from farthing.run.checkpoint import Checkpoints
from farthing.run.parts import Shared, contents_of
from farthing.storage import logs
from farthing.storage.files import (
    DamagedFileError,
    commit_folder,
    seal,
    seal_file,
    unseal,
    verify_folder,
    write_text,
)
from farthing.storage.logs import SummedLines
from killed import killed_at
from together import on_ranks
from workshop import read_json


def test_the_snapshot_is_of_the_moment_of_the_call(checkpoints):
    model = Weights(5)
    checkpoints.save(5, {"model": model, "optimizer": Weights(105)}, None)
    model.tensors["a"].zero_()
    checkpoints.wait()
    assert restored(checkpoints.folder) == 5


def test_only_the_newest_and_the_best_are_kept(checkpoints):
    for step in range(1, 8):
        save(checkpoints, step, best=2 if step >= 2 else None)
    assert checkpoints.steps() == [7, 6, 5, 2]
    for best, steps in ((2, ["2", "7"]), (None, ["7"]), (1, ["7"])):
        assert [path.name[12] for path in checkpoints.to_go_on(7, best)] == steps
    with pytest.raises(DamagedFileError, match="there is no checkpoint of step 1"):
        checkpoints.folder_of(1)
    broken = Weights(8)
    broken.values["loss"] = float("nan")
    with pytest.raises(ValueError, match="JSON compliant"):
        checkpoints.save(8, {"model": broken}, None)


def test_each_rank_writes_its_own_rows_and_the_files_of_a_part_are_told_by_their_names():
    second = Shared(False, 1, 2, False, {"spread": (3, 6)}.get, lambda value: [value])
    assert (second.writes("spread"), second.writes("whole")) == (True, False)
    assert replace(second, shard=0).writes("whole")
    assert not replace(second, is_copy=True).writes("spread")
    names = ["model.safetensors", "model-00001-of-00002.safetensors", "model-x", "state.json"]
    assert list(contents_of(dict.fromkeys(names, "sha256"), "model")) == names[:2]


def test_a_folder_that_another_process_commits_meanwhile_is_there_already(tmp_path):
    def theirs(draft):
        (draft / "theirs").write_text("quick")
        (draft / "empty").touch()

    def fill(draft):
        (draft / "mine").write_text("late")
        commit_folder(tmp_path / "set", theirs, {})

    with pytest.raises(FileExistsError):
        commit_folder(tmp_path / "set", fill, {})
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    files = verify_folder(tmp_path / "set")["files"]
    assert {each["name"]: each["size"] for each in files} == {"theirs": 5, "empty": 0}
    assert (tmp_path / "set").stat().st_mode & 0o777 == 0o700


# ---- killed while saving ----


def kill_everywhere(rank: int, folder: str):
    """A save that is killed at its first, second, third ... file operation, until one gets through."""  # noqa: E501
    outcomes, folder_of_all = [], Path(folder)
    before = folder_of_all / "before"
    save(Checkpoints(before, "run-1", 2, warn=print), 1, 2)
    for k in range(1, 200):
        copy = shutil.copytree(before, folder_of_all / f"kill-{k}")
        was_killed = killed_at(
            k, lambda copy=copy: save(Checkpoints(copy, "run-1", 2, warn=print), 3)
        )
        outcomes.append(restored(copy))
        leftovers = [path.name for path in copy.iterdir() if ".draft-" in path.name]
        assert leftovers == [], "a fresh start sweeps what a killed writer left"
        if not was_killed:
            break
    assert outcomes[-1] == 3
    assert set(outcomes) == {2, 3}
    assert outcomes == sorted(outcomes), "once committed, a checkpoint stays"
    assert len(outcomes) > 15


def test_a_kill_at_any_file_operation_of_a_save_leaves_the_old_checkpoint_or_the_new(tmp_path):
    """In a process of its own: it forks, which is safe only where no other thread has run yet."""
    on_ranks(1, tmp_path / "meetings", kill_everywhere, str(tmp_path))


# ---- damaged afterwards ----


def flipped(path: Path):
    chance = random.Random(path.name)
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "emptied": lambda path: os.truncate(path, 0),
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "flipped": flipped,
    "grown": lambda path: os.truncate(path, path.stat().st_size + 1),
    "removed": lambda path: path.unlink(),
}


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_detected_and_the_previous_checkpoint_used(
    file, damage, checkpoints, said
):
    save(checkpoints, 1, 2)
    DAMAGES[damage](newest(checkpoints.folder) / file)
    assert restored(checkpoints.folder, said) == 1
    assert len(said) == 1
    assert "step 2" in said[0]
    assert "damaged" in said[0]
    assert any(".bad-" in path.name for path in checkpoints.folder.iterdir())
    assert restored(checkpoints.folder) == 1, "and the damaged one never comes back"


@pytest.mark.parametrize("trouble", ["extra file", "empty folder", "folders swapped"])
def test_a_tampered_folder_is_not_used(trouble, checkpoints, said):
    save(checkpoints, 1, 2)
    folder = newest(checkpoints.folder)
    if trouble == "extra file":
        (folder / "more.bin").write_bytes(b"x")
    elif trouble == "empty folder":
        shutil.rmtree(folder)
        folder.mkdir()
    else:
        older = min(path for path in checkpoints.folder.iterdir())
        older.rename(checkpoints.folder / "spare")
        folder.rename(older)
        (checkpoints.folder / "spare").rename(folder)
        with pytest.raises(RunDamagedError):
            restored(checkpoints.folder, said)
        return
    assert restored(checkpoints.folder, said) == 1
    assert len(said) == 1


def test_a_checkpoint_of_a_newer_farthing_is_refused_with_words(checkpoints):
    save(checkpoints, 1)
    path = newest(checkpoints.folder) / "manifest.json"
    write_text(path, seal(read_json(path) | {"schema": 99}))
    with pytest.raises(RunChangedError, match="another version of farthing"):
        restored(checkpoints.folder)
    assert checkpoints.steps() == [1], (
        "and not set aside: it is fine for the farthing that wrote it"
    )


def test_a_checkpoint_of_another_run_is_not_used(checkpoints, said):
    save(checkpoints, 1)
    other = Checkpoints(checkpoints.folder, "run-2", 3, warn=said.append)
    with pytest.raises(RunDamagedError):
        other.newest_valid()
    assert "another run" in said[0]


# ---- a disk that fails ----


def test_a_full_disk_keeps_the_old_checkpoint_and_gives_up_after_three(
    checkpoints, said, monkeypatch
):
    save(checkpoints, 1)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    save(checkpoints, 2, 3)
    assert len(said) == 2
    assert "No space left" in said[0]
    with pytest.raises(SaveError):
        save(checkpoints, 4)
    monkeypatch.undo()
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-00000001-0001"], (
        "and no drafts stay behind"
    )
    assert restored(checkpoints.folder) == 1


def test_one_failed_save_is_forgiven_when_the_next_one_works(checkpoints, said, monkeypatch):
    real = os.fsync
    for step in range(1, 8):
        failing = step % 2 == 0

        def fsync(descriptor, failing=failing):
            if failing:
                raise OSError(5, "Input/output error")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        save(checkpoints, step)
    assert len(said) == 3
    monkeypatch.undo()
    assert restored(checkpoints.folder) == 7


# ---- what is restored, and what is refused ----


def test_a_third_save_of_a_step_replaces_the_second(checkpoints):
    save(checkpoints, 4, 6, 4, 4)
    assert [path.name for path in checkpoints.folder.glob("step-00000004-*")] == [
        "step-00000004-0004"
    ]
    checkpoints.verify(4)


def test_a_run_of_other_parts_is_refused(checkpoints):
    save(checkpoints, 3)
    with pytest.raises(
        RunChangedError, match=r"holds \['model', 'optimizer'\], this run \['model'\]"
    ):
        checkpoints.restore(checkpoints.folder_of(3), {"model": Weights()})


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            ValueError("7 columns for 5"),
            RunDamagedError,
            r"the optimizer of step-00000003-0001.*7 columns for 5",
        ),
        (RuntimeError("CUDA error: device-side assert triggered"), RuntimeError, "CUDA error"),
    ],
)
def test_a_part_that_cannot_take_what_was_saved(error, kind, words, checkpoints):
    class Unlike(Weights):
        def restore(self, tensors, values):
            raise error

    save(checkpoints, 3)
    with pytest.raises(kind, match=words):
        checkpoints.restore(checkpoints.folder_of(3), {"model": Weights(), "optimizer": Unlike()})


def test_a_run_that_starts_from_zero_keeps_its_checkpoints_aside(checkpoints):
    save(checkpoints, 3, 5)
    before = sorted(path.name for path in checkpoints.folder.iterdir())
    checkpoints.forget_all()
    assert checkpoints.steps() == []
    aside = sorted(path.name for path in checkpoints.folder.iterdir())
    assert [name.partition(".")[0] for name in aside] == before, "nothing is deleted"


@pytest.mark.parametrize("n_bytes", [1 << 60, 1 << 20])
def test_no_memory_is_taken_by_what_a_header_says(checkpoints, n_bytes):
    save(checkpoints, 5)
    folder = newest(checkpoints.folder)
    path, manifest = folder / "model.safetensors", folder / "manifest.json"
    path.write_bytes(n_bytes.to_bytes(8, "little") + path.read_bytes()[8:])
    facts = unseal(manifest.read_text(), "it")
    del facts["sha256"]
    sealed = [each for each in facts["files"] if each["name"] != path.name] + [seal_file(path)]
    manifest.write_text(seal({**facts, "files": sealed}))
    with pytest.raises(DamagedFileError, match=r"is no file of tensors: .*header"):
        checkpoints.verify(5)


def test_a_line_is_written_whole_or_is_an_error(tmp_path):
    log = SummedLines(tmp_path / "log.jsonl")
    log.append({"step": 1})

    class Half:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            return int(self.file.write(data[: len(data) // 2]))

    log.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "open_own", lambda path, mode: Half(path.open(mode, buffering=0)))
        with pytest.raises(OSError, match="No space left"):
            log.append({"step": 2})
        log.close()
    log.append({"step": 3})
    assert list(log.rows()) == [{"step": 1}, {"step": 3}]
    assert log.damaged == [], "the half was taken back"
    with pytest.raises(ValueError, match="JSON compliant"):
        log.append({"loss": float("nan")})
    log.keep(lambda row: True)
    whole = log.path.read_bytes()
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        log.path.write_bytes(flipped)
        assert list(log.rows()) == [{"step": 1}, {"step": 3}] or log.damaged, bit
