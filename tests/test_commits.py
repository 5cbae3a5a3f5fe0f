"""A run brought from a store onto a disk: room for it, its ledger, and a store without a run."""

from types import SimpleNamespace

import pytest

from farthing.errors import DiskFullError
from farthing.run import commits as commits_module
from farthing.run.accounts import read_ledger
from farthing.run.commits import list_commits, read_commit, take_run, take_small
from farthing.storage.objects import open_store
from mirrored import folder_of_run, mirror_of, step_done


@pytest.fixture
def store(tmp_path):
    """The copies of two steps, whose ledger says 2 s; the lease says 5 s."""
    store, run = open_store(str(tmp_path / "store")), folder_of_run(tmp_path / "run")
    mirror = mirror_of(store, run)
    mirror.bring_back()
    for step in (1, 2):
        mirror.offer(step, [step_done(run, step)])
        assert mirror.wait(30)
    step_done(run, 5)
    mirror.close(30)
    return store


def test_a_run_comes_with_its_checkpoint_and_all_that_is_known_of_its_money(store, tmp_path):
    take_run(store, tmp_path / "here", print)
    names = sorted(path.name for path in (tmp_path / "here/checkpoints").iterdir())
    assert names == ["step-00000002-0001"]
    (account,) = read_ledger(tmp_path / "here/ledger.jsonl").accounts
    assert (account.wall_s, account.step) == (5.0, 5)
    assert not (tmp_path / "here/log.parts").exists()
    assert (tmp_path / "here/log.jsonl").read_text().count("\n") == 2


def test_twice_the_size_of_a_copy_has_to_be_free(store, tmp_path, monkeypatch):
    newest = list_commits(store)[0]
    n_bytes = sum(entry["size"] for entry in read_commit(store, newest)["files"])
    free = [2 * n_bytes - 1]
    usage = lambda folder: SimpleNamespace(free=free[0])  # noqa: E731
    monkeypatch.setattr(commits_module.shutil, "disk_usage", usage)
    with pytest.raises(DiskFullError, match="twice as much must be free"):
        take_run(store, tmp_path / "here", print)
    assert list((tmp_path / "here").iterdir()) == []
    free[0] += 1
    take_run(store, tmp_path / "here", print)
    assert (tmp_path / "here/run.json").exists()


def test_a_store_without_a_run_gives_nothing(tmp_path):
    empty, here = open_store(str(tmp_path / "empty")), tmp_path / "here"
    take_run(empty, here, print)
    assert not here.exists()
    assert not take_small(empty, here, [])
    here.mkdir()
    assert take_small(empty, here, [{"attempt": 1, "id": "x", "spans": {"idle": 7.0}}])


def test_a_look_takes_what_is_small_and_the_words_of_the_lease(store, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    assert take_small(
        store, here, [{"attempt": 2, "id": "x", "committed": 9, "spans": {"idle": 7.0}}]
    )
    accounts = read_ledger(here / "ledger.jsonl").accounts
    assert [(each.wall_s, each.committed) for each in accounts] == [(2.0, -1), (7.0, -1)]
    assert not (here / "checkpoints").exists()
    assert (here / "log.jsonl").read_text().count("\n") == 2
