"""The log of a run reaches a store in pieces: each once, the last with every commit, and old stores
are read as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farthing.errors import RunChangedError
from farthing.run.commits import LOG_PARTS
from farthing.storage import logs
from farthing.storage.files import seal, unseal
from farthing.storage.logs import LogParts
from test_store import Faulty, Model, delivered, folder_of_run, mirror_of, step_done, taken


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "PART_BYTES", 1000)


def write_steps(run: Path, first: int, last: int) -> None:
    """Lines of about a hundred bytes."""
    with open(run / "log.jsonl", "a") as log:
        for step in range(first, last):
            log.write(json.dumps({"step": step, "loss": 1.0, "note": "x" * 70}) + "\n")


def commits_of(tmp_path: Path, n: int) -> tuple[Model, list[str], Path]:
    """A store with `n` commits of a log that grows by 45 lines each; the pieces that were sent, in
    order.
    """
    store, sent = Model(), []

    def note(name: str, key: str, operation: Callable[[], Any]) -> Any:
        sent.extend([key.rpartition("/")[2]] if name == "put" and f"/{LOG_PARTS}/" in key else [])
        return operation()

    run = folder_of_run(tmp_path / "run")
    (run / "log.jsonl").unlink(missing_ok=True)
    mirror = mirror_of(Faulty(store, note), run)
    mirror.bring_back()
    for step in range(1, n + 1):
        write_steps(run, 45 * step - 45, 45 * step)
        assert delivered(mirror, step, step_done(run, step))
    mirror.offer_last_words()
    assert mirror.wait(60)
    mirror.close(1)
    return store, sent, run


def test_each_piece_is_sent_once_and_the_last_with_every_commit(tmp_path: Path) -> None:
    store, sent, run = commits_of(tmp_path, 6)
    n_whole = len(set(sent)) - 1
    assert n_whole > 15
    assert (
        len(sent) <= n_whole + 6
    )  # the last one of a commit may be whole in the next, with more lines
    assert taken(store, tmp_path / "empty") == 6
    assert (tmp_path / "empty" / "log.jsonl").read_bytes() == (run / "log.jsonl").read_bytes()
    assert not (tmp_path / "empty" / LOG_PARTS).exists()
    held = {key.rpartition("/")[2] for key in store.objects if f"/{LOG_PARTS}/" in key}
    assert held == set(sent), "old commits go, what newer ones share with them stays"


def test_a_machine_that_goes_on_sends_only_what_is_new(tmp_path: Path) -> None:
    store, sent, _ = commits_of(tmp_path, 4)
    n_before, other, puts = len(set(sent)), tmp_path / "other", []

    def note(name: str, key: str, operation: Callable[[], Any]) -> Any:
        puts.extend([key] if name == "put" and f"/{LOG_PARTS}/" in key else [])
        return operation()

    mirror = mirror_of(Faulty(store, note), other)
    assert mirror.bring_back() == 4
    write_steps(other, 180, 200)
    assert delivered(mirror, 5, step_done(other, 5))
    mirror.close(1)
    assert len(puts) <= 4 < n_before
    assert taken(store, tmp_path / "third") == 5
    assert (tmp_path / "third" / "log.jsonl").read_bytes() == (other / "log.jsonl").read_bytes()


def test_a_lost_micro_batch_costs_its_lines_and_is_said(tmp_path: Path) -> None:
    store, _, run = commits_of(tmp_path, 3)
    (lost,) = [key for key in store.objects if key.endswith(f"/{LOG_PARTS}/000004")]
    n_lost = store.objects.pop(lost).count(b"\n")
    said: list[str] = []
    assert taken(store, tmp_path / "empty", said) == 3
    assert "log.parts/000004 of the copy of step 3 in the store is lost" in said[0]
    whole, found = (
        (folder / "log.jsonl").read_bytes().splitlines() for folder in (run, tmp_path / "empty")
    )
    assert len(found) == len(whole) - n_lost
    assert set(found) < set(whole)


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    store, _, _ = commits_of(tmp_path, 2)
    for key in store.list("commits/"):
        manifest = unseal(store.objects[key].decode(), "it")
        del manifest["sha256"]
        store.objects[key] = seal({**manifest, "schema": 1}).encode()
    with pytest.raises(RunChangedError, match="another version of farthing wrote this"):
        mirror_of(store, tmp_path / "other").bring_back()


def test_a_log_that_was_cut_back_is_cut_into_pieces_anew(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 60)
    parts = LogParts(tmp_path / "log.jsonl", tmp_path / "parts")

    def whole() -> bytes:
        rest = parts.bring_up()
        names = [*parts.digests, *([rest.name] if rest else [])]
        return b"".join((tmp_path / "parts" / name).read_bytes() for name in names)

    assert whole() == (tmp_path / "log.jsonl").read_bytes()
    assert len(parts.digests) > 4
    lines = (tmp_path / "log.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "log.jsonl").write_bytes(b"".join(lines[:20]))
    write_steps(tmp_path, 100, 110)
    assert whole() == (tmp_path / "log.jsonl").read_bytes()
    with open(tmp_path / "log.jsonl", "a") as log:
        log.write("torn" * 600)  # a last line without its end
    assert whole() == (tmp_path / "log.jsonl").read_bytes()
