"""The choices of a plan, and what was refused, as typed values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from farthing.planner.types import Range

View = TypeVar("View")

RENTED = ("on-demand", "spot")  # the kinds of what is rented


def machine_name(n_gpus: int, gpu: str) -> str:
    """`2x A100-80GB`, `A100-80GB`."""
    return f"{n_gpus}x {gpu}" if n_gpus > 1 else gpu


def view_of(kind: type[View], /, *sources: Any, **values: Any) -> View:
    """A view with these values; other fields come from the first source with that name."""
    missing = object()
    for name in {field.name for field in fields(kind)} - values.keys():  # type: ignore[arg-type]
        found = (getattr(source, name, missing) for source in sources)
        value = next((one for one in found if one is not missing), missing)
        if value is not missing:
            values[name] = value
    return kind(**values)


@dataclass(frozen=True)
class PlanLimits:
    max_usd: float | None
    max_hours: float | None
    max_gpu_hours: float | None
    deadline_s: float | None
    confidence: float | None


@dataclass(frozen=True)
class JobView:
    model: str
    revision: str | None
    task: str
    method: str
    optimizer: str
    n_parameters: int
    n_trainable: int
    n_labels: int
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
    limits: PlanLimits


@dataclass(frozen=True)
class Prices:
    words: str
    where: str
    is_stale: bool
    renewal: str  # what gives newer prices
    age_days: dict[str, int]


@dataclass(frozen=True)
class RecipeView:
    words: str
    method: str
    precision: str
    precision_note: str
    micro_batch_tokens: int
    mean_tokens_at_once: float
    n_micro_batches: float
    is_flat: bool
    global_batch: int
    checkpointing: str
    checkpoint_every: int
    optimizer: str
    sharding: str
    to_set: tuple[str, ...]
    n_shards: int


@dataclass(frozen=True)
class MemoryView:
    """Of one device: what it needs, and what is there."""

    parts: dict[str, int]
    needed_bytes: int
    range_bytes: Range
    capacity_bytes: int
    spare_bytes: int
    moment: str
    is_tight: bool
    host_bytes: int


@dataclass(frozen=True)
class StepView:
    seconds: float
    parts: dict[str, float]
    tokens_per_s: float
    useful_share: float
    flops_per_s: float


@dataclass(frozen=True)
class SpotView:
    checkpoint_s: float
    restart_s: float
    lost_s: float
    waiting_s: float
    n_interruptions: float
    save_every_s: float
    law: str
    mixture: str


@dataclass(frozen=True)
class Elsewhere:
    """The same choice in another place."""

    instance: str
    region: str
    zone: str
    usd_per_hour: float | None
    total_usd: float
    hours: float


@dataclass(frozen=True)
class Choice:
    """A way to run the job. Ranges are [low, likely, high]: 4 of 5 runs are in between."""

    rank: int
    name: str
    provider: str
    instance: str
    gpu: str
    is_cpu: bool
    n_gpus: int
    region: str
    zone: str
    kind: str  # on-demand, spot, own or here
    usd_per_hour: float | None
    usd_per_gpu_hour: float | None
    paid_gb: float | None
    price_source: str
    price_date: str
    price_age_days: int
    price_is: str
    price_notes: tuple[str, ...]
    recipe: RecipeView
    memory: MemoryView
    seconds: dict[str, float]
    wall_s: float
    hours: float
    hours_range: Range
    step: StepView
    usd: dict[str, float]
    total_usd: float
    usd_range: Range
    up_front_usd: float
    save_every_s: float
    spot: SpotView | None
    chance: float | None
    pace: str
    confidence: str
    why: str
    on_front: bool
    n_also: int
    also_at: tuple[Elsewhere, ...]

    @property
    def is_rented(self) -> bool:
        return self.kind in RENTED

    @property
    def is_priced(self) -> bool:
        return self.kind != "here" or bool(self.usd_per_hour)

    @property
    def must_buy_more(self) -> bool:
        """Whether more has to be bought than the run uses, such as a whole pack of credits."""
        return self.up_front_usd > self.total_usd + 0.005

    @property
    def machine(self) -> str:
        return "CPU" if self.is_cpu else machine_name(self.n_gpus, self.gpu)

    @property
    def waiting_s(self) -> float:
        return self.seconds.get("waiting", 0.0)


@dataclass(frozen=True)
class Refused:
    """Offers that will not do, alike in machine and reason."""

    gpu: str
    n_gpus: int
    kind: str
    reason: str
    detail: str
    change: str
    cause: str
    change_kind: str
    n_offers: int
    usd_per_hour: float | None
    provider: str
    distance: float | None
