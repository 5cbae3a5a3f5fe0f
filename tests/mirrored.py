"""Run folders without a run, and their copies in a store: nothing here needs torch."""

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from farthing.run.accounts import Account, as_line
from farthing.run.folder import copies_of, keep
from farthing.run.mirror import Mirror, MirrorTimes
from farthing.storage.files import commit_folder, seal, unseal, verify_folder
from farthing.storage.logs import line_of
from farthing.storage.objects import (
    Entry,
    NoSuchObjectError,
    Store,
)

Kind = TypeVar("Kind", bound=Store)
QUICK = MirrorTimes(
    renew_s=0.05,
    lease_s=0.4,
    answer_s=1.0,
    deliver_s=0.3,
    pause_s=0.01,
    again_s=0.05,
    finish_s=120.0,
    give_up_s=1.0,
    leave_s=60.0,
)
"""Of whole runs: faults are given up soon, and a store without faults may be as slow as a machine
that others use.
"""
IN_TROUBLE = MirrorTimes(
    renew_s=0.5, lease_s=5, pause_s=0.02, again_s=0.2, give_up_s=60, leave_s=300
)
STILL = MirrorTimes(
    renew_s=60.0, lease_s=0.3, answer_s=0.5, deliver_s=1.0, pause_s=0.001, again_s=0.02
)


def folder_of_run(folder: Path, run_id: str = "run-1") -> Path:
    """What a run leaves before its first step."""
    folder.mkdir(parents=True, exist_ok=True)
    keep(folder / "run.json", {"run_id": run_id, "identity": {}, "format": 1})
    keep(folder / "plan.json", {"wall_s": 1})
    return folder


def step_done(folder: Path, step: int, attempt: int = 1) -> Path:
    """A step's line in log and ledger, and its checkpoint."""
    with open(folder / "log.jsonl", "a") as log, open(folder / "ledger.jsonl", "a") as ledger:
        log.write(line_of({"step": step}) + "\n")
        account = Account(
            attempt,
            f"{folder.name}-{attempt}",
            line=step,
            state="running",
            at=1000.0 * attempt + step,
            spans={"compute": float(step)},
            step=step,
            usd_per_hour=1.0,
        )
        ledger.write(as_line(account))

    def fill(draft):
        (draft / "model.safetensors").write_bytes(random.Random(step).randbytes(5000))
        (draft / "state.json").write_text(json.dumps({"step": step}))

    final = folder / "checkpoints" / f"step-{step:08d}-{attempt:04d}"
    facts = {"kind": "farthing checkpoint", "step": step, "run_id": "run-1"}
    commit_folder(final, fill, {**facts, "run_files": copies_of(folder)})
    return final


def mirror_of(
    store: Store,
    folder: Path,
    said: list[str] | None = None,
    pace: MirrorTimes = STILL,
    keep: int = 2,
) -> Mirror:
    folder.mkdir(parents=True, exist_ok=True)
    return Mirror(store, folder, keep, (said if said is not None else []).append, pace)


@contextlib.contextmanager
def mirroring(
    store: Store, run: Path, said: list[str] | None = None, step: int | None = None, **how
) -> Iterator[Mirror]:
    """A run that goes on from the copy of this step, with its mirror."""
    mirror = mirror_of(store, run, said, **how)
    assert mirror.bring_back() == step
    yield mirror
    mirror.close(1)


def delivered(mirror: Mirror, step: int, *checkpoints: Path, seconds: float = 60.0) -> bool:
    mirror.offer(step, checkpoints)
    return mirror.wait(seconds)


def with_copies(store: Kind, run: Path, *steps: int) -> Kind:
    """A store that a run has brought these steps to."""
    with mirroring(store, run) as mirror:
        for step in steps:
            assert delivered(mirror, step, step_done(run, step))
    return store


OTHER = seal({"host": "other", "folder": "/x"}).encode()
"""A link of a machine that holds the run."""


class Model:
    """A store in a dictionary, with the semantics of S3; the reference for all others."""

    name = "model://store"

    def __init__(self):
        self.objects = {}
        self.written_at = {}

    def create(self, key: str, data: bytes) -> bool:
        if key in self.objects:
            return False
        self._write(key, data)
        return True

    def put(self, key: str, content: Path | bytes):
        self._write(key, content if isinstance(content, bytes) else content.read_bytes())

    def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise NoSuchObjectError(key)
        return self.objects[key]

    def fetch(self, key: str, path: Path, n_bytes: int):
        path.write_bytes(self.get(key))

    def list(self, prefix: str) -> dict[str, Entry]:
        return {
            key: Entry(len(data), self.written_at[key])
            for key, data in list(self.objects.items())
            if key.startswith(prefix)
        }

    def remove(self, keys: Iterable[str]):
        for key in keys:
            self.objects.pop(key, None)

    def _write(self, key: str, data: bytes):
        self.objects[key] = data
        self.written_at[key] = time.time()


class Faulty:
    """A store whose operations go through `fault(name, key, operation)`."""

    def __init__(self, store: Store, fault: Callable[[str, str, Callable[[], Any]], Any]):
        self.name, self._store, self._fault = store.name, store, fault

    def __getattr__(self, name: str):
        operation = getattr(self._store, name)

        def run(first, *rest):
            keys = list(first) if name == "remove" else first
            return self._fault(name, str(keys), lambda: operation(keys, *rest))

        return run


def noting(store: Store, part: str) -> tuple[Faulty, list[str]]:
    """The store; and what follows `part` in each key that is put, in order."""
    puts = []

    def note(name, key, operation):
        if name == "put" and part in key:
            puts.append(key.partition(part)[2])
        return operation()

    return Faulty(store, note), puts


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


def behaves_like_a_store(store: Store, folder: Path):
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


def newest_objects(store: Model) -> list[str]:
    commit = max(store.list("commits/"))
    return [
        commit,
        *(entry["object"] for entry in unseal(store.get(commit).decode(), "it")["files"]),
    ]
