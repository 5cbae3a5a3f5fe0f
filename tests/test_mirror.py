"""The copy of a run where its store is away, refuses, or has become another machine's."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from farthing.errors import InputError, RunTakenError, StoreUnavailableError
from farthing.run import mirror as mirror_module
from farthing.run.accounts import Account, as_line, read_ledger
from farthing.run.mirror import open_mirror
from farthing.storage import mounts
from farthing.storage.files import seal
from farthing.storage.objects import (
    NoSuchBucketError,
    Store,
    StoreError,
    StoreRefusedError,
    open_store,
)
from mirrored import (
    OTHER,
    STILL,
    Faulty,
    Model,
    delivered,
    folder_of_run,
    mirror_of,
    mirroring,
    step_done,
    taken,
    with_copies,
)
from patience import until

BUSY = StoreError("503")


class Away(Model):
    """A store whose operations of these names fail with this."""

    def __init__(self):
        super().__init__()
        self.fault: Exception | None = None
        self.names = {"create", "put", "get", "fetch", "list", "remove"}

    def behind(self) -> Store:
        def meets(name: str, key: str, operation: Callable[[], Any]):
            if self.fault is not None and name in self.names:
                raise self.fault
            return operation()

        return Faulty(self, meets)


@pytest.fixture
def store():
    return Away()


@pytest.fixture
def run(tmp_path):
    return folder_of_run(tmp_path / "run")


@pytest.fixture
def said():
    return []


@pytest.fixture
def mirror(store, run, said):
    with mirroring(store.behind(), run, said) as begun:
        yield begun


def test_how_long_a_store_is_waited_for_and_a_lease_is_held(tmp_path, run):
    """The first five as `docs/guides/interruptions.md` has them."""
    mirror = open_mirror(str(tmp_path / "store"), run, 2, print)
    assert mirror is not None
    assert mirror.delivery_s == 0.0
    times = mirror.pace
    assert (times.renew_s, times.lease_s, times.leave_s) == (20, 60, 20)
    assert (times.finish_s, times.give_up_s) == (600, 60)
    assert (times.answer_s, times.deliver_s, times.pause_s, times.again_s) == (60, 3600, 0.5, 30)


# ---- at the start ----


@pytest.mark.parametrize(
    ("fault", "names", "here", "error"),
    [
        (BUSY, "list", False, StoreUnavailableError),
        (BUSY, "list", True, None),
        (StoreRefusedError("403"), "list", True, InputError),
        (StoreRefusedError("403"), "create", True, StoreUnavailableError),
        (NoSuchBucketError("no bucket"), "create", True, InputError),
    ],
)
def test_a_store_that_fails_at_the_start(fault, names, here, error, store, tmp_path, said):
    run = folder_of_run(tmp_path / "run") if here else tmp_path / "run"
    store.fault, store.names = fault, {names}
    mirror = mirror_of(store.behind(), run, said)
    if error is None:
        assert mirror.bring_back() is None
        assert said == ["the store does not answer (503); the run continues from this folder"]
        mirror.close(0)
    else:
        with pytest.raises(error) as caught:
            mirror.bring_back()
        found = caught.value.exit_code, f"the store refuses: {fault}" in str(caught.value)
        assert found == ((2, True) if error is InputError else (75, False))
        assert caught.value.where == "output_store: model://store"


@pytest.mark.parametrize("has_gone_on", [False, True])
def test_a_run_that_began_without_its_store_takes_it_later_unless_another_went_on(
    has_gone_on, store, run, tmp_path, said
):
    with_copies(store, run, 1)
    store.fault = BUSY
    with mirroring(store.behind(), run, said) as mirror:
        with mirroring(store, other := tmp_path / "other", step=1) as elsewhere:
            done = step_done(other, 3, attempt=2)
            assert not has_gone_on or delivered(elsewhere, 3, done)
        store.fault = None
        assert delivered(mirror, 2, step_done(run, 2)) is not has_gone_on
        if has_gone_on:
            with pytest.raises(
                RunTakenError, match="the run has gone on elsewhere while the store"
            ):
                mirror.check()
        mirror.close(1)
    assert max(int(key[-13:-5]) for key in store.list("commits/")) == (3 if has_gone_on else 2)
    ids = [account.id for account in read_ledger(run / "ledger.jsonl").accounts]
    assert ids == ["run-1", "other-2"], "what it has cost elsewhere is on the bill"


def test_another_machine_is_kept_out_while_the_first_renews(store, run, tmp_path):
    with mirroring(store, run, pace=replace(STILL, renew_s=0.05, lease_s=2.0)):
        until(lambda: len(store.list("writers/")) > 3)
        with pytest.raises(RunTakenError, match="is training this run") as caught:
            mirror_of(store, tmp_path / "second").bring_back()
        assert caught.value.where == "output_store: model://store"
    assert json.loads(store.objects[max(store.list("writers/"))])["released"] is True


def test_a_folder_that_is_no_place_for_a_copy_is_doubted(run, tmp_path, monkeypatch):
    def doubt(store):
        return str(mirror_of(open_store(store), run).doubt())

    assert doubt(str(tmp_path)).startswith("is on the disk of the run: mount one that outlives")
    assert doubt("/dev") == "None"
    assert mirror_of(Model(), run).doubt() is None
    bucket = SimpleNamespace(device="gcsfuse", mountpoint=str(tmp_path), fstype="fuse.gcsfuse")
    monkeypatch.setattr(mounts.psutil, "disk_partitions", lambda all: [bucket])
    assert doubt(str(tmp_path)).startswith("is a bucket, mounted by gcsfuse: by its own address")


def test_a_folder_takes_from_its_store_what_it_has_lost_and_nothing_else(store, run):
    def again():
        mirror = mirror_of(store, run)
        step = mirror.bring_back()
        mirror.offer_last_words()  # there are none yet
        mirror.close(1)
        return step

    with mirroring(store, run) as mirror:
        assert delivered(mirror, 0)
    assert again() is None, "no step is in the store"
    with_copies(store, run, 1, 2)
    step_done(run, 3)
    assert again() is None, "it was here last"
    for lost in ("*-0000000[23]-*", "*"):
        for folder in (run / "checkpoints").glob(lost):
            shutil.rmtree(folder)
        assert again() == 2, "of an older copy of the folder"
    (run / "store.json").write_text('{"store": "another", "epoch": 99}')
    assert again() == 2
    shutil.rmtree(run / "checkpoints")
    (run / "search.jsonl").touch()
    (run / "ledger.jsonl").write_text(as_line(Account(9, committed=3)))
    assert again() is None, "a search that is further, and has no checkpoints"


def test_a_model_goes_along_where_it_is_asked_for_and_the_last_words_after_it(
    mirror, store, run, tmp_path
):
    (run / "model/sub").mkdir(parents=True)
    (run / "model/sub/weights").write_text("w")
    for step in (1, 2):
        mirror.offer(step, [step_done(run, step)], with_model=step == 2)
        assert mirror.wait(60)
        assert any("/model/sub/weights" in key for key in store.objects) == (step == 2)
        held = [path.name for path in (run / "outbox").iterdir()]
        assert held == ["log.parts"], "no link keeps an old checkpoint on the disk"
    with open(run / "ledger.jsonl", "a") as ledger:
        ledger.write(as_line(Account(1, "run-1", 9, spans={"compute": 9.0})))
    mirror.offer_last_words()
    mirror.close(60)
    store.remove(list(store.list("writers/")))  # the lease knows the money too
    (tmp_path / "empty/model").mkdir(parents=True)
    assert taken(store, tmp_path / "empty") == 2
    assert read_ledger(tmp_path / "empty/ledger.jsonl").accounts[0].wall_s == 9.0
    assert (tmp_path / "empty/model.bad-1").is_dir(), "it was of no run"
    (run / "model/of another step").write_text("old")
    shutil.rmtree(run / "checkpoints")
    (run / "restore.draft-1234abcd").mkdir()  # of an attempt that was killed
    assert taken(store, run) == 2
    for folder in (run, tmp_path / "empty"):
        assert [path.name for path in (folder / "model").rglob("*")] == ["sub", "weights"]


# ---- while the run continues ----


def test_after_a_gap_the_store_is_asked_before_the_run_continues(store, run, said, monkeypatch):
    gaps = SimpleNamespace(tick=lambda: None, taken=lambda: True)
    monkeypatch.setattr(mirror_module, "Gaps", lambda most_s: gaps)
    with mirroring(store.behind(), run, said) as mirror:
        store.fault = BUSY
        mirror.check()
        assert said == ["the store does not answer (503); the run continues"]
        store.fault = None
        mirror.check()
        store.create("writers/00000003.json", OTHER)
        with pytest.raises(RunTakenError, match="other is training this run in /x"):
            mirror.check()
    assert len(store.list("bills/")) == 1


def test_the_bills_that_other_machines_left_are_joined_with_the_ledger(mirror, store, run, said):
    for number, name in enumerate(["theirs", "of a third"]):
        left = Account(9, name, 1, "running", spans={"idle": 7.0 + number})
        bill = seal({"ledger": [left.as_row()]}).encode()
        store.put(f"bills/ab-{number}.json", bill)
    store.put("bills/ab-2.json", bill.replace(b"8.0", b"9.0"))
    assert delivered(mirror, 1, step_done(run, 1))
    mirror.check()
    found = read_ledger(run / "ledger.jsonl").accounts
    walls = {account.number: account.wall_s for account in found}
    assert walls == {1: 1.0, 9: 7.0, 10: 8.0}
    (damaged,) = said
    assert damaged.startswith(
        "what another machine has spent on this run is not on its bill: bills"
    )


def test_a_store_that_fails_is_said_once_and_so_is_that_it_is_back(mirror, store, run, said):
    store.fault, store.names = BUSY, {"put"}
    mirror.offer(1, [step_done(run, 1)])
    until(lambda: (mirror.check(), said)[1])
    mirror.offer(2, [step_done(run, 2)])
    store.fault = None
    assert mirror.wait(60)
    mirror.check()
    away, back = said
    assert away == "the copy of step 1 has not reached the store (503); training continues"
    assert back.startswith("the store is back: the copy of step ")
    assert mirror.delivered_step == 2


@pytest.mark.parametrize(("sent", "there"), [([], "nothing"), ([1], "step 1")])
def test_what_does_not_reach_the_store_by_the_end_is_named(sent, there, store, run, said):
    mirror = mirror_of(store.behind(), run, said, pace=replace(STILL, give_up_s=0.02))
    mirror.bring_back()
    for step in sent:
        assert delivered(mirror, step, step_done(run, step))
    store.fault = BUSY
    mirror.offer(2, [step_done(run, 2)])
    mirror.close(1e9)  # it ends, as the store only fails
    assert said[-1] == (
        f"the newest copy could not be brought to model://store: {there} of this attempt is there"
    )
    assert not (run / "outbox").exists()


def test_a_checkpoint_that_is_damaged_on_this_disk_is_not_copied(mirror, store, run, said):
    damaged = step_done(run, 2)
    (damaged / "state.json").write_text('{"step": 3}')
    assert delivered(mirror, 2, damaged)
    mirror.check()
    assert said[0].startswith("the checkpoint of step 2 is damaged on this disk (state.json")
    assert store.list("commits/") == {}
