"""What services that fine-tune for you would charge for a job: by the trained token, with the rules
that each counts by.

Prices are rows of `facts/managed.csv` with source and date. What is counted are the tokens of this
job's own tokenizer, a little off where the service has another.

Together counts rows x max length where packing is off, and the tokens of each validation
(docs.together.ai/docs/fine-tuning/pricing); it and Fireworks have no minimum charge that is
published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import date
from functools import cache
from typing import NamedTuple

from farthing.objectives.registry import objective_of
from farthing.planner.types import JobSpec
from farthing.tables import typed


class Service(NamedTuple):
    """A row of prices."""

    provider: str
    model: str
    """The one model it is for; empty: every model of its size."""
    method: str
    """lora, full, or closed: a model whose weights nobody gets."""
    over_billion: float
    usd_per_million_tokens: float
    """Of trained ones."""
    counts: str
    you_get: str
    afterwards: str
    ends: date | None
    """No new jobs from this day on."""
    source: str
    date: date
    upto_billion: float = math.inf
    usd_high: float = 0.0
    """Where it is a range; else 0."""


def say_size(service: Service) -> str:
    """The method and the sizes of models that a row is for, such as "LoRA up to 16B"."""
    method = "LoRA" if service.method == "lora" else service.method
    if service.upto_billion == math.inf:
        return f"{method} over {service.over_billion:g}B"
    begins = f"{service.over_billion:g}B to" if service.over_billion else "up to"
    return f"{method} {begins} {service.upto_billion:g}B"


@dataclass(frozen=True)
class Bill:
    """What a service would charge for a job."""

    service: Service
    n_tokens: float
    usd: float
    usd_high: float
    usd_unpacked: float | None
    """Where it counts rows x max length without packing."""


@cache
def services() -> tuple[Service, ...]:
    return tuple(typed("managed", Service))


def bills(wanted: JobSpec, task: str, model: str, max_length: int, today: date) -> list[Bill]:
    """What the services would charge for a job, cheapest first; none for a task that they do not
    have.

    `model` is a name on the Hub or a folder. A closed model is listed beside the others, as it is
    what one may have now.
    """
    if not objective_of(task).predicts_next:
        return []
    method, name = (
        "full" if wanted.method == "full" else "lora",
        model.rstrip("/").rpartition("/")[2].lower(),
    )
    billion = wanted.shape.n_parameters / 1e9
    found = []
    for service in services():
        fits = service.method in (method, "closed") and (
            service.ends is None or today < service.ends
        )
        if service.model and service.method != "closed":
            fits = fits and service.model.lower() == name
        elif not service.model:
            fits = fits and service.over_billion < billion <= service.upto_billion
        if fits:
            found.append(bill_of(service, wanted, max_length))
    return sorted(found, key=lambda bill: (bill.usd, bill.service.provider))


def bill_of(service: Service, wanted: JobSpec, max_length: int) -> Bill:
    """What a service would charge for a job whose rows it cuts or fills to `max_length` tokens."""
    lengths, n_epochs = wanted.lengths, _epochs(wanted)
    n_tokens, n_rows = lengths.n_tokens * n_epochs, lengths.n_examples * n_epochs
    evaluated = 0.0
    if service.counts == "with validation":
        evaluated = (
            wanted.eval_lengths.n_tokens * max(1.0, n_epochs) if wanted.eval_lengths else 0.0
        )
    million, usd = (n_tokens + evaluated) / 1e6, service.usd_per_million_tokens
    unpacked = (
        (n_rows * max_length + evaluated) / 1e6 * usd
        if service.counts == "with validation"
        else None
    )
    return Bill(
        service, n_tokens + evaluated, million * usd, million * (service.usd_high or usd), unpacked
    )


def _epochs(wanted: JobSpec) -> float:
    """Passes over the data, also where the job counts in steps."""
    if wanted.max_steps is None:
        return wanted.n_epochs
    return wanted.max_steps * wanted.global_batch / max(1, wanted.lengths.n_examples)
