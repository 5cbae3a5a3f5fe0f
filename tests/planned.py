"""Jobs, machines with their offers, and what the planner decides for them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from farthing.config.job import Job
from farthing.data.lengths import Lengths, from_arrays
from farthing.models.model_config import known_config
from farthing.models.shapes import Shape, read_shape
from farthing.planner.decide import decide as decide_offered
from farthing.planner.inputs import PlanOptions, Study, study_job
from farthing.planner.machines import machine_of
from farthing.planner.search import Refusal
from farthing.planner.software import Torch
from farthing.planner.types import Answer, JobSpec, Machine, OfferPlan, Rejected
from farthing.prices.gpus import gpus
from farthing.prices.offers import Offer
from offers import TODAY, offer_of

H = 3600.0


@cache
def shape_of(name: str) -> Shape:
    """A known model."""
    return read_shape(known_config(name))


def lengths_of(n: int = 20_000, longest: int = 1024) -> Lengths:
    """Lengths around a quarter of the longest."""
    drawn = np.random.default_rng(0).lognormal(np.log(longest / 5), 0.6, min(n, 4096))
    tokens = np.clip(drawn, 8, longest).astype(int)
    tokens[0] = longest
    return from_arrays(tokens, source="made", n_examples=n)


def wanted_of(model: str = "meta-llama/Llama-3.2-1B", **changes) -> JobSpec:
    """A job on a small model; `changes` are of `JobSpec`."""
    usual = {
        "shape": shape_of(model),
        "method": "lora",
        "optim": "adamw_torch_fused",
        "global_batch": 32,
        "lengths": lengths_of(),
        "n_epochs": 3.0,
    }
    return JobSpec(**(usual | changes))


class Place(NamedTuple):
    """A machine, and its offer."""

    machine: Machine | Refusal
    offer: Offer

    def but(self, **changes) -> Place:
        """With other fields of its machine."""
        return self._replace(machine=replace(self.machine, **changes))

    def sold(self, **changes) -> Place:
        """With other fields of its offer."""
        return self._replace(offer=self.offer._replace(**changes))

    def aged(self, days: int) -> Place:
        return self.sold(date=TODAY - timedelta(days=days))


def at(offer: Offer, wanted: JobSpec | None = None, torch: Torch | None = None) -> Place:
    """Where an offer would have a job run."""
    machine = machine_of(gpus()[offer.gpu], offer.n_gpus, wanted or wanted_of(), torch=torch)
    return Place(machine, offer)


def place(gpu: str, usd: float, n_gpus: int = 1, **more) -> Place:
    found = at(offer_of(gpu, usd, n_gpus, **more))
    assert isinstance(found.machine, Machine), found
    return found


def decide(wanted: JobSpec, places: list[Place], **more) -> Answer:
    """What is decided; places that were `sold` of one place share its machine."""
    machines = {id(one.machine): one.machine for one in places}.values()
    offered = [(of, [one.offer for one in places if one.machine is of]) for of in machines]
    return decide_offered(wanted, offered, today=TODAY, **more)


def only(wanted: JobSpec, *places: Place, **more) -> OfferPlan:
    """The one plan for these places."""
    answer = decide(wanted, list(places), **more)
    assert len(answer.plans) == 1, answer.rejected
    return answer.plans[0]


def refused(wanted: JobSpec, *places: Place, **more) -> Rejected:
    """The one rejected offer of these places."""
    answer = decide(wanted, list(places), **more)
    assert not answer.plans
    assert len(answer.rejected) == 1
    return answer.rejected[0]


NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
OWN = "RTX 4090:1600usd:0.45kW"


def job_of(folder: Path, **keys) -> Job:
    values = {
        "task": "causal-lm",
        "model": "meta-llama/Llama-3.1-8B",
        "data": "rows.jsonl",
        "method": "lora",
        "output_dir": "run",
        "cache_dir": str(folder),
    }
    return Job.model_validate(values | keys)


def ask(folder: Path, job=None, **wishes) -> Study:
    """The answer for 10,000 examples of 400 tokens on every offer."""
    wanted = {"n_examples": 10_000, "mean_tokens": 400.0, "is_local": False}
    return study_job(job_of(folder, **(job or {})), PlanOptions(**(wanted | wishes)), now=NOW)
