"""What serving the trained model would cost: 1,000 requests a day, the cheapest way.

A request is as long as the run's examples: what was learned is written, the rest is read.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path

from farthing.clock import today
from farthing.config.job import Job
from farthing.errors import InputError
from farthing.models.shapes import Shape, read_shape
from farthing.objectives.registry import objective_of
from farthing.planner.serving import Served, Traffic, serve
from farthing.prices.catalog import Catalog, read_catalog
from farthing.report.plan_types import machine_name, view_of
from farthing.report.training_log import TrainingLog
from farthing.run.folder import MODEL, RECEIPT, kept
from farthing.storage.files import DamagedFileError, Json, read_json

REQUESTS_PER_DAY = 1000.0
CONFIGS = ("model_config.json", "config.json")  # the whole model's


@dataclass(frozen=True)
class Serving:
    usd_per_month: float
    machine: str
    provider: str
    precision: str
    is_always_on: bool  # else it goes to zero between answers
    requests_per_day: float
    input_tokens: float
    output_tokens: float
    price_date: str


def serving_of(folder: Path, values: Json | None, log: TrainingLog) -> Serving | None:
    """The cheapest way for the model of a finished run, by its job; None where it is not known."""
    with contextlib.suppress(OSError, ValueError, InputError, StopIteration):
        job = Job.model_validate(values)  # ValueError: of another version of farthing
        traffic = traffic_of(job, log)
        if traffic is None or not objective_of(job.task).scores_tokens:
            return None
        if (known := _known(folder, traffic)) is not None:
            return known
        path = next(path for name in CONFIGS if (path := folder / MODEL / name).exists())
        best = _cheapest(read_shape(read_json(path), job.task), traffic)
        if best is not None:
            on, zero = best.always_on_usd, best.to_zero_usd()
            return view_of(
                Serving,
                *(best.server, best.offer, traffic),
                usd_per_month=min(on, zero),
                machine=machine_name(best.server.n_gpus, best.server.gpu.name),
                is_always_on=on <= zero,
                price_date=best.offer.date.isoformat(),
            )
    return None


def _known(folder: Path, traffic: Traffic) -> Serving | None:
    """What the run's own receipt says of that traffic: at the prices of its day, not of today."""
    with contextlib.suppress(DamagedFileError, KeyError, TypeError):
        found = Serving(**(kept(folder / RECEIPT) or {})["serving"])
        asked = traffic.input_tokens, traffic.output_tokens
        if (found.input_tokens, found.output_tokens) == asked:
            return found
    return None


def traffic_of(job: Job, log: TrainingLog) -> Traffic | None:
    """Requests as long as the run's examples; None before a step was taken."""
    n_examples = log.step * job.global_batch_size
    if not n_examples or not log.n_targets:
        return None
    n_out = max(1.0, log.n_targets / n_examples)
    return Traffic(REQUESTS_PER_DAY, max(1.0, log.n_tokens / n_examples - n_out), n_out)


@functools.lru_cache(maxsize=16)  # a run writes its receipt twice, and asks all offers each time
def _cheapest(shape: Shape, traffic: Traffic) -> Served | None:
    return next(iter(serve(shape, traffic, list(_prices().offers))[0]), None)


@functools.lru_cache(maxsize=1)
def _prices() -> Catalog:
    return read_catalog(None, today())
