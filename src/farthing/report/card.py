"""The model card: what the model was made from, how well it does, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farthing.config.job import Job
from farthing.objectives.registry import objective_of
from farthing.report.html import environment
from farthing.report.receipt_report import classes_table
from farthing.report.receipt_types import RunReceipt
from farthing.storage.files import Json
from farthing.units import digits_of


def model_card(
    receipt: RunReceipt, *, is_merged: bool, step: int | None = None, in_form: Sequence[str] = ()
) -> str:
    """Markdown with the metadata block that the Hub reads. Local paths are shortened to their last
    part.

    `step`: whose weights these are, where the receipt does not know it yet. `in_form`: the lines of
    a section on a form that transformers does not have it in.
    """
    job, metrics = Job.model_validate(receipt.job), receipt.metrics or {}
    base, task = job.model.model_name_or_path, objective_of(job.task)
    is_local, dollars = Path(base).is_absolute(), digits_of(receipt.usd)
    spans = [
        (s.what, f"{s.seconds:.1f}", *([dollars(s.usd)] if receipt.usd_is_known else []))
        for s in receipt.spans
        if s.seconds >= 0.005
    ]
    values: dict[str, Any] = {
        **{"receipt": receipt, "job": job, "task": task, "base": base, "is_local": is_local},
        "step": step or receipt.exported_step or receipt.steps,
        "name": Path(receipt.run).name,
        "shown": Path(base).name if is_local else base,
        "data": [Path(name).name for name in job.data.train],
        "is_adapter": job.method.name != "full" and not is_merged,
        "machine": receipt.machine or {},
        "numbers": _numbers(metrics).items(),
        "n_examples": metrics.get("n_examples", 0),
        "classes": classes_table(metrics),
        "comparisons": [
            ("Before and after", receipt.evaluation),
            ("Before and after, by standard tasks", receipt.standard_tasks),
        ],
        "figures": _numbers,
        "in_form": in_form,
        "cost": dollars(receipt.usd) if receipt.usd_is_known else "no price was given",
        "spans": spans,
    }
    return environment().get_template("card.md").render(values)


def _numbers(metrics: Json) -> dict[str, str]:
    return {name: f"{value:.4f}" for name, value in metrics.items() if isinstance(value, float)}
