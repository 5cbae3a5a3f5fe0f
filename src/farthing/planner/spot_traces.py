"""Traces of spot capacity -> how long it lasts in each zone, for the planner.

A trace is a JSON file {"metadata": {"gap_seconds": g}, "data": [instances available, ...]}, as in
the public traces of Wu et al. (NSDI 2024); its name says zone and GPU: `us-east-1a_v100_1.json`,
the last number being the GPUs of an instance.

Refuses to decide: `spot` reckons with what is found here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from farthing.errors import InputError
from farthing.planner.spot import Interruptions, Now, drawn_together, fit, prior
from farthing.planner.uptime import spells_of
from farthing.prices.gpus import find_gpu
from farthing.prices.offers import Offer
from farthing.units import plural

RECENT_S = 3600.0  # a trace that ends no longer ago says what a zone is like now
HALF_LIFE_S = (
    2 * 86400.0
)  # capacity drifts: what is two days older counts half. These two had the least error within the
SHARE = 0.4  # first halves of nine zones; so far of the way a zone is moved to the mean of all


@dataclass(frozen=True)
class Trace:
    """Instances available in one zone, one number per `gap_s`."""

    name: str
    gap_s: int
    available: tuple[int, ...]
    until: datetime | None = None
    """When it ends, where it says so (`metadata.until`)."""

    def state(self, at: int | None = None) -> Now:
        """What the zone is like at the end, or at place `at` of the trace."""
        is_up = np.asarray(self.available[: None if at is None else at + 1]) > 0
        changes = np.flatnonzero(np.diff(is_up))
        n_alike = len(is_up) - (int(changes[-1]) + 1 if len(changes) else 0)
        return Now(bool(is_up[-1]), (n_alike - 1) * float(self.gap_s))

    def halves(self) -> tuple[Trace, Trace]:
        """What a prediction may see, and what it is judged on."""
        middle = len(self.available) // 2
        first, second = self.available[:middle], self.available[middle:]
        return Trace(self.name, self.gap_s, first), Trace(self.name, self.gap_s, second)

    @property
    def zone(self) -> str:
        """What its name begins with, up to the GPU: us-east-1a."""
        return Path(self.name).name.split("_")[0].lower()

    @property
    def gpu(self) -> str:
        """The GPU that its name names, by the catalog; empty where it names none."""
        parts = Path(self.name).name.split("_")
        try:
            return find_gpu(parts[1]).name if len(parts) > 1 else ""
        except InputError:
            return ""

    @property
    def n_gpus(self) -> int:
        """GPUs of an instance: the number that its name ends with, 1 without one."""
        found = re.search(r"_(\d+)$", Path(self.name).name)
        return max(1, int(found[1])) if found else 1


def read_traces(folder: Path) -> list[Trace]:
    """Every trace under a folder, by path. Raises `InputError` for a folder without any, or with a
    broken one.
    """
    if not folder.is_dir():
        raise InputError("no such folder", where=str(folder), to_do="name a folder of JSON traces")
    traces = []
    for path in sorted(folder.rglob("*.json")):
        try:
            content: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(
                "not a trace: no JSON", where=str(path), to_do="correct it or remove it"
            ) from error
        if (
            not isinstance(content, dict)
            or "data" not in content
            or "gap_seconds" not in content.get("metadata", {})
        ):
            continue
        gap_s, data = content["metadata"]["gap_seconds"], content["data"]
        is_whole = (
            isinstance(data, list) and data and all(isinstance(n, int) and n >= 0 for n in data)
        )
        if not is_whole or not isinstance(gap_s, int | float) or gap_s <= 0:
            to_do = "data is a list of whole numbers, gap_seconds a number above 0"
            raise InputError("a trace that can't be read", where=str(path), to_do=to_do)
        until = _moment(content["metadata"].get("until"), path)
        traces.append(
            Trace(str(path.relative_to(folder).with_suffix("")), int(gap_s), tuple(data), until)
        )
    if not traces:
        raise InputError(
            "no traces",
            where=str(folder),
            to_do='each is {"metadata": {"gap_seconds": 60}, "data": [1, 0, ...]}',
        )
    return traces


def _moment(text: Any, path: Path) -> datetime | None:
    try:
        return None if text is None else datetime.fromisoformat(text).astimezone()
    except (TypeError, ValueError):
        what = f"metadata.until is {text!r}"
        raise InputError(
            what, where=str(path), to_do="an ISO time, such as 2026-11-22T10:00:00+00:00"
        ) from None


def hazards(
    traces: list[Trace], now: datetime | None = None
) -> tuple[Callable[[Offer], Interruptions], str]:
    """The law of an offer's spot capacity, and words on it: its zone's or region's where traced,
    else the prior.

    A trace that ends within `RECENT_S` of `now` also says what its zone is like at the moment:
    chances begin with that.

    A zone of another GPU, or of other nodes, says something only after scaling by node size; of
    another GPU, nothing.
    """
    by_gpu: dict[tuple[str, int], list[Trace]] = {}
    for trace in traces:
        if trace.gpu and max(trace.available) > 0:
            by_gpu.setdefault((trace.gpu, trace.n_gpus), []).append(trace)
    known: dict[tuple[str, str, int], Interruptions] = {}
    n_recent = 0
    for (gpu, n_gpus), group in by_gpu.items():
        zones = [
            fit(*spells_of(trace.available, trace.gap_s), half_life_s=HALF_LIFE_S)
            for trace in group
        ]
        for trace, zone in zip(group, drawn_together(zones, SHARE), strict=True):
            is_recent = (
                now is not None
                and trace.until
                and abs((now - trace.until).total_seconds()) <= RECENT_S
            )
            n_recent += bool(is_recent)
            known[trace.zone, _plain(gpu), n_gpus] = (
                replace(zone, now=trace.state()) if is_recent else zone
            )

    def of(offer: Offer) -> Interruptions:
        kind = _plain(offer.gpu)
        sizes = sorted(
            {n for _, gpu, n in known if gpu == kind}, key=lambda n: abs(n - offer.n_gpus)
        )
        for n in sizes:
            law = known.get((offer.zone.lower(), kind, n)) or known.get(
                (offer.region.lower(), kind, n)
            )
            if (
                law is None and offer.region and not offer.zone
            ):  # any zone of the region will do: the middle one
                region = offer.region.lower()
                there = [key for key in known if key[1:] == (kind, n) and key[0].startswith(region)]
                laws = [known[key] for key in there]
                law = sorted(laws, key=lambda one: one.up.mean_s)[len(laws) // 2] if laws else None
            if law is not None:
                return law if n == offer.n_gpus else law.for_node(offer.n_gpus, n)
        return prior(offer.n_gpus)

    words = (
        f"spot capacity from {plural(len(known), 'trace')} where zone and GPU are traced, else from"
        " the prior"
    )
    if n_recent:
        words += f"; {plural(n_recent, 'zone')} as it is now"
    return of, words


def _plain(gpu: str) -> str:
    """V100-16GB and V100-32GB are taken away alike."""
    return gpu.split("-")[0]
