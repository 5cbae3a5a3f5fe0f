"""A run's copy in a store: through every fault of the store, kills at each operation, two machines,
damage, empty machines.
"""

import json
import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import obstore.store
import pytest

from farthing.config.load import load_job
from farthing.errors import (
    RunChangedError,
    RunDamagedError,
)
from farthing.events import Exported, Restored, StepTaken
from farthing.launch.words import StoreWords
from farthing.run import mirror as mirror_module
from farthing.run.commits import take_run, take_small
from farthing.run.folder import is_finished, kept
from farthing.storage.files import commit_folder, unseal
from farthing.storage.objects import (
    NoSuchObjectError,
    Retrying,
    Store,
    StoreError,
    StoreRefusedError,
    open_store,
)
from interrupted import LeavesAt
from machines import machine, same_result
from machines import quick as quick
from mirrored import (
    OTHER,
    Faulty,
    Model,
    behaves_like_a_store,
    delivered,
    folder_of_run,
    mirror_of,
    mirroring,
    newest_objects,
    noting,
    step_done,
    taken,
    with_copies,
)
from workshop import Heard, job_file, make_job, read_json, read_rows, train


class Killed(BaseException):
    """The process is gone."""


# ---- what an empty machine gets ----


@pytest.fixture
def run(tmp_path):
    return folder_of_run(tmp_path / "run")


# ---- the interface ----


@pytest.fixture(params=["model", "folder", "file"])
def store(request, tmp_path):
    if request.param == "model":
        yield Model()
    else:
        yield open_store(("file://" if request.param == "file" else "") + str(tmp_path / "store"))


def test_a_store_behaves_like_the_model_of_one(store, tmp_path):
    behaves_like_a_store(store, tmp_path)


def test_a_folder_without_hard_links_is_a_store_too(tmp_path, monkeypatch):
    whole, reason = obstore.store.LocalStore, 1

    class NoLinks:
        def __init__(self, *given, **how):
            self.real = whole(*given, **how)

        def put(self, key, data, **how):
            if how.pop("mode", "") == "create":
                raise OSError(
                    f"Generic LocalFileSystem error: it can't be done (os error {reason})"
                )
            self.real.put(key, data, **how)

        def __getattr__(self, name):
            return getattr(self.real, name)

    monkeypatch.setattr(obstore.store, "LocalStore", NoLinks)
    store = open_store(str(tmp_path / "store"))
    behaves_like_a_store(store, tmp_path)
    reason = 28  # no space is left
    with pytest.raises(StoreError, match="os error 28"):
        store.create("commits/2", b"second")
    assert list(store.list("commits/")) == ["commits/1"]
    reason, (most, _) = 1, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3, resource.RLIM_INFINITY))
    with pytest.raises(StoreError, match="too large"):
        store.create("commits/2", b"second")
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    assert store.create("commits/2", b"second")


def test_large_files_travel_in_four_parts_at_once_and_no_more_than_a_bucket_takes(
    tmp_path, monkeypatch
):
    given: list[tuple[int, int]] = []

    def put(key, content, *, chunk_size, max_concurrency):
        given.append((chunk_size, max_concurrency))
        (tmp_path / key).write_bytes(b"")

    monkeypatch.setattr(obstore.store, "LocalStore", lambda *_, **__: SimpleNamespace(put=put))
    store = open_store(str(tmp_path))
    with open(tmp_path / "large", "wb") as large:
        for n_bytes in (10, 72 << 30, 90_000_000_000):
            large.truncate(n_bytes)  # a file of holes
            store.put("data", tmp_path / "large")
    assert given == [(8 << 20, 4), (8_589_934, 4), (10_000_000, 4)]


@pytest.mark.parametrize(
    ("fault", "total_s", "pauses_s"),
    [
        (StoreError("503"), 1e9, [0.5, 1, 2, 4, 8, 16, 20]),
        (StoreRefusedError("403"), 1e9, [0.5, 1, 2, 4]),
        (StoreError("503"), 3.0, [0.5, 1, 2]),
        (NoSuchObjectError("gone"), 1e9, []),
    ],
)
def test_a_store_is_asked_again_after_pauses_that_double(fault, total_s, pauses_s, monkeypatch):
    waited = []
    stop = SimpleNamespace(wait=lambda seconds: waited.append(seconds))
    monkeypatch.setattr("random.uniform", lambda low, high: (low + high) / 2)

    def fails(name, key, operation):
        raise fault

    patient = Retrying(Faulty(Model(), fails), total_s, stop)  # type: ignore[arg-type]
    with pytest.raises(type(fault)):
        patient.get("commits/1")
    assert waited == pauses_s
    assert patient.has_answered == isinstance(fault, NoSuchObjectError)


def test_where_it_is_kept_does_not_identify_a_run(tmp_path):
    job = load_job(job_file(tmp_path), ["output_store=s3://bucket/x"])
    assert job.identity() == make_job(tmp_path).identity()


# ---- what is kept ----


def test_the_newest_and_the_best_are_kept_and_nothing_is_sent_twice(run, tmp_path):
    store = Model()
    noted, puts = noting(store, "/checkpoints/")
    with mirroring(noted, run) as mirror:
        best = step_done(run, 1)
        assert delivered(mirror, 1, best)
        for step in (2, 3, 4):
            assert delivered(mirror, step, best, step_done(run, step))
        mirror.offer_last_words()
        assert mirror.wait(60)
    assert len(puts) == len(set(puts)) == 12
    assert [int(key[-13:-5]) for key in store.list("commits/")] == [3, 4]
    steps = {
        key.split("/checkpoints/step-")[1][:8] for key in store.objects if "/checkpoints/" in key
    }
    assert steps == {"00000001", "00000003", "00000004"}
    assert taken(store, tmp_path / "empty") == 4
    assert sorted(path.name for path in (tmp_path / "empty/checkpoints").iterdir()) == [
        "step-00000001-0001",
        "step-00000004-0001",
    ]


def test_what_abandoned_uploads_left_is_removed_when_it_is_old(run):
    store = Model()
    old, young = (f"data/00000000-{digit * 32}/x" for digit in "0f")
    for key, age_s in {old: 87000.0, young: 86000.0, "data/mine.csv": 1e9}.items():
        store.put(key, b"left")
        store.written_at[key] -= age_s
    with mirroring(store, run) as mirror:
        assert delivered(mirror, 1, step_done(run, 1))
    assert [key for key, data in store.objects.items() if data == b"left"] == [
        young,
        "data/mine.csv",
    ]


def test_nothing_goes_of_which_it_is_not_known_that_no_commit_names_it(run, tmp_path, monkeypatch):
    """The newest commit is missing in a late list, or an older one damaged on its way here; the
    clock here is two days ahead of the store's.
    """
    trouble, store, ahead = "", Model(), lambda: time.time() + 172_800
    clocks = SimpleNamespace(time=ahead, monotonic=time.monotonic)
    monkeypatch.setattr(mirror_module, "time", clocks)

    def fault(name, key, operation):
        found = operation()
        if trouble == "late" and (name, key) == ("list", "commits/"):
            del found[max(found)]
        return b"{}" if trouble == "damaged" and name == "get" and "commits/" in key else found

    behind = Faulty(store, fault)
    store.put(other := f"data/00000009-{'f' * 32}/x", b"of another machine")
    with mirroring(behind, run) as mirror:
        for step, trouble in enumerate(["", "late", ""], 1):  # noqa: B007
            assert delivered(mirror, step, step_done(run, step))
    shutil.rmtree(run / "checkpoints")
    with mirroring(behind, run, step=3, keep=3) as mirror:
        trouble = "damaged"
        store.written_at = {key: at - 100_000 for key, at in store.written_at.items()}
        assert delivered(mirror, 4, step_done(run, 4))
    assert store.get(other) == b"of another machine"
    assert taken(store, tmp_path / "empty") == 4
    store.remove([max(store.list("commits/"))])
    assert taken(store, tmp_path / "another") == 3


def test_who_reads_a_commit_that_is_removed_for_a_newer_one_gets_that(run, tmp_path):
    store, said, step, until = Model(), [], 0, 2

    def goes_on(name, key, operation):
        nonlocal step
        while name != "list" and "writers/" not in key and step < until:
            step += 1
            assert delivered(mirror, step, step_done(run, step))
        return operation()

    with mirroring(store, run) as mirror:
        behind = Faulty(store, goes_on)
        goes_on("get", "", dict)
        (tmp_path / "look").mkdir()
        for until in (8, 14):
            assert take_small(behind, tmp_path / "look", [])
            assert f'"step": {until}' in (tmp_path / "look/log.jsonl").read_text()
        until = 20
        take_run(behind, tmp_path / "here", said.append)
    names = [path.name for path in (tmp_path / "here/checkpoints").iterdir()]
    assert (names, said) == (["step-00000020-0001"], [])


# ---- killed at every operation ----


def test_a_kill_before_any_operation_leaves_the_copy_before_or_the_new_one(tmp_path):
    outcomes = []
    begun = with_copies(Model(), folder_of_run(tmp_path / "begun"), 1)
    for k in range(1, 100):
        store, run, count = Model(), tmp_path / f"run-{k}", 0
        store.objects, store.written_at = dict(begun.objects), dict(begun.written_at)
        shutil.copytree(tmp_path / "begun", run)
        best = run / "checkpoints/step-00000001-0001"

        def fault(name, key, operation, k=k):
            nonlocal count
            count += 1
            if count >= k:
                raise Killed
            return operation()

        second = mirror_of(Faulty(store, fault), run)
        was_killed = False
        try:  # what its threads would do, here, so that the kill ends it
            patient = second.patient(1.0)
            second.catch_up(second.lease.claim(patient, lambda: False), False)
            second.offer(2, [best, step_done(run, 2)])
            second.send(second.pending, patient)
        except Killed:
            was_killed = True
        outcomes.append(taken(store, tmp_path / f"empty-{k}"))
        if not was_killed:
            break
        if k % 12 == 0:
            with mirroring(store, run) as again:
                assert delivered(again, 3, step_done(run, 3, attempt=2)), (
                    "and the next attempt is not in the way of what is left"
                )
            assert taken(store, tmp_path / f"again-{k}") == 3
    assert outcomes[-1] == 2
    assert set(outcomes) == {1, 2}
    assert outcomes == sorted(outcomes), "once committed, a copy stays"
    assert len(outcomes) > 15


# ---- two machines ----


def test_a_machine_that_has_lost_the_run_commits_nothing(tmp_path):
    store, run = Model(), folder_of_run(tmp_path / "a")
    first = mirror_of(store, run)  # renews once a minute: for the others it is dead
    first.bring_back()
    with mirroring(store, tmp_path / "b"):
        assert not delivered(first, 2, step_done(run, 2))
        assert store.list("commits/") == {}
        first.close(0)


def test_a_machine_that_comes_back_takes_what_the_other_did(tmp_path):
    store, said = Model(), []  # type: ignore[var-annotated]
    a, b = folder_of_run(tmp_path / "a"), tmp_path / "b"
    with mirroring(store, a) as first:
        assert delivered(first, 2, step_done(a, 2))
    step_done(a, 6)  # never sent, as what was then at step 4
    shutil.copytree(a / "checkpoints/step-00000002-0001", a / "checkpoints/step-00000004-0009")
    with mirroring(store, b, step=2) as second:
        assert delivered(second, 4, step_done(b, 4, attempt=2))
    with mirroring(store, a, said, step=4):
        pass
    here = sorted(
        path.name for path in (a / "checkpoints").iterdir() if "elsewhere" not in path.name
    )
    assert here == ["step-00000002-0001", "step-00000004-0002"]
    assert "step-00000006-0001 here is not part of the run that the store has" in said[0]
    rows = read_rows(a / "ledger.jsonl")
    last = {row["attempt"]: row["spans"]["compute"] for row in rows}
    assert last == {1: 6.0, 2: 4.0}, "time that was spent here and not sent stays on the bill"


@pytest.fixture
def two_copies(run):
    return with_copies(Model(), run, 1, 2)


def test_any_damage_to_any_object_is_detected_and_what_is_whole_used(two_copies, tmp_path):
    """A commit or its checkpoint: the copy before. A small file: the rest of this one."""
    whole, chance, tried = dict(two_copies.objects), random.Random(1), 0
    names = newest_objects(two_copies)
    before = objects_by_path(two_copies, min(two_copies.list("commits/"))).values()
    shared = {name for name in {*before} & {*names} if "/log.parts/" not in name}
    assert not shared, "what both needed would leave none to fall back to"
    for name in names:
        size = len(whole[name])
        at, bit = chance.randrange(size), chance.randrange(8)
        flipped = whole[name][:at] + bytes([whole[name][at] ^ 1 << bit]) + whole[name][at + 1 :]
        cut = [whole[name][:length] for length in (0, size // 2, size - 1)]
        for n, content in enumerate([flipped, *cut, whole[name] + b"\0", None]):
            two_copies.objects = {**whole, name: content} if content is not None else dict(whole)
            if content is None:
                del two_copies.objects[name]
            said = []
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
    assert tried >= 6 * 6


def test_swapped_objects_are_detected(two_copies, tmp_path):
    commits = sorted(two_copies.list("commits/"))
    objects = two_copies.objects
    objects[commits[0]], objects[commits[1]] = objects[commits[1]], objects[commits[0]]
    with pytest.raises(RunDamagedError, match="none of the 2 commits"):
        mirror_of(two_copies, tmp_path / "empty").bring_back()
    said = []
    mirror = mirror_of(two_copies, tmp_path / "empty", said)
    assert mirror.bring_back(allow_restart=True) is None, "unless starting again is asked for"
    assert "as you asked" in said[-1]
    mirror.close(1)


def objects_by_path(store: Model, commit: str) -> dict[str, str]:
    """path -> object of a commit."""
    return {
        entry["path"]: entry["object"]
        for entry in unseal(store.get(commit).decode(), "it")["files"]
    }


@pytest.fixture
def with_best(tmp_path, run):
    """Commits of steps 2 and 3, both with the best checkpoint, of step 1."""
    store = Model()
    with mirroring(store, run) as mirror:
        best = step_done(run, 1)
        for step in (2, 3):
            assert delivered(mirror, step, best, step_done(run, step))
    return store


def test_a_lost_object_of_the_best_checkpoint_leaves_the_last_step(with_best, tmp_path):
    """Both commits name the same object: none of them is of no use for it."""
    by_path = objects_by_path(with_best, newest_objects(with_best)[0])
    name = by_path["checkpoints/step-00000001-0001/model.safetensors"]
    del with_best.objects[name]
    said = []
    assert taken(with_best, tmp_path / "empty", said) == 3
    assert "checkpoints/step-00000001-0001 of the copy of step 3 in the store is lost" in said[0]
    assert [path.name for path in (tmp_path / "empty/checkpoints").iterdir()] == [
        "step-00000003-0001"
    ]


def test_a_lost_object_of_the_last_checkpoint_leaves_the_one_before_and_then_the_best(
    with_best, tmp_path
):
    for n, (lost, left) in enumerate([(3, 2), (2, 1)]):
        for key in with_best.list("commits/"):
            by_path = objects_by_path(with_best, key)
            with_best.objects.pop(
                by_path.get(f"checkpoints/step-0000000{lost}-0001/state.json", ""), None
            )
        assert taken(with_best, tmp_path / f"empty-{n}") == left
    steps = {path.name[:13] for path in (tmp_path / "empty-1/checkpoints").iterdir()}
    assert steps == {"step-00000001"}


def test_what_was_lost_in_the_store_is_sent_again(with_best, tmp_path):
    by_path = objects_by_path(with_best, newest_objects(with_best)[0])
    damaged = by_path["checkpoints/step-00000001-0001/model.safetensors"]
    with_best.objects[damaged] = bytes(len(with_best.objects[damaged]))
    with mirroring(with_best, tmp_path / "empty", step=3) as mirror:
        assert delivered(
            mirror, 4, step_done(tmp_path / "empty", 1), step_done(tmp_path / "empty", 4)
        )
    assert taken(with_best, tmp_path / "other") == 4
    assert (tmp_path / "other/checkpoints/step-00000001-0001").is_dir()


@pytest.mark.parametrize("name", ["run.json", "plan.json"])
def test_a_file_that_decides_and_is_damaged_here_comes_back_from_the_store(name, with_best, run):
    """Checkpoints of earlier versions have no copies of these files: the store has."""
    whole = read_json(run / name)
    (run / name).write_text("{")
    with mirroring(with_best, run, step=3):
        pass
    assert read_json(run / name) == whole
    assert {path.name for path in (run / "checkpoints").glob("step-*[0-9]")} >= {
        "step-00000003-0001"
    }


def test_what_was_damaged_when_it_was_sent_is_written_anew_from_the_checkpoint(tmp_path):
    run = folder_of_run(tmp_path / "run")
    facts = {name: kept(run / name) for name in ("run.json", "plan.json")}

    def fill(draft):
        (draft / "state.json").write_text("{}")

    checkpoint = run / "checkpoints/step-00000002-0001"
    commit_folder(checkpoint, fill, {"step": 2, "run_id": "run-1", "run_files": facts})
    store = Model()
    with mirroring(store, run) as mirror:
        for name in facts:
            (run / name).write_text("{")
        assert delivered(mirror, 2, checkpoint)
    assert taken(store, tmp_path / "empty") == 2
    assert kept(tmp_path / "empty/plan.json") == facts["plan.json"]


def test_what_is_here_and_damaged_is_fetched_again_to_be_looked_at(two_copies, tmp_path):
    folder = tmp_path / "looked at"
    folder.mkdir()
    assert take_small(two_copies, folder, [])
    whole = (folder / "plan.json").read_bytes()
    (folder / "plan.json").write_bytes(whole[:-2] + b" \n")
    assert take_small(two_copies, folder, [])
    assert (folder / "plan.json").read_bytes() == whole
    two_copies.remove([name for name in newest_objects(two_copies) if name.endswith("/plan.json")])
    (folder / "plan.json").unlink()
    assert take_small(two_copies, folder, [])
    assert (folder / "plan.json").read_bytes() == b"", "damaged, as the report says"


def test_a_store_that_holds_another_run_is_refused(two_copies, tmp_path):
    other = folder_of_run(tmp_path / "other", run_id="run-2")
    with pytest.raises(RunChangedError, match="holds another run"):
        mirror_of(two_copies, other).bring_back()


# ---- whole runs ----


def behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Callable[[str], None]
) -> Store:
    """The store of runs from now on, each of whose operations meets `trouble` first."""
    real = open_store(str(tmp_path / "store"))

    def fault(name, key, operation):
        trouble(name)
        return operation()

    monkeypatch.setattr(mirror_module, "open_store", lambda address: Faulty(real, fault))
    return real


def test_an_empty_machine_goes_on_to_the_same_bits_with_the_money_on_the_bill(quick, tmp_path):
    store = tmp_path / "store"
    assert train(machine(tmp_path, "alone", None)).exit_code == 0
    first = train(machine(tmp_path, "first", store), LeavesAt(step=3))
    assert first.exit_code == 75
    (tmp_path / "first").rename(tmp_path / "gone")
    second = train(machine(tmp_path, "second", store), LeavesAt(step=5))
    assert second.exit_code == 75
    heard = Heard()
    third = train(machine(tmp_path, "third", store), heard)
    assert third.exit_code == 0
    assert heard.warnings == ""
    assert [event.step for event in heard.of(Restored)] == [5]
    assert same_result(tmp_path / "alone", tmp_path / "third") == []
    ended = [attempt["ended"] for attempt in third.receipt.attempts]
    assert ended == ["interrupted", "interrupted", "finished"]
    before = [a["wall_s"] for a in second.receipt.attempts]
    known = [a["wall_s"] for a in third.receipt.attempts]
    assert known[0] == pytest.approx(before[0])
    assert 0.5 * before[1] < known[1] <= before[1], "but for giving the lease back"
    fourth = train(machine(tmp_path, "fourth", store), heard := Heard())
    assert fourth.reason.startswith("the run had finished already"), "the model came along"
    assert heard.of(StepTaken) == []
    assert same_result(tmp_path / "alone", tmp_path / "fourth") == []
    with pytest.raises(RunChangedError, match="learning_rate"):
        train(machine(tmp_path, "fourth", store, learning_rate=0.5))
    words = StoreWords(open_store(str(store)))
    assert words.accounts()[-1].state == "finished", "who was refused is on no bill"
    assert words.run_file("run.json")["finished"]


@pytest.mark.slow
def test_what_is_waited_for_after_the_last_step_is_on_the_bill(quick, monkeypatch, tmp_path):
    """A store that takes its time at the end: the copy of the model, the last words, the lease."""
    heard = Heard()

    def trouble(name):
        if heard.of(Exported) and name == "put":
            time.sleep(0.15)

    behind(tmp_path, monkeypatch, trouble)
    receipt = train(machine(tmp_path, "run", tmp_path / "store"), heard).receipt
    (attempt,) = receipt.attempts
    assert (attempt["ended"], attempt["spans"]["checkpoint"] > 1.0) == ("finished", True)
    on_disk = read_json(tmp_path / "run/receipt.json")
    assert on_disk["wall_s"] == receipt.wall_s
    (tmp_path / "run").rename(tmp_path / "gone")
    again = train(machine(tmp_path, "run", tmp_path / "store"), Heard()).receipt.attempts[0]
    assert 1.0 < again["spans"]["checkpoint"] <= attempt["spans"]["checkpoint"]


def test_a_run_that_another_machine_takes_over_stops_in_words(monkeypatch, quick, tmp_path):
    store = open_store(str(tmp_path / "store"))

    def take_over(event):
        if isinstance(event, StepTaken) and event.step == 4:
            links = sorted(store.list("writers/"))
            number = int(links[-1][-13:-5]) + 1
            while not store.create(f"writers/{number:08d}.json", OTHER):
                number += 1
            time.sleep(0.3)

    taken = train(machine(tmp_path, "run", tmp_path / "store", num_train_epochs=50), take_over)  # type: ignore[arg-type]
    assert (taken.exit_code, taken.state) == (75, "interrupted")
    assert "other is training this run" in taken.reason
    (key,) = store.list("bills/")
    (account,) = json.loads(store.get(key))["ledger"]
    assert sum(account["spans"].values()) > 0


@pytest.mark.slow
def test_a_store_that_is_down_to_the_end_costs_nothing_but_the_copy(quick, monkeypatch, tmp_path):
    heard = Heard()

    def trouble(name):
        if heard.of(StepTaken):
            raise StoreError("503 for ever")

    real = behind(tmp_path, monkeypatch, trouble)
    outcome = train(machine(tmp_path, "run", tmp_path / "store"), heard)
    assert outcome.exit_code == 0
    assert "could not be brought to" in heard.warnings
    assert not (tmp_path / "run/outbox").exists()
    assert (tmp_path / "run/model").is_dir()
    assert not is_finished(tmp_path / "run"), "the model is not where it was asked for"
    heard.clear()
    monkeypatch.setattr(mirror_module, "open_store", lambda address: real)
    assert train(machine(tmp_path, "run", tmp_path / "store"), heard).state == "finished"
    assert heard.of(StepTaken) == []
    assert is_finished(tmp_path / "run")
