"""Faults that no other file has, injected into whole runs: full disks, late kills, stale lists, and
formats of the past.

Unless it says otherwise, what comes out is held to the bit against a run that was left alone.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import farthing.train.evaluate
import farthing.train.run
import survive
from command import Cli
from farthing.cli import main
from farthing.config.load import load_job
from farthing.errors import DiskFullError, RunChangedError, SaveError, StoreUnavailableError
from farthing.events import DataRead, Emit, Event, Restored, StepTaken
from farthing.run import mirror as mirror_module
from farthing.run.checkpoint import Checkpoints, saves_in
from farthing.storage.files import seal, unseal
from farthing.storage.logs import SummedLines
from farthing.storage.objects import Entry, ObjectStore, open_store
from farthing.train.run import train
from interrupted import job_in, quiet, when
from mirrored import QUICK, delivered, folder_of_run, mirror_of, step_done
from patience import until
from test_store import Faulty, Model, machine, same_result, taken
from thinned import thinned
from together import forkserver
from workshop import Heard, file_system, job_file

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, Any]:
    assert train(job_in(tmp_path, "alone"), quiet).exit_code == 0
    return survive.result_of(tmp_path / "alone")


def ends_like(alone: dict[str, Any], run: Path) -> bool:
    return survive.differences(alone, survive.result_of(run)) == []


# ---- disks ----


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    with file_system(tmp_path / "small disk", "size=8m") as folder:
        yield folder


def fill(folder: Path) -> None:
    """Leave no byte free."""
    with open(folder / "filler", "wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError:
                continue
    assert shutil.disk_usage(folder).free == 0


def once_committed(run: Path, step: int, action: Callable[[], None]) -> Emit:
    """Do something when the checkpoint of `step` is on the disk and no later one is begun: a save
    that is written in the background is told of only when the next one has begun."""

    def act() -> None:
        until(lambda: step in [save.step for save in saves_in(run / "checkpoints")])
        action()

    return when(StepTaken, step + 1, act)


def test_a_disk_that_is_full_in_the_middle_of_a_run_loses_nothing(
    small_disk: Path, alone: dict[str, Any], tmp_path: Path, cli: Cli
) -> None:
    """Log, ledger and checkpoints meet a real ENOSPC; with room again, the same command resumes to
    the same bits.
    """
    job_in(tmp_path, "run")
    path = tmp_path / "run.yaml"
    path.write_text(
        path.read_text().replace("output_dir: run", f"output_dir: {small_disk / 'run'}")
    )
    tell = once_committed(small_disk / "run", 4, lambda: fill(small_disk))
    with pytest.raises((DiskFullError, SaveError), match="No space left"):
        train(load_job(path), tell)
    said = cli.err("train", path, code=75)
    assert "Traceback" not in said
    assert "make room" in said
    (small_disk / "filler").unlink()
    heard = Heard()
    assert train(load_job(path), heard).exit_code == 0
    assert [event.step for event in heard.of(Restored)] == [4]
    assert ends_like(alone, small_disk / "run")


@pytest.mark.slow
def test_a_quota_that_stops_checkpoints_keeps_the_old_ones_and_ends_the_run_in_words(
    alone: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files may not become larger than 60 kB: logs go on for a while, checkpoints do not."""
    job, before = job_in(tmp_path, "run"), resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = Heard()
    limit = once_committed(
        tmp_path / "run", 4, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    )

    def tell(event: Event) -> None:
        heard(event)
        limit(event)

    try:
        with pytest.raises(SaveError, match="3 checkpoints in a row could not be written") as error:
            train(job, tell)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.exit_code == 75
    assert heard.warnings.count("could not be written") == 3
    assert sorted(path.name[:13] for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000004",
    ]
    assert train(job, quiet).exit_code == 0
    assert ends_like(alone, tmp_path / "run")


@pytest.mark.parametrize("number", thinned([errno.EIO, errno.EROFS, errno.ESTALE, errno.EDQUOT], 2))
def test_a_log_that_can_not_be_written_ends_the_run_in_words(
    number: int,
    alone: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = SummedLines.append

    def append(lines: SummedLines, row: dict[str, Any]) -> None:
        if lines.path.name == "log.jsonl" and row["step"] == 6:
            raise OSError(number, os.strerror(number))
        real(lines, row)

    job = job_in(tmp_path, "run")
    with monkeypatch.context() as patch:
        patch.setattr(SummedLines, "append", append)
        assert main(["train", str(tmp_path / "run.yaml")]) == 75
    said = capsys.readouterr().err
    assert f"the disk fails: {os.strerror(number)}; saved checkpoints are intact" in said
    assert "Traceback" not in said
    assert train(job, quiet).exit_code == 0
    assert ends_like(alone, tmp_path / "run")


# ---- memory ----


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()],
    ids=["gpu", "host"],
)
def test_memory_that_runs_out_in_an_evaluation_halves_it(
    error: BaseException, alone: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, asked = farthing.train.evaluate.evaluate, []

    def evaluate(*arguments: Any, micro_batch_tokens: int, **more: Any) -> Any:
        asked.append(micro_batch_tokens)
        if len(asked) in (1, 2, 3):
            raise error
        return honest(*arguments, micro_batch_tokens=micro_batch_tokens, **more)

    monkeypatch.setattr(farthing.train.evaluate, "evaluate", evaluate)
    heard = Heard()
    assert train(job_in(tmp_path, "run"), heard).exit_code == 0
    assert asked[1] == asked[0]  # once as it was, after memory was given back
    assert asked[2] == asked[0] // 2
    assert heard.warnings.count("out of memory in the evaluation") == 2
    ours = {
        row["step"]: row["loss"]
        for row in SummedLines(tmp_path / "run" / "log.jsonl").rows()
        if "loss" in row
    }
    theirs = {
        row["step"]: row["loss"]
        for row in SummedLines(tmp_path / "alone" / "log.jsonl").rows()
        if "loss" in row
    }
    assert ours == theirs, "training never sees it"


def test_an_evaluation_without_room_for_one_example_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    def evaluate(*arguments: Any, **more: Any) -> Any:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
        )

    job_in(tmp_path, "run")
    monkeypatch.setattr(farthing.train.evaluate, "evaluate", evaluate)
    said = cli.err("train", tmp_path / "run.yaml", code=1)
    assert "the device has no memory left" in said
    assert "Traceback" not in said


# ---- data ----


@pytest.mark.slow
def test_bad_rows_are_left_out_alike_by_every_attempt(tmp_path: Path) -> None:
    """Also by one whose cache is empty and has to read them again."""
    job = job_in(tmp_path, "alone")
    lines = (tmp_path / "data.jsonl").read_text().splitlines()
    spoilt = [
        *lines[:7],
        '{"prompt": ',
        *lines[7:20],
        '{"prompt": 5, "completion": " x"}',
        "[]",
        *lines[20:],
        "",
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(spoilt))
    jobs = {}
    for name in ("alone", "stopped"):
        job_in(tmp_path, name)
        jobs[name] = load_job(tmp_path / f"{name}.yaml", ["data.max_bad_rows=0.1"])
    assert train(jobs["alone"], quiet).exit_code == 0
    assert (
        train(
            jobs["stopped"], when(StepTaken, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
        ).exit_code
        == 75
    )
    shutil.rmtree(str(job.cache_dir))
    heard = Heard()
    assert train(jobs["stopped"], heard).exit_code == 0
    assert heard.of(DataRead)[0].n_bad == 3
    assert ends_like(survive.result_of(tmp_path / "alone"), tmp_path / "stopped")


# ---- stores ----


@pytest.mark.slow
def test_a_stop_signal_within_an_upload_is_heard_and_the_copy_is_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, sent = open_store(str(tmp_path / "store")), []

    def trouble(name: str, key: str, operation: Callable[[], Any]) -> Any:
        if name == "put" and not sent:
            os.kill(os.getpid(), signal.SIGTERM)
            sent.append(key)
            time.sleep(0.3)
        return operation()

    monkeypatch.setattr(mirror_module, "PACE", QUICK)
    monkeypatch.setattr(mirror_module, "open_store", lambda address: Faulty(real, trouble))
    assert train(machine(tmp_path, "alone", None), quiet).exit_code == 0
    first = train(
        machine(tmp_path, "first", tmp_path / "store"),
        when(StepTaken, 6, lambda: until(lambda: sent)),
    )
    assert first.exit_code == 75
    heard = Heard()
    assert train(machine(tmp_path, "second", tmp_path / "store"), heard).exit_code == 0
    assert [event.step for event in heard.of(Restored)] == (
        [first.receipt.steps] if first.receipt.steps else []
    )
    assert same_result(tmp_path / "alone", tmp_path / "second") == []


@pytest.mark.slow
def test_a_bucket_that_is_emptied_in_the_middle_of_a_run_gets_a_whole_copy_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mirror_module, "PACE", replace(QUICK, give_up_s=60.0))

    def tell(event: Event) -> None:
        if isinstance(event, StepTaken):
            time.sleep(0.1)
        if isinstance(event, StepTaken) and event.step == 5:
            (tmp_path / "store").rename(tmp_path / "emptied")

    outcome = train(machine(tmp_path, "run", tmp_path / "store"), tell)
    assert outcome.exit_code == 0
    fresh = mirror_of(open_store(str(tmp_path / "store")), tmp_path / "empty")
    assert fresh.bring_back() == 8
    fresh.close(1)


class Late(Model):
    """As stores of the past had it: an object under some prefixes is in no list until long after it
    was written.
    """

    def __init__(self, *prefixes: str) -> None:
        super().__init__()
        self.prefixes = prefixes

    def list(self, prefix: str) -> dict[str, Entry]:
        found = super().list(prefix)
        if prefix in self.prefixes:
            found = {
                key: entry for key, entry in found.items() if time.time() - (entry.at or 0) > 3600
            }
        return found


def test_what_no_list_has_is_in_no_commit(tmp_path: Path) -> None:
    store, run, said = Late("data/"), folder_of_run(tmp_path / "run"), []  # type: ignore[var-annotated]
    mirror = mirror_of(store, run, said, pace=QUICK)
    mirror.bring_back()
    assert not delivered(mirror, 1, step_done(run, 1), seconds=0.5)
    until(lambda: (mirror.check(), said)[1])  # type: ignore[func-returns-value]
    assert "did not arrive whole" in said[0]
    assert store.list("commits/") == {}
    store.prefixes = ()
    assert mirror.wait(60)
    mirror.close(5)
    assert taken(store, tmp_path / "empty") == 1


def test_where_the_lists_of_leases_are_behind_no_run_begins(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="can't keep two machines apart"):
        mirror_of(Late("writers/"), tmp_path / "run", pace=QUICK).bring_back()


# ---- killed so many seconds after having been asked to leave ----


def train_with_slow_store(job: str, put_s: float) -> None:
    """In a process of its own: each object takes a while, and the run is told to leave after its
    sixth step.
    """
    put = ObjectStore.put

    def slow(store: ObjectStore, key: str, path: Path) -> None:
        time.sleep(put_s)
        put(store, key, path)

    ObjectStore.put = slow  # type: ignore[method-assign]
    mirror_module.PACE = QUICK
    torch.set_num_threads(1)

    def tell(event: Event) -> None:
        if isinstance(event, StepTaken) and event.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    sys.exit(train(load_job(job), tell).exit_code)


@pytest.mark.slow
@pytest.mark.parametrize("grace_s", [30.0, 5.0, 0.5, 0.0])
def test_a_kill_so_long_after_the_notice_leaves_the_last_step_or_a_whole_one_before(
    grace_s: float, tmp_path: Path
) -> None:
    assert train(machine(tmp_path, "alone", None), quiet).exit_code == 0
    path = job_file(tmp_path)
    job = machine(tmp_path, "first", tmp_path / "store")
    path.write_text(json.dumps(job.model_dump(mode="json", exclude_none=True)))
    process = forkserver().Process(target=train_with_slow_store, args=(str(path), 0.05))
    process.start()
    log = tmp_path / "first" / "log.jsonl"
    while process.is_alive() and (not log.exists() or log.read_text().count('"examples"') < 6):
        time.sleep(0.01)
    process.join(grace_s)
    if grace_s == 30.0:
        assert process.exitcode == 75, "in time it leaves by itself"
    process.kill()
    process.join()
    (tmp_path / "first").rename(tmp_path / "gone")
    heard = Heard()
    assert train(machine(tmp_path, "second", tmp_path / "store"), heard).exit_code == 0
    restored = [event.step for event in heard.of(Restored)]
    assert restored in ([], [2], [3], [4], [6])
    assert grace_s < 30 or restored == [6]
    assert same_result(tmp_path / "alone", tmp_path / "second") == []


# ---- formats of the past ----


class Kept:
    """A part of the golden checkpoint."""

    def state(self) -> Any:
        return (
            {
                "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
                "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
            },
            {"step": 7, "best_metric": 0.25, "stopped_early": False, "best_step": None},
        )

    def restore(self, tensors: Any, values: Any) -> None:
        wanted, values_wanted = self.state()
        assert values == values_wanted
        assert tensors.keys() == wanted.keys()
        assert all(
            torch.equal(tensors[name], wanted[name]) and tensors[name].dtype == wanted[name].dtype
            for name in wanted
        )
        self.was_restored = True


def test_a_checkpoint_of_schema_1_is_read(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "checkpoints", tmp_path / "checkpoints")
    checkpoints = Checkpoints(tmp_path / "checkpoints", "golden", 2, warn=print)
    assert checkpoints.newest_valid() == 7
    part = Kept()
    (folder,) = (tmp_path / "checkpoints").glob("step-*7*")
    checkpoints.restore(folder, {"part": part})
    assert part.was_restored


def test_a_commit_of_a_newer_farthing_is_refused_with_words(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "store", tmp_path / "store")
    (path,) = (tmp_path / "store" / "commits").iterdir()
    path.write_text(seal(unseal(path.read_text(), "it") | {"schema": 99}))
    with pytest.raises(RunChangedError, match="another version of farthing"):
        mirror_of(open_store(str(tmp_path / "store")), tmp_path / "run").bring_back()
    assert path.exists(), "it is fine for the farthing that wrote it"
