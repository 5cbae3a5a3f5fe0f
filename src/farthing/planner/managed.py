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
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import NamedTuple

from farthing.objectives.registry import objective_of
from farthing.planner.types import JobSpec
from farthing.prices.offers import Offer, bill
from farthing.tables import typed


class Service(NamedTuple):
    provider: str
    model: str  # the one model it is for; empty: every model of its size
    method: str  # lora, full, or closed: a model whose weights nobody gets
    over_billion: float
    usd_per_million_tokens: float  # of trained ones
    counts: str
    you_get: str
    afterwards: str
    ends: date | None  # no new jobs from this day on
    source: str
    date: date
    upto_billion: float = math.inf
    usd_high: float = 0.0  # where it is a range; else 0


@dataclass(frozen=True)
class Fee:
    """What a service would charge for a job, and whether it takes this model."""

    provider: str
    what: str
    usd: float
    usd_high: float
    unit: str
    usd_per_unit: float
    price_source: str
    price_date: str
    takes_the_model: bool = True
    is_known: bool = False  # of farthing's own table, not of a price file
    usd_unpacked: float | None = None  # where it counts rows x max length without packing
    n_tokens: float | None = None
    you_get: str = ""
    afterwards: str = ""
    ends: str | None = None

    @property
    def name(self) -> str:
        return f"{self.provider}, {self.what}"

    @property
    def total_usd(self) -> float:
        return self.usd

    @property
    def hours(self) -> None:
        """Nobody says how long it takes."""


@cache
def services() -> tuple[Service, ...]:
    return tuple(typed("managed", Service))


def fees_of(
    wanted: JobSpec, model: str, max_length: int, offers: Iterable[Offer], today: date
) -> tuple[Fee, ...]:
    """What the services that are known would charge, then those of a price file; each the cheapest
    first.

    `model` is a name on the Hub or a folder. A closed model is listed beside the others, as it is
    what one may have now. The known services train causal models alone.
    """
    method, name = "full" if wanted.method == "full" else "lora", Path(model).name.lower()
    billion, known = wanted.shape.n_parameters / 1e9, list[Fee]()
    for one in services() if objective_of(wanted.shape.task).predicts_next else ():
        fits = one.method == "closed" or (one.method == method and one.model.lower() == name)
        if not one.model:
            fits = one.method == method and one.over_billion < billion <= one.upto_billion
        if fits and (one.ends is None or today < one.ends):
            known.append(fee_of(one, wanted, max_length))
    of_file = []
    for offer in offers:
        usd = sum(bill(offer, n_tokens=wanted.n_tokens).values())
        said = offer.unit, offer.usd, offer.source, offer.date.isoformat()
        takes = _takes(offer, name, method, billion)
        of_file.append(Fee(offer.provider, offer.instance, usd, usd, *said, takes))
    known.sort(key=lambda fee: (fee.usd, fee.provider))
    return (*known, *sorted(of_file, key=lambda fee: fee.usd))


def _takes(offer: Offer, name: str, method: str, billion: float) -> bool:
    """Whether a row of a price file is for this model: by its name, or by method and size."""
    instance = offer.instance.lower()
    size = re.search(r"up to (\d+)b|(\d+)b to (\d+)b", instance)
    if size is None:
        return offer.unit == "run" or instance.removesuffix(" hosted") == name
    low, high = float(size[2] or 0), float(size[1] or size[3])
    return low * 0.97 <= billion < high + 1 and ("lora" in instance) == (method == "lora")


def fee_of(service: Service, wanted: JobSpec, max_length: int) -> Fee:
    """What a service would charge for a job whose rows it cuts or fills to `max_length` tokens."""
    lengths, n_epochs, held_out = wanted.lengths, _epochs(wanted), wanted.eval_lengths
    counts_validation = service.counts == "with validation"
    evaluated, usd = 0.0, service.usd_per_million_tokens
    if counts_validation and held_out is not None:
        evaluated = held_out.n_tokens * max(1.0, n_epochs)
    n_tokens = lengths.n_tokens * n_epochs + evaluated
    n_unpacked = lengths.n_examples * n_epochs * max_length + evaluated
    costs = n_tokens / 1e6 * usd, n_tokens / 1e6 * (service.usd_high or usd)
    said = "million_tokens", usd, service.source, service.date.isoformat()
    return Fee(
        *(service.provider, service.model or _sizes(service), *costs, *said),
        takes_the_model=service.method != "closed",
        is_known=True,
        usd_unpacked=n_unpacked / 1e6 * usd if counts_validation else None,
        n_tokens=n_tokens,
        you_get=service.you_get,
        afterwards=service.afterwards,
        ends=service.ends.isoformat() if service.ends else None,
    )


def _sizes(service: Service) -> str:
    """The method and the sizes of models that a row is for, such as "LoRA up to 16B"."""
    method = "LoRA" if service.method == "lora" else service.method
    if service.upto_billion == math.inf:
        return f"{method} over {service.over_billion:g}B"
    begins = f"{service.over_billion:g}B to" if service.over_billion else "up to"
    return f"{method} {begins} {service.upto_billion:g}B"


def _epochs(wanted: JobSpec) -> float:
    """Passes over the data, also where the job counts in steps."""
    if wanted.max_steps is None:
        return wanted.n_epochs
    return wanted.max_steps * wanted.global_batch / max(1, wanted.lengths.n_examples)
