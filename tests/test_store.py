"""A run's copy in a store: through every fault of the store, kills at each operation, two machines,
damage, empty machines.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farthing.config.load import load_job
from farthing.errors import (
    JobError,
    RunChangedError,
    RunDamagedError,
    RunTakenError,
    StoreUnavailableError,
)
from farthing.events import Event, Exported, Note, Restored, StepTaken
from farthing.run import mirror as mirror_module
from farthing.run.accounts import read_ledger
from farthing.run.commits import take_small
from farthing.run.folder import is_finished, kept
from farthing.run.mirror import Mirror, Pace
from farthing.storage import lease as lease_module
from farthing.storage import objects as store_module
from farthing.storage.files import commit_folder, unseal, verify_folder
from farthing.storage.objects import (
    Entry,
    NoSuchObjectError,
    Store,
    StoreError,
    open_store,
)
from mirrored import QUICK, delivered, folder_of_run, mirror_of, step_done, with_copies
from patience import until
from workshop import Heard, file_system, job_file, make_job, train


class Model:
    """A store in a dictionary, with the semantics of S3; the reference for all others."""

    name = "model://store"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.written_at: dict[str, float] = {}

    def create(self, key: str, data: bytes) -> bool:
        if key in self.objects:
            return False
        self._write(key, data)
        return True

    def put(self, key: str, content: Path | bytes) -> None:
        self._write(key, content if isinstance(content, bytes) else content.read_bytes())

    def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise NoSuchObjectError(key)
        return self.objects[key]

    def fetch(self, key: str, path: Path, n_bytes: int) -> None:
        path.write_bytes(self.get(key))

    def list(self, prefix: str) -> dict[str, Entry]:
        return {
            key: Entry(len(data), self.written_at[key])
            for key, data in list(self.objects.items())
            if key.startswith(prefix)
        }

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def _write(self, key: str, data: bytes) -> None:
        self.objects[key] = data
        self.written_at[key] = time.time()


class Faulty:
    """A store whose operations go through `fault(name, key, operation)`."""

    def __init__(self, store: Store, fault: Callable[[str, str, Callable[[], Any]], Any]) -> None:
        self.name, self._store, self._fault = store.name, store, fault

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def run(first: Any, *rest: Any) -> Any:
            keys = list(first) if name == "remove" else first
            return self._fault(name, str(keys), lambda: operation(keys, *rest))

        return run


class Killed(BaseException):
    """The process is gone."""


# ---- what an empty machine gets ----


def taken(store: Store, folder: Path, said: list[str] | None = None) -> int | None:
    """The step an empty machine goes on from; everything it got is verified."""
    mirror = mirror_of(store, folder, said)
    step = mirror.bring_back()
    for path in (folder / "checkpoints").glob("step-*") if step else ():
        assert verify_folder(path)["step"] <= step
    newest = max(
        (verify_folder(path)["step"] for path in (folder / "checkpoints").glob("step-*")), default=0
    )
    assert newest == (step or 0)
    if step is not None:
        assert json.loads((folder / "run.json").read_text())["run_id"] == "run-1"
        assert (folder / "plan.json").exists()
        assert not list(folder.rglob("*.draft-*"))
    mirror.close(0)
    return step


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return folder_of_run(tmp_path / "run")


# ---- the interface ----


@pytest.fixture(params=["model", "folder", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "model":
        yield Model()
    else:
        yield open_store(("file://" if request.param == "file" else "") + str(tmp_path / "store"))


def behaves_like_a_store(store: Store, folder: Path) -> None:
    assert store.list("data/") == {}
    (folder / "some").write_bytes(b"abc")
    store.put("data/1/a", folder / "some")
    store.put("data/1/sub/b", folder / "some")
    assert {key: entry.n_bytes for key, entry in store.list("data/").items()} == {
        "data/1/a": 3,
        "data/1/sub/b": 3,
    }
    assert all(
        entry.at is None or abs(entry.at - time.time()) < 100
        for entry in store.list("data/").values()
    )
    assert store.list("dat/") == {}
    store.fetch("data/1/a", folder / "back", 3)
    assert (folder / "back").read_bytes() == store.get("data/1/sub/b") == b"abc"
    assert store.create("commits/1", b"first")
    assert not store.create("commits/1", b"second")
    assert store.get("commits/1") == b"first"
    with pytest.raises(NoSuchObjectError):
        store.get("data/2")
    with pytest.raises(NoSuchObjectError):
        store.fetch("data/2", folder / "none", 1)
    store.remove(["data/1/a", "data/never"])
    assert list(store.list("data/")) == ["data/1/sub/b"]


def test_a_store_behaves_like_the_model_of_one(store: Store, tmp_path: Path) -> None:
    behaves_like_a_store(store, tmp_path)


def test_a_folder_without_hard_links_is_a_store_too(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    real = store._small

    class NoLinks:
        def put(self, key: str, data: bytes, mode: str = "overwrite") -> None:
            if mode == "create":
                raise OSError("Generic LocalFileSystem error: Operation not permitted (os error 1)")
            real.put(key, data)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    vars(store)["_small"] = NoLinks()
    behaves_like_a_store(store, tmp_path)


def test_a_copy_goes_through_each_kind_of_store(store: Store, run: Path, tmp_path: Path) -> None:
    mirror = mirror_of(store, run)
    assert mirror.bring_back() is None
    assert delivered(mirror, 2, step_done(run, 2))
    mirror.close(1.0)
    assert taken(store, tmp_path / "empty") == 2
    assert read_ledger(tmp_path / "empty" / "ledger.jsonl") == read_ledger(run / "ledger.jsonl")
    for name in ("log.jsonl", "checkpoints/step-00000002-0001/model.safetensors"):
        assert (tmp_path / "empty" / name).read_bytes() == (run / name).read_bytes()


def test_an_address_with_secrets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="credentials go into the environment"):
        load_job(job_file(tmp_path), ["output_store=s3://key:secret@bucket/x"])


def test_where_it_is_kept_does_not_identify_a_run(tmp_path: Path) -> None:
    job = load_job(job_file(tmp_path), ["output_store=s3://bucket/x"])
    assert job.identity() == make_job(tmp_path).identity()
    assert Path(
        str(load_job(job_file(tmp_path), ["output_store=sub/copy"]).output_store)
    ).is_absolute()


# ---- what is kept ----


def test_the_newest_and_the_best_are_kept_and_nothing_is_sent_twice(
    run: Path, tmp_path: Path
) -> None:
    store, puts = Model(), []

    def note(name: str, key: str, operation: Callable[[], Any]) -> Any:
        puts.extend(
            [key.partition("/checkpoints/")[2]] if name == "put" and "/checkpoints/" in key else []
        )
        return operation()

    mirror = mirror_of(Faulty(store, note), run)
    mirror.bring_back()
    best = step_done(run, 1)
    assert delivered(mirror, 1, best)
    for step in (2, 3, 4):
        assert delivered(mirror, step, best, step_done(run, step))
    mirror.offer_last_words()
    assert mirror.wait(60)
    mirror.close(1)
    assert len(puts) == len(set(puts)) == 12
    assert [int(key[-13:-5]) for key in store.list("commits/")] == [3, 4]
    steps = {
        key.split("/checkpoints/step-")[1][:8] for key in store.objects if "/checkpoints/" in key
    }
    assert steps == {"00000001", "00000003", "00000004"}
    assert taken(store, tmp_path / "empty") == 4
    assert sorted(path.name for path in (tmp_path / "empty" / "checkpoints").iterdir()) == [
        "step-00000001-0001",
        "step-00000004-0001",
    ]


def test_what_abandoned_uploads_left_is_removed_when_it_is_old(run: Path) -> None:
    store = Model()
    for name, age_s in (("old", 2e5), ("young", 10.0)):
        store._write(f"data/00000000-{name}/x", b"left")
        store.written_at[f"data/00000000-{name}/x"] -= age_s
    mirror = mirror_of(store, run)
    mirror.bring_back()
    assert delivered(mirror, 1, step_done(run, 1))
    mirror.close(1)
    assert [key for key in store.objects if key.startswith("data/00000000-")] == [
        "data/00000000-young/x"
    ]


# ---- killed at every operation ----


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_at_any_operation_leaves_the_copy_before_or_the_new_one(
    after: bool, tmp_path: Path
) -> None:
    outcomes = []
    for k in range(1, 100):
        store, run, count = Model(), folder_of_run(tmp_path / f"run-{k}"), 0
        first = mirror_of(store, run)
        first.bring_back()
        best = step_done(run, 1)
        assert delivered(first, 1, best)
        first.close(1)

        def fault(name: str, key: str, operation: Callable[[], Any], k: int = k) -> Any:
            nonlocal count
            count += 1
            if count == k and not after:
                raise Killed
            result = operation() if count <= k else None
            if count >= k:
                raise Killed
            return result

        second = mirror_of(Faulty(store, fault), run)
        was_killed = False
        try:  # what its threads would do, here, so that the kill ends it
            patient = second.patient(1.0)
            second.catch_up(second.lease.claim(patient, lambda: False), False)
            second.offer(2, [best, step_done(run, 2)])
            assert second.pending is not None
            second.send(second.pending, patient)
        except Killed:
            was_killed = True
        outcomes.append(taken(store, tmp_path / f"empty-{k}"))
        if not was_killed:
            break
        again = mirror_of(store, run)
        again.bring_back()
        assert delivered(again, 3, step_done(run, 3, attempt=2)), (
            "and the next attempt is not in the way of what is left"
        )
        again.close(1)
        assert taken(store, tmp_path / f"again-{k}") == 3
    assert outcomes[-1] == 2
    assert set(outcomes) == {1, 2}
    assert outcomes == sorted(outcomes), "once committed, a copy stays"
    assert len(outcomes) > 15


# ---- two machines ----

HOLDING = replace(QUICK, lease_s=10.0)
"""Renewed so often that a machine which others use does not miss it."""


def test_of_two_machines_that_begin_together_one_holds_the_run(tmp_path: Path) -> None:
    store = Model()
    first, second = (
        mirror_of(store, folder_of_run(tmp_path / "a"), pace=HOLDING),
        mirror_of(store, tmp_path / "b"),
    )
    first.bring_back()
    with pytest.raises(RunTakenError, match="is training this run"):
        second.bring_back()
    assert delivered(first, 1, step_done(tmp_path / "a", 1))
    first.check()
    first.close(1)
    assert taken(store, tmp_path / "b") == 1, "and when it has given the lease back, the other may"


def test_a_machine_that_is_silent_loses_the_run_and_stops_in_words(tmp_path: Path) -> None:
    store = Model()
    run, said = folder_of_run(tmp_path / "a"), []  # type: ignore[var-annotated]
    first = mirror_of(store, run)  # renews once a minute: for the others it is dead
    first.bring_back()
    assert delivered(first, 1, step_done(run, 1))
    second = mirror_of(store, tmp_path / "b", said)
    assert second.bring_back() == 1
    assert "waiting up to" in said[0]
    assert not delivered(first, 2, step_done(run, 2))
    with pytest.raises(RunTakenError, match="is training this run"):
        first.check()
    assert delivered(second, 2, step_done(tmp_path / "b", 2, attempt=2))
    second.check()
    commits = [json.loads(store.get(key)) for key in sorted(store.list("commits/"))]
    assert [commit["step"] for commit in commits] == [1, 2]
    assert commits[0]["epoch"] < commits[1]["epoch"]
    first.close(0)
    second.close(1)


def test_the_same_folder_goes_on_at_once_after_a_kill(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Model()
    killed = mirror_of(store, run, pace=Pace(lease_s=60, renew_s=60))
    killed.bring_back()
    monkeypatch.setattr(
        lease_module.time, "sleep", lambda _: pytest.fail("it waits for its own lease")
    )
    mirror_of(store, run).bring_back()


def test_a_machine_that_comes_back_takes_what_the_other_did(tmp_path: Path) -> None:
    store, said = Model(), []  # type: ignore[var-annotated]
    a, b = folder_of_run(tmp_path / "a"), tmp_path / "b"
    first = mirror_of(store, a)
    first.bring_back()
    assert delivered(first, 2, step_done(a, 2))
    first.close(1)
    step_done(a, 6)  # never sent
    second = mirror_of(store, b)
    assert second.bring_back() == 2
    assert delivered(second, 4, step_done(b, 4, attempt=2))
    second.close(1)
    third = mirror_of(store, a, said)
    assert third.bring_back() == 4
    third.close(1)
    here = sorted(
        path.name for path in (a / "checkpoints").iterdir() if "elsewhere" not in path.name
    )
    assert here == ["step-00000002-0001", "step-00000004-0002"]
    assert "step-00000006-0001 here is not part of the run that the store has" in said[0]
    rows = [json.loads(line) for line in (a / "ledger.jsonl").read_text().splitlines()]
    last = {row["attempt"]: row["spans"]["compute"] for row in rows}
    assert last == {1: 6.0, 2: 4.0}, "time that was spent here and not sent stays on the bill"


@pytest.fixture
def two_copies(run: Path) -> Model:
    return with_copies(Model(), run, 1, 2)


def newest_objects(store: Model) -> list[str]:
    commit = max(store.list("commits/"))
    return [
        commit,
        *(entry["object"] for entry in unseal(store.get(commit).decode(), "it")["files"]),
    ]


def test_any_damage_to_any_object_is_detected_and_what_is_whole_used(
    two_copies: Model, tmp_path: Path
) -> None:
    """A commit or its checkpoint: the copy before. A small file: the rest of this one."""
    whole, chance, tried = dict(two_copies.objects), random.Random(1), 0
    names = newest_objects(two_copies)
    before = {
        e["object"] for e in unseal(whole[min(two_copies.list("commits/"))].decode(), "it")["files"]
    }
    shared = {name for name in before & {*names} if "/log.parts/" not in name}
    assert not shared, "what both needed would leave none to fall back to"
    for name in names:
        size = len(whole[name])
        flips = [(chance.randrange(size), chance.randrange(8)) for _ in range(15)]
        damaged = [
            whole[name][:at] + bytes([whole[name][at] ^ 1 << bit]) + whole[name][at + 1 :]
            for at, bit in flips
        ]
        damaged += [whole[name][: int(size * share)] for share in (0, 0.01, 0.5)] + [
            whole[name][:-1],
            whole[name] + b"\0",
        ]
        for n, content in enumerate([*damaged, None]):
            two_copies.objects = {**whole, name: content} if content is not None else dict(whole)
            if content is None:
                del two_copies.objects[name]
            said: list[str] = []
            empty = tmp_path / f"empty-{names.index(name)}-{n}"
            is_small = "checkpoints/" not in name and not name.startswith("commits/")
            assert taken(two_copies, empty, said) == (2 if is_small else 1)
            if is_small:
                lost = "log.parts" if "/log.parts/" in name else name.rpartition("/")[2]
                assert f"{lost} of the copy of step 2 in the store is lost" in said[0]
            else:
                assert (
                    content is None and name.startswith("commits/")
                ) or "step 2 in the store is damaged" in said[0]
            shutil.rmtree(empty)
            tried += 1
    assert tried > 150


def test_swapped_objects_are_detected(two_copies: Model, tmp_path: Path) -> None:
    commits = sorted(two_copies.list("commits/"))
    objects = two_copies.objects
    objects[commits[0]], objects[commits[1]] = objects[commits[1]], objects[commits[0]]
    with pytest.raises(RunDamagedError, match="none of the 2 commits"):
        mirror_of(two_copies, tmp_path / "empty").bring_back()
    said: list[str] = []
    mirror = mirror_of(two_copies, tmp_path / "empty", said)
    assert mirror.bring_back(allow_restart=True) is None, "unless starting again is asked for"
    assert "as you asked" in said[-1]
    mirror.close(1)


@pytest.fixture
def three_copies(run: Path) -> Model:
    return with_copies(Model(), run, 1, 2, 3, keep=3)


@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "manifest.json"])
def test_objects_of_two_steps_swapped_are_detected_and_the_copy_before_both_used(
    file: str, three_copies: Model, tmp_path: Path
) -> None:
    objects = three_copies.objects
    commits = [
        unseal(objects[key].decode(), "it")["files"]
        for key in sorted(three_copies.list("commits/"))[1:]
    ]
    second, third = (
        next(e["object"] for e in files if e["path"].endswith(file)) for files in commits
    )
    objects[second], objects[third] = objects[third], objects[second]
    said: list[str] = []
    assert taken(three_copies, tmp_path / "empty", said) == 1
    assert [text.split(" in the store")[0] for text in said] == [
        "the copy of step 3",
        "the copy of step 2",
    ]


def objects_by_path(store: Model, commit: str) -> dict[str, str]:
    """path -> object of a commit."""
    return {
        entry["path"]: entry["object"]
        for entry in unseal(store.get(commit).decode(), "it")["files"]
    }


@pytest.fixture
def with_best(tmp_path: Path, run: Path) -> Model:
    """Commits of steps 2 and 3, both with the best checkpoint, of step 1."""
    store = Model()
    mirror = mirror_of(store, run)
    mirror.bring_back()
    best = step_done(run, 1)
    for step in (2, 3):
        assert delivered(mirror, step, best, step_done(run, step))
    mirror.close(1)
    return store


def test_a_lost_object_of_the_best_checkpoint_leaves_the_last_step(
    with_best: Model, tmp_path: Path
) -> None:
    """Both commits name the same object: none of them is of no use for it."""
    by_path = objects_by_path(with_best, newest_objects(with_best)[0])
    name = by_path["checkpoints/step-00000001-0001/model.safetensors"]
    del with_best.objects[name]
    said: list[str] = []
    assert taken(with_best, tmp_path / "empty", said) == 3
    assert "checkpoints/step-00000001-0001 of the copy of step 3 in the store is lost" in said[0]
    assert [path.name for path in (tmp_path / "empty" / "checkpoints").iterdir()] == [
        "step-00000003-0001"
    ]


def test_a_lost_object_of_the_last_checkpoint_leaves_the_one_before_and_then_the_best(
    with_best: Model, tmp_path: Path
) -> None:
    for n, (lost, left) in enumerate([(3, 2), (2, 1)]):
        for key in with_best.list("commits/"):
            by_path = objects_by_path(with_best, key)
            with_best.objects.pop(
                by_path.get(f"checkpoints/step-0000000{lost}-0001/state.json", ""), None
            )
        assert taken(with_best, tmp_path / f"empty-{n}") == left
    steps = {path.name[:13] for path in (tmp_path / "empty-1" / "checkpoints").iterdir()}
    assert steps == {"step-00000001"}


def test_a_commit_without_its_small_files_is_used(with_best: Model, tmp_path: Path) -> None:
    """Files that decide come from the checkpoint, the money from the lease, the log is lost."""
    newest = max(with_best.list("commits/"))
    for path in ("log.parts/000000", "plan.json", "run.json", "ledger.jsonl"):
        with_best.objects.pop(objects_by_path(with_best, newest)[path], None)
    said: list[str] = []
    assert taken(with_best, tmp_path / "empty", said) == 3
    lost = {"log.parts", "plan.json", "run.json", "ledger.jsonl"}
    assert {text.split(" of ")[0] for text in said} == lost
    assert (tmp_path / "empty" / "run.json").exists()
    assert read_ledger(tmp_path / "empty" / "ledger.jsonl").accounts[1].wall_s == 3


def test_what_was_lost_in_the_store_is_sent_again(with_best: Model, tmp_path: Path) -> None:
    by_path = objects_by_path(with_best, newest_objects(with_best)[0])
    damaged = by_path["checkpoints/step-00000001-0001/model.safetensors"]
    with_best.objects[damaged] = bytes(len(with_best.objects[damaged]))
    mirror = mirror_of(with_best, tmp_path / "empty")
    assert mirror.bring_back() == 3
    assert delivered(mirror, 4, step_done(tmp_path / "empty", 1), step_done(tmp_path / "empty", 4))
    mirror.close(1)
    assert taken(with_best, tmp_path / "other") == 4
    assert (tmp_path / "other" / "checkpoints" / "step-00000001-0001").is_dir()


@pytest.mark.parametrize("name", ["run.json", "plan.json"])
def test_a_file_that_decides_and_is_damaged_here_comes_back_from_the_store(
    name: str, with_best: Model, run: Path
) -> None:
    """Checkpoints of earlier versions have no copies of these files: the store has."""
    whole = json.loads((run / name).read_text())
    (run / name).write_text("{")
    mirror = mirror_of(with_best, run)
    assert mirror.bring_back() == 3
    mirror.close(1)
    assert json.loads((run / name).read_text()) == whole
    assert {path.name for path in (run / "checkpoints").glob("step-*[0-9]")} >= {
        "step-00000003-0001"
    }


def test_what_was_damaged_when_it_was_sent_is_written_anew_from_the_checkpoint(
    tmp_path: Path,
) -> None:
    run = folder_of_run(tmp_path / "run")
    facts = {name: kept(run / name) for name in ("run.json", "plan.json")}

    def fill(draft: Path) -> None:
        (draft / "state.json").write_text("{}")

    checkpoint = run / "checkpoints" / "step-00000002-0001"
    commit_folder(checkpoint, fill, {"step": 2, "run_id": "run-1", "run_files": facts})
    store = Model()
    mirror = mirror_of(store, run)
    mirror.bring_back()
    for name in facts:
        (run / name).write_text("{")
    assert delivered(mirror, 2, checkpoint)
    mirror.close(1)
    assert taken(store, tmp_path / "empty") == 2
    assert kept(tmp_path / "empty" / "plan.json") == facts["plan.json"]


def test_a_commit_whose_data_is_gone_is_passed_over_and_what_no_commit_names_is_ignored(
    three_copies: Model, tmp_path: Path
) -> None:
    before = {
        e["object"]
        for e in unseal(three_copies.get(sorted(three_copies.list("commits/"))[1]).decode(), "")[
            "files"
        ]
    }
    _, *data = newest_objects(three_copies)
    prefix = next(name for name in data if name not in before).split("/checkpoints/")[0]
    three_copies.put(
        f"{prefix}/checkpoints/step-00000003-0001/more.bin", tmp_path / "run" / "run.json"
    )
    three_copies.put("data/of-nobody", tmp_path / "run" / "run.json")
    assert taken(three_copies, tmp_path / "one") == 3
    assert not list((tmp_path / "one").rglob("more.bin"))
    three_copies.remove([name for name in data if name not in before])
    assert taken(three_copies, tmp_path / "two") == 2


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 1])
def test_when_every_commit_is_damaged_nothing_restarts_in_silence(
    share: float, three_copies: Model, tmp_path: Path
) -> None:
    for key in three_copies.list("commits/"):
        content = three_copies.objects[key]
        three_copies.objects[key] = content[: min(int(len(content) * share), len(content) - 1)]
    said: list[str] = []
    with pytest.raises(RunDamagedError, match="none of the 3 commits") as error:
        mirror_of(three_copies, tmp_path / "empty", said).bring_back()
    assert "--allow-restart" in str(error.value)
    assert len(said) == 3


def test_what_is_here_and_damaged_is_fetched_again_to_be_looked_at(
    two_copies: Model, tmp_path: Path
) -> None:
    folder = tmp_path / "looked at"
    folder.mkdir()
    assert take_small(two_copies, folder, [])
    whole = (folder / "plan.json").read_bytes()
    (folder / "plan.json").write_bytes(whole[:-2] + b" \n")
    assert take_small(two_copies, folder, [])
    assert (folder / "plan.json").read_bytes() == whole


def test_a_store_that_holds_another_run_is_refused(two_copies: Model, tmp_path: Path) -> None:
    other = folder_of_run(tmp_path / "other", run_id="run-2")
    with pytest.raises(RunChangedError, match="holds another run"):
        mirror_of(two_copies, other).bring_back()


# ---- whole runs ----


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "PACE", QUICK)


def machine(folder: Path, name: str, store: str | Path | None, **keys: Any) -> Any:
    """The job as a machine with an empty disk would run it: its own output_dir, the same data and
    model.
    """
    settings = {
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "max_steps": 8,
        "lr_scheduler_type": "linear",
    }
    job = make_job(folder, output_dir=f"./{name}", data={"eval_fraction": 0.2}, **(settings | keys))
    return job.model_copy(update={"output_store": store and str(store)})


def stop_after(step: int) -> Heard:
    """Asks the run to leave once `step` is done."""
    import os
    import signal

    class Stopping(Heard):
        def __call__(self, event: Event) -> None:
            super().__call__(event)
            if isinstance(event, StepTaken) and event.step == step:
                os.kill(os.getpid(), signal.SIGTERM)

    return Stopping()


def mirrors_made(monkeypatch: pytest.MonkeyPatch) -> list[Mirror]:
    """The mirrors of all runs from now on."""
    made: list[Mirror] = []
    real = Mirror.__init__

    def init(mirror: Mirror, *arguments: Any) -> None:
        real(mirror, *arguments)
        made.append(mirror)

    monkeypatch.setattr(Mirror, "__init__", init)
    return made


def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How many seconds after a mirror was made each wait for it was over: one before the ledger is
    written for the last time that a store hears of, one after."""
    over_s, made_at = list[float](), [0.0]
    init, wait = Mirror.__init__, Mirror.wait

    def made(mirror: Mirror, *arguments: Any) -> None:
        init(mirror, *arguments)
        made_at[0] = time.monotonic()

    def waited(mirror: Mirror, seconds: float) -> bool:
        is_done = wait(mirror, seconds)
        over_s.append(time.monotonic() - made_at[0])
        return is_done

    monkeypatch.setattr(Mirror, "__init__", made)
    monkeypatch.setattr(Mirror, "wait", waited)
    return over_s


def same_result(left: Path, right: Path) -> list[str]:
    import survive

    found = survive.differences(survive.result_of(left), survive.result_of(right))
    return [name for name in found if name != "model/README.md"]  # it names the data by its address


@pytest.mark.slow
def test_a_store_that_is_lost_with_the_disk_of_the_run_is_named(
    quick: None, tmp_path: Path
) -> None:
    """As where the disk that was meant is not mounted."""
    said = "is on the disk of the run: mount one that outlives this machine"
    heard = Heard()
    train(machine(tmp_path, "here", tmp_path / "store", max_steps=1), heard)
    assert [event.text for event in heard.of(Note) if "disk of the run" in event.text] == [
        f"{tmp_path / 'store'} {said}"
    ]
    with file_system(tmp_path / "mounted", "size=64m") as folder:
        heard = Heard()
        train(machine(tmp_path, "there", folder / "store", max_steps=1), heard)
        assert said not in str(heard.of(Note))


def test_an_empty_machine_goes_on_to_the_same_bits_with_the_money_on_the_bill(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    assert train(machine(tmp_path, "alone", None)).exit_code == 0
    first = train(machine(tmp_path, "first", store), stop_after(3))
    assert first.exit_code == 75
    (tmp_path / "first").rename(tmp_path / "gone")
    waited = waits(monkeypatch)
    second = train(machine(tmp_path, "second", store), stop_after(5))
    assert second.exit_code == 75
    until_the_last_words_s = waited[-2]
    heard = Heard()
    third = train(machine(tmp_path, "third", store), heard)
    assert third.exit_code == 0
    assert heard.warnings == ""
    assert [event.step for event in heard.of(Restored)] == [5]
    assert same_result(tmp_path / "alone", tmp_path / "third") == []
    ended = [attempt["ended"] for attempt in third.receipt.attempts]
    assert ended == ["interrupted", "interrupted", "finished"]
    second_s = [a["wall_s"] for a in second.receipt.attempts]
    third_s = [a["wall_s"] for a in third.receipt.attempts][:2]
    assert third_s[0] == pytest.approx(second_s[0])
    assert until_the_last_words_s <= third_s[1] <= second_s[1], (
        "all but the moment in which the lease was given back"
    )
    fourth = train(machine(tmp_path, "fourth", store), heard := Heard())
    assert fourth.reason.startswith("the run had finished already"), "the model came along"
    assert heard.of(StepTaken) == []
    assert same_result(tmp_path / "alone", tmp_path / "fourth") == []


def test_a_run_that_another_machine_takes_over_stops_in_words(
    monkeypatch: pytest.MonkeyPatch, quick: None, tmp_path: Path
) -> None:
    store = open_store(str(tmp_path / "store"))

    def take_over(event: Event) -> None:
        if isinstance(event, StepTaken) and event.step == 4:
            links = sorted(store.list("writers/"))
            number = int(links[-1][-13:-5]) + 1
            while not store.create(
                f"writers/{number:08d}.json", json.dumps({"host": "other", "folder": "/x"}).encode()
            ):
                number += 1
            time.sleep(0.3)

    taken = train(machine(tmp_path, "run", tmp_path / "store", num_train_epochs=50), take_over)  # type: ignore[arg-type]
    assert (taken.exit_code, taken.state) == (75, "interrupted")
    assert "other is training this run" in taken.reason
    (key,) = store.list("bills/")
    (account,) = json.loads(store.get(key))["ledger"]
    assert sum(account["spans"].values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["fails", "hangs", "slow", "refuses"])
def test_a_store_that_goes_away_holds_nothing_up_and_gets_its_backlog(
    fault: str, quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    is_away = False
    real = open_store(str(tmp_path / "store"))
    mirrors = mirrors_made(monkeypatch)

    def trouble(name: str, key: str, operation: Callable[[], Any]) -> Any:
        if is_away and fault == "hangs":
            time.sleep(0.5)
            raise StoreError("no answer")
        if is_away and fault != "slow":
            raise StoreError("503") if fault == "fails" else store_module.StoreRefusedError("403")
        if is_away:
            time.sleep(0.1)
        return operation()

    monkeypatch.setattr(mirror_module, "open_store", lambda address: Faulty(real, trouble))
    monkeypatch.setattr(mirror_module, "PACE", replace(QUICK, give_up_s=60.0))
    heard = Heard()

    def tell(event: Event) -> None:
        nonlocal is_away
        heard(event)
        if isinstance(event, StepTaken) and event.step == 3:
            is_away = True
        if isinstance(event, StepTaken) and is_away:
            time.sleep(0.2)
        if isinstance(event, StepTaken) and event.step == 7:
            until(lambda: mirrors[0].failing or fault in ("slow", "hangs"))
            is_away = False

    assert train(machine(tmp_path, "run", tmp_path / "store"), tell).exit_code == 0  # type: ignore[arg-type]
    assert fault in ("slow", "hangs") or "has not reached the store" in heard.warnings
    assert taken_run(tmp_path) == 8


def taken_run(tmp_path: Path) -> int | None:
    mirror = mirror_of(open_store(str(tmp_path / "store")), tmp_path / "taken")
    step = mirror.bring_back()
    mirror.close(1)
    return step


@pytest.mark.slow
def test_a_store_that_is_down_to_the_end_costs_nothing_but_the_copy(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, heard = open_store(str(tmp_path / "store")), Heard()

    def trouble(name: str, key: str, operation: Callable[[], Any]) -> Any:
        if heard.of(StepTaken):
            raise StoreError("503 for ever")
        return operation()

    monkeypatch.setattr(mirror_module, "open_store", lambda address: Faulty(real, trouble))
    outcome = train(machine(tmp_path, "run", tmp_path / "store"), heard)
    assert outcome.exit_code == 0
    assert "could not be brought to" in heard.warnings
    assert not (tmp_path / "run" / "outbox").exists()
    assert (tmp_path / "run" / "model").is_dir()
    assert not is_finished(tmp_path / "run"), "the model is not where it was asked for"
    heard.clear()
    monkeypatch.setattr(mirror_module, "open_store", lambda address: real)
    assert train(machine(tmp_path, "run", tmp_path / "store"), heard).state == "finished"
    assert heard.of(StepTaken) == []
    assert is_finished(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "gone")
    assert train(machine(tmp_path, "run", tmp_path / "store"), Heard()).reason.startswith(
        "the run had finished already"
    )
    assert (tmp_path / "run" / "model").is_dir()


@pytest.mark.slow
def test_a_store_that_is_down_at_the_start(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, is_down = open_store(str(tmp_path / "store")), True

    def trouble(name: str, key: str, operation: Callable[[], Any]) -> Any:
        if is_down:
            raise StoreError("503")
        return operation()

    monkeypatch.setattr(mirror_module, "open_store", lambda address: Faulty(real, trouble))
    with pytest.raises(StoreUnavailableError, match="does not answer") as error:
        train(machine(tmp_path, "run", tmp_path / "store"))
    assert error.value.exit_code == 75, "an empty folder never begins again in silence"
    is_down = False
    train(machine(tmp_path, "run", tmp_path / "store"), stop_after(3))
    is_down = True
    heard = Heard()

    def tell(event: Event) -> None:
        nonlocal is_down
        heard(event)
        is_down = is_down and not heard.of(StepTaken)

    assert train(machine(tmp_path, "run", tmp_path / "store"), tell).exit_code == 0  # type: ignore[arg-type]
    assert "the run continues from this folder" in heard.warnings
    assert taken_run(tmp_path) == 8


@pytest.mark.slow
def test_what_is_waited_for_after_the_last_step_is_on_the_bill(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A store that takes its time at the end: the copy of the model, the last words, the lease."""
    real, heard = open_store(str(tmp_path / "store")), Heard()

    def trouble(name: str, key: str, operation: Callable[[], Any]) -> Any:
        if heard.of(Exported) and name == "put":
            time.sleep(0.15)
        return operation()

    monkeypatch.setattr(mirror_module, "open_store", lambda address: Faulty(real, trouble))
    monkeypatch.setattr("farthing.run.opening.seconds_since_process_start", lambda: 0.0)
    job, waited = machine(tmp_path, "run", tmp_path / "store"), waits(monkeypatch)
    began = time.monotonic()
    receipt = train(job, heard).receipt
    elapsed_s = time.monotonic() - began
    *_, until_the_last_words_s, to_the_end_s = waited
    attempt = receipt.attempts[0]
    assert to_the_end_s <= receipt.wall_s <= elapsed_s
    assert attempt["spans"]["checkpoint"] > 1.0
    assert receipt.usd == pytest.approx(receipt.wall_s / 3600 * 3.6)
    assert [a["ended"] for a in receipt.attempts] == ["finished"]
    on_disk = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert on_disk["wall_s"] == receipt.wall_s
    (tmp_path / "run").rename(tmp_path / "gone")
    again = train(machine(tmp_path, "run", tmp_path / "store"), Heard()).receipt
    known_s = again.attempts[0]["wall_s"]
    assert until_the_last_words_s <= known_s <= attempt["wall_s"], "and the store knows it"
