"""What a plan says, as frozen values: `plan_view` makes them, `--json` and all drawings get them as plain values (`plain`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

Parts = Mapping[str, float]
"""Of a sum, by what they are."""
Triple = list[float]
"""[low, likely, high]: 80 % of cases are in between."""


def plain(value: Any) -> Any:
    """Values that JSON has: frozen ones by their fields, numbers of numpy become Python's, what is not finite becomes null."""
    if value is None or isinstance(value, str | int):  # most are leaves
        return value
    if not isinstance(value, float):
        if is_dataclass(value):
            return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
        if isinstance(value, Mapping):
            return {str(key): plain(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
    number = float(value)
    return float(f"{number:.10g}") if math.isfinite(number) else None


# ---- the question ----


@dataclass(frozen=True)
class LimitsView:
    """What the job may take."""

    max_usd: float | None
    max_hours: float | None
    max_gpu_hours: float | None
    deadline_s: float | None
    confidence: float | None


@dataclass(frozen=True)
class JobView:
    """The job."""

    model: str
    revision: str | None
    task: str
    method: str
    optimizer: str
    n_parameters: int
    n_trainable: int
    n_examples: int
    n_epochs: float | None
    n_steps: int
    global_batch: int
    mean_tokens: float
    longest_tokens: int
    longest_target_tokens: int | None
    n_tokens: float
    lengths_are_exact: bool
    lengths_source: str
    n_evaluations: int
    n_eval_examples: int
    limits: LimitsView


@dataclass(frozen=True)
class AgesView:
    """Days since prices were read."""

    newest: int
    median: int
    oldest: int


@dataclass(frozen=True)
class PricesView:
    """Where prices come from."""

    words: str
    where: str
    is_stale: bool
    age_days: AgesView


# ---- a choice ----


@dataclass(frozen=True)
class RecipeView:
    """How it is computed."""

    words: str
    method: str
    precision: str
    precision_note: str
    micro_batch_tokens: int | None
    mean_tokens_at_once: float
    n_micro_batches: float
    is_flat: bool
    global_batch: int
    checkpointing: str
    checkpoint_every: int | None
    optimizer: str
    sharding: str
    to_set: list[str]
    n_shards: int


@dataclass(frozen=True)
class MemoryView:
    """What it needs of a GPU, and what is there."""

    parts: Parts
    needed_bytes: float
    range_bytes: Triple
    capacity_bytes: int
    spare_bytes: float
    moment: str
    is_tight: bool
    host_bytes: int
    """Of main memory, for weights or an optimizer's state that are kept there."""


@dataclass(frozen=True)
class StepView:
    """One optimizer step."""

    seconds: float
    parts: Parts
    tokens_per_s: float
    useful_share: float
    flops_per_s: float


@dataclass(frozen=True)
class SpotView:
    """What interruptions take, and by which law."""

    n_interruptions: float
    lost_s: float
    restart_s: float
    waiting_s: float
    checkpoint_s: float
    save_every_s: float
    cache_bytes: int
    law: str
    mixture: str


@dataclass(frozen=True)
class AlsoAt:
    """The same machine elsewhere."""

    instance: str
    region: str
    zone: str
    usd_per_hour: float | None
    total_usd: float
    hours: float


@dataclass(frozen=True)
class PlanRow:
    """A choice: where, how, and what it comes to."""

    rank: int
    name: str
    provider: str
    instance: str
    gpu: str
    is_cpu: bool
    n_gpus: int
    region: str
    zone: str
    kind: str
    usd_per_hour: float | None
    usd_per_gpu_hour: float | None
    paid_gb: float | None
    price_source: str
    price_date: str
    price_age_days: int
    price_is: str
    price_notes: list[str]
    recipe: RecipeView
    memory: MemoryView
    seconds: Parts
    wall_s: float
    hours: float
    hours_range: Triple
    step: StepView
    usd: Parts
    total_usd: float
    usd_range: Triple
    up_front_usd: float
    save_every_s: float
    cache_bytes: int
    spot: SpotView | None
    chance: float | None
    confidence: str
    why: str
    on_front: bool
    also_at: list[AlsoAt]


@dataclass(frozen=True)
class HereView:
    """This machine: a plan, or why not."""

    name: str
    rank: int | None
    words: str
    reason: str
    change: str


@dataclass(frozen=True)
class RejectedRow:
    """Offers that will not do, for the same reason."""

    gpu: str
    n_gpus: int
    kind: str
    reason: str
    change: str
    n_offers: int
    usd_per_hour: float | None
    provider: str
    distance: float


# ---- beside the choices ----


@dataclass(frozen=True)
class Sooner:
    """A choice that is sooner, and what for."""

    rank: int
    words: str


@dataclass(frozen=True)
class SpotOrNot:
    """The best on spot against the best on demand."""

    spot_rank: int
    on_demand_rank: int
    saved_usd: float
    saved_share: float | None
    words: str


@dataclass(frozen=True)
class TwoOrOne:
    """Two cheap GPUs against a dear one."""

    two_rank: int
    one_rank: int
    saved_usd: float
    saved_share: float | None
    words: str


@dataclass(frozen=True)
class Paid:
    """What was paid beside what the best plan costs."""

    usd: float
    here_usd: float | None
    saved_usd: float | None
    ratio: float | None


@dataclass(frozen=True)
class MethodView:
    """The first choice by a method."""

    method: str
    is_asked: bool
    usd: float | None
    hours: float | None
    where: str


@dataclass(frozen=True)
class RunsView:
    """What so many runs come to."""

    n_runs: int
    usd: Parts
    words: list[str]


@dataclass(frozen=True)
class Against:
    """When an owned machine pays back against what else does its work."""

    rank: int | None
    name: str
    is_equal: bool
    usd_per_own_hour: float
    break_even_hours: float | None
    break_even_months: float | None
    hours_per_month: float


@dataclass(frozen=True)
class OwnView:
    """A machine of one's own: what this run costs on it, and when buying it pays back."""

    name: str
    price_usd: float
    power_kw: float
    usd_per_kwh: float
    running_usd_per_h: float
    wear_usd_per_h: float
    hours_per_month: float
    rank: int | None = None
    hours: float | None = None
    usd: Parts | None = None
    total_usd: float | None = None
    against: tuple[Against, ...] = ()
    words: str = ""


@dataclass(frozen=True)
class YearsView:
    """What a project of so many runs a month comes to, in a year and in three."""

    runs_per_month: float
    saved_in_a_year: Mapping[str, Mapping[str, float | None]]
    one_year_usd: Parts
    three_years_usd: Parts
    notes: list[str]
