"""Feeds of prices from a server on this machine: what is written, what fails alone, what is never
half there.

The real feeds are not asked by any test.
"""

import contextlib
import io
import sys
import time
import zipfile
from datetime import date
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace

import pytest

from farthing.errors import FarthingError, FeedsUnavailableError, InputError
from farthing.prices import feeds as price_feeds
from farthing.prices.feeds import Feed, known_feeds, update
from farthing.prices.formats import read_prices
from farthing.tables import facts
from web import Pages

TODAY = date(2026, 11, 21)

SKYPILOT = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone"  # noqa: E501
AWS = "\n".join(
    [
        SKYPILOT,
        *(
            f"p5.48xlarge,H100,8,192,2048,,55.04,{usd},us-east-1,{zone}"
            for zone, usd in (("a", 12.5), ("b", 30.25))
        ),
        "g5.xlarge,A10G,1,4,16,,1.006,0.4,us-east-1,a",
        "g5.xlarge,A10G,1,4,16,,1.006,0.4,us-east-1,b",
        "m5.large,,,2,8,,0.1,0.05,us-east-1,a",
        "fancy,QUANTUM9,1,2,8,,0.1,,us-east-1,a",
    ]
)
GPUHUNT = "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,gpu_vendor,flags"  # noqa: E501
GCP = "\n".join(
    [
        GPUHUNT,
        "a2-highgpu-1g,us-central1,3.67,12,85,1,A100,40,False,,nvidia,",
        "a2-highgpu-1g,us-central1,1.25,12,85,1,A100,40,True,,nvidia,",
        "m5.large,us-central1,0.09,2,8,0,,,False,,,",
    ]
)


def zipped(name: str, text: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, text)
    return buffer.getvalue()


@pytest.fixture
def server(monkeypatch):
    for name in ("GPUHUNT_CATALOG_DIR", "GPUHUNT_CATALOG_URL"):
        monkeypatch.delenv(name, raising=False)
    pages = Pages(
        {
            "/aws.csv": AWS.encode(),
            "/v3/gcp/version": b"20261121-77\n",
            "/v3/gcp/20261121-77/catalog.zip": zipped("gcp.csv", GCP),
        }
    )
    with pages.served() as address:
        pages.feeds = [
            Feed("AWS", "skypilot", f"{address}/aws.csv"),
            Feed("GCP", "gpuhunt", f"{address}/v3/gcp"),
        ]
        yield pages


def test_feeds_become_prices_of_the_day(server, tmp_path):
    path = tmp_path / "new" / "folder" / "prices.csv"
    said = []
    result = update(path, TODAY, server.feeds, progress=said.append)
    assert (result.refreshed, result.kept, result.failed) == (("AWS", "GCP"), (), ())
    assert sorted(said) == ["AWS (skypilot): 5 prices", "GCP (gpuhunt): 2 prices"]
    offers = read_prices(path, TODAY)[0]
    assert result.n_offers == len(offers) == 7
    rows = {(o.instance, o.kind, o.zone): o for o in offers}
    assert set(rows) == {
        ("p5.48xlarge", "on-demand", ""),  # the same in both zones
        ("p5.48xlarge", "spot", "a"),
        ("p5.48xlarge", "spot", "b"),
        ("g5.xlarge", "on-demand", ""),
        ("g5.xlarge", "spot", ""),
        ("a2-highgpu-1g", "on-demand", ""),
        ("a2-highgpu-1g", "spot", ""),
    }
    assert rows["p5.48xlarge", "spot", "b"].usd == 30.25
    assert {offer.date for offer in offers} == {TODAY}
    assert all(
        offer.source.endswith("127.0.0.1:" + server.address.rpartition(":")[2]) for offer in offers
    )
    assert result.outcomes[0].n_skipped == 1, "a GPU that is not known is counted"
    assert [p.name for p in path.parent.iterdir()] == ["prices.csv"], "no draft is left"


def test_one_feed_may_fail_alone_and_the_next_of_its_provider_is_taken(server, tmp_path):
    feeds = [
        Feed("AWS", "skypilot", f"{server.address}/gone.csv"),
        Feed("AWS", "skypilot", f"{server.address}/aws.csv"),
        Feed("AWS", "skypilot", f"{server.address}/later.csv"),
        Feed("Azure", "gpuhunt", f"{server.address}/v3/azure"),
    ]
    server.says["/later.csv"] = "\n".join(AWS.splitlines()[:2]).encode()
    result = update(tmp_path / "prices.csv", TODAY, feeds)
    assert (result.refreshed, result.n_offers) == (("AWS",), 5)
    assert [(o.feed.provider, o.problem) for o in result.failed] == [
        ("AWS", "HTTP 404"),
        ("Azure", "HTTP 404"),
    ]


def test_what_was_known_of_a_provider_stays_when_its_feed_fails(server, tmp_path):
    path = tmp_path / "prices.csv"
    update(path, TODAY, server.feeds)
    del server.says["/v3/gcp/version"]
    result = update(path, date(2026, 12, 1), server.feeds)
    assert (result.refreshed, result.kept) == (("AWS",), ("GCP",))
    days = {offer.provider: offer.date for offer in read_prices(path, date(2026, 12, 1))[0]}
    assert days == {"AWS": date(2026, 12, 1), "GCP": TODAY}


def test_nothing_changes_when_every_feed_fails(server, tmp_path):
    path = tmp_path / "prices.csv"
    update(path, TODAY, server.feeds)
    before = path.read_bytes()
    server.says.clear()
    with pytest.raises(FeedsUnavailableError, match="none of the 2 price feeds answered") as caught:
        update(path, TODAY, server.feeds)
    assert caught.value.exit_code == 2, "no crash"
    assert "HTTP 404" in str(caught.value)
    assert path.read_bytes() == before
    with pytest.raises(FarthingError):
        update(tmp_path / "none" / "prices.csv", TODAY, server.feeds)
    assert not (tmp_path / "none").exists()


def test_a_damaged_file_in_the_cache_is_replaced(server, tmp_path):
    path = tmp_path / "prices.csv"
    path.write_bytes(b"\x00\xff torn")
    update(path, TODAY, server.feeds)
    assert len(read_prices(path, TODAY)[0]) == 7


def test_a_disk_that_is_full_leaves_the_old_prices(server, tmp_path, monkeypatch):
    path = tmp_path / "prices.csv"
    update(path, TODAY, server.feeds)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(price_feeds.os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        update(path, TODAY, server.feeds)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["prices.csv"]


def pour(handler: BaseHTTPRequestHandler, n: int, piece: bytes, pause_s: float):
    handler.send_response(200)
    handler.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(n):
            handler.wfile.write(piece)
            handler.wfile.flush()
            time.sleep(pause_s)


def drips(handler: BaseHTTPRequestHandler):
    pour(handler, 100, b"x", 0.1)


def silent(handler: BaseHTTPRequestHandler):
    time.sleep(3)


def endless(handler: BaseHTTPRequestHandler):
    pour(handler, 200, b"x" * 65536, 0.0)


def cut_off(handler: BaseHTTPRequestHandler):
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    handler.wfile.write(AWS.encode())


@pytest.mark.parametrize(
    ("answer", "words", "limits"),
    [
        (drips, "took too long", {"feed_s": 1.0}),
        (silent, "timed out", {"timeout_s": 0.5}),
        (endless, "larger than 1 MiB", {}),
        (cut_off, "expected 100000", {}),
        (b"<html>blocked</html>", "the header lacks", {}),
        (b"\xff\xfe\x00\x01", "not text in UTF-8", {}),
    ],
)
def test_a_bad_answer_is_the_failure_of_one_feed(
    server, tmp_path, monkeypatch, answer, words, limits
):
    monkeypatch.setattr(price_feeds, "MAX_FEED_BYTES", 1 << 20)
    honest = price_feeds.download

    def download(address, timeout_s, give_up_at):
        """The others may be as slow as this machine is."""
        is_bad = address.endswith("/bad.csv")
        limits = (timeout_s, give_up_at) if is_bad else (120.0, float("inf"))
        return honest(address, *limits)

    monkeypatch.setattr(price_feeds, "download", download)
    server.says["/bad.csv"] = answer
    feeds = [Feed("Azure", "skypilot", f"{server.address}/bad.csv"), *server.feeds]
    result = update(tmp_path / "prices.csv", TODAY, feeds, **limits)
    (failed,) = result.failed
    assert failed.feed.provider == "Azure"
    assert words in failed.problem
    assert result.refreshed == ("AWS", "GCP")


@pytest.mark.parametrize(
    ("version", "archive", "words"),
    [
        (b"../../etc", None, "is not a version"),
        (b"", None, "is not a version"),
        (b"7", b"not a zip", "not a zip"),
        (b"7", zipped("other.csv", GCP), "there is no gcp.csv in the ZIP"),
        (b"7", zipped("gcp.csv", "x" * (2 << 20)), "larger than 1 MiB"),
    ],
)
def test_a_bad_archive_is_the_failure_of_one_feed(
    server, tmp_path, monkeypatch, version, archive, words
):
    monkeypatch.setattr(price_feeds, "MAX_FEED_BYTES", 1 << 20)
    server.says |= {"/v3/gcp/version": version, "/v3/gcp/7/catalog.zip": archive}
    (failed,) = update(tmp_path / "prices.csv", TODAY, server.feeds).failed
    assert failed.feed.provider == "GCP"
    assert words in failed.problem


def test_only_https_is_used_but_for_this_machine(tmp_path):
    feeds = [
        Feed("A", "skypilot", "http://example.org/vms.csv"),
        Feed("B", "skypilot", "file:///etc/passwd"),
        Feed("C", "odd", "https://example.org"),
    ]
    with pytest.raises(FarthingError, match="http is not used for prices, https is"):
        update(tmp_path / "prices.csv", TODAY, feeds)


def test_a_mirror_and_a_folder_stand_in_for_gpuhunts_servers(server, tmp_path, monkeypatch):
    feeds = [Feed("GCP", "gpuhunt", "https://example.org/v3/gcp")]
    monkeypatch.setenv("GPUHUNT_CATALOG_URL", f"{server.address}/v3/")
    assert update(tmp_path / "one.csv", TODAY, feeds).n_offers == 2
    n_asked = len(server.asked)
    (tmp_path / "gcp.csv").write_text(GCP)
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(tmp_path))
    assert update(tmp_path / "two.csv", TODAY, feeds).n_offers == 2
    assert len(server.asked) == n_asked, "nothing was asked of a server"
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(tmp_path / "none"))
    with pytest.raises(FarthingError, match="No such file"):
        update(tmp_path / "three.csv", TODAY, feeds)


# ---- live, by the library ----


class NoKey(Exception):
    pass


def sold(gpu: str | None, gib: float | None, usd: float, **more) -> SimpleNamespace:
    """A machine as gpuhunt tells of it."""
    known = {"instance_name": "1x", "location": "here", "gpu_count": 1, "cpu": 8, "memory": 32.0}
    known |= {"spot": False, "gpu_name": gpu, "gpu_memory": gib, "price": usd, **more}
    return SimpleNamespace(**dict.fromkeys(GPUHUNT.split(",")) | known)


def raises(error: Exception):
    def call(*_, **__):
        raise error

    return call


def provider_with(get):
    return SimpleNamespace(from_env=lambda: SimpleNamespace(get=get))


@pytest.fixture
def library(monkeypatch):
    machines = [
        sold("RTX4090", 24.0, 0.4),
        sold("RTX3090", 24.0, 0.2, spot=True),
        sold(None, None, 0.1, gpu_count=0),
    ]
    providers = {
        "Good": provider_with(lambda *_, **__: machines),
        "WithoutKey": SimpleNamespace(from_env=raises(NoKey("no key"))),
        "Broken": provider_with(raises(RuntimeError("the API has changed"))),
    }
    monkeypatch.setitem(sys.modules, "gpuhunt", SimpleNamespace(MissingCredsError=NoKey))
    monkeypatch.setitem(sys.modules, "gpuhunt_providers", SimpleNamespace(**providers))


@pytest.mark.usefixtures("library")
def test_live_providers_are_asked_by_the_library(tmp_path):
    feeds = [
        Feed("Vast.ai", "gpuhunt-live", "gpuhunt_providers:Good"),
        Feed("Crusoe", "gpuhunt-live", "gpuhunt_providers:WithoutKey"),
        Feed("Lium", "gpuhunt-live", "gpuhunt_providers:Broken"),
        Feed("Gone", "gpuhunt-live", "gpuhunt_providers:Renamed"),
    ]
    result = update(tmp_path / "prices.csv", TODAY, feeds)
    assert result.refreshed == ("Vast.ai",)
    assert [(o.feed.provider, o.is_absent) for o in result.outcomes if o.problem] == [
        ("Crusoe", True),
        ("Lium", False),
        ("Gone", False),
    ]
    assert "the API has changed" in result.failed[0].problem
    offers = read_prices(tmp_path / "prices.csv", TODAY)[0]
    assert [(o.gpu, o.kind, o.usd) for o in offers] == [
        ("RTX 4090", "on-demand", 0.4),
        ("RTX 3090", "spot", 0.2),
    ]


def test_without_the_library_live_feeds_are_not_asked(server, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    feeds = [Feed("Lium", "gpuhunt-live", "gpuhunt.providers.lium:LiumProvider"), *server.feeds]
    result = update(tmp_path / "prices.csv", TODAY, feeds)
    assert not result.failed
    assert [o.feed.provider for o in result.outcomes if o.is_absent] == ["Lium"]


def test_the_library_itself_reads_the_same_from_a_folder(tmp_path, monkeypatch):
    gpuhunt = pytest.importorskip("gpuhunt", reason="the extra `prices` is not installed")
    header = f"{GPUHUNT},cpu_arch,provider_data"
    rows = [
        "p4d.24xlarge,us-east-1,21.96,96,1152,8,A100,40,False,,nvidia,,x86,",
        "box,r,0.5,8,32,1,L4,24,True,,nvidia,,,",
    ]
    (tmp_path / "aws.csv").write_text("\n".join([header, *rows]) + "\n")
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(tmp_path))
    theirs = gpuhunt.Catalog(balance_resources=False, auto_reload=False).query(provider="aws")
    items = tmp_path / "items.csv"
    items.write_text(price_feeds.csv_of(theirs))
    update(tmp_path / "prices.csv", TODAY, [Feed("AWS", "gpuhunt", "https://example.org/v3/aws")])
    ours, of_items = (
        sorted((o.instance, o.n_gpus, o.usd, o.is_spot) for o in read_prices(path, TODAY, **how)[0])
        for path, how in ((tmp_path / "prices.csv", {}), (items, {"is_feed": True}))
    )
    assert ours == of_items
    assert ours == sorted((i.instance_name, i.gpu_count, i.price, i.spot) for i in theirs)


def test_the_librarys_providers_are_where_the_feeds_say():
    pytest.importorskip("gpuhunt", reason="the extra `prices` is not installed")
    import importlib

    for feed in known_feeds():
        if feed.layout == "gpuhunt-live":
            module, _, name = feed.address.partition(":")
            assert hasattr(importlib.import_module(module), name), feed


def test_the_known_feeds_are_https_and_of_known_layouts():
    feeds = known_feeds()
    assert len({feed.provider for feed in feeds}) >= 12
    for feed in feeds:
        assert feed.address.startswith("https://") or feed.layout == "gpuhunt-live", feed
    layouts = {row["layout"] for row in facts("price_feeds")}
    assert layouts == {"skypilot", "gpuhunt", "gpuhunt-live"}
