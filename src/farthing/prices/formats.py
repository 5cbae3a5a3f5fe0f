"""Price files: the columns of farthing, of gpuhunt and of SkyPilot, row by row to offers."""

from __future__ import annotations

import contextlib
import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from farthing.errors import InputError
from farthing.prices.gpus import did_you_mean, find_gpu, gpu_named
from farthing.prices.offers import KINDS, UNITS, Offer, billing_of
from farthing.tables import facts
from farthing.units import plural

COLUMNS = (
    *("provider", "instance", "gpu", "n_gpus", "region", "zone", "kind", "unit", "usd", "vcpus"),
    *("ram_gib", "source", "date"),
)
_LARGEST_USD = 100_000.0


class _Line(NamedTuple):
    """One row of a price file, as its cells; a number that may be missing is the empty string."""

    provider: str
    instance: str
    gpu: str
    memory_gib: float | None  # of one GPU, where the file says it
    n_gpus: str
    region: str
    source: str
    date: str
    zone: str = ""
    kind: str = "on-demand"
    unit: str = "machine_hour"
    usd: str = ""
    vcpus: str = ""
    ram_gib: str = ""


_Cells = Callable[[str], str]
"""The cell of a row below the name of a column; empty where there is no such column."""
_Layout = Callable[[_Cells, Path, str], list[_Line]]


def read_prices(
    path: Path, today: date, *, is_own: bool = False, is_feed: bool = False
) -> tuple[tuple[Offer, ...], Mapping[str, int]]:
    """The offers of a price file, and the GPU names that are not known with their rows.

    In columns of our own in a file of one's own, GPUs must be known and offers be there once. A
    price without a date counts as read `today`; a date may be one day later, which it is already in
    other time zones.
    """
    offers: list[Offer] = []
    skipped: dict[str, int] = {}
    bad: list[InputError] = []
    seen: dict[tuple[str, str, str, int, str, str, bool, str], int] = {}
    with _opened(path, today) as (layout, rows):
        is_strict = is_own and layout is _own_line
        parse = _Parser(today, is_strict)
        for number, lines in rows:
            for line in lines:
                try:
                    offer = parse.offer(line)
                except InputError as error:
                    where = f"{path}:{number}: {error.where}"
                    bad.append(InputError(error.what, where=where, to_do=error.to_do))
                    if is_feed:
                        continue
                    raise bad[0] from None
                if offer is None:
                    name = (
                        line.gpu
                        if line.memory_gib is None
                        else f"{line.gpu} ({line.memory_gib:.0f} GiB)"
                    )
                    skipped[name] = skipped.get(name, 0) + 1
                    continue
                first = seen.setdefault((*offer[:7], offer.unit), number)
                if first == number:
                    offers.append(offer)
                elif is_strict:
                    raise InputError(
                        f"the same offer as on line {first}",
                        where=f"{path}:{number}",
                        to_do="keep one of the two, or give them different instances",
                    )
    if len(bad) > len(offers) / 9:
        raise bad[0]
    if not offers:
        what = (
            f"no GPU in it is known: {', '.join(skipped)}" if skipped else "there is no price in it"
        )
        raise InputError(
            what, where=str(path), to_do=f"give it rows with the columns {', '.join(COLUMNS)}"
        )
    return tuple(offers), MappingProxyType(skipped)


@contextlib.contextmanager
def _opened(path: Path, today: date) -> Iterator[tuple[_Layout, Iterator[tuple[int, list[_Line]]]]]:
    """The layout of a file and its rows with their lines; what is wrong with the file as a whole is
    said in words.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            header = [name.strip() for name in next(rows, [])]
            layout = _layout_of(header, path)
            yield layout, _lines(rows, header, layout, path, today.isoformat())
    except FileNotFoundError:
        raise InputError(
            "no such file", where=str(path), to_do="name a CSV file of prices"
        ) from None
    except IsADirectoryError:
        raise InputError(
            "a folder, not a file", where=str(path), to_do="name a CSV file of prices"
        ) from None
    except OSError as error:
        what = f"can't be read: {error.strerror}"
        raise InputError(
            what, where=str(path), to_do="check the path and its permissions"
        ) from None
    except UnicodeDecodeError:
        raise InputError(
            "not text in UTF-8", where=str(path), to_do="save it as CSV in UTF-8"
        ) from None
    except csv.Error as error:
        where = f"{path}:{rows.line_num}"
        raise InputError(
            f"not CSV: {error}", where=where, to_do="save it as CSV in UTF-8"
        ) from None


def _lines(
    rows: Any, header: list[str], layout: _Layout, path: Path, read_on: str
) -> Iterator[tuple[int, list[_Line]]]:
    """Line and content of each row; one row of SkyPilot is an on-demand and a spot offer."""
    index = {name: at for at, name in enumerate(header)}
    for row in rows:
        if not row:
            continue
        if len(row) != len(header):
            raise InputError(
                f"{plural(len(row), 'cell')} where the header has {len(header)}",
                where=f"{path}:{rows.line_num}",
                to_do=(
                    "put cells with commas in quotes; write nothing between two commas for an empty"
                    " cell"
                ),
            )

        def cell(name: str, row: list[str] = row) -> str:
            return row[index[name]].strip() if name in index else ""

        yield rows.line_num, layout(cell, path, read_on)


def _layout_of(header: list[str], path: Path) -> _Layout:
    """How to read a file with these columns."""
    names = set(header)
    for needed, layout in (
        ({"provider", "gpu", "n_gpus", "usd"}, _own_line),
        ({"instance_name", "location", "price", "gpu_count", "gpu_name", "spot"}, _gpuhunt_line),
        (
            {"InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "Region"},
            _skypilot_line,
        ),
    ):
        if needed <= names:
            return layout
    missing = [name for name in ("provider", "gpu", "n_gpus", "usd") if name not in names]
    raise InputError(
        f"the header lacks {', '.join(missing)}" if header else "the file is empty",
        where=f"{path}:1",
        to_do=(
            f"use the columns {', '.join(COLUMNS)} (those of gpuhunt and of SkyPilot are read too)"
        ),
    )


def _own_line(cell: _Cells, path: Path, read_on: str) -> list[_Line]:
    defaults = {"kind": "on-demand", "unit": "machine_hour", "source": path.name, "date": read_on}
    return [
        _Line(**{name: cell(name) or defaults.get(name, "") for name in COLUMNS}, memory_gib=None)
    ]


def _gpuhunt_line(cell: _Cells, path: Path, read_on: str) -> list[_Line]:
    """A row of gpuhunt's catalogs, version 2 and later: the provider is the name of the file."""
    if _is_none(cell("gpu_count")):
        return []
    memory = cell("gpu_memory")
    return [
        _Line(
            provider=provider_name(cell("provider") or path.stem),
            instance=cell("instance_name"),
            gpu=cell("gpu_name"),
            memory_gib=(
                float(memory)
                if re.fullmatch(r"\d+(\.\d+)?", memory) and float(memory) > 0
                else None
            ),
            n_gpus=cell("gpu_count"),
            region=cell("location"),
            kind="spot" if cell("spot").lower() in ("true", "1") else "on-demand",
            usd=cell("price"),
            vcpus=cell("cpu"),
            ram_gib=cell("memory"),
            source=f"gpuhunt catalog {path.name}",
            date=read_on,
        )
    ]


def _skypilot_line(cell: _Cells, path: Path, read_on: str) -> list[_Line]:
    """A row of a catalog of SkyPilot, on demand and on spot. Google's hosts are priced apart from
    their GPUs there.
    """
    n_gpus = cell("AcceleratorCount")
    if _is_none(n_gpus) or not cell("InstanceType"):
        return []
    line = _Line(
        provider=provider_name(path.parent.name if path.stem == "vms" else path.stem),
        instance=cell("InstanceType"),
        gpu=cell("AcceleratorName"),
        memory_gib=_skypilot_memory(cell("GpuInfo"), n_gpus, cell("AcceleratorName")),
        n_gpus=n_gpus,
        region=cell("Region"),
        zone=cell("AvailabilityZone"),
        vcpus=cell("vCPUs"),
        ram_gib=cell("MemoryGiB"),
        source=f"SkyPilot catalog {path.parent.name}/{path.name}",
        date=read_on,
    )
    prices = {"on-demand": cell("Price"), "spot": cell("SpotPrice")}
    return [line._replace(kind=kind, usd=usd) for kind, usd in prices.items() if not _is_none(usd)]


def _is_none(text: str) -> bool:
    """Whether a cell of a feed says that there is none: no GPU, not sold on spot."""
    return text.lower() in ("", "nan", "none") or re.fullmatch(r"0*\.?0*", text) is not None


@cache
def _skypilot_memory(info: str, n_gpus: str, name: str) -> float | None:
    """GiB of one GPU. Some clouds write the size of all of them, some write GB where MiB is
    said.
    """
    match = re.search(r"'SizeInMiB': (\d+)", info)
    if match is None or int(match[1]) == 0:
        return None
    size = int(match[1])
    gib = size / 1024 if size > 1000 else float(size)
    for each in (gib, gib / max(1.0, float(n_gpus))):
        if gpu_named(name, each) is not None:
            return each
    return gib


@cache
def _names() -> dict[str, str]:
    return {row["feed"]: row["name"] for row in facts("provider_names")}


def provider_name(text: str) -> str:
    """How farthing writes the provider that a feed names."""
    return _names().get(text.lower(), text)


class _Parser:
    """Cells to offers. What many rows share (GPUs, dates, terms) is looked up once."""

    def __init__(self, today: date, is_strict: bool) -> None:
        self._today = today
        self._is_strict = is_strict
        self._dates: dict[str, date] = {}

    def offer(self, line: _Line) -> Offer | None:
        """The offer of a line; None where a feed names a GPU that is not known. Raises with the
        column as `where`.
        """
        if not line.provider:
            raise InputError("there is no provider", where="provider", to_do="name who sells it")
        if line.unit not in UNITS:
            to_do = f"{did_you_mean(line.unit, UNITS)}use one of {', '.join(UNITS)}"
            raise InputError(f"no unit `{line.unit}` is known", where="unit", to_do=to_do)
        if line.kind not in KINDS:
            to_do = f"use one of {', '.join(KINDS)}"
            raise InputError(f"no kind `{line.kind}` is known", where="kind", to_do=to_do)
        is_managed = line.unit in ("run", "million_tokens")
        gpu = ""
        if line.gpu or not is_managed:
            known = gpu_named(line.gpu, line.memory_gib)
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
            raise InputError(what, where="n_gpus", to_do="write how many GPUs the price is for")
        return int(number)

    def _date(self, text: str) -> date:
        day = self._dates.get(text)
        if day is None:
            try:
                day = date.fromisoformat(text)
            except ValueError:
                what = f"{text!r} is not a date"
                raise InputError(what, where="date", to_do="write it as in 2026-11-21") from None
            if (
                day > self._today + timedelta(days=1) and self._is_strict
            ):  # a day later elsewhere on Earth
                what = f"{text} is after today ({self._today.isoformat()})"
                raise InputError(what, where="date", to_do="write the day the price was read")
            self._dates[text] = day
        return day


def _usd(text: str) -> float:
    try:
        usd = float(text.removeprefix("$"))
    except ValueError:
        usd = math.nan
    if not 0 < usd <= _LARGEST_USD:
        what = f"{text!r} is not a price in dollars above 0 and at most {_LARGEST_USD:,.0f}"
        raise InputError(what, where="usd", to_do="write dollars for one unit, as in 1.29")
    return usd


def _amount(text: str, column: str) -> float | None:
    if not text or text.lower() in ("nan", "none"):
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise InputError(
            f"{text!r} is not a number", where=column, to_do="write a number, or leave it empty"
        )
    return number
