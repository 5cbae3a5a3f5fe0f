"""The model of a run and what it began with, on the same held-out examples in the same batches, side by side.

What was measured is kept in the run folder (`evaluation.json`) as soon as one of the two is done: a call that is interrupted
goes on with the other. Refuses to mix figures of different examples, models or precisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from farthing.after.held_out import HeldOut
from farthing.durability.files import Damaged, Json
from farthing.durability.run_folder import EVALUATION, keep, kept
from farthing.errors import UserMistake
from farthing.export.folders import trained_model, untrained_model, write_card
from farthing.metrics import Metrics
from farthing.report.receipt import build_receipt
from farthing.tasks.registry import task_of

Progress = Callable[[str, int, int], None]
SIDES = ("base", "tuned")


def evaluate_run(
    run: Path, held_out: HeldOut, *, with_base: bool, trust_remote_code: bool = False, progress: Progress
) -> Json:
    """Metrics of `tuned`, of `base` where asked for, and what each point of gain has cost; kept beside the run."""
    numerics, job = held_out.numerics(), held_out.job
    receipt = build_receipt(run)
    subject = {
        "examples_sha256": held_out.sha256,
        "examples": held_out.what,
        "n_examples": len(held_out.indices),
        "exported_step": receipt.exported_step,
        "precision": numerics.name,
    }
    found = _earlier(run, subject)
    makers = {"base": untrained_model, "tuned": trained_model}
    for side in SIDES[0 if with_base else 1 :]:
        if side in found:
            continue
        _refuse_past_cap(job.limits.max_usd, receipt.usd + found.get("usd", 0.0))
        started_s = time.monotonic()
        model = makers[side](run, numerics.base_dtype, trust_remote_code=trust_remote_code)
        metrics = held_out.measure(
            model, numerics, generates=True, emit=lambda done, total, side=side: progress(side, done, total)
        )
        found[side] = metrics
        found["usd"] = found.get("usd", 0.0) + (time.monotonic() - started_s) / 3600 * job.usd_per_hour
        found["gains"] = _gains(found, receipt.usd, job.task)
        keep(run / EVALUATION, {"kind": "farthing evaluation", **subject, **found})
    write_card(run, build_receipt(run))
    return {"run": str(run), **subject, **found}


def _refuse_past_cap(cap_usd: float | None, spent_usd: float) -> None:
    if cap_usd is not None and spent_usd >= cap_usd:
        raise UserMistake(
            f"the run and its evaluation have cost {spent_usd:.4f} dollars, all that its job allows",
            where="limits.max_usd",
            to_do="raise it in the job and run `farthing train` once more, or export the model and measure it elsewhere",
        )


def _earlier(run: Path, subject: Mapping[str, object]) -> Json:
    """What an earlier call has measured of the same subject."""
    try:
        values = kept(run / EVALUATION) or {}
    except Damaged:
        return {}
    is_same = all(values.get(key) == value for key, value in subject.items())
    return {key: values[key] for key in (*SIDES, "usd", "gains") if key in values} if is_same else {}


def _gains(found: Mapping[str, Metrics], usd: float, task: str) -> dict[str, dict[str, float | None]]:
    """By metric: what the run has gained on its base, and the dollars for each point: a hundredth of it."""
    better = task_of(task).metrics
    gains: dict[str, dict[str, float | None]] = {}
    for name, value in found.get("tuned", {}).items():
        before = found.get("base", {}).get(name)
        if name in better and isinstance(value, float) and isinstance(before, float):
            gain = (value - before) * (1 if better[name] else -1)
            gains[name] = {"gain": gain, "usd_per_point": usd / (100 * gain) if gain > 0 and usd > 0 else None}
    return gains
