"""The copy of a run in Google Cloud Storage, as gcsfs and an emulator have it, behind a proxy that
breaks things.

The emulator does not look at `ifGenerationMatch`; the proxy does, as the service would.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import threading
import time
import urllib.parse
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from farthing.errors import InputError, RunTakenError
from farthing.events import ReadingData, Restored
from farthing.run import mirror as mirror_module
from farthing.run.mirror import Pace
from farthing.storage import objects as store_module
from farthing.storage.objects import (
    BucketStore,
    Retrying,
    StoreError,
    StoreRefuses,
    open_store,
)
from fault_proxy import FaultProxy
from mirrored import IN_TROUBLE, PATIENT, delivered, folder_of_run, mirror_of, step_done
from test_store import behaves_like_a_store, machine, newest_objects, same_result, stop_after
from workshop import Heard, train

if importlib.util.find_spec("gcsfs") is None:  # not imported: how that goes is the store's
    pytest.skip(
        "gcsfs is not installed: nothing is tried against Google Cloud Storage",
        allow_module_level=True,
    )
emulator = pytest.importorskip(
    "gcp_storage_emulator.server",
    reason="gcp-storage-emulator is not installed: no Google Cloud Storage here",
)


class GcsProxy(FaultProxy):
    """Enforces `ifGenerationMatch=0` (only where no object is), one request at a time, and counts
    what it has refused.
    """

    def __init__(self, backend_port: int) -> None:
        super().__init__(backend_port)
        self.n_refused = 0
        self._one_by_one = threading.Lock()

    def _pass_on(
        self, request: BaseHTTPRequestHandler, body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        url = urllib.parse.urlsplit(request.path)
        asked = urllib.parse.parse_qs(url.query)
        if asked.get("ifGenerationMatch") != ["0"]:
            return super()._pass_on(request, body)
        first_part = body.split(b"\n\n", 2)[1]
        name = json.loads(first_part.splitlines()[0])["name"]
        bucket = url.path.split("/b/")[1].split("/")[0]
        with self._one_by_one:
            if self._is_there(bucket, name):
                self.n_refused += 1
                reply = json.dumps(
                    {"error": {"code": 412, "message": "Precondition Failed"}}
                ).encode()
                return 412, [("Content-Type", "application/json")], reply
            return super()._pass_on(request, body)

    def _is_there(self, bucket: str, name: str) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.backend_port)
        connection.request("GET", f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}")
        found = connection.getresponse().status == 200
        connection.close()
        return found

    def _error(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        text = json.dumps({"error": {"code": status, "message": code}}).encode()
        request.send_response_only(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(text)


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    server = emulator.create_server("127.0.0.1", 0, in_memory=True)
    server.start()
    while server._api._httpd is None:
        time.sleep(0.01)
    yield server
    server.stop()


@pytest.fixture
def proxy(server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsProxy]:
    with GcsProxy(server._api._httpd.server_address[1]) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        yield proxy


@pytest.fixture
def address(server: Any) -> str:
    from gcp_storage_emulator.handlers.buckets import create_bucket

    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    create_bucket(bucket, server._storage)
    return f"gs://{bucket}/runs/one"


def test_gcs_behaves_like_the_model_of_a_store(
    proxy: GcsProxy, address: str, tmp_path: Path
) -> None:
    store = open_store(address)
    assert isinstance(store, BucketStore)
    behaves_like_a_store(store, tmp_path)
    assert proxy.n_refused == 1, "the condition is the bucket's, not ours"


def test_of_many_that_create_an_object_at_once_one_does(proxy: GcsProxy, address: str) -> None:
    outcomes: list[bool] = []
    stores = [open_store(address) for _ in range(6)]
    threads = [
        threading.Thread(
            target=lambda i=i, store=store: outcomes.append(store.create("commits/1", b"%d" % i))
        )  # type: ignore[misc]
        for i, store in enumerate(stores)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("fault", "method"),
    [
        ("503", "POST"),
        ("reset", "POST"),
        ("lost reply", "POST"),
        ("slow", "POST"),
        ("truncate", "GET"),
        ("503", "GET"),
    ],
)
def test_a_fault_that_passes_is_waited_out(
    fault: str, method: str, proxy: GcsProxy, address: str, tmp_path: Path
) -> None:
    """The first request of a kind fails: a write happens once, and what is read is what was
    written.
    """
    n_left = 1

    def trouble(number: int, its_method: str, path: str) -> str | None:
        nonlocal n_left
        if its_method != method or n_left == 0:
            return None
        n_left -= 1
        return fault

    store = Retrying(open_store(address), 20, pause_s=0.01)
    (tmp_path / "file").write_bytes(b"x" * 5000)
    if method == "GET":
        assert store.create("commits/1", b"mine")
        store.put("data/1", tmp_path / "file")
    proxy.begin(trouble)
    if method == "POST":
        assert store.create("commits/1", b"mine"), "a lost reply is no other writer"
        n_left = 1
        store.put("data/1", tmp_path / "file")
    else:
        assert store.get("commits/1") == b"mine"
        n_left = 1
        store.fetch("data/1", tmp_path / "back", 5000)
        assert (tmp_path / "back").read_bytes() == b"x" * 5000
    assert n_left == 0
    proxy.begin()
    assert store.get("commits/1") == b"mine"
    assert not store.create("commits/1", b"other")
    assert store.get("data/1") == b"x" * 5000


def test_what_is_changed_on_its_way_is_found_out(
    proxy: GcsProxy, address: str, tmp_path: Path
) -> None:
    """The service answers with the checksum of what arrived."""
    content = bytes(range(256)) * 40

    def change(server_pass: Any) -> Any:
        def pass_on(request: Any, body: bytes) -> Any:
            return server_pass(request, body.replace(content[:256], content[:255] + b"\0", 1))

        return pass_on

    store = open_store(address)
    (tmp_path / "file").write_bytes(content)
    honest = proxy._pass_on
    proxy._pass_on = change(honest)  # type: ignore[method-assign]
    with pytest.raises(StoreError):
        store.put("data/1", tmp_path / "file")
    proxy._pass_on = honest  # type: ignore[method-assign]
    store.put("data/1", tmp_path / "file")
    assert store.get("data/1") == content


@pytest.mark.parametrize(
    ("fault", "kind"), [("503", StoreError), ("403", StoreRefuses), ("hang", StoreError)]
)
def test_a_fault_that_lasts_ends_in_bounded_time(
    fault: str,
    kind: type[Exception],
    proxy: GcsProxy,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_store(address)
    store.create("commits/1", b"x" * 100)
    monkeypatch.setattr(store_module, "TRY_S", 1.0)
    monkeypatch.setattr(store_module, "LEAST_BYTES_PER_S", 1e9)
    patient = Retrying(store, 3.0, pause_s=0.05)
    proxy.begin(lambda number, method, path: fault)
    with pytest.raises(kind):
        patient.get("commits/1")
    assert proxy.n_requests < 40


def test_a_bucket_that_is_not_there_or_refuses_is_said_at_the_start(
    proxy: GcsProxy, address: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"the store refuses.*no such bucket"):
        mirror_of(open_store("gs://no-such-bucket-here/x"), tmp_path / "a").bring_back()
    proxy.begin(lambda number, method, path: "403")
    with pytest.raises(InputError, match="the store refuses"):
        mirror_of(open_store(address), tmp_path / "b").bring_back()


def test_of_two_machines_one_holds_the_bucket(
    proxy: GcsProxy, address: str, tmp_path: Path
) -> None:
    said: list[str] = []
    pace = Pace(renew_s=0.2, lease_s=10.0)
    first = mirror_of(open_store(address), folder_of_run(tmp_path / "a"), said, pace=pace)
    first.bring_back()
    assert said == [], "the bucket keeps its condition"
    with pytest.raises(RunTakenError, match="is training this run"):
        mirror_of(open_store(address), tmp_path / "b").bring_back()
    assert delivered(first, 1, step_done(tmp_path / "a", 1))
    first.close(2)


@pytest.mark.slow
@pytest.mark.slow
def test_a_flipped_object_in_the_bucket_is_detected(
    proxy: GcsProxy, address: str, tmp_path: Path
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


@pytest.mark.slow
def test_a_large_file_goes_in_parts_and_comes_back(
    proxy: GcsProxy, address: str, tmp_path: Path
) -> None:
    content = bytes(range(256)) * (240 << 10)
    (tmp_path / "large").write_bytes(content)
    store = Retrying(open_store(address), 60, pause_s=0.05)
    store.put("data/large", tmp_path / "large")
    assert any("uploadType=resumable" in path for _, path in proxy.requests)
    assert store.list("data/")["data/large"].n_bytes == len(content)
    store.fetch("data/large", tmp_path / "back", len(content))
    assert (tmp_path / "back").read_bytes() == content


@pytest.mark.slow
@pytest.mark.slow
def test_training_reads_its_data_from_a_bucket(
    proxy: GcsProxy, address: str, tmp_path: Path
) -> None:
    import gcsfs

    # of other tests, with the addresses of their servers
    gcsfs.GCSFileSystem.clear_instance_cache()
    bucket = address.split("/")[2]
    job = machine(tmp_path, "local", None)
    content = (tmp_path / "data.jsonl").read_bytes()
    (tmp_path / "copy").write_bytes(content)
    open_store(f"gs://{bucket}/sets").put("a.jsonl", tmp_path / "copy")
    assert train(job).exit_code == 0
    data = job.data.model_copy(update={"train": (f"gs://{bucket}/sets/a.jsonl",)})
    remote = job.model_copy(update={"data": data, "output_dir": str(tmp_path / "remote")})
    heard = Heard()
    assert train(remote, heard).exit_code == 0
    assert same_result(tmp_path / "local", tmp_path / "remote") == []
    assert heard.of(ReadingData)[0].what == f"downloading gs://{bucket}/sets/a.jsonl"
    assert heard.of(ReadingData)[0].done_bytes == len(content)
    missing = data.model_copy(update={"train": (f"gs://{bucket}/sets/b.jsonl",)})
    with pytest.raises(InputError, match="no such file"):
        train(remote.model_copy(update={"data": missing, "output_dir": str(tmp_path / "missing")}))


@pytest.mark.slow
def test_a_run_goes_on_from_the_bucket_alone_through_a_store_in_trouble(
    proxy: GcsProxy, address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every fortieth request meets another fault; the result is that of a run that was left alone."""  # noqa: E501
    faults = ["503", "reset", "lost reply", "slow", "truncate"]

    def trouble(number: int, method: str, path: str) -> str | None:
        return faults[number // 40 % len(faults)] if number % 40 == 0 else None

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


def test_the_library_asks_twice_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own six tries take half a minute, before anything can be said of an endpoint that
    refuses.
    """
    asked: list[str] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(503)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(StoreError):
            open_store("gs://bucket/run").list("commits/")
        assert len(asked) == 2
    finally:
        server.shutdown()
        server.server_close()
