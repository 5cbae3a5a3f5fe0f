"""What costs money though no process of the run is alive."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from farthing.storage.files import Json
from farthing.units import say_bytes, say_usd


def still_billed(job: Json, machines: Sequence[Json], n_bytes: int | None = None) -> list[Json]:
    """`what` and `ends` of each thing; `n_bytes` of the store, where they were counted."""
    found = [
        (f"{row['name']}: {say_usd(row['usd_per_hour'])} an hour", "farthing launch stop JOB")
        for row in machines
        if row["state"] != "gone"
    ]
    if machines:
        from farthing.launch.registry import TARGETS  # not needed by a run at home

        known = [TARGETS.get(row["target"]) for row in machines]
        found += dict.fromkeys(each.keeps_billing for each in known if each and each.keeps_billing)
    elif price := (job.get("where") or {}).get("usd_per_hour"):
        ends = "its provider, where you rented it"
        found.append((f"the machine that it ran on: {say_usd(price)} an hour", ends))
    store = job.get("output_store") or ""
    if n_bytes != 0 and (ends := _removal_of(store)):
        what = "objects" if n_bytes is None else say_bytes(n_bytes)
        found.append((f"{what} in {store}", f"{ends}, once you have the model"))
    return [{"what": what, "ends": ends} for what, ends in found]


def _removal_of(store: str) -> str:
    """The command that empties a store; empty for a folder, which nobody bills by itself."""
    scheme, _, path = store.partition("://")
    bucket, _, prefix = path.partition("/")
    return {
        "s3": f"aws s3 rm --recursive {shlex.quote(store)}",
        "gs": f"gcloud storage rm --recursive {shlex.quote(store)}",
        "az": f"az storage blob delete-batch --source {shlex.quote(bucket)} --pattern"
        f" {shlex.quote(f'{prefix}/*' if prefix else '*')}",
    }.get(scheme, "")
