"""The model of a run and what it began with, on the same held-out examples or standard tasks, side
by side.

What was measured is kept in the run folder (`evaluation.json`, `standard_tasks.json`) as soon as a
part is done: a call that is interrupted continues with the others.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from farthing.after.held_out import HeldOut
from farthing.config.job import Job
from farthing.errors import InputError
from farthing.export.folders import trained_model, untrained_model, write_card
from farthing.metrics import Metrics
from farthing.objectives.registry import objective_of
from farthing.report.receipt import build_receipt
from farthing.run.folder import EVALUATION, STANDARD_TASKS, keep, kept
from farthing.storage.files import DamagedFileError, Json

Progress = Callable[[str, int, int], None]
SIDES = ("base", "tuned")


@dataclass(frozen=True)
class Measure:
    """What a model is measured by, in parts that are kept as soon as each is done."""

    job: Job
    what: str
    """In words."""
    sha256: str
    """Identity of what is measured."""
    of_part: Callable[[Any, str, Callable[[int, int], None]], Metrics]
    """(model, part, progress) -> figures by name"""
    better: Mapping[str, bool]
    """Metrics that have a better and a worse: whether greater is better. May be known only when
    they are measured.
    """
    kept_in: str
    """File of the run folder."""
    parts: Sequence[str] = ("",)
    n_examples: int | None = None
    dtype: torch.dtype = torch.float32
    """That the model is loaded in."""
    precision: str = "fp32"


def on_examples(held_out: HeldOut) -> Measure:
    """Loss and the task's metrics on held-out examples, in one part."""
    numerics, better = held_out.numerics(), objective_of(held_out.job.task).metrics

    def measured(model: Any, part: str, progress: Callable[[int, int], None]) -> Metrics:
        return held_out.measure(model, numerics, generates=True, emit=progress)

    return Measure(
        held_out.job,
        held_out.what,
        held_out.sha256,
        measured,
        better,
        EVALUATION,
        n_examples=len(held_out.indices),
        dtype=numerics.base_dtype,
        precision=numerics.name,
    )


def evaluate_run(
    run: Path, by: Measure, *, with_base: bool, trust_remote_code: bool = False, progress: Progress
) -> Json:
    """Figures of `tuned`, of `base` where asked for, and what each point of gain has cost; kept
    beside the run.

    Each part is kept when it is done, and not measured again. Raises `InputError` where the run and
    what was measured of it have cost what the job allows.
    """
    receipt = build_receipt(run)
    subject = {
        "examples_sha256": by.sha256,
        "examples": by.what,
        "n_examples": by.n_examples,
        "exported_step": receipt.exported_step,
        "precision": by.precision,
    }
    found = _earlier(run / by.kept_in, subject)
    makers = {"base": untrained_model, "tuned": trained_model}
    for side in SIDES[0 if with_base else 1 :]:
        model = None
        for part in by.parts:
            if [side, part] in found["done"]:
                continue
            _refuse_past_cap(by.job.limits.max_usd, receipt.usd + _measured_usd(run))
            started_s = time.monotonic()
            if model is None:
                model = makers[side](run, by.dtype, trust_remote_code=trust_remote_code)
            figures = by.of_part(model, part, functools.partial(progress, side))
            found[side] = found.get(side, {}) | figures
            found["done"].append([side, part])
            usd = (time.monotonic() - started_s) / 3600 * by.job.usd_per_hour
            found |= {name: found.get(name, 0.0) + usd for name in ("usd", "spent_usd")}
            found["gains"] = found.get("gains", {}) | _gains(found, receipt.usd, by.better)
            keep(run / by.kept_in, {"kind": "farthing evaluation", **subject, **found})
    write_card(run, build_receipt(run))
    return {"run": str(run), **subject, **found}


def _refuse_past_cap(cap_usd: float | None, spent_usd: float) -> None:
    if cap_usd is not None and spent_usd >= cap_usd:
        raise InputError(
            f"the run and its evaluation have cost {spent_usd:.4f} dollars, all that its job"
            " allows",
            where="limits.max_usd",
            to_do=(
                "raise it in the job and run `farthing train` once more, or export the model and"
                " measure it elsewhere"
            ),
        )


def _measured_usd(run: Path) -> float:
    """Dollars of everything that was measured of the run, on examples and tasks of earlier calls
    too.
    """
    return sum(_kept(run / name).get("spent_usd", 0.0) for name in (EVALUATION, STANDARD_TASKS))


def _kept(path: Path) -> Json:
    try:
        return kept(path) or {}
    except DamagedFileError:
        return {}


def _earlier(path: Path, subject: Mapping[str, object]) -> Json:
    """What an earlier call has measured of the same subject, and which parts of it."""
    values = _kept(path)
    if any(values.get(key) != value for key, value in subject.items()):
        return {"done": [], "spent_usd": values.get("spent_usd", 0.0)}
    return {key: value for key, value in values.items() if key not in ("kind", *subject)}


def _gains(
    found: Json, usd: float, better: Mapping[str, bool]
) -> dict[str, dict[str, float | None]]:
    """By metric: what the run has gained on its base, and the dollars for each point: a hundredth
    of it.
    """
    gains: dict[str, dict[str, float | None]] = {}
    for name, value in found.get("tuned", {}).items():
        before = found.get("base", {}).get(name)
        if name in better and isinstance(value, float) and isinstance(before, float):
            gain = (value - before) * (1 if better[name] else -1)
            gains[name] = {
                "gain": gain,
                "usd_per_point": usd / (100 * gain) if gain > 0 and usd > 0 else None,
            }
    return gains
