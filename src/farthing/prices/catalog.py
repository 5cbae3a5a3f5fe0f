"""What GPUs are and what they cost: facts from files in which every row has its unit, source and date.

`Gpu` is what a device can do, `Offer` a machine that can be had for a price, `bill` what using it for some hours comes
to, part by part. Prices come from the snapshot of the package, from its refreshed copy, or from a file of one's own.

Refuses to look at the clock (today is handed in), to reach the network (`price_feeds` does), to import torch, and to
guess a price: a row that can't be read is an error with its line.
"""

from __future__ import annotations

import contextlib
import csv
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from farthing.errors import UserMistake
from farthing.units import plural

FACTS = Path(__file__).parents[1] / "facts"
UNITS = ("machine_hour", "gb_hour", "run", "million_tokens")
KINDS = ("on-demand", "spot")
STALE_AFTER_DAYS = 30
HOURS_PER_MONTH = 730.0
COLUMNS = (
    *("provider", "instance", "gpu", "n_gpus", "region", "zone", "kind", "unit", "usd", "vcpus", "ram_gib"),
    *("source", "date"),
)

_MEMORY_TOLERANCE = 0.12  # marketing says 24 GB where the driver shows 22.5 GiB
_LARGEST_USD = 100_000.0


# ---- GPUs ----


class Gpu(NamedTuple):
    """What one GPU can do, by its maker's data sheet. Peaks are dense."""

    name: str
    aliases: tuple[str, ...]  # as providers, `nvidia-smi` and torch write it
    vendor: str
    architecture: str
    compute_capability: str
    memory_bytes: int  # what the driver shows
    bandwidth_bytes_per_s: float
    flops: Mapping[str, float]  # FLOP/s by dtype; a dtype it does not compute in natively is not there
    link: str  # to other GPUs of its machine: nvlink, pcie or infinity-fabric
    link_bytes_per_s: float  # of one GPU in one direction
    power_watts: float
    source: str
    date: date

    @property
    def has_bf16(self) -> bool:
        """Whether it computes in bf16 natively (Ampere and later)."""
        return "bf16" in self.flops

    @property
    def memory_gib(self) -> float:
        """Memory in GiB, as the driver shows it."""
        return self.memory_bytes / 2**30


@cache
def gpus() -> dict[str, Gpu]:
    """Every GPU that is known, by its name here."""
    found = {}
    with open(FACTS / "gpus.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            flops = {
                dtype: float(row[f"{dtype}_tflops"]) * 1e12
                for dtype in ("bf16", "fp16", "tf32", "fp32", "fp8")
                if row[f"{dtype}_tflops"]
            }
            found[row["name"]] = Gpu(
                name=row["name"],
                aliases=tuple(row["aliases"].split(";")) if row["aliases"] else (),
                vendor=row["vendor"],
                architecture=row["architecture"],
                compute_capability=row["compute_capability"],
                memory_bytes=int(row["memory_mib"]) << 20,
                bandwidth_bytes_per_s=float(row["bandwidth_gb_per_s"]) * 1e9,
                flops=MappingProxyType(flops),
                link=row["link"],
                link_bytes_per_s=float(row["link_gb_per_s"]) * 1e9,
                power_watts=float(row["power_watts"]),
                source=row["source"],
                date=date.fromisoformat(row["date"]),
            )
    return found


def find_gpu(text: str, memory_gib: float | None = None) -> Gpu:
    """The GPU that `text` names, whatever its case, spaces and hyphens: "rtx4090", "NVIDIA A100-SXM4-80GB", "h100".

    Where a name goes with several sizes (an A100 has 40 or 80 GB), `memory_gib` says which; without it a plain "A100"
    or "V100" is the smaller one. Raises `UserMistake`.
    """
    gpu = _gpu_named(text, memory_gib)
    if gpu is not None:
        return gpu
    plain = _gpu_named(_without_memory(text)[0])
    if plain is not None:
        hint = f"{plain.name} has {plain.memory_gib:.0f} GiB; "
    else:
        hint = _did_you_mean(text, [name for known in gpus().values() for name in (known.name, *known.aliases)])
    what = f"no GPU `{text}` is known" + (f" with {memory_gib:g} GiB" if memory_gib is not None else "")
    raise UserMistake(what, where="gpu", to_do=f"{hint}known: {', '.join(gpus())}")


def gpu_of_device(name: str) -> Gpu | None:
    """The GPU behind the name that torch gives a device; None for laptops, slices of a GPU, and names not known."""
    key = _key(name)
    if "laptop" in key or "maxq" in key or re.search(r"mig\d+g", key):
        return None
    if key in _by_key():
        return _by_key()[key]
    begins = [known for known in _by_key() if len(known) > 3 and key.startswith(known)]
    return _by_key()[max(begins, key=len)] if begins else None


@cache
def _gpu_named(text: str, memory_gib: float | None = None) -> Gpu | None:
    """Like `find_gpu`, None where it fails. A name may end in its memory ("L4-24GB") as long as that is true."""
    plain, said_gb = _without_memory(text)
    sized = [f"{text} {size}GB" for size in _sizes(memory_gib)] if memory_gib is not None else []
    for name in (*sized, text, plain):
        gpu = _by_key().get(_key(name))
        if gpu is None or (memory_gib is not None and not _is_about(gpu, memory_gib)):
            continue
        if name != plain or said_gb is None or _is_about(gpu, said_gb):
            return gpu
    return None


def _without_memory(text: str) -> tuple[str, float | None]:
    """ "L4-24GB" -> ("L4", 24); the text itself and None where it does not end so."""
    ends = re.fullmatch(r"(.+?)[\s_(-]+(\d+)\s*(?:g|gb|gib)?\)?", text.strip(), re.IGNORECASE)
    return (ends[1], float(ends[2])) if ends else (text, None)


@cache
def _by_key() -> dict[str, Gpu]:
    return {_key(name): gpu for gpu in gpus().values() for name in (*gpu.aliases, gpu.name)}


def _key(text: str) -> str:
    """A name without case, punctuation, and the words that every card of a maker has."""
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla|amd|instinct", "", text.lower())


def _sizes(memory_gib: float) -> list[int]:
    """The sizes in GB that a maker may have written on a card with this memory."""
    return [gb for gb in (10, 12, 16, 24, 32, 40, 80, 94) if abs(gb - memory_gib) <= _MEMORY_TOLERANCE * gb]


def _is_about(gpu: Gpu, memory_gib: float) -> bool:
    return abs(gpu.memory_gib - memory_gib) <= _MEMORY_TOLERANCE * max(gpu.memory_gib, memory_gib)


# ---- offers and their terms ----


class Billing(NamedTuple):
    """A provider's terms. A month of storage is 730 hours."""

    provider: str
    minimum_s: float = 0.0
    increment_s: float = 1.0
    storage_usd_per_gb_month: float = 0.0
    egress_usd_per_gb: float = 0.0
    minimum_usd: float = 0.0  # of one managed run
    pack_usd: float = 0.0  # credits are sold in packs of this price; 0: no packs
    notes: str = ""
    source: str = ""
    date: date | None = None


class Offer(NamedTuple):
    """One thing that can be bought: a machine by the hour, memory by the hour, a run, or training by the token."""

    provider: str
    instance: str
    gpu: str  # a name of `gpus`; empty for managed training, where the GPU is the provider's business
    n_gpus: int
    region: str
    zone: str
    is_spot: bool
    unit: str  # one of UNITS
    usd: float  # of one unit; of a machine_hour, the whole machine
    source: str
    date: date
    billing: Billing
    vcpus: float | None = None
    ram_gib: float | None = None

    @property
    def kind(self) -> str:
        """on-demand or spot."""
        return "spot" if self.is_spot else "on-demand"

    @property
    def usd_per_hour(self) -> float | None:
        """Dollars for an hour of the whole machine; None where hours are not what is paid for."""
        if self.unit == "machine_hour":
            return self.usd
        if self.unit == "gb_hour":
            return self.usd * self.n_gpus * gpus()[self.gpu].memory_gib
        return None

    @property
    def usd_per_gpu_hour(self) -> float | None:
        """Dollars for an hour of one GPU."""
        usd = self.usd_per_hour
        return None if usd is None else usd / self.n_gpus


def bill(
    offer: Offer,
    hours: float = 0.0,
    *,
    n_starts: int = 1,
    n_runs: int = 1,
    n_tokens: float = 0.0,
    storage_gb: float = 0.0,
    storage_hours: float | None = None,
    egress_gb: float = 0.0,
) -> dict[str, float]:
    """What using an offer comes to, in dollars by part; the parts add up to the bill. Parts of nothing are left out.

    `rounding` is what the provider's minimum and increments add; `n_starts` machines share the hours evenly, as when
    spot capacity is taken away and comes back. Storage is paid for `storage_hours` (the hours, unless said).
    """
    terms = offer.billing
    usd_per_hour = offer.usd_per_hour
    parts: dict[str, float] = {}
    if usd_per_hour is not None:
        parts["compute"] = hours * usd_per_hour
        each_s = hours * 3600 / max(1, n_starts)
        billed_s = max(terms.minimum_s, math.ceil(each_s / terms.increment_s - 1e-9) * terms.increment_s)
        parts["rounding"] = max(0.0, max(1, n_starts) * billed_s - hours * 3600) / 3600 * usd_per_hour if hours else 0.0
    else:
        n_units = n_runs if offer.unit == "run" else n_tokens / 1e6
        parts["compute"] = n_units * offer.usd
        if n_units:
            parts["minimum"] = max(0.0, n_runs * terms.minimum_usd - parts["compute"])
    held_hours = hours if storage_hours is None else storage_hours
    parts["storage"] = storage_gb * held_hours / HOURS_PER_MONTH * terms.storage_usd_per_gb_month
    parts["egress"] = egress_gb * terms.egress_usd_per_gb
    return {name: usd for name, usd in parts.items() if usd or name == "compute"}


def up_front_usd(offer: Offer, usd: float) -> float:
    """What has to be paid before a bill of `usd` can be met: whole packs where credits are sold in packs."""
    pack = offer.billing.pack_usd
    return math.ceil(usd / pack - 1e-9) * pack if pack else usd


@cache
def billings() -> dict[str, Billing]:
    """The terms of every provider whose terms are known, by name."""
    found = {}
    with open(FACTS / "billing.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found[row["provider"]] = Billing(
                provider=row["provider"],
                minimum_s=float(row["minimum_s"] or 0),
                increment_s=float(row["increment_s"] or 1),
                storage_usd_per_gb_month=float(row["storage_usd_per_gb_month"] or 0),
                egress_usd_per_gb=float(row["egress_usd_per_gb"] or 0),
                minimum_usd=float(row["minimum_usd"] or 0),
                pack_usd=float(row["pack_usd"] or 0),
                notes=row["notes"],
                source=row["source"],
                date=date.fromisoformat(row["date"]),
            )
    return found


def billing_of(provider: str) -> Billing:
    """The terms of a provider; by the second and nothing for storage where they are not known."""
    return billings().get(provider) or Billing(provider)


# ---- the catalog ----


class Catalog(NamedTuple):
    """Offers, where they were read, and how old they are on `today`."""

    offers: tuple[Offer, ...]
    where: str
    today: date
    skipped: Mapping[str, int]  # GPU names of a feed that are not known here, with their rows

    @property
    def providers(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(sorted({offer.provider for offer in self.offers}))

    @property
    def ages_days(self) -> tuple[int, int, int]:
        """Days since the newest, the median and the oldest price was read."""
        ages = sorted(max(0, (self.today - offer.date).days) for offer in self.offers)
        return (ages[0], ages[(len(ages) - 1) // 2], ages[-1]) if ages else (0, 0, 0)

    @property
    def is_stale(self) -> bool:
        """Whether more than half of the prices are older than a month."""
        return self.ages_days[1] > STALE_AFTER_DAYS

    @property
    def words(self) -> str:
        """Where the prices come from and how old they are, for every plan to print."""
        newest, median, oldest = self.ages_days
        text = (
            f"{plural(len(self.offers), 'price')} of {plural(len(self.providers), 'provider')} from {self.where}: "
            f"newest {_days(newest)} old, half within {_days(median)}, oldest {_days(oldest)}"
        )
        return f"{text}; stale: `farthing prices update` refreshes them" if self.is_stale else text


def _days(n: int) -> str:
    return plural(n, "day")


def cache_path() -> Path:
    """Where refreshed prices are kept."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "farthing" / "prices.csv"


def read_catalog(path: Path | str | None, today: date) -> Catalog:
    """The prices to plan with.

    A path is a file of one's own (columns of farthing, gpuhunt or SkyPilot) and is taken alone. Without one: the
    snapshot of the package, in which the refreshed copy replaces every provider of which it has newer prices.
    Raises `UserMistake` with file, line and column.
    """
    if path is not None:
        return _read(Path(path), today, is_own=True)
    shipped = _read(FACTS / "prices.csv", today)._replace(where="the snapshot of the package")
    refreshed = cache_path()
    if not refreshed.is_file():
        return shipped
    try:
        newer = _read(refreshed, today)
    except UserMistake as error:
        to_do = f"run `farthing prices update`, or delete {refreshed}"
        raise UserMistake(error.what, where=error.where, to_do=to_do) from None
    newest_here, newest_there = _newest(shipped.offers), _newest(newer.offers)
    replaced = {who for who, day in newest_there.items() if day >= newest_here.get(who, date.min)}
    kept = tuple(offer for offer in shipped.offers if (offer.provider, offer.unit) not in replaced)
    fresh = tuple(offer for offer in newer.offers if (offer.provider, offer.unit) in replaced)
    where = f"{refreshed} and the snapshot of the package"
    return Catalog(offers=fresh + kept, where=where, today=today, skipped=newer.skipped)


def _newest(offers: Iterable[Offer]) -> dict[tuple[str, str], date]:
    found: dict[tuple[str, str], date] = {}
    for offer in offers:
        who = (offer.provider, offer.unit)
        found[who] = max(found.get(who, date.min), offer.date)
    return found


def select(
    catalog: Catalog,
    gpu: str | None = None,
    provider: str | None = None,
    region: str | None = None,
    kind: str | None = None,
    max_usd_per_hour: float | None = None,
) -> list[Offer]:
    """The offers that answer every wish; a region may be the beginning of its name ("us-"). Raises `UserMistake`."""
    name = None if gpu is None else find_gpu(gpu).name
    if kind is not None and kind not in KINDS:
        raise UserMistake(f"no kind `{kind}` is known", where="kind", to_do=f"use one of {', '.join(KINDS)}")
    wanted = None
    if provider is not None:
        by_key = {_key(who): who for who in catalog.providers}
        wanted = by_key.get(_key(provider))
        if wanted is None:
            hint = _did_you_mean(provider, catalog.providers)
            to_do = f"{hint}known: {', '.join(catalog.providers)}"
            raise UserMistake(f"no prices of `{provider}` are known", where="provider", to_do=to_do)
    found = []
    for offer in catalog.offers:
        if name is not None and offer.gpu != name:
            continue
        if wanted is not None and offer.provider != wanted:
            continue
        if region is not None and not offer.region.lower().startswith(region.lower()):
            continue
        if kind is not None and offer.is_spot != (kind == "spot"):
            continue
        if max_usd_per_hour is not None:
            usd = offer.usd_per_hour
            if usd is None or usd > max_usd_per_hour:
                continue
        found.append(offer)
    return found


def sort_offers(offers: Iterable[Offer], by: str) -> list[Offer]:
    """Offers by `usd` (of an hour), `usd-per-gpu` or `age`, the least first; those not paid by the hour come last."""
    if by == "age":
        return sorted(
            offers, key=lambda offer: (-offer.date.toordinal(), offer.usd_per_gpu_hour or math.inf, offer[:7])
        )
    hourly = {"usd": lambda o: o.usd_per_hour, "usd-per-gpu": lambda o: o.usd_per_gpu_hour}[by]
    return sorted(offers, key=lambda offer: (hourly(offer) or math.inf, offer.usd, offer[:7]))


# ---- reading ----


class _Line(NamedTuple):
    """One row of a price file, as its cells; a number that may be missing is the empty string."""

    provider: str
    instance: str
    gpu: str
    memory_gib: float | None  # of one GPU, where the file says it
    n_gpus: str
    region: str
    zone: str
    kind: str
    unit: str
    usd: str
    vcpus: str
    ram_gib: str
    source: str
    date: str


_Layout = Callable[[list[str], dict[str, int], Path, str], list[_Line]]


def read_feed(path: Path, today: date) -> Catalog:
    """The prices of one feed, as downloaded: a file in the layout of gpuhunt or of SkyPilot.

    A feed has rows twice, GPUs that are not known here and prices that are none: these rows are left out, and the
    feed is refused when they are more than a tenth. Raises `UserMistake`.
    """
    return _read(path, today, is_feed=True)


def read_refreshed(path: Path, today: date) -> Catalog:
    """The prices that `price_feeds.update` wrote, by themselves. Raises `UserMistake`."""
    return _read(path, today)


def _read(path: Path, today: date, *, is_own: bool = False, is_feed: bool = False) -> Catalog:
    """Read a price file. In columns of our own in a file of one's own, GPUs must be known and offers be there once."""
    offers: list[Offer] = []
    skipped: dict[str, int] = {}
    bad: list[UserMistake] = []
    seen: dict[tuple[str, str, str, int, str, str, bool, str], int] = {}
    with _opened(path) as (layout, rows):
        is_strict = is_own and layout is _own_line
        parse = _Parser(today, is_strict)
        for number, lines in rows:
            for line in lines:
                try:
                    offer = parse.offer(line)
                except UserMistake as error:
                    where = f"{path}:{number}: {error.where}"
                    bad.append(UserMistake(error.what, where=where, to_do=error.to_do))
                    if is_feed:
                        continue
                    raise bad[0] from None
                if offer is None:
                    name = line.gpu if line.memory_gib is None else f"{line.gpu} ({line.memory_gib:.0f} GiB)"
                    skipped[name] = skipped.get(name, 0) + 1
                    continue
                first = seen.setdefault((*offer[:7], offer.unit), number)
                if first == number:
                    offers.append(offer)
                elif is_strict:
                    raise UserMistake(
                        f"the offer of line {first} once more",
                        where=f"{path}:{number}",
                        to_do="keep one of the two, or give them different instances",
                    )
    if len(bad) > len(offers) / 9:
        raise bad[0]
    if not offers:
        what = f"no GPU in it is known: {', '.join(skipped)}" if skipped else "there is no price in it"
        raise UserMistake(what, where=str(path), to_do=f"give it rows with the columns {', '.join(COLUMNS)}")
    return Catalog(tuple(offers), str(path), today, MappingProxyType(skipped))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[_Layout, Iterator[tuple[int, list[_Line]]]]]:
    """The layout of a file and its rows with their lines; what is wrong with the file as a whole is said in words."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            header = [name.strip() for name in next(rows, [])]
            layout = _layout_of(header, path)
            read_on = date.fromtimestamp(os.fstat(file.fileno()).st_mtime).isoformat()
            yield layout, _lines(rows, header, layout, path, read_on)
    except FileNotFoundError:
        raise UserMistake("no such file", where=str(path), to_do="name a CSV file of prices") from None
    except IsADirectoryError:
        raise UserMistake("a folder, not a file", where=str(path), to_do="name a CSV file of prices") from None
    except OSError as error:
        what = f"can't be read: {error.strerror}"
        raise UserMistake(what, where=str(path), to_do="check the path and its permissions") from None
    except UnicodeDecodeError:
        raise UserMistake("not text in UTF-8", where=str(path), to_do="save it as CSV in UTF-8") from None
    except csv.Error as error:
        where = f"{path}:{rows.line_num}"
        raise UserMistake(f"not CSV: {error}", where=where, to_do="save it as CSV in UTF-8") from None


def _lines(
    rows: Any, header: list[str], layout: _Layout, path: Path, read_on: str
) -> Iterator[tuple[int, list[_Line]]]:
    """Line and content of each row; one row of SkyPilot is an on-demand and a spot offer."""
    index = {name: at for at, name in enumerate(header)}
    for row in rows:
        if not row:
            continue
        if len(row) != len(header):
            raise UserMistake(
                f"{plural(len(row), 'cell')} where the header has {len(header)}",
                where=f"{path}:{rows.line_num}",
                to_do="put cells with commas in quotes; write nothing between two commas for an empty cell",
            )
        yield rows.line_num, layout(row, index, path, read_on)


def _layout_of(header: list[str], path: Path) -> _Layout:
    """How to read a file with these columns."""
    names = set(header)
    for needed, layout in (
        ({"provider", "gpu", "n_gpus", "usd"}, _own_line),
        ({"instance_name", "location", "price", "gpu_count", "gpu_name", "spot"}, _gpuhunt_line),
        ({"InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "Region"}, _skypilot_line),
    ):
        if needed <= names:
            return layout
    missing = [name for name in ("provider", "gpu", "n_gpus", "usd") if name not in names]
    raise UserMistake(
        f"the header lacks {', '.join(missing)}" if header else "the file is empty",
        where=f"{path}:1",
        to_do=f"use the columns {', '.join(COLUMNS)} (those of gpuhunt and of SkyPilot are read too)",
    )


def _own_line(row: list[str], index: dict[str, int], path: Path, read_on: str) -> list[_Line]:
    def cell(name: str, otherwise: str = "") -> str:
        at = index.get(name)
        return (row[at].strip() or otherwise) if at is not None else otherwise

    return [
        _Line(
            provider=cell("provider"),
            instance=cell("instance"),
            gpu=cell("gpu"),
            memory_gib=None,
            n_gpus=cell("n_gpus"),
            region=cell("region"),
            zone=cell("zone"),
            kind=cell("kind", "on-demand"),
            unit=cell("unit", "machine_hour"),
            usd=cell("usd"),
            vcpus=cell("vcpus"),
            ram_gib=cell("ram_gib"),
            source=cell("source", path.name),
            date=cell("date", read_on),
        )
    ]


def _gpuhunt_line(row: list[str], index: dict[str, int], path: Path, read_on: str) -> list[_Line]:
    """A row of gpuhunt's catalogs, version 2 and later: the provider is the name of the file."""

    def cell(name: str) -> str:
        at = index.get(name)
        return row[at].strip() if at is not None else ""

    if _is_none(cell("gpu_count")):
        return []
    memory = cell("gpu_memory")
    return [
        _Line(
            provider=provider_name(cell("provider") or path.stem),
            instance=cell("instance_name"),
            gpu=cell("gpu_name"),
            memory_gib=float(memory) if re.fullmatch(r"\d+(\.\d+)?", memory) and float(memory) > 0 else None,
            n_gpus=cell("gpu_count"),
            region=cell("location"),
            zone="",
            kind="spot" if cell("spot").lower() in ("true", "1") else "on-demand",
            unit="machine_hour",
            usd=cell("price"),
            vcpus=cell("cpu"),
            ram_gib=cell("memory"),
            source=f"gpuhunt catalog {path.name}",
            date=read_on,
        )
    ]


def _skypilot_line(row: list[str], index: dict[str, int], path: Path, read_on: str) -> list[_Line]:
    """A row of a catalog of SkyPilot, on demand and on spot. Google's hosts are priced apart from their GPUs there."""

    def cell(name: str) -> str:
        at = index.get(name)
        return row[at].strip() if at is not None else ""

    if _is_none(cell("AcceleratorCount")) or not cell("InstanceType"):
        return []
    n_gpus = cell("AcceleratorCount")
    found = []
    for kind, usd in (("on-demand", cell("Price")), ("spot", cell("SpotPrice"))):
        if _is_none(usd):
            continue
        found.append(
            _Line(
                provider=provider_name(path.parent.name if path.stem == "vms" else path.stem),
                instance=cell("InstanceType"),
                gpu=cell("AcceleratorName"),
                memory_gib=_skypilot_memory(cell("GpuInfo"), n_gpus, cell("AcceleratorName")),
                n_gpus=n_gpus,
                region=cell("Region"),
                zone=cell("AvailabilityZone"),
                kind=kind,
                unit="machine_hour",
                usd=usd,
                vcpus=cell("vCPUs"),
                ram_gib=cell("MemoryGiB"),
                source=f"SkyPilot catalog {path.parent.name}/{path.name}",
                date=read_on,
            )
        )
    return found


def _is_none(text: str) -> bool:
    """Whether a cell of a feed says that there is none: no GPU, not sold on spot."""
    return text.lower() in ("", "nan", "none") or re.fullmatch(r"0*\.?0*", text) is not None


@cache
def _skypilot_memory(info: str, n_gpus: str, name: str) -> float | None:
    """GiB of one GPU. Some clouds write the size of all of them, some write GB where MiB is said."""
    match = re.search(r"'SizeInMiB': (\d+)", info)
    if match is None or int(match[1]) == 0:
        return None
    size = int(match[1])
    gib = size / 1024 if size > 1000 else float(size)
    for each in (gib, gib / max(1.0, float(n_gpus))):
        if _gpu_named(name, each) is not None:
            return each
    return gib


_NAMES = {
    **{"aws": "AWS", "gcp": "GCP", "azure": "Azure", "oci": "Oracle", "lambda": "Lambda", "lambdalabs": "Lambda"},
    **{"lambda_labs": "Lambda", "runpod": "RunPod", "vast": "Vast.ai", "vastai": "Vast.ai", "vast_ai": "Vast.ai"},
    **{"verda": "Verda", "datacrunch": "Verda", "nebius": "Nebius", "hyperbolic": "Hyperbolic", "cudo": "Cudo"},
    **{"jarvislabs": "JarvisLabs", "mithril": "Mithril", "cloudrift": "CloudRift", "do": "DigitalOcean"},
    **{"digitalocean": "DigitalOcean", "vultr": "Vultr", "fluidstack": "FluidStack", "paperspace": "Paperspace"},
    **{"together_ai": "Together", "together": "Together", "modal": "Modal", "coreweave": "CoreWeave"},
    **{"seeweb": "Seeweb", "crusoe": "Crusoe", "hotaisle": "Hot Aisle", "lium": "Lium", "shadeform": "Shadeform"},
    **{"primeintellect": "Prime Intellect", "hyperstack": "Hyperstack", "tensordock": "TensorDock"},
}


def provider_name(text: str) -> str:
    """How farthing writes the provider that a feed names."""
    return _NAMES.get(text.lower(), text)


class _Parser:
    """Cells to offers. What many rows share (GPUs, dates, terms) is looked up once."""

    def __init__(self, today: date, is_strict: bool) -> None:
        self._today = today
        self._is_strict = is_strict
        self._dates: dict[str, date] = {}

    def offer(self, line: _Line) -> Offer | None:
        """The offer of a line; None where a feed names a GPU that is not known. Raises with the column as `where`."""
        if not line.provider:
            raise UserMistake("there is no provider", where="provider", to_do="name who sells it")
        if line.unit not in UNITS:
            to_do = f"{_did_you_mean(line.unit, UNITS)}use one of {', '.join(UNITS)}"
            raise UserMistake(f"no unit `{line.unit}` is known", where="unit", to_do=to_do)
        if line.kind not in KINDS:
            to_do = f"use one of {', '.join(KINDS)}"
            raise UserMistake(f"no kind `{line.kind}` is known", where="kind", to_do=to_do)
        is_managed = line.unit in ("run", "million_tokens")
        gpu = ""
        if line.gpu or not is_managed:
            known = _gpu_named(line.gpu, line.memory_gib)
            if known is None:
                if not self._is_strict:
                    return None
                known = find_gpu(line.gpu, line.memory_gib)
            gpu = known.name
        return Offer(
            provider=line.provider,
            instance=line.instance,
            gpu=gpu,
            n_gpus=self._count(line.n_gpus, 0 if is_managed else 1),
            region=line.region,
            zone=line.zone,
            is_spot=line.kind == "spot",
            unit=line.unit,
            usd=_usd(line.usd),
            source=line.source,
            date=self._date(line.date),
            billing=billing_of(line.provider),
            vcpus=_amount(line.vcpus, "vcpus"),
            ram_gib=_amount(line.ram_gib, "ram_gib"),
        )

    def _count(self, text: str, least: int) -> int:
        try:
            number = float(text or "0")
        except ValueError:
            number = math.nan
        if not number >= least or number != int(number) or number > 1024:
            what = f"{text!r} is not a whole number from {least} to 1024"
            raise UserMistake(what, where="n_gpus", to_do="write how many GPUs the price is for")
        return int(number)

    def _date(self, text: str) -> date:
        day = self._dates.get(text)
        if day is None:
            try:
                day = date.fromisoformat(text)
            except ValueError:
                what = f"{text!r} is not a date"
                raise UserMistake(what, where="date", to_do="write it as in 2026-11-21") from None
            if day > self._today and self._is_strict:
                what = f"{text} is after today ({self._today.isoformat()})"
                raise UserMistake(what, where="date", to_do="write the day the price was read")
            self._dates[text] = day
        return day


def _usd(text: str) -> float:
    try:
        usd = float(text.removeprefix("$"))
    except ValueError:
        usd = math.nan
    if not 0 < usd <= _LARGEST_USD:
        what = f"{text!r} is not a price in dollars above 0 and at most {_LARGEST_USD:,.0f}"
        raise UserMistake(what, where="usd", to_do="write dollars for one unit, as in 1.29")
    return usd


def _amount(text: str, column: str) -> float | None:
    if not text or text.lower() in ("nan", "none"):
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise UserMistake(f"{text!r} is not a number", where=column, to_do="write a number, or leave it empty")
    return number


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    import difflib

    by_key = {_key(name): name for name in known}
    key = _key(word)
    longer = [name for name in by_key if key and name.startswith(key)]
    near = longer or difflib.get_close_matches(key, list(by_key), n=1, cutoff=0.5)
    return f"did you mean `{by_key[near[0]]}`? " if near else ""
