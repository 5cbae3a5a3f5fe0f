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

from farthing.after.held_out import HeldOut
from farthing.config.job import Job
from farthing.errors import InputError
from farthing.export.folders import trained_model, untrained_model, write_card
from farthing.metrics import Metrics
from farthing.model.hardware import Numerics
from farthing.report.receipt import build_receipt
from farthing.run.folder import EVALUATION, STANDARD_TASKS, keep, kept
from farthing.storage.files import DamagedFileError, Json
from farthing.train.resolve import sha256_of_examples

Progress = Callable[[str, int, int], None]
"""(side, examples done, examples in all)"""


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
    """Whether greater is better, by metric. May be known only when they are measured."""
    kept_in: str
    """File of the run folder."""
    numerics: Numerics
    parts: Sequence[str] = ("",)
    n_examples: int | None = None


def on_examples(held_out: HeldOut) -> Measure:
    """Loss and the task's metrics on held-out examples, in one part."""
    spec = held_out.spec
    return Measure(
        spec.job,
        held_out.what,
        sha256_of_examples(held_out.examples),
        lambda model, part, progress: held_out.measure(model, generates=True, progress=progress),
        spec.objective.metrics,
        EVALUATION,
        spec.numerics,
        n_examples=len(held_out.examples),
    )


def evaluate_run(
    run: Path,
    by: Measure,
    *,
    with_base: bool,
    progress: Progress = lambda side, done, total: None,
) -> Json:
    """Figures of `tuned`, of `base` where asked for, and the dollars for each point of gain; kept
    beside the run.

    Each part is kept when it is done, and not measured again. Raises `InputError` where the run and
    its evaluations have cost what the job allows.
    """
    receipt, cap_usd = build_receipt(run), by.job.limits.max_usd
    subject = {
        "examples_sha256": by.sha256,
        "examples": by.what,
        "n_examples": by.n_examples,
        "exported_step": receipt.exported_step,
        "precision": by.numerics.name,
    }
    found = _kept(run / by.kept_in)
    if any(found.get(key) != value for key, value in subject.items()):
        found = {"done": [], "spent_usd": found.get("spent_usd", 0.0)}  # of other examples
    for side in ("base", "tuned")[0 if with_base else 1 :]:
        model = None
        for part in by.parts:
            if [side, part] in found["done"]:
                continue
            kept_of = (_kept(run / name) for name in (EVALUATION, STANDARD_TASKS))
            spent_usd = receipt.usd + sum(each.get("spent_usd", 0.0) for each in kept_of)
            if cap_usd is not None and spent_usd >= cap_usd:
                raise InputError(
                    f"the run and its evaluation have cost {spent_usd:.4f} dollars, all that its"
                    " job allows",
                    where="limits.max_usd",
                    to_do="raise it in the job and run `farthing train` once more",
                )
            started_s = time.monotonic()
            if model is None:
                make = trained_model if side == "tuned" else untrained_model
                trusts = by.job.model.trust_remote_code  # as the user does, who was asked
                model = make(run, by.numerics.base_dtype, trust_remote_code=trusts)
            figures = by.of_part(model, part, functools.partial(progress, side))
            found[side] = found.get(side, {}) | figures
            found["done"].append([side, part])
            usd = (time.monotonic() - started_s) / 3600 * by.job.usd_per_hour
            found |= {name: found.get(name, 0.0) + usd for name in ("usd", "spent_usd")}
            found["gains"] = found.get("gains", {}) | _gains(found, receipt.usd, by.better)
            keep(run / by.kept_in, {"kind": "farthing evaluation", **subject, **found})
    write_card(run, build_receipt(run))
    return {"run": str(run), **subject, **found}


def _kept(path: Path) -> Json:
    try:
        values = kept(path) or {}
    except DamagedFileError:
        return {}
    return {key: value for key, value in values.items() if key != "kind"}


def _gains(found: Json, usd: float, better: Mapping[str, bool]) -> Json:
    """By metric: the gain of the run on its base, and the dollars for each point, a hundredth."""
    gains: Json = {}
    for name, value in found.get("tuned", {}).items():
        before = found.get("base", {}).get(name)
        if name in better and isinstance(value, float) and isinstance(before, float):
            gain = (value - before) * (1 if better[name] else -1)
            usd_per_point = usd / (100 * gain) if gain > 0 and usd > 0 else None
            gains[name] = {"gain": gain, "usd_per_point": usd_per_point}
    return gains
