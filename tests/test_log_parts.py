"""The log of a run reaches a store in pieces: each once."""

import json
from pathlib import Path

import pytest

from farthing.errors import RunChangedError
from farthing.run import mirror as mirror_module
from farthing.storage.files import seal, unseal
from mirrored import (
    Model,
    delivered,
    folder_of_run,
    mirror_of,
    mirroring,
    noting,
    step_done,
    taken,
)


def write_steps(run: Path, first: int, last: int):
    """Lines of about a hundred bytes."""
    with open(run / "log.jsonl", "a") as log:
        for step in range(first, last):
            log.write(json.dumps({"step": step, "loss": 1.0, "note": "x" * 70}) + "\n")


def log_of(folder: Path) -> bytes:
    return (folder / "log.jsonl").read_bytes()


def commits_of(tmp_path: Path, n: int) -> tuple[Model, list[str], Path]:
    """A store with `n` commits of a log that grows by 45 lines each; the pieces that were sent, in
    order.
    """
    store, run = Model(), folder_of_run(tmp_path / "run")
    noted, sent = noting(store, "/log.parts/")
    (run / "log.jsonl").unlink(missing_ok=True)
    with mirroring(noted, run) as mirror:
        for step in range(1, n + 1):
            write_steps(run, 45 * step - 45, 45 * step)
            assert delivered(mirror, step, step_done(run, step))
        mirror.offer_last_words()
        assert mirror.wait(60)
    return store, sent, run


def test_each_piece_is_sent_once(tmp_path):
    store, sent, run = commits_of(tmp_path, 6)
    assert sent == [f"{n:06d}" for n in range(6)]
    assert taken(store, tmp_path / "empty") == 6
    assert log_of(tmp_path / "empty") == log_of(run)
    assert not (tmp_path / "empty/log.parts").exists()
    held = {key.rpartition("/")[2] for key in store.objects if "/log.parts/" in key}
    assert held == set(sent), "old commits go, what newer ones share with them stays"


def test_a_log_that_was_cut_back_or_is_in_many_pieces_is_sent_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(mirror_module, "MOST_PIECES", 4)
    store, sent, run = commits_of(tmp_path, 6)
    assert sent == ["000000", "000001", "000002", "000003", "000000", "000001"]
    assert taken(store, tmp_path / "empty") == 6
    assert log_of(tmp_path / "empty") == log_of(run)
    with mirroring(store, run) as mirror:
        for step, n_lines in ((7, 300), (8, 20)):
            lines = log_of(run).splitlines(keepends=True)
            (run / "log.jsonl").write_bytes(b"".join(lines[:n_lines]))
            assert delivered(mirror, step, step_done(run, step))
    assert taken(store, tmp_path / "shorter") == 8
    assert log_of(tmp_path / "shorter") == log_of(run)


def test_a_last_line_without_its_end_waits_for_it(tmp_path):
    store, run = Model(), folder_of_run(tmp_path / "run")
    with mirroring(store, run) as mirror:
        write_steps(run, 0, 5)
        whole = log_of(run)
        for step, more in ((1, b'{"step": 5'), (2, b", 1}\n")):
            checkpoint = step_done(run, step)
            (run / "log.jsonl").write_bytes(whole + more)
            whole = whole + more
            assert delivered(mirror, step, checkpoint)
    assert taken(store, tmp_path / "empty") == 2
    assert log_of(tmp_path / "empty") == whole


def test_a_machine_that_goes_on_sends_only_what_is_new(tmp_path):
    store, _, _ = commits_of(tmp_path, 4)
    other = tmp_path / "other"
    noted, puts = noting(store, "/log.parts/")
    with mirroring(noted, other, step=4) as mirror:
        write_steps(other, 180, 200)
        assert delivered(mirror, 5, step_done(other, 5))
    assert len(puts) == 1
    assert taken(store, tmp_path / "third") == 5
    assert log_of(tmp_path / "third") == log_of(other)


def test_a_lost_micro_batch_costs_its_lines_and_is_said(tmp_path):
    store, _, run = commits_of(tmp_path, 3)
    (lost,) = [key for key in store.objects if key.endswith("/log.parts/000001")]
    n_lost = store.objects.pop(lost).count(b"\n")
    said = []
    assert taken(store, tmp_path / "empty", said) == 3
    assert "log.parts of the copy of step 3 in the store is lost" in said[0]
    whole, found = (log_of(folder).splitlines() for folder in (run, tmp_path / "empty"))
    assert len(found) == len(whole) - n_lost
    assert set(found) < set(whole)


def test_a_store_of_another_version_is_refused(tmp_path):
    store, _, _ = commits_of(tmp_path, 2)
    for key in store.list("commits/"):
        manifest = unseal(store.objects[key].decode(), "it")
        del manifest["sha256"]
        store.objects[key] = seal({**manifest, "schema": 1}).encode()
    with pytest.raises(RunChangedError, match="another version of farthing wrote this"):
        mirror_of(store, tmp_path / "other").bring_back()
