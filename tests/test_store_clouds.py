"""The copy of a run in S3, in Google Cloud Storage and in Azure Blob Storage, behind a proxy that
breaks things; each wait has a bound.

Buckets of S3 are moto's. Google's is moto's too, whose XML requests are the same but for the name
of the condition. Azure is `azure_server`.
"""

import base64
import http.client
import uuid

import pytest

from azure_server import ACCOUNT, KEY, AzureServer
from farthing.errors import InputError
from farthing.events import ReadingData, Restored
from farthing.run import mirror as mirror_module
from farthing.storage import objects as store_module
from farthing.storage.objects import Retrying, StoreError, StoreRefusedError, open_store
from fault_proxy import FaultProxy
from interrupted import LeavesAt
from machines import machine, same_result
from mirrored import (
    IN_TROUBLE,
    behaves_like_a_store,
    mirror_of,
)
from thinned import thinned
from web import serving
from workshop import Heard, train

moto_server = pytest.importorskip(
    "moto.server", reason="moto[s3], flask and flask-cors are not installed: no buckets here"
)
ON_S3 = pytest.mark.parametrize("cloud", ["s3"], indirect=True)
Cloud = tuple[FaultProxy, str]


class GoogleProxy(FaultProxy):
    """Names Google's condition as S3 does."""

    def pass_on(self, request, body):
        if request.headers.get("x-goog-if-generation-match") == "0":
            request.headers["If-None-Match"] = "*"
        return super().pass_on(request, body)


@pytest.fixture(scope="module")
def moto():
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture(params=["s3", "gs", "az"])
def cloud(request, moto, monkeypatch):
    """A proxy in front of a bucket, and the address of a run in it."""
    bucket, scheme = f"bucket{uuid.uuid4().hex[:8]}", request.param
    address = f"{scheme}://{bucket}/runs/one"
    if scheme == "az":
        with (
            serving(AzureServer(bucket).serve, "HTTP/1.1") as server,
            FaultProxy(int(server.rpartition(":")[2])) as proxy,
        ):
            monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", proxy.url)
            monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
            monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
            yield proxy, address
        return
    connection = http.client.HTTPConnection("127.0.0.1", moto)
    connection.request("PUT", f"/{bucket}")
    assert connection.getresponse().status == 200
    with (GoogleProxy if scheme == "gs" else FaultProxy)(moto) as proxy:
        keys = {
            "GOOGLE_BASE_URL": proxy.url,
            "GOOGLE_BEARER_TOKEN": "canary-of-a-secret",
            "AWS_ENDPOINT_URL": proxy.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "canary-of-a-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        for name, value in keys.items():
            monkeypatch.setenv(name, value)
        yield proxy, address


def test_a_bucket_behaves_like_the_model_of_a_store(cloud, tmp_path):
    behaves_like_a_store(open_store(cloud[1]), tmp_path)


@ON_S3
def test_keys_come_from_a_profile_where_the_environment_has_none(cloud, tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (tmp_path / "keys").write_text("[mine]\naws_access_key_id = a\naws_secret_access_key = b\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert open_store(cloud[1]).create("commits/1", b"first")
    assert not open_store(cloud[1]).create("commits/1", b"second")


@ON_S3
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
def test_a_fault_that_passes_is_waited_out(fault, method, cloud, tmp_path):
    """The first three requests of a kind fail: a write happens once, and what is read is what was
    written.
    """
    proxy, address = cloud
    n_left = 3

    def trouble(number, its_method, path):
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


@ON_S3
@pytest.mark.parametrize(
    ("fault", "kind"),
    thinned(
        [
            ("503", StoreError),
            ("reset", StoreError),
            ("403", StoreRefusedError),
            ("truncate", StoreError),
            ("hang", StoreError),
        ],
        2,
    ),
)
def test_a_fault_that_lasts_ends_in_bounded_time(fault, kind, cloud, monkeypatch):
    proxy, address = cloud
    monkeypatch.setattr(store_module, "TRY_S", 1.0)
    store = open_store(address)
    store.create("commits/1", b"x" * 100)
    patient = Retrying(store, 3.0, pause_s=0.05)
    proxy.begin(lambda number, method, path: fault)
    with pytest.raises(kind) as error:
        patient.get("commits/1")
    assert proxy.n_requests < 40
    assert "canary" not in str(error.value)


def test_a_bucket_that_is_not_there_or_refuses_is_said_at_the_start(cloud, tmp_path):
    proxy, address = cloud
    with pytest.raises(InputError, match="the store refuses"):
        mirror_of(open_store(f"{address[:2]}://no-such-bucket-here/x"), tmp_path / "a").bring_back()
    proxy.begin(lambda number, method, path: "403")
    with pytest.raises(InputError, match="the store refuses") as error:
        mirror_of(open_store(address), tmp_path / "b").bring_back()
    assert "canary" not in str(error.value)


def test_a_large_file_goes_in_parts_and_comes_back(cloud, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "PART_BYTES", 5 << 20)
    content = bytes(range(256)) * (48 << 10) + b"end"
    (tmp_path / "large").write_bytes(content)
    methods = []

    def trouble(number, method, path):
        methods.append(method)
        return "reset" if method == "PUT" and methods.count("PUT") == 2 else None

    store = Retrying(open_store(cloud[1]), 60, pause_s=0.05)
    cloud[0].begin(trouble)
    store.put("data/large", tmp_path / "large")
    assert methods.count("PUT") >= 4, "three parts, and the one that was lost"
    assert store.list("data/")["data/large"].n_bytes == len(content)
    store.fetch("data/large", tmp_path / "back", len(content))
    assert (tmp_path / "back").read_bytes() == content


# ---- whole runs ----


@pytest.mark.parametrize("cloud", thinned(["s3", "gs", "az"], 3), indirect=True)
def test_training_reads_its_data_from_a_bucket(cloud, tmp_path):
    proxy, address = cloud
    where = f"{address.rpartition('/runs')[0]}/sets"
    job, sets = machine(tmp_path, "local", None), open_store(where)
    content = (tmp_path / "data.jsonl").read_bytes()
    sets.put("a.jsonl", tmp_path / "data.jsonl")
    assert train(job).exit_code == 0
    data = job.data.model_copy(update={"train": (f"{where}/a.jsonl",)})
    remote = job.model_copy(update={"data": data, "output_dir": str(tmp_path / "remote")})
    heard = Heard()
    assert train(remote, heard).exit_code == 0
    assert same_result(tmp_path / "local", tmp_path / "remote") == []
    assert heard.of(ReadingData)[0] == ReadingData(
        f"downloading {where}/a.jsonl", len(content), len(content)
    )
    proxy.begin(lambda number, method, path: "403" if method == "GET" else None)
    again = remote.model_copy(update={"output_dir": str(tmp_path / "again")})
    assert train(again).exit_code == 0, "it is in the cache"
    proxy.begin()
    (tmp_path / "other.jsonl").write_bytes(content + content)
    sets.put("a.jsonl", tmp_path / "other.jsonl")
    with pytest.raises(InputError, match="content"):
        train(remote)
    missing = data.model_copy(update={"train": (f"{where}/b.jsonl",)})
    with pytest.raises(InputError, match="no such file"):
        train(remote.model_copy(update={"data": missing, "output_dir": str(tmp_path / "missing")}))


@pytest.mark.slow
def test_a_run_goes_on_from_the_bucket_alone_through_a_store_in_trouble(
    cloud, monkeypatch, tmp_path
):
    """Every seventh or twentieth request meets another fault; the result is that of a run that was
    left alone.
    """
    faults, every = ["503", "reset", "lost reply", "slow", "truncate"], 20
    if cloud[1].startswith("s3"):
        faults, every = [*faults, "flip"], 7

    def trouble(number, method, path):
        return faults[number // every % len(faults)] if number % every == 0 else None

    monkeypatch.setattr(mirror_module, "PACE", IN_TROUBLE)
    assert train(machine(tmp_path, "alone", None)).exit_code == 0
    cloud[0].begin(trouble)
    assert train(machine(tmp_path, "first", cloud[1]), LeavesAt(step=3)).exit_code == 75
    heard = Heard()
    last = train(machine(tmp_path, "second", cloud[1]), heard)
    assert last.exit_code == 0
    assert [event.step for event in heard.of(Restored)] == [3]
    assert same_result(tmp_path / "alone", tmp_path / "second") == []
    assert [attempt["ended"] for attempt in last.receipt.attempts] == ["interrupted", "finished"]
    for path in tmp_path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert b"canary-of-a-secret" not in content
            assert base64.b64decode(KEY) not in content


def test_an_azure_store_without_an_account_names_the_variable(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(InputError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://container/run")


@pytest.mark.parametrize("scheme", ["memory", "gcs", "https"])
def test_a_scheme_that_is_no_store_is_refused_by_name(scheme):
    with pytest.raises(InputError, match=f"{scheme}:// is no store"):
        open_store(f"{scheme}://bucket/run")
