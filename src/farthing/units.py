"""Bytes, seconds and dollars: parse what people write ("$5", "3h"), print what people read.

Inside farthing a quantity is a plain number whose name carries its unit: `_bytes`, `_s`, `_usd`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

_SECONDS = {
    "ms": 0.001,
    "s": 1.0,
    "sec": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "hr": 3600.0,
    "d": 86400.0,
}


def _split(text: str, what: str) -> tuple[float, str]:
    match = isinstance(text, str) and re.fullmatch(
        r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*", text
    )
    if not match:
        raise ValueError(f"{text!r} is not {what}")
    return float(match[1]), match[2].lower()


def parse_in(text: str, units: Mapping[str, float], what: str) -> float:
    """A number in one of these units, by how many of it make one: of `"450W"` 1,000."""
    number, unit = _split(text, what)
    if unit not in units:
        raise ValueError(f"{text!r} is not {what}")
    return number / units[unit]


def parse_usd(value: str | float) -> float:
    """Dollars from `5`, `"5"`, `"$5"` or `"5 usd"`."""
    if isinstance(value, int | float):
        return float(value)
    number, unit = _split(
        value.strip().removeprefix("$") if isinstance(value, str) else value,
        'an amount of dollars such as "$5"',
    )
    if unit not in ("", "usd", "dollars"):
        raise ValueError(f"{value!r}: only US dollars are understood")
    return number


def parse_hours(value: str | float) -> float:
    """Hours from `3` (hours) or `"90min"`, `"3h"`, `"1d"`."""
    if isinstance(value, int | float):
        return float(value)
    number, unit = _split(value, 'a duration such as "90min", "3h" or "2d"')
    if unit == "":
        return number
    if unit not in _SECONDS:
        raise ValueError(f'{value!r}: use one of {", ".join(_SECONDS)}, as in "3h"')
    return number * _SECONDS[unit] / 3600


def parse_share(value: str) -> float:
    """A share of 1 from `0.5` or `"50%"`; from 0 to below 1."""
    text = value.strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ValueError(f'{value!r} is not a share such as "50%" or "0.5"')
    return share


def said_apart(a: float, b: float, say: Callable[[float], str], unit: str) -> tuple[str, str]:
    """Two figures as texts that differ where the figures do; `unit` has `{}` for a number with as
    many digits as it takes.
    """
    if a == b or say(a) != say(b):
        return say(a), say(b)
    for n_digits in range(2, 12):
        one, other = (unit.format(f"{value:,.{n_digits}f}") for value in (a, b))
        if one != other:
            return one, other
    return say(a), say(b)


def say_usd(usd: float | None) -> str:
    """`$12.34`, with more digits when the amount is small, so that a cent is never shown as
    nothing.
    """
    if usd is None:
        return "unknown"
    if usd == 0 or abs(usd) >= 1:
        return f"${usd:,.2f}"
    whole, _, decimals = (f"{usd:.4f}" if abs(usd) >= 0.001 else f"{usd:.6f}").partition(".")
    return f"${whole}.{decimals.rstrip('0').ljust(2, '0')}"


def digits_of(total_usd: float) -> Callable[[float], str]:
    """How to print a sum of dollars and its parts below each other: with the digits that show a
    thousandth of it.
    """
    digits = min(8, max(2, 3 - math.floor(math.log10(abs(total_usd) or 1))))
    return lambda usd: f"${usd:,.{digits}f}"


def say_seconds(seconds: float | None) -> str:
    """`0.4 s`, `42 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds is None:
        return "unknown"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def say_bytes(n_bytes: float | None) -> str:
    """GiB, MiB or KiB, the units of `nvidia-smi` and of torch's own memory figures."""
    if n_bytes is None:
        return "unknown"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n_bytes) >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes:.0f} B"


def plural(n: int, word: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{n:,} {word}" if n == 1 else f"{n:,} {word}s"


def say_count(n: float | None) -> str:
    """`12`, `3.4 k`, `22.7 M`, `8.0 B`."""
    if n is None:
        return "unknown"
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(n) >= size:
            return f"{n / (1e3 if unit == 'k' else size):.1f} {unit}"
    return f"{n:,.0f}"
