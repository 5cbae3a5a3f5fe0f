"""Public price feeds -> a refreshed file of prices in the user's cache.

Every feed may fail alone, with a warning. The file is replaced in one step, and not at all when
every feed failed. Providers that could not be refreshed keep the prices they had.

The planner's only module that uses the network.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from farthing.addresses import without_secrets
from farthing.errors import FeedsUnavailableError, InputError
from farthing.prices.formats import COLUMNS, read_prices
from farthing.prices.offers import Offer
from farthing.storage.files import write_text
from farthing.tables import typed
from farthing.units import plural

MAX_FEED_BYTES = 96 << 20
TIMEOUT_S = 20.0  # for one answer of a server
FEED_S = 90.0  # for one feed as a whole
_GPUHUNT_COLUMNS = (
    *("instance_name", "location", "price", "cpu", "memory", "gpu_count", "gpu_name"),
    *("gpu_memory", "spot", "disk_size"),
)


class Feed(NamedTuple):
    """One place that publishes the prices of one provider."""

    provider: str
    # skypilot: a CSV; gpuhunt: a folder with versions of a ZIP; gpuhunt-live: a class of that
    # library
    layout: str
    address: str


class FeedResult(NamedTuple):
    feed: Feed
    offers: tuple[Offer, ...] = ()
    n_skipped: int = 0  # rows with GPUs that are not known here
    problem: str = ""  # why it failed
    is_absent: bool = False  # it was not asked: the library or a key for it is not there


class PriceUpdate(NamedTuple):
    path: Path
    n_offers: int
    refreshed: tuple[str, ...]  # providers with new prices
    kept: tuple[str, ...]  # providers whose earlier prices stay
    outcomes: tuple[FeedResult, ...]

    @property
    def failed(self) -> tuple[FeedResult, ...]:
        return tuple(one for one in self.outcomes if one.problem and not one.is_absent)


def known_feeds() -> tuple[Feed, ...]:
    """Of `facts/price_feeds.csv`; of two for one provider the first that answers is taken."""
    return tuple(typed("price_feeds", Feed))


def update(
    path: Path,
    today: date,
    feeds: Sequence[Feed] | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    feed_s: float = FEED_S,
    progress: Callable[[str], None] | None = None,
) -> PriceUpdate:
    """Ask the feeds, at once, and put what they say into the file at `path`.

    `GPUHUNT_CATALOG_DIR` (a folder of CSVs) and `GPUHUNT_CATALOG_URL` (a mirror) stand in for the
    servers of gpuhunt, as they do for the library. Raises `FeedsUnavailableError` when no feed
    answered; the file is then as it was.
    """
    asked = known_feeds() if feeds is None else tuple(feeds)

    def one(feed: Feed) -> FeedResult:
        outcome = _ask(feed, today, timeout_s, feed_s)
        if progress is not None:
            progress(_words(outcome))
        return outcome

    with ThreadPoolExecutor(max_workers=8) as pool:
        outcomes = tuple(pool.map(one, asked))
    fresh: dict[str, tuple[Offer, ...]] = {}
    for outcome in outcomes:
        if outcome.offers:
            fresh.setdefault(outcome.feed.provider, outcome.offers)
    if not fresh:
        failed = [outcome for outcome in outcomes if outcome.problem]
        what = f"none of the {plural(len(asked), 'price feed')} answered; the prices stay as they "
        what += f"are ({_words(failed[0]) if failed else 'no feed is known'})"
        to_do = "check the network, or give a price file of your own with --prices"
        raise FeedsUnavailableError(what, where=str(path), to_do=to_do)
    kept: tuple[Offer, ...] = ()
    with contextlib.suppress(InputError):  # a file that can't be read is replaced
        kept = tuple(o for o in read_prices(path, today)[0] if o.provider not in fresh)
    offers = [offer for provider in sorted(fresh) for offer in fresh[provider]] + list(kept)
    _write(path, offers)
    kept_of = tuple(sorted({offer.provider for offer in kept}))
    return PriceUpdate(path, len(offers), tuple(sorted(fresh)), kept_of, outcomes)


def _words(outcome: FeedResult) -> str:
    name = f"{outcome.feed.provider} ({outcome.feed.layout})"
    if outcome.problem:
        return f"{name}: {outcome.problem}"
    return f"{name}: {plural(len(outcome.offers), 'price')}"


# ---- one feed ----


def _ask(feed: Feed, today: date, timeout_s: float, feed_s: float) -> FeedResult:
    give_up_at = time.monotonic() + feed_s
    path = Path(feed.provider, "vms.csv") if feed.layout == "skypilot" else Path(feed.provider)
    readers: dict[str, Callable[[str, float, float], bytes]] = {
        **{"skypilot": download, "gpuhunt": _gpuhunt_csv, "gpuhunt-live": _live_csv}
    }
    if feed.layout not in readers:
        return FeedResult(feed, problem=f"no layout `{feed.layout}` is known")
    try:
        content = readers[feed.layout](feed.address, timeout_s, give_up_at)
        offers, skipped = read_prices(path, today, is_feed=True, content=content)
    except _Absent as absent:
        return FeedResult(feed, problem=str(absent), is_absent=True)
    except InputError as mistake:
        line = mistake.where.rpartition(path.name)[2].strip(":")
        return FeedResult(feed, problem=f"{mistake.what}{f' (line {line})' if line else ''}")
    except Exception as error:  # whatever a server or a library does is the failure of this feed
        known = OSError, ValueError, zipfile.BadZipFile, httpx.HTTPError, httpx.InvalidURL
        name = "" if isinstance(error, known) else f"{type(error).__name__}: "
        return FeedResult(feed, problem=name + _reason(error))
    said = dict[str, Any](provider=feed.provider, source=_source(feed), date=today)
    found = tuple(offer._replace(**said) for offer in _without_zones(offers))
    return FeedResult(feed, found, n_skipped=sum(skipped.values()))


class _Absent(Exception):
    """A feed that can't be asked here: the library or a key for it is missing."""


def _reason(error: Exception) -> str:
    text = str(error)
    if isinstance(error, httpx.HTTPStatusError):
        text = f"HTTP {error.response.status_code}"
    text = re.sub(r"^\[Errno -?\d+\] ", "", text)
    return (text or type(error).__name__).splitlines()[0][:200]


def _source(feed: Feed) -> str:
    if feed.layout == "gpuhunt-live":
        return f"{feed.provider} by way of gpuhunt"
    return f"{feed.layout} feed, {urlsplit(without_secrets(feed.address)).netloc}"


def download(address: str, timeout_s: float, give_up_at: float) -> bytes:
    """The bytes at an address: over HTTPS (or this machine), bounded in size and time."""
    parts = urlsplit(address)
    is_here = parts.scheme == "http" and parts.hostname in ("127.0.0.1", "localhost")
    if parts.scheme != "https" and not is_here:
        raise ValueError(f"{parts.scheme or 'no scheme'} is not used for prices, https is")
    headers = {"User-Agent": "farthing", "Accept-Encoding": "identity"}
    content, how = bytearray(), dict[str, Any](headers=headers, timeout=timeout_s)
    with httpx.stream("GET", address, follow_redirects=True, **how) as answer:
        answer.raise_for_status()
        for piece in answer.iter_raw():
            content += piece
            if len(content) > MAX_FEED_BYTES:
                raise ValueError(f"larger than {MAX_FEED_BYTES >> 20} MiB")
            if time.monotonic() > give_up_at:
                raise TimeoutError("it took too long")
    return bytes(content)


def _gpuhunt_csv(address: str, timeout_s: float, give_up_at: float) -> bytes:
    """Of one provider of gpuhunt: from a local folder, or the newest that a server has."""
    name = address.rstrip("/").rpartition("/")[2]
    local = os.environ.get("GPUHUNT_CATALOG_DIR")
    if local:
        return (Path(local) / f"{name}.csv").read_bytes()
    mirror = os.environ.get("GPUHUNT_CATALOG_URL")
    base = f"{mirror.rstrip('/')}/{name}" if mirror else address.rstrip("/")
    version = download(f"{base}/version", timeout_s, give_up_at).decode("utf-8", "replace").strip()
    if not re.fullmatch(r"[\w-][\w.-]{0,63}", version):
        raise ValueError(f"{version[:40]!r} is not a version")
    data = download(f"{base}/{version}/catalog.zip", timeout_s, give_up_at)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        try:
            size = archive.getinfo(f"{name}.csv").file_size
        except KeyError:
            raise ValueError(f"there is no {name}.csv in the ZIP") from None
        if size > MAX_FEED_BYTES:
            raise ValueError(f"larger than {MAX_FEED_BYTES >> 20} MiB")
        with archive.open(f"{name}.csv") as file:
            return file.read(MAX_FEED_BYTES)


def _live_csv(address: str, *_: float) -> bytes:
    """By the library gpuhunt, in its layout; its keys are in the environment."""
    import importlib

    module, name = address.split(":")
    try:
        library = importlib.import_module("gpuhunt")
        provider = getattr(importlib.import_module(module), name)
    except ImportError as error:
        what = f"{error.name or 'gpuhunt'} is not installed (the extra `prices` has it)"
        raise _Absent(f"not asked: {what}") from None
    try:
        source = provider.from_env() if hasattr(provider, "from_env") else provider()
    except getattr(library, "MissingCredsError", ()):
        raise _Absent("not asked: it needs a key") from None
    return csv_of(source.get(query_filter=None, balance_resources=False)).encode()


def csv_of(items: Iterable[Any], columns: Sequence[str] = _GPUHUNT_COLUMNS) -> str:
    """By default items of gpuhunt in its own layout."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(columns)
    for item in items:
        cells = [getattr(item, name, None) for name in columns]
        rows.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells])
    return text.getvalue()


def _without_zones(offers: Sequence[Offer]) -> list[Offer]:
    """One row for a region whose zones have one price: most on demand."""
    groups: dict[Offer, list[Offer]] = {}
    for offer in offers:
        groups.setdefault(offer._replace(zone="", usd=0.0), []).append(offer)
    found = []
    for group in groups.values():
        is_alike = len(group) > 1 and len({offer.usd for offer in group}) == 1
        found += [group[0]._replace(zone="")] if is_alike else group
    return found


# ---- the file ----


def _write(path: Path, offers: Sequence[Offer]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, csv_of(offers, COLUMNS))
    except OSError as error:
        what = f"the prices can't be written: {error.strerror or error}"
        to_do = "free space there, or set XDG_CACHE_HOME"
        raise InputError(what, where=str(path), to_do=to_do) from None
