"""The copy of a run in S3, as moto's server has it, behind a proxy that breaks things; each wait
has a bound.
"""

from __future__ import annotations

import http.client
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farthing.errors import InputError, RunTakenError
from farthing.events import ReadingData, Restored
from farthing.run import mirror as mirror_module
from farthing.run.mirror import Pace
from farthing.storage import objects as store_module
from farthing.storage.objects import Retrying, StoreError, StoreRefuses, open_store
from fault_proxy import FaultProxy
from mirrored import IN_TROUBLE, PATIENT, delivered, folder_of_run, mirror_of, step_done, upload
from test_store import behaves_like_a_store, machine, newest_objects, same_result, stop_after
from thinned import thinned
from together import forkserver
from workshop import Heard, train

moto_server = pytest.importorskip(
    "moto.server", reason="moto[s3], flask and flask-cors are not installed: no S3 here"
)


@pytest.fixture(scope="module")
def backend() -> Iterator[int]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def proxy(backend: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FaultProxy(backend) as proxy:
        for name, value in {
            "AWS_ENDPOINT_URL": proxy.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "canary-of-a-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture(scope="module")
def processes() -> Any:
    """Where processes are forked from that have the libraries already."""
    return forkserver()


@pytest.fixture
def address(backend: int) -> str:
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    connection = http.client.HTTPConnection("127.0.0.1", backend)
    connection.request("PUT", f"/{bucket}")
    assert connection.getresponse().status == 200
    return f"s3://{bucket}/runs/one"


def test_s3_behaves_like_the_model_of_a_store(
    proxy: FaultProxy, address: str, tmp_path: Path
) -> None:
    behaves_like_a_store(open_store(address), tmp_path)


def test_keys_come_from_a_profile_where_the_environment_has_none(
    proxy: FaultProxy, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (tmp_path / "keys").write_text("[mine]\naws_access_key_id = a\naws_secret_access_key = b\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert open_store(address).create("commits/1", b"first")
    assert not open_store(address).create("commits/1", b"second")


@pytest.mark.parametrize(
    ("fault", "method"),
    thinned(
        [
            ("503", "PUT"),
            ("reset", "PUT"),
            ("lost reply", "PUT"),
            ("flip", "PUT"),
            ("slow", "PUT"),
            ("truncate", "GET"),
            ("503", "GET"),
            ("reset", "GET"),
        ],
        2,
    ),
)
def test_a_fault_that_passes_is_waited_out(
    fault: str, method: str, proxy: FaultProxy, address: str, tmp_path: Path
) -> None:
    """The first three requests of a kind fail: a write happens once, and what is read is what was
    written.
    """
    n_left = 3

    def trouble(number: int, its_method: str, path: str) -> str | None:
        nonlocal n_left
        if its_method != method or "runs/one/" not in path or n_left == 0:
            return None
        n_left -= 1
        return fault

    store = Retrying(open_store(address), 20, pause_s=0.01)
    (tmp_path / "file").write_bytes(b"x" * 5000)
    if method == "GET":
        assert store.create("commits/1", b"mine")
        store.put("data/1", tmp_path / "file")
    proxy.begin(trouble)
    if method == "PUT":
        assert store.create("commits/1", b"mine"), "a lost reply is no other writer"
        n_left = 3
        store.put("data/1", tmp_path / "file")
    else:
        assert store.get("commits/1") == b"mine"
        n_left = 3
        store.fetch("data/1", tmp_path / "back", 5000)
        assert (tmp_path / "back").read_bytes() == b"x" * 5000
    assert n_left == 0 or (fault == "slow" and n_left == 2)
    proxy.begin()
    assert store.get("commits/1") == b"mine"
    assert not store.create("commits/1", b"other")
    assert store.get("data/1") == b"x" * 5000


@pytest.mark.parametrize(
    ("fault", "kind"),
    thinned(
        [
            ("503", StoreError),
            ("403", StoreRefuses),
            ("reset", StoreError),
            ("hang", StoreError),
            ("truncate", StoreError),
        ],
        2,
    ),
)
def test_a_fault_that_lasts_ends_in_bounded_time(
    fault: str,
    kind: type[Exception],
    proxy: FaultProxy,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "TRY_S", 1.0)
    store = open_store(address)
    store.create("commits/1", b"x" * 100)
    patient = Retrying(store, 3.0, pause_s=0.05)
    proxy.begin(lambda number, method, path: fault)
    with pytest.raises(kind):
        patient.get("commits/1")
    assert proxy.n_requests < 40


def test_a_bucket_that_is_not_there_or_refuses_is_said_at_the_start(
    proxy: FaultProxy, address: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="the store refuses"):
        mirror_of(open_store("s3://no-such-bucket-here/x"), tmp_path / "a").bring_back()
    proxy.begin(lambda number, method, path: "403")
    with pytest.raises(InputError, match="the store refuses") as error:
        mirror_of(open_store(address), tmp_path / "b").bring_back()
    assert "canary" not in str(error.value)


@pytest.mark.slow
def test_a_large_file_goes_in_parts_and_comes_back(
    proxy: FaultProxy, address: str, tmp_path: Path
) -> None:
    content = bytes(range(256)) * (120 << 12)
    (tmp_path / "large").write_bytes(content)
    n_broken = 0

    def trouble(number: int, method: str, path: str) -> str | None:
        nonlocal n_broken
        if "partNumber=2" in path and n_broken < 1:
            n_broken += 1
            return "reset"
        return None

    proxy.begin(trouble)
    store = Retrying(open_store(address), 60, pause_s=0.05)
    store.put("data/large", tmp_path / "large")
    assert any("partNumber" in path for _, path in proxy.requests)
    assert store.list("data/")["data/large"].n_bytes == len(content)
    store.fetch("data/large", tmp_path / "back", len(content))
    assert (tmp_path / "back").read_bytes() == content
    assert n_broken == 1


@pytest.mark.slow
def test_of_two_machines_one_holds_the_bucket(
    proxy: FaultProxy, address: str, tmp_path: Path
) -> None:
    first = mirror_of(
        open_store(address), folder_of_run(tmp_path / "a"), pace=Pace(renew_s=0.2, lease_s=10.0)
    )
    first.bring_back()
    with pytest.raises(RunTakenError, match="is training this run"):
        mirror_of(open_store(address), tmp_path / "b").bring_back()
    assert delivered(first, 1, step_done(tmp_path / "a", 1))
    first.close(2)


@pytest.mark.slow
def test_a_flipped_object_in_the_bucket_is_detected(
    proxy: FaultProxy, address: str, tmp_path: Path
) -> None:
    run, store = folder_of_run(tmp_path / "run"), open_store(address)
    mirror = mirror_of(store, run, pace=PATIENT)
    mirror.bring_back()
    for step in (1, 2):
        assert delivered(mirror, step, step_done(run, step))
    mirror.close(2)
    name = next(key for key in newest_objects(store) if key.endswith("model.safetensors"))  # type: ignore[arg-type]
    content = bytearray(store.get(name))
    content[100] ^= 4
    (tmp_path / "flipped").write_bytes(content)
    store.put(name, tmp_path / "flipped")
    said: list[str] = []
    empty = mirror_of(store, tmp_path / "empty", said, pace=PATIENT)
    assert empty.bring_back() == 1
    assert "step 2 in the store is damaged" in said[0]
    empty.close(2)


# ---- killed at every request of an upload ----


def killed_in_upload(
    context: Any, proxy: FaultProxy, address: str, folder: Path, k: int, fault: str
) -> tuple[bool, int | None]:
    """Whether the kill at request `k` struck, and the step that an empty machine then goes on from."""  # noqa: E501
    run = folder_of_run(folder / f"run-{k}")
    process = context.Process(target=upload, args=(address, str(run), dict(os.environ)))
    process.start()
    proxy.pid = process.pid or 0
    proxy.begin(lambda number, method, path: fault if number == k else None)
    process.join(300)
    assert process.exitcode is not None, "it ended in bounded time"
    was_killed = process.exitcode != 0
    proxy.begin()
    empty = mirror_of(
        open_store(address), folder / f"empty-{k}", pace=Pace(renew_s=60, lease_s=0.1, pause_s=0.01)
    )
    step = empty.bring_back()
    empty.close(2)
    return was_killed, step


def kills(
    context: Any, proxy: FaultProxy, address: str, folder: Path, ks: range, fault: str
) -> list[int | None]:
    outcomes = []
    for k in ks:
        was_killed, step = killed_in_upload(context, proxy, f"{address}-{k}", folder, k, fault)
        outcomes.append(step)
        if not was_killed:
            assert step == 2
            break
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "kill after"])
def test_a_kill_at_some_requests_of_an_upload_leaves_a_whole_copy(
    fault: str, processes: Any, proxy: FaultProxy, address: str, tmp_path: Path
) -> None:
    outcomes = kills(processes, proxy, address, tmp_path, range(5, 120, 12), fault)
    assert set(outcomes) == {None, 1, 2}
    assert outcomes == sorted(outcomes, key=lambda step: step or 0)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "kill after"])
def test_a_kill_at_any_request_of_an_upload_leaves_a_whole_copy(
    fault: str, processes: Any, proxy: FaultProxy, address: str, tmp_path: Path
) -> None:
    outcomes = kills(processes, proxy, address, tmp_path, range(1, 100), fault)
    assert set(outcomes) == {None, 1, 2}
    assert outcomes == sorted(outcomes, key=lambda step: step or 0)
    assert len(outcomes) > 20


# ---- whole runs ----


@pytest.mark.slow
def test_training_reads_its_data_from_a_bucket(
    proxy: FaultProxy, address: str, tmp_path: Path
) -> None:
    bucket = address.split("/")[2]
    job = machine(tmp_path, "local", None)
    content = (tmp_path / "data.jsonl").read_bytes()
    sets = open_store(f"s3://{bucket}/sets")
    sets.put("a.jsonl", tmp_path / "data.jsonl")
    assert train(job).exit_code == 0
    data = job.data.model_copy(update={"train": (f"s3://{bucket}/sets/a.jsonl",)})
    remote = job.model_copy(update={"data": data, "output_dir": str(tmp_path / "remote")})
    heard = Heard()
    assert train(remote, heard).exit_code == 0
    assert same_result(tmp_path / "local", tmp_path / "remote") == []
    assert heard.of(ReadingData)[0] == ReadingData(
        f"downloading s3://{bucket}/sets/a.jsonl", len(content), len(content)
    )
    proxy.begin(lambda number, method, path: "403" if method == "GET" else None)
    assert (
        train(remote.model_copy(update={"output_dir": str(tmp_path / "again")})).exit_code == 0
    ), "it is in the cache"
    proxy.begin()
    (tmp_path / "other.jsonl").write_bytes(content + content)
    sets.put("a.jsonl", tmp_path / "other.jsonl")
    with pytest.raises(InputError, match="content"):
        train(remote)
    missing = data.model_copy(update={"train": (f"s3://{bucket}/sets/b.jsonl",)})
    with pytest.raises(InputError, match="no such file"):
        train(remote.model_copy(update={"data": missing, "output_dir": str(tmp_path / "missing")}))


@pytest.mark.slow
def test_a_run_goes_on_from_the_bucket_alone_through_a_store_in_trouble(
    proxy: FaultProxy, address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every seventh request meets another fault; the result is that of a run that was left alone."""  # noqa: E501
    faults = ["503", "reset", "lost reply", "slow", "truncate", "flip"]

    def trouble(number: int, method: str, path: str) -> str | None:
        return faults[number // 7 % len(faults)] if number % 7 == 0 else None

    monkeypatch.setattr(mirror_module, "PACE", IN_TROUBLE)
    assert train(machine(tmp_path, "alone", None)).exit_code == 0
    proxy.begin(trouble)
    assert train(machine(tmp_path, "first", address), stop_after(3)).exit_code == 75
    heard = Heard()
    last = train(machine(tmp_path, "second", address), heard)
    assert last.exit_code == 0
    assert [event.step for event in heard.of(Restored)] == [3]
    assert same_result(tmp_path / "alone", tmp_path / "second") == []
    assert [attempt["ended"] for attempt in last.receipt.attempts] == ["interrupted", "finished"]
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"canary-of-a-secret" not in path.read_bytes(), path
