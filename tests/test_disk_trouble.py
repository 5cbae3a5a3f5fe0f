"""Disks and file systems that fail in ways of their own: what was saved is found, and what is wrong
is said in words.
"""

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors import SafetensorError

from checkpoints import checkpoints as checkpoints
from checkpoints import newest, restored, save
from checkpoints import said as said
from command import in_python
from farthing.errors import InputError, RunBusyError
from farthing.events import Restored
from farthing.run import checkpoint as checkpoint_module
from farthing.run import mirror as replica
from farthing.storage import files, mounts
from farthing.storage.files import install_folder, only_writer
from farthing.storage.logs import append_line
from farthing.storage.objects import open_store
from interrupted import LeavesAt, job_in, quiet
from machines import machine, same_result
from machines import quick as quick
from mirrored import folder_of_run, mirror_of, step_done
from workshop import Heard, file_system, job_file, train


def failing(number: int):
    """A call that the operating system refuses."""

    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


class Mount(NamedTuple):
    """As psutil lists them."""

    device: str
    mountpoint: str
    fstype: str


# ---- the folder itself ----


@pytest.fixture
def read_only(tmp_path):
    """A folder on a file system that takes no writes."""
    with file_system(tmp_path / "read only", "ro,size=1m") as folder:
        yield folder


def test_a_run_folder_that_is_there_and_takes_no_writes_is_refused_in_words(
    read_only, tmp_path, cli
):
    job_in(tmp_path, "run", max_steps=6)
    said = cli.err("train", tmp_path / "run.yaml", "--set", f"output_dir={read_only}")
    assert "Traceback" not in said
    assert "the run folder can't be written: Read-only file system" in said
    assert "choose another output_dir" in said


@pytest.mark.parametrize(
    ("kind", "source", "program"),
    [
        ("fuse.gcsfuse", "gcsfuse", "gcsfuse"),
        ("fuse", "mountpoint-s3", "mountpoint-s3"),
        ("fuse.rclone", "remote:bucket", "rclone"),
        ("fuse.sshfs", "me@host:/", None),
        ("ext4", "/dev/gcsfuse", None),
        ("nfs4", "server:/s3fs", None),
    ],
)
def test_a_bucket_that_looks_like_a_folder_is_known(kind, source, program, tmp_path, monkeypatch):
    place = tmp_path / "a bucket"
    disk = Mount("/dev/sda", "/", "ext4")
    mounted = [disk, Mount(source, str(place), kind)]
    monkeypatch.setattr(mounts.psutil, "disk_partitions", lambda all: mounted)
    assert mounts.bucket_mount_of(place / "runs/first") == program
    assert mounts.bucket_mount_of(tmp_path / "a bucket of another name") is None
    mounted.append(Mount("/dev/sdb", str(place / "runs"), "ext4"))
    assert mounts.bucket_mount_of(place / "runs/first") is None, "a disk is mounted within it"


@pytest.mark.slow
def test_no_run_begins_in_a_bucket_and_one_that_did_goes_on(tmp_path, monkeypatch, cli):
    job_in(tmp_path, "run")
    begun = job_in(tmp_path, "begun")
    train(begun, LeavesAt(step=2))
    bucket = Mount("gcsfuse", str(tmp_path), "fuse.gcsfuse")
    monkeypatch.setattr(mounts.psutil, "disk_partitions", lambda all: [bucket])
    assert "this folder is a bucket, mounted by gcsfuse" in cli.err("train", tmp_path / "run.yaml")
    assert "is a bucket, mounted by gcsfuse" in cli.out("doctor", tmp_path / "run.yaml", code=2)
    assert train(begun, quiet).state == "finished"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_and_not_taken_for_another_process(
    number, tmp_path, monkeypatch
):
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with pytest.raises(InputError, match="can't lock files") as error, only_writer(tmp_path):
        pass
    assert not isinstance(error.value, RunBusyError)
    assert "local disk" in error.value.to_do


def test_the_lock_of_a_process_that_has_just_died_is_waited_for(tmp_path, monkeypatch):
    with open(tmp_path / ".lock", "w") as last:
        fcntl.flock(last, fcntl.LOCK_EX)
        monkeypatch.setattr(files.time, "sleep", lambda seconds: last.close())
        with only_writer(tmp_path):
            assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_a_disk_that_fails_while_a_run_is_brought_back_is_said_in_words(tmp_path, monkeypatch, cli):
    job_in(tmp_path, "run", max_steps=6)
    monkeypatch.setattr(replica.Mirror, "bring_back", failing(errno.EIO))
    words = ["train", str(tmp_path / "run.yaml"), "--set", f"output_store={tmp_path}/store"]
    said = cli.err(*words, code=75)
    assert "Traceback" not in said
    assert "the disk fails: Input/output error" in said


# ---- what kills leave behind ----


def test_a_kill_within_the_export_leaves_no_second_model_on_the_disk(tmp_path, monkeypatch):
    """Killed as the model is about to be put in place, and again between the two renames that
    replace it.
    """

    class Killed(BaseException):
        pass

    def dies(*_):
        raise Killed

    monkeypatch.setattr(
        files.shutil, "rmtree", lambda *_, **__: None
    )  # a process that is dead removes nothing
    job = job_in(tmp_path, "run", max_steps=6)
    for name in ("fsync_path", "rename"):
        with monkeypatch.context() as patch:
            real = os.rename

            def rename(source, target, real=real):
                if ".draft-" in str(source) and Path(target).name == "model":
                    raise Killed
                real(source, target)

            if name == "rename":
                patch.setattr(files.os, "rename", rename)
            else:
                patch.setattr("farthing.export.folders.seal_export", dies)
            with pytest.raises(Killed):
                train(job, quiet)
        assert list((tmp_path / "run").glob("model.draft-*"))
    monkeypatch.undo()
    assert train(job, quiet).exit_code == 0
    left = sorted(path.name for path in (tmp_path / "run").iterdir() if ".draft-" in path.name)
    assert left == []
    assert (tmp_path / "run/model/manifest.json").exists()


def test_what_is_there_is_on_the_disk_with_its_entries(checkpoints, tmp_path, monkeypatch):
    """Files before their folder has its name, and then the name; nothing stays open."""
    forced = []

    def before(name, subject):
        real = getattr(os, name)

        def noted(first, *more):
            forced.append(subject(first, *more).partition(".draft-")[0])
            real(first, *more)

        monkeypatch.setattr(os, name, noted)

    save(checkpoints, 1)
    n_open = len(os.listdir("/proc/self/fd"))
    before("fsync", lambda descriptor: Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
    before("rename", lambda source, target: f"-> {Path(target).name}")
    save(checkpoints, 2)
    files_of_it = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
    name = "step-00000002-0002"
    assert forced == [*files_of_it, name, f"-> {name}", "checkpoints"]
    assert len(os.listdir("/proc/self/fd")) == n_open
    forced.clear()
    install_folder(tmp_path / "model", lambda draft: (draft / "weights").write_text("w") and None)
    assert forced == ["weights", "model", "-> model", tmp_path.name]
    forced.clear()
    store = open_store(str(tmp_path / "store"))
    assert store.create("commits/1", b"first")
    store.put("data/1/a", b"second")
    assert forced == ["1", "commits", "a", "1"]
    forced.clear()
    append_line(tmp_path / "rows.jsonl", {"row": 1})
    files.write_json(tmp_path / "note.json", {})
    assert forced == ["rows.jsonl", "note.json", tmp_path.name]


def test_a_full_disk_that_a_library_has_in_its_text_alone_is_one(tmp_path):
    def fill(_):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with pytest.raises(OSError, match=str(tmp_path)) as found:
        install_folder(tmp_path / "model", fill)
    assert found.value.errno == errno.ENOSPC


# ---- checkpoints ----


def test_a_checkpoint_that_the_disk_no_longer_gives_is_passed_over(checkpoints, said, monkeypatch):
    """A bad sector under the newest one: the one before is whole."""
    save(checkpoints, 1, 2)
    bad, real = newest(checkpoints.folder), files.sha256_of

    def read(path, *more):
        if path.parent == bad and path.suffix == ".safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *more)

    monkeypatch.setattr(files, "sha256_of", read)
    assert restored(checkpoints.folder, said) == 1
    assert "can't be read: Input/output error" in said[0]
    assert (checkpoints.folder / f"{bad.name}.bad-1").is_dir()


def test_old_checkpoints_that_can_not_be_removed_end_no_run(checkpoints, said, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "discard", failing(errno.EPERM))
        save(checkpoints, *range(1, 8))
    assert checkpoints.steps() == [7, 6, 5, 4, 3, 2, 1]
    assert len(said) == 4
    assert all("older checkpoint could not be removed" in text for text in said)
    save(checkpoints, 8)
    assert checkpoints.steps() == [8, 7, 6], "once it can be, it is"


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_run_whose_checkpoints_here_are_all_damaged_goes_on_from_the_copy_in_its_store(tmp_path):
    store = tmp_path / "store"
    assert train(machine(tmp_path, "alone", None)).exit_code == 0
    assert train(machine(tmp_path, "run", store), LeavesAt(step=5)).exit_code == 75
    for path in (tmp_path / "run/checkpoints").rglob("*.safetensors"):
        os.truncate(path, 100)
    left = train(machine(tmp_path, "run", store))
    assert left.exit_code == 75, "so that --retry and a launch try it again"
    assert "the same command takes the copy in the store" in left.reason
    again = train(machine(tmp_path, "run", store), heard := Heard())
    assert again.exit_code == 0
    assert [event.step for event in heard.of(Restored)] == [5]
    assert same_result(tmp_path / "alone", tmp_path / "run") == []


# ---- the store's outbox ----


def test_what_could_not_be_set_aside_for_the_store_holds_no_room(tmp_path, monkeypatch):
    """On a full disk the small files can't be copied: links of the checkpoint left behind would
    keep its room for good.
    """
    run, warned = folder_of_run(tmp_path / "run"), []
    mirror = mirror_of(open_store(str(tmp_path / "store")), run, warned)
    done = step_done(run, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", failing(errno.ENOSPC))
        mirror.offer(1, [done])
    assert list((run / "outbox").iterdir()) == []
    assert (done / "model.safetensors").stat().st_nlink == 1
    mirror.check()
    assert "could not be set aside" in warned[0]
    for _ in range(2):  # the second takes the place of the first, which nobody has sent
        mirror.offer(1, [done])
        assert (done / "model.safetensors").stat().st_nlink == 2


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_run_folder_of_another_user_is_named(tmp_path):
    """Each verb runs once as root, which imports what it needs, and once as nobody."""
    theirs = tmp_path / "theirs"
    path = job_file(tmp_path / "job", max_steps=1, output_dir=str(theirs))
    code = (
        "import os, sys\nfrom farthing.cli import main\n"
        f"job, run = {str(path)!r}, {str(theirs)!r}\n"
        "verbs = [['train', job], ['report', run], ['runs', run], ['watch', run]]\n"
        "assert [main(words) for words in verbs] == [0] * len(verbs)\n"
        "os.chmod(os.path.dirname(job), 0o755)\nos.chmod(run, 0o700)\nos.seteuid(65534)\n"
        "print('codes', *[main(words) for words in verbs])\n"
    )
    for each in (tmp_path, *tmp_path.parents[:3], tmp_path / "job", *(tmp_path / "job").rglob("*")):
        each.chmod(0o755)
    done = in_python(code)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout.splitlines()[-1] == "codes 2 2 2 2", done.stderr
    assert done.stderr.count("this user may not read or write it") == 4, done.stderr


def test_a_damaged_line_in_the_log_of_a_finished_run_is_shown(tmp_path, cli):
    path = job_file(tmp_path, max_steps=6)
    cli("train", path)
    log = tmp_path / "run/log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"n_tokens": ', b'"n_tokens": 9')
    log.write_bytes(b"".join(lines))
    run = tmp_path / "run"
    for verb in (["train", path], ["report", run], ["runs", run], ["watch", run, "--once"]):
        assert "1 damaged or missing line, left out" in cli.out(*verb)


@pytest.mark.parametrize("name", ["model.safetensors", "chat_template.jinja"])
def test_a_model_file_that_is_a_pipe_is_refused(name, tmp_path, cli):
    path = job_file(tmp_path, max_steps=1, pretrained=True)
    (tmp_path / "base" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "base" / name)
    for verb in ("plan", "train"):
        assert "this is no file" in cli.err(verb, path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_a_disk_that_is_full_ends_any_verb_alike(number, tmp_path, monkeypatch, cli):
    monkeypatch.setattr("farthing.cli.init.run", failing(number))
    assert os.strerror(number) in cli.err("init", tmp_path / "job.yaml", code=75)
