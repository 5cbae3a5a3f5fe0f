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


_OWN = [
    *("bills/*", "commits/*", "data/????????-*"),
    *("inputs/sha256-*", "launch/*", "trials/*", "writers/*"),
]
"""The keys of a run in its store, which may hold other data beside them."""


def _removal_of(store: str) -> str:
    """The command that takes a run out of its store; empty for a folder, which nobody bills by
    itself.
    """
    scheme, _, path = store.rstrip("/").partition("://")
    bucket, _, prefix = path.partition("/")
    below = f"{prefix}/" if prefix else ""
    if scheme == "s3":
        filters = [word for key in _OWN for word in ("--include", key)]
        return shlex.join(["aws", "s3", "rm", "--recursive", store, "--exclude", "*", *filters])
    if scheme == "gs":
        keys = [f"gs://{bucket}/{below}{key}" for key in _OWN]
        return shlex.join(["gcloud", "storage", "rm", "--recursive", "--continue-on-error", *keys])
    if scheme == "az":
        keys = [f"{below}{key}" for key in _OWN]
        remove = ["az", "storage", "blob", "delete-batch", "--source", bucket, "--pattern"]
        return f'for key in {shlex.join(keys)}; do {shlex.join(remove)} "$key"; done'
    return ""
