"""Price files: the columns of farthing, of gpuhunt and of SkyPilot, row by row to offers."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Mapping
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

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
Cells = dict[str, str]  # a row of a file, by its header
Line = dict[str, Any]
"""What a row says in our columns, and `memory_gib` of one GPU where the file has it."""
_MISSING: Line = dict.fromkeys(COLUMNS, "") | {"kind": "on-demand", "unit": "machine_hour"}
# our columns in files of others
_GPUHUNT = {
    **{"instance": "instance_name", "region": "location", "usd": "price", "vcpus": "cpu"},
    **{"ram_gib": "memory", "n_gpus": "gpu_count", "gpu": "gpu_name"},
}
_SKYPILOT = {
    **{"instance": "InstanceType", "gpu": "AcceleratorName", "n_gpus": "AcceleratorCount"},
    **{"region": "Region", "zone": "AvailabilityZone", "vcpus": "vCPUs", "ram_gib": "MemoryGiB"},
}


def read_prices(
    path: Path,
    today: date,
    *,
    is_own: bool = False,
    is_feed: bool = False,
    content: bytes | None = None,
) -> tuple[tuple[Offer, ...], Mapping[str, int]]:
    """The offers of a price file, and the GPU names that are not known with their rows.

    In columns of our own in a file of one's own, GPUs must be known and offers be there once. A
    feed may have bad rows, up to a tenth. A price without a date counts as read `today`; a date may
    be one day later, which it is already in other time zones. `content`: what would be in the file.
    Raises `InputError` with file, line and column.
    """
    to_do = "name a CSV file of prices, in UTF-8"
    try:
        text = (path.read_bytes() if content is None else content).decode("utf-8-sig")
        first = text.partition("\n")[0]  # spreadsheets write other separators in some countries
        mark = next((mark for mark in ";\t" if mark in first and "," not in first), ",")
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True)
        return _read(rows, path, today, is_own=is_own, is_feed=is_feed)
    except OSError as error:
        what = (error.strerror or str(error)).lower()
        raise InputError(what, where=str(path), to_do=to_do) from None
    except UnicodeDecodeError:
        raise InputError("not text in UTF-8", where=str(path), to_do=to_do) from None
    except csv.Error as error:
        where = f"{path}:{rows.line_num}"
        raise InputError(f"not CSV: {error}", where=where, to_do=to_do) from None


def _read(
    rows: Any, path: Path, today: date, *, is_own: bool, is_feed: bool
) -> tuple[tuple[Offer, ...], Mapping[str, int]]:
    header = [name.strip() for name in next(rows, [])]
    lines_of = _layout_of(header, path)
    is_strict = is_own and lines_of is _own_lines
    named = [name for name in header if name]
    unknown = next((name for name in named if name not in COLUMNS or named.count(name) > 1), "")
    if is_strict and unknown:
        what, hint = "is not known", did_you_mean(unknown, COLUMNS)
        if unknown in COLUMNS:
            what, hint = "appears twice", ""
        to_do = f"{hint}take it out; known: {', '.join(COLUMNS)}"
        raise InputError(f"the column `{unknown}` {what}", where=f"{path}:1", to_do=to_do)
    offers: list[Offer] = []
    bad: list[InputError] = []
    skipped: dict[str, int] = {}
    seen: dict[tuple[object, ...], int] = {}
    for row in filter(None, rows):
        number, where = rows.line_num, f"{path}:{rows.line_num}"
        if len(row) != len(header):
            what = f"{plural(len(row), 'cell')} where the header has {len(header)}"
            to_do = "put cells with commas in quotes; write nothing for an empty cell"
            raise InputError(what, where=where, to_do=to_do)
        cells = dict(zip(header, map(str.strip, row), strict=True))
        for line in lines_of(cells, path):
            try:
                offer = _offer(_MISSING | line, today, is_strict)
            except InputError as error:
                where = f"{where}: {error.where}"
                bad.append(InputError(error.what, where=where, to_do=error.to_do))
                if is_feed:
                    continue
                raise bad[0] from None
            if offer is None:
                gib = line.get("memory_gib")
                name = line["gpu"] + ("" if gib is None else f" ({gib:.0f} GiB)")
                skipped[name] = skipped.get(name, 0) + 1
                continue
            first = seen.setdefault((*offer[:7], offer.unit), number)
            if first == number:
                offers.append(offer)
            elif is_strict:
                to_do = "keep one of the two, or give them different instances"
                raise InputError(f"the same offer as on line {first}", where=where, to_do=to_do)
    if len(bad) > len(offers) / 9:
        raise bad[0]
    if not offers:
        unknown = ", ".join(skipped)
        what = f"no GPU in it is known: {unknown}" if skipped else "there is no price in it"
        to_do = f"give it rows with the columns {', '.join(COLUMNS)}"
        raise InputError(what, where=str(path), to_do=to_do)
    return tuple(offers), MappingProxyType(skipped)


# ---- layouts ----


def _layout_of(header: list[str], path: Path) -> Callable[[Cells, Path], list[Line]]:
    own = ("provider", "gpu", "n_gpus", "usd")
    for needed, lines_of in (
        (own, _own_lines),
        (("instance_name", "location", "price", "gpu_count", "gpu_name", "spot"), _gpuhunt_lines),
        (("InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "Region"), _sky_lines),
    ):
        if {*needed} <= {*header}:
            return lines_of
    missing = ", ".join(name for name in own if name not in header)
    what = f"the header lacks {missing}" if header else "the file is empty"
    to_do = f"use the columns {', '.join(COLUMNS)} (those of gpuhunt and of SkyPilot are read too)"
    raise InputError(what, where=f"{path}:1", to_do=to_do)


def _own_lines(cells: Cells, path: Path) -> list[Line]:
    known = {name: cell for name, cell in cells.items() if cell and name in _MISSING}
    return [{"gpu": "", "source": path.name} | known]


def _gpuhunt_lines(cells: Cells, path: Path) -> list[Line]:
    if _is_none(cells["gpu_count"]):
        return []
    memory = cells.get("gpu_memory", "")
    return [
        {ours: cells.get(theirs, "") for ours, theirs in _GPUHUNT.items()}
        | {
            "provider": provider_name(cells.get("provider") or path.stem),
            "memory_gib": None if _is_none(memory) else _number(memory),
            "kind": "spot" if cells["spot"].lower() in ("true", "1") else "on-demand",
            "source": f"gpuhunt catalog {path.name}",
        }
    ]


def _sky_lines(cells: Cells, path: Path) -> list[Line]:
    """On demand and on spot. Google's hosts are priced apart from their GPUs there."""
    line: Line = {ours: cells.get(theirs, "") for ours, theirs in _SKYPILOT.items()}
    if _is_none(line["n_gpus"]) or not line["instance"]:
        return []
    line |= {
        "provider": provider_name(path.parent.name if path.stem == "vms" else path.stem),
        "memory_gib": _skypilot_memory(cells.get("GpuInfo", ""), line["n_gpus"], line["gpu"]),
        "source": f"SkyPilot catalog {path.parent.name}/{path.name}",
    }
    prices = {"on-demand": cells["Price"], "spot": cells.get("SpotPrice", "")}
    return [line | {"kind": kind, "usd": usd} for kind, usd in prices.items() if not _is_none(usd)]


def _is_none(text: str) -> bool:
    """Whether a cell of a feed says that there is none: no GPU, not sold on spot."""
    return text.lower() in ("", "nan", "none") or re.fullmatch(r"0*\.?0*", text) is not None


@cache
def _skypilot_memory(info: str, n_gpus: str, name: str) -> float | None:
    """GiB of one GPU. Some clouds write the size of all GPUs, some write GB under a key in MiB."""
    match = re.search(r"'SizeInMiB': (\d+)", info)
    if match is None or int(match[1]) == 0:
        return None
    size = int(match[1])
    gib = size / 1024 if size > 1000 else float(size)
    for each in (gib, gib / max(1.0, _number(n_gpus))):
        if gpu_named(name, each) is not None:
            return each
    return gib


@cache
def _names() -> dict[str, str]:
    return {row["feed"]: row["name"] for row in facts("provider_names")}


def provider_name(text: str) -> str:
    return _names().get(text.lower(), text)


# ---- cells ----


def _offer(line: Line, today: date, is_strict: bool) -> Offer | None:
    """None where a feed names a GPU that is not known. Raises with the column as `where`."""
    unit, kind, gpu = line["unit"], line["kind"], line["gpu"]
    if not line["provider"]:
        raise InputError("there is no provider", where="provider", to_do="name who sells it")
    for column, word, known in (("unit", unit, UNITS), ("kind", kind, KINDS)):
        if word not in known:
            to_do = f"{did_you_mean(word, known)}use one of {', '.join(known)}"
            raise InputError(f"no {column} `{word}` is known", where=column, to_do=to_do)
    is_managed = unit in ("run", "million_tokens")
    if gpu or not is_managed:
        asked = gpu, line.get("memory_gib")
        found = find_gpu(*asked) if is_strict else gpu_named(*asked)
        if found is None:
            return None
        gpu = found.name
    return Offer(
        provider=line["provider"],
        instance=line["instance"],
        gpu=gpu,
        n_gpus=_count(line["n_gpus"], 0 if is_managed else 1),
        region=line["region"],
        zone=line["zone"],
        is_spot=kind == "spot",
        unit=unit,
        usd=_usd(line["usd"]),
        source=line["source"],
        date=_date(line["date"], today, is_strict) if line["date"] else today,
        billing=billing_of(line["provider"]),
        vcpus=_amount(line["vcpus"], "vcpus"),
        ram_gib=_amount(line["ram_gib"], "ram_gib"),
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _count(text: str, least: int) -> int:
    number = _number(text or "0")
    if not (least <= number <= 1024 and number.is_integer()):
        what = f"{text!r} is not a whole number from {least} to 1024"
        raise InputError(what, where="n_gpus", to_do="write how many GPUs the price is for")
    return int(number)


def _date(text: str, today: date, is_strict: bool) -> date:
    try:
        day = date.fromisoformat(text)
    except ValueError:
        to_do = "write it as in 2026-11-21"
        raise InputError(f"{text!r} is not a date", where="date", to_do=to_do) from None
    if is_strict and day > today + timedelta(days=1):  # a day later elsewhere on Earth
        what = f"{text} is after today ({today.isoformat()})"
        raise InputError(what, where="date", to_do="write the day the price was read")
    return day


def _usd(text: str) -> float:
    usd = _number(text.removeprefix("$"))
    if not 0 < usd <= _LARGEST_USD:
        what = f"{text!r} is not a price in dollars above 0 and at most {_LARGEST_USD:,.0f}"
        raise InputError(what, where="usd", to_do="write dollars for one unit, as in 1.29")
    return usd


def _amount(text: str, column: str) -> float | None:
    if text.lower() in ("", "nan", "none"):
        return None
    number = _number(text)
    if not 0 <= number < math.inf:
        to_do = "write a number, or leave it empty"
        raise InputError(f"{text!r} is not a number", where=column, to_do=to_do)
    return number
