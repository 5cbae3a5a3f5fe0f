"""Every recipe x every offer -> memory, hours and dollars with their ranges, ranked; and why not elsewhere.

For each kind of machine the quickest recipe that fits is taken (an hour costs the same whatever is computed in it). Then
each offer is priced: hours billed, interruptions of spot counted. What does not fit, or passes a limit, is rejected with
the reason and the nearest change that would let it in.

Pure: values in, values out. Refuses to import torch, and to ask a clock, a file or the network.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from statistics import NormalDist
from typing import Any, NamedTuple

from farthing.errors import UserMistake
from farthing.planner.frozen_cache_cost import prefix_cache_bytes
from farthing.planner.lengths import Cut, Lengths, Padded
from farthing.planner.memory import Memory, estimate_memory, evaluation_memory
from farthing.planner.recipe import Recipe, Stack, stack_for
from farthing.planner.shapes import Adapters, Shape
from farthing.planner.speed import (
    Calibration,
    Device,
    StepTime,
    Work,
    device_of,
    forward_work,
    prefix_work,
    step_time,
    work_of,
)
from farthing.planner.spot import (
    Choice,
    Expected,
    Interruptions,
    Rhythm,
    best_interval_s,
    choose,
    expect,
    prior,
    young_interval_s,
)
from farthing.prices.catalog import Gpu, Offer, bill, gpus, up_front_usd
from farthing.units import say_bytes, say_seconds, say_usd

# of a micro-batch on a GPU: smaller ones leave it idle, but for longer examples
FEWEST_TOKENS, MOST_TOKENS = 1024, 65_536
CPU_TOKENS = 2048  # of a micro-batch on a CPU: more is quicker by a hundredth at most, for more memory (docs/log.md)
TIE = 0.05  # dollars closer than this are not told apart by estimates that share their error
_80_PERCENT = NormalDist().inv_cdf(0.9)  # standard deviations on either side that hold 80 % of cases
WORST = 10.0  # of what is likely: the upper end of a range that has none
N_DRAWN = 40  # plans whose chance to meet the deadline is drawn
CRASH_EVERY_S = 7 * 86400.0  # of a machine that is not taken away, by assumption: a week
SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S = 60.0, 1800.0
GENERATED_S_PER_LAYER = 0.4e-3  # host time of one layer for one generated token

# Relative error of tokens/s without calibration, by GPU: the 90th percentile that `bench/plan_accuracy.py` shows for
# published runs (L40S 25 %, RTX 4090 20 %; A100-80GB 9 %, more because its share was fitted there; the 40 GB card is the same
# chip); where there are none, by assumption.
SPEED_ERROR = {"A100-40GB": 0.15, "A100-80GB": 0.15, "L40S": 0.25, "RTX 4090": 0.20}
SPEED_ERROR_UNKNOWN = 0.40
MEMORY_ERROR = 0.09


class Assumptions(NamedTuple):
    """What a plan supposes where nothing was measured. All are printed with it."""

    setup_s: float = 240.0  # of a rented machine: boot, drivers, installation
    download_bytes_per_s: float = 100e6
    load_bytes_per_s: float = 1e9  # from disk to the device
    import_s: float = 10.0
    tokenize_tokens_per_s: float = 0.4e6  # two cores, measured
    snapshot_bytes_per_s: float = 5e9  # checkpoint from the device to host memory; written in the background
    disk_bytes_per_s: float = 500e6
    process_bytes: int = 420 << 20  # of a CPU run: the interpreter with its libraries

    def in_words(self) -> list[str]:
        """One line each."""
        return [
            f"a rented machine needs {say_seconds(self.setup_s)} before it can begin, and downloads at "
            f"{self.download_bytes_per_s / 1e6:.0f} MB/s",
            f"imports take {self.import_s:.0f} s, weights load at {self.load_bytes_per_s / 1e9:g} GB/s",
            f"tokenizing runs at {self.tokenize_tokens_per_s / 1e6:g} M tokens/s",
            f"a checkpoint halts training while {self.snapshot_bytes_per_s / 1e9:g} GB/s go to host memory",
        ]


@dataclass(frozen=True)
class Wanted:
    """A job in the planner's terms."""

    shape: Shape
    method: str
    optim: str
    global_batch: int
    lengths: Lengths
    n_epochs: float = 1.0
    max_steps: int | None = None
    micro_tokens: int | None = None
    """Most computed tokens of a micro-batch; None: the planner's choice."""
    may_go_flat: bool = True
    """Whether documents may be laid end to end: not where the job names an attention of its own."""
    caches_prefix: bool = False
    """Whether what the layers below the first trained one compute is kept on the disk, see `model.prefix_cache`."""
    every_n_layers: int | None = None
    """Activation checkpointing; None: as little as memory needs."""
    precision: str | None = None
    lora_r: int = 16
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False
    eval_lengths: Lengths | None = None
    eval_steps: int | None = None
    """Optimizer steps between evaluations; None: once an epoch. 0: only at the end."""
    eval_batch: int = 16
    max_new_tokens: int = 0
    """Above 0: evaluation generates as many tokens at most."""
    save_every_s: float | None = None
    """None: the planner's choice."""
    save_steps: int | None = None
    """Or optimizer steps between checkpoints."""
    is_tokenized: bool = False
    max_usd: float | None = None
    max_hours: float | None = None
    deadline_s: float | None = None
    """Seconds from now."""
    sure: float = 0.9
    """Chance that a spot plan must have to meet the deadline."""

    @cached_property
    def adapters(self) -> Adapters | None:
        """What is trained of the model; None: all of it."""
        return _adapters(self)

    @cached_property
    def n_trainable(self) -> int:
        """Trained weights."""
        return self.shape.n_parameters if self.adapters is None else self.adapters.n_trainable

    @property
    def cache_bytes(self) -> int:
        """What is kept of the layers below the first trained one on the disk, for each byte of a number."""
        if not self.caches_prefix or self.adapters is None or not self.adapters.first_layer:
            return 0
        n_tokens = self.lengths.n_tokens + (self.eval_lengths.n_tokens if self.eval_lengths is not None else 0.0)
        return prefix_cache_bytes(round(n_tokens), self.shape.hidden, 1)

    @property
    def is_flat(self) -> bool:
        """Whether the trainer lays documents end to end."""
        return self.stack("fp32").is_flat

    def stack(self, precision: str) -> Stack:
        """How the trainer computes it."""
        changed = () if self.adapters is None else (*self.adapters.adapted, *self.adapters.saved)
        return stack_for(
            self.shape.model_type,
            self.shape.task,
            precision,
            self.method,
            may_go_flat=self.may_go_flat,
            has_plain_head=not any(weight.part == "head" for weight, _ in changed),
            has_plain_adapters=self.lora_dropout == 0 and not self.use_dora,
        )

    def cut(self, most_tokens: int, n_gpus: int = 1) -> Cut:
        """The part of a step that one GPU takes, in micro-batches of at most so many tokens."""
        return self.lengths.cut(most_tokens, -(-self.global_batch // n_gpus), is_flat=self.is_flat)

    def eval_cut(self, most_tokens: int) -> Cut:
        """The evaluation examples as they are cut where training takes so many tokens at once."""
        assert self.eval_lengths is not None
        most = min(most_tokens, self.eval_batch * self.eval_lengths.longest_example)
        return self.eval_lengths.cut(most, self.eval_lengths.n_examples, is_flat=self.is_flat)

    @property
    def n_steps(self) -> int:
        """Optimizer steps of the whole job."""
        if self.max_steps is not None:
            return self.max_steps
        return math.ceil(self.n_epochs * -(-self.lengths.n_examples // self.global_batch))

    @property
    def n_evaluations(self) -> int:
        """Evaluations, the last one included."""
        if self.eval_lengths is None:
            return 0
        if self.eval_steps == 0:
            return 1
        each = self.eval_steps or -(-self.lengths.n_examples // self.global_batch)
        return max(1, math.ceil(self.n_steps / each))

    @property
    def labelled_share(self) -> float:
        """Share of the tokens that go through the loss."""
        if self.shape.task != "causal-lm":
            return 1.0
        return min(1.0, self.lengths.n_target_tokens / max(1.0, self.lengths.n_tokens))

    @property
    def tokens_per_example(self) -> float:
        """Mean tokens without padding; seq2seq: source and target."""
        return self.lengths.mean + (self.lengths.mean_target if self.shape.task == "seq2seq" else 0.0)

    @property
    def save_bytes(self) -> float:
        """Of a checkpoint: trained weights and the optimizer's state in fp32."""
        return self.n_trainable * (4.0 + {"sgd": 0.0}.get(self.optim, 2.0 if "8bit" in self.optim else 8.0))


@cache
def _adapters_of(shape: Shape, r: int, targets: tuple[str, ...], saved: tuple[str, ...], dora: bool) -> Adapters:
    return shape.with_lora(r, targets, saved, use_dora=dora)


def _adapters(wanted: Wanted) -> Adapters | None:
    if wanted.method == "full":
        return None
    return _adapters_of(wanted.shape, wanted.lora_r, wanted.target_modules, wanted.modules_to_save, wanted.use_dora)


@dataclass(frozen=True)
class Place:
    """Somewhere to run: an offer, or a machine of one's own, as a device with memory and a price."""

    offer: Offer
    device: Device
    precision: str
    memory_bytes: int
    calibration: Calibration = field(default_factory=Calibration)
    is_local: bool = False
    """This machine: nothing is set up or downloaded, and nobody takes it away."""
    is_cuda: bool = True


@dataclass(frozen=True)
class Range:
    """A figure and where it will probably be: 80 % of cases by the errors that were seen."""

    low: float
    likely: float
    high: float

    def as_list(self) -> list[float]:
        """[low, likely, high]."""
        return [self.low, self.likely, self.high]


@dataclass(frozen=True)
class Plan:
    """One way to run the job: where, how, and what it comes to."""

    place: Place
    recipe: Recipe
    memory: Memory
    memory_range: Range
    step: StepTime
    seconds: dict[str, float]
    """By what they go to; they add up to `wall_s`."""
    usd: dict[str, float]
    """By what they go to; they add up to `total_usd`."""
    hours_range: Range
    usd_range: Range
    interval_s: float
    """Between checkpoints."""
    spot: Expected | None = None
    chance: float | None = None
    """To meet the deadline."""
    cache_bytes: int = 0
    """On the disk: what frozen layers give, computed once."""
    mixture: str = ""
    """Why the same machine on demand steps in when spot falls behind the deadline; empty where it does not."""
    why: str = ""
    on_front: bool = False

    @property
    def offer(self) -> Offer:
        """What is bought."""
        return self.place.offer

    @cached_property
    def wall_s(self) -> float:
        """From the moment the job is wanted to its end."""
        return sum(self.seconds.values())

    @cached_property
    def total_usd(self) -> float:
        """The bill."""
        return sum(self.usd.values())

    @property
    def is_tight(self) -> bool:
        """Whether it may not fit after all: the range of its memory passes what is there."""
        return self.memory_range.high > self.place.memory_bytes

    @property
    def is_runnable(self) -> bool:
        """Whether the trainer can do it: on one GPU so far."""
        return self.recipe.n_gpus == 1


@dataclass(frozen=True)
class Rejected:
    """An offer that will not do."""

    offer: Offer
    reason: str
    change: str
    """The nearest change that would let it in."""
    distance: float = math.inf
    """How far off it is, to name the nearest first: the factor that is missing."""


@dataclass(frozen=True)
class Answer:
    """All plans, the best first, and everything that was rejected."""

    plans: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    managed: tuple[tuple[Offer, float], ...]
    """Services that train for a fee, with their dollars; another's recipe, and often another's models."""
    n_steps: int

    @property
    def best(self) -> Plan | None:
        """The first that the trainer can run."""
        return next((plan for plan in self.plans if plan.is_runnable), None)

    def nearest(self, n: int = 3) -> list[Rejected]:
        """The rejected offers that are nearest to being possible, one for each kind of change, whatever its figures."""
        found: dict[str, Rejected] = {}
        for rejected in sorted(self.rejected, key=lambda r: (r.distance, _usd_key(r.offer))):
            found.setdefault(re.sub(r"[\d.]+", "", rejected.change), rejected)
            if len(found) == n:
                break
        return list(found.values())


def decide(
    wanted: Wanted,
    places: Iterable[Place],
    *,
    assumptions: Assumptions | None = None,
    managed: Iterable[Offer] = (),
    hazard: Callable[[Offer], Interruptions] | None = None,
) -> Answer:
    """Plans for every place, ranked. `hazard` says how long spot capacity lasts; by default the measured prior does.

    Raises `UserMistake` for a job that no place can do at all.
    """
    if wanted.lengths.n_examples < 1:
        raise UserMistake("there is nothing to train on", where="data", to_do="check the data set")
    study = _Study(wanted, assumptions or Assumptions(), hazard or (lambda offer: prior(offer.n_gpus)))
    plans: list[Plan] = []
    rejected: list[Rejected] = []
    for place in places:
        found = study.judge(place)
        if isinstance(found, Plan):
            plans.append(found)
        else:
            rejected.append(found)
    plans = _ranked(plans)
    if wanted.deadline_s is not None:
        plans, late = study.meet_deadline(plans)
        rejected += late
        plans = _ranked(plans)
    tokens = wanted.n_steps * wanted.global_batch * wanted.tokens_per_example
    fees = [(offer, sum(bill(offer, n_tokens=tokens).values())) for offer in managed]
    return Answer(tuple(plans), tuple(rejected), tuple(sorted(fees, key=lambda fee: fee[1])), wanted.n_steps)


class _Chosen(NamedTuple):
    """The recipe for a kind of machine, and the seconds of the whole job there, interruptions and checkpoints aside."""

    recipe: Recipe
    memory: Memory
    step: StepTime
    seconds: dict[str, float]
    save_s: float


class _OnSpot(NamedTuple):
    """What interruptions do to a job: on average, with capacity that lasts longer, and with such that is taken sooner."""

    likely: Expected
    good: Expected
    bad: Expected
    interval_s: float


class _Study:
    """What is worked out once for many offers: recipes by precision and number of GPUs, times by machine."""

    def __init__(self, wanted: Wanted, assumptions: Assumptions, hazard: Callable[[Offer], Interruptions]) -> None:
        self.wanted = wanted
        self.assumptions = assumptions
        self.hazard = hazard
        self._candidates: dict[tuple[str, int, bool], list[tuple[Recipe, Memory, Work]]] = {}
        self._chosen: dict[Any, _Chosen | Rejected] = {}
        self._spot: dict[Any, _OnSpot] = {}
        self._intervals: dict[tuple[float, float, Interruptions], float] = {}
        self._held_gb = (wanted.shape.n_parameters * 2 + 3 * wanted.save_bytes) / 1e9
        self._changes: dict[Any, list[tuple[str, int]]] = {}

    def judge(self, place: Place) -> Plan | Rejected:
        """The plan for a place, or why there is none."""
        offer = place.offer
        key = (
            place.device,
            offer.n_gpus,
            place.precision,
            place.is_local,
            place.is_cuda,
            place.memory_bytes,
            place.calibration,
        )
        if key not in self._chosen:
            self._chosen[key] = self._choose(place)
        chosen = self._chosen[key]
        if isinstance(chosen, Rejected):
            return replace(chosen, offer=offer)
        plan = self._price(place, chosen)
        return self._within_limits(plan) if isinstance(plan, Plan) else plan

    # ---- recipes ----

    def candidates(self, precision: str, n_gpus: int, is_cuda: bool) -> list[tuple[Recipe, Memory, Work]]:
        """Every recipe that is worth a look, with its memory and its work."""
        key = precision, n_gpus, is_cuda
        if key not in self._candidates:
            self._candidates[key] = list(self._make_candidates(*key))
        return self._candidates[key]

    def _make_candidates(self, precision: str, n_gpus: int, is_cuda: bool) -> Iterable[tuple[Recipe, Memory, Work]]:
        wanted = self.wanted
        if n_gpus > wanted.global_batch:
            return
        everies = [wanted.every_n_layers] if wanted.every_n_layers is not None else [0, 2, 1]
        shardings = ["none"] if n_gpus == 1 else ["ddp", "fsdp"]
        for most in budgets(wanted, n_gpus, is_cuda):
            example = wanted.cut(most, n_gpus).example
            for every in everies:
                for sharding in shardings:
                    recipe = recipe_of(wanted, precision, most, every, n_gpus, sharding)
                    yield recipe, self.memory_of(wanted, recipe, is_cuda), self.work_of(recipe, example)

    def memory_of(self, wanted: Wanted, recipe: Recipe, is_cuda: bool) -> Memory:
        """Peak memory of a recipe, in training or evaluation."""
        assert recipe.micro_tokens is not None
        how: dict[str, Any] = {"labelled_share": wanted.labelled_share, "is_cuda": is_cuda}
        largest = wanted.cut(recipe.micro_tokens, recipe.n_gpus).largest
        memory = estimate_memory(wanted.shape, recipe, largest, wanted.adapters, **how)
        if wanted.eval_lengths is not None:  # an evaluation takes as many tokens at once as training does
            largest = wanted.eval_cut(recipe.micro_tokens).largest
            other = evaluation_memory(wanted.shape, recipe, largest, wanted.adapters, **how)
            memory = max(memory, other, key=lambda one: one.allocated_bytes)
        return memory

    def work_of(self, recipe: Recipe, padded: Padded) -> Work:
        """Work of a step of a recipe."""
        wanted = self.wanted
        return work_of(
            wanted.shape,
            recipe,
            padded,
            wanted.tokens_per_example,
            wanted.adapters,
            labelled_share=wanted.labelled_share,
        )

    def needed_bytes(self, place: Place, memory: Memory) -> int:
        """What a place must have for it: what was measured beside the formula included."""
        extra = place.calibration.extra_bytes
        if extra is not None:
            return memory.allocated_bytes + extra
        return memory.total_bytes + (0 if place.is_cuda else self.assumptions.process_bytes)

    def _choose(self, place: Place) -> _Chosen | Rejected:
        n_gpus = max(1, place.offer.n_gpus)
        found = self.candidates(place.precision, n_gpus, place.is_cuda)
        if not found:
            what = f"a step of {self.wanted.global_batch} examples can't be divided by {n_gpus} GPUs"
            return Rejected(place.offer, what, f"train.global_batch_size: {n_gpus}", n_gpus / self.wanted.global_batch)
        fitting = [
            (recipe, memory, step_time(work, place.device, place.calibration), work)
            for recipe, memory, work in found
            if self.needed_bytes(place, memory) <= place.memory_bytes
        ]
        # a run that dies of memory has cost its dollars: what fits with its error comes before what may not
        sure = [
            one for one in fitting if self.needed_bytes(place, one[1]) * (1 + memory_error(place)) <= place.memory_bytes
        ]
        if fitting and not sure:
            sure = [min(fitting, key=lambda one: self.needed_bytes(place, one[1]))]
        if fitting:

            def cheapness(one: tuple[Recipe, Memory, StepTime, Work]) -> tuple[float, ...]:
                recipe, _, step, _ = one
                if not place.is_cuda:  # what a micro-batch costs by itself is not in the seconds of a CPU
                    return recipe.every_n_layers, -(recipe.micro_tokens or 0)
                return step.seconds, recipe.every_n_layers, recipe.micro_tokens or 0

            recipe, memory, step, work = min(sure, key=cheapness)
            save_s = place.calibration.save_s
            if save_s is None:
                save_s = 0.05 + self.wanted.save_bytes / self.assumptions.snapshot_bytes_per_s
            return _Chosen(recipe, memory, step, self._seconds(place, recipe, step, work), save_s)
        least = min((self.needed_bytes(place, memory), recipe.in_words()) for recipe, memory, _ in found)
        reason = f"needs {say_bytes(least[0])} at least, has {say_bytes(place.memory_bytes)} ({least[1]})"
        distance = least[0] / place.memory_bytes
        for change, n_bytes in self.changes(place.precision, n_gpus, place.is_cuda):
            if n_bytes + self.needed_bytes(place, Memory({}, "loss", place.is_cuda)) <= place.memory_bytes:
                return Rejected(place.offer, reason, change, distance)
        return Rejected(place.offer, reason, "a smaller model, or a GPU with more memory", distance * 4)

    def changes(self, precision: str, n_gpus: int, is_cuda: bool) -> list[tuple[str, int]]:
        """Changes of the job that save memory, with the least they need: the mildest first."""
        key = precision, n_gpus, is_cuda
        if key not in self._changes:
            self._changes[key] = found = []
            for changed in _memory_savers(self.wanted, is_cuda):
                other = replace(self.wanted, **changed)
                most = min(budgets(other, n_gpus, is_cuda))
                every = other.every_n_layers if other.every_n_layers is not None else 1
                sharding = "none" if n_gpus == 1 else "fsdp"
                memory = self.memory_of(other, recipe_of(other, precision, most, every, n_gpus, sharding), is_cuda)
                found.append((_in_words(changed), memory.reserved_bytes))
        return self._changes[key]

    # ---- price ----

    def _price(self, place: Place, chosen: _Chosen) -> Plan | Rejected:
        wanted, offer = self.wanted, place.offer
        recipe, memory, step, at_best, save_s = chosen
        seconds = dict(at_best)
        before_s = seconds["setup"] + seconds["download"] + seconds["start-up"]
        busy_s = seconds["frozen layers"] + seconds["training"] + seconds["evaluation"]
        expected: Expected | None = None
        good = bad = None
        if offer.is_spot:
            asked_s = self._asked_interval_s(step)
            key = round(busy_s, 3), round(before_s, 3), round(save_s, 4), asked_s, self.hazard(offer)
            if key not in self._spot:
                self._spot[key] = self._on_spot(*key)
            expected, good, bad, interval_s = self._spot[key]
            if not math.isfinite(expected.wall_s):
                what = "interruptions come faster than work is saved"
                return Rejected(offer, what, "the same machine on demand", 10.0)
            seconds["checkpoints"] = expected.checkpoint_s
            seconds |= {"lost work": expected.lost_s, "restarts": expected.restart_s, "waiting": expected.waiting_s}
        else:
            interval_s = self._asked_interval_s(step) or quiet_interval_s(save_s)
            seconds["checkpoints"] = (busy_s // interval_s + 1) * save_s
        seconds = {name: value for name, value in seconds.items() if value > 0}
        error = speed_error(place)
        scaled = [name for name in seconds if name in ("frozen layers", "training", "evaluation", "lost work")]
        moving_s = sum(seconds[name] for name in scaled)
        wall_s = sum(seconds.values())
        billed_s = wall_s - seconds.get("waiting", 0.0)
        n_starts = (
            1 + math.ceil(expected.n_interruptions) if expected and math.isfinite(expected.n_interruptions) else 1
        )
        out_gb = wanted.n_trainable * 4 / 1e9
        usd = bill(
            offer, billed_s / 3600, n_starts=n_starts, storage_gb=self._held_gb, storage_hours=wall_s / 3600,
            egress_gb=0.0 if place.is_local else out_gb,
        )  # fmt: skip
        rate = (offer.usd_per_hour or 0.0) / 3600
        total = sum(usd.values())
        low_s, high_s = wall_s - error * moving_s, wall_s + error * moving_s
        low_usd, high_usd = total - rate * error * moving_s, total + rate * error * moving_s
        if expected and good and bad and not math.isfinite(bad.wall_s):
            high_s, high_usd = WORST * wall_s, WORST * total  # a bad case that never ends: the range is only a warning
        elif expected and good and bad:
            low_s -= max(0.0, expected.wall_s - good.wall_s)
            high_s += max(0.0, bad.wall_s - expected.wall_s)
            low_usd -= rate * max(0.0, expected.billed_s - good.billed_s)
            high_usd += rate * max(0.0, bad.billed_s - expected.billed_s)
        needed = self.needed_bytes(place, memory)
        around = memory_error(place)
        return Plan(
            place=place,
            recipe=recipe,
            memory=memory,
            memory_range=Range(needed * (1 - around), float(needed), needed * (1 + around)),
            step=step,
            seconds=seconds,
            usd=usd,
            hours_range=Range(max(0.0, low_s) / 3600, wall_s / 3600, high_s / 3600),
            usd_range=Range(max(0.0, low_usd), total, high_usd),
            interval_s=interval_s,
            cache_bytes=wanted.cache_bytes * recipe.residual_bytes,
            spot=expected,
        )

    def _seconds(self, place: Place, recipe: Recipe, step: StepTime, work: Work) -> dict[str, float]:
        wanted, a, known = self.wanted, self.assumptions, place.calibration
        shape = wanted.shape
        weights_bytes = shape.n_parameters * 2.0
        start_s = known.start_s
        if start_s is None:
            start_s = a.import_s + weights_bytes / a.load_bytes_per_s
        tokens = wanted.lengths.n_tokens + (wanted.lengths.n_target_tokens if shape.task == "seq2seq" else 0.0)
        export_s = known.export_s if known.export_s is not None else 0.5 + wanted.n_trainable * 4 / a.disk_bytes_per_s
        seconds = {
            "setup": 0.0 if place.is_local else a.setup_s,
            "download": 0.0 if place.is_local else weights_bytes / a.download_bytes_per_s,
            "start-up": start_s,
            "tokenizing": 0.0 if wanted.is_tokenized and place.is_local else tokens / a.tokenize_tokens_per_s,
            "frozen layers": self._filling_s(place, recipe),
            "training": wanted.n_steps * step.seconds,
            "evaluation": 0.0,
            "checkpoints": 0.0,
            "export": export_s,
        }
        if wanted.eval_lengths is not None:
            assert recipe.micro_tokens is not None
            cut, n = wanted.eval_cut(recipe.micro_tokens), wanted.eval_lengths.n_examples
            n_steps = n * (cut.example.tokens + cut.example.targets) / max(1.0, work.n_padded_tokens)
            once = step_time(forward_work(work, n_steps), place.device).seconds * known.compute * known.evaluation
            if wanted.max_new_tokens:
                n_words = min(wanted.max_new_tokens, max(1.0, wanted.eval_lengths.longest_target))
                of_word = 2.0 * shape.n_parameters / place.device.bandwidth_bytes_per_s
                host = GENERATED_S_PER_LAYER * (shape.n_decoder_layers or shape.n_layers)
                once += cut.n_micro_batches * n_words * max(of_word, host)
            seconds["evaluation"] = wanted.n_evaluations * once
        return seconds

    def _filling_s(self, place: Place, recipe: Recipe) -> float:
        """Seconds until what frozen layers give is on the disk; 0 where it is not kept."""
        wanted = self.wanted
        if not wanted.cache_bytes or wanted.adapters is None or recipe.micro_tokens is None:
            return 0.0
        example = wanted.cut(recipe.micro_tokens, recipe.n_gpus).example
        n_examples = wanted.lengths.n_examples + (wanted.eval_lengths.n_examples if wanted.eval_lengths else 0)
        filling = prefix_work(wanted.shape, recipe, example, wanted.adapters, n_examples, wanted.tokens_per_example)
        writing_s = wanted.cache_bytes * recipe.residual_bytes / self.assumptions.disk_bytes_per_s
        return max(writing_s, step_time(filling, place.device).seconds * place.calibration.compute)

    def _asked_interval_s(self, step: StepTime) -> float | None:
        """The interval between checkpoints that the job asks for."""
        if self.wanted.save_steps:
            return self.wanted.save_steps * step.seconds
        return self.wanted.save_every_s

    def _on_spot(
        self, busy_s: float, before_s: float, save_s: float, asked_s: float | None, zone: Interruptions
    ) -> _OnSpot:
        interval_s = asked_s
        if interval_s is None:
            key = save_s, before_s, zone
            if key not in self._intervals:
                self._intervals[key] = best_interval_s(*key)
            interval_s = max(30.0, min(self._intervals[key], busy_s))
        rhythm = Rhythm(interval_s, save_s, before_s)
        good, bad = zone.shifted(zone.spread), zone.shifted(1 / zone.spread)
        likely, better, worse = (expect(busy_s, rhythm, one) for one in (zone, good, bad))
        return _OnSpot(likely, better, worse, interval_s)

    # ---- limits ----

    def _within_limits(self, plan: Plan) -> Plan | Rejected:
        wanted, usd, hours = self.wanted, plan.total_usd, plan.wall_s / 3600
        if wanted.max_usd is not None and usd > wanted.max_usd:
            what = f"costs {say_usd(usd)}, the cap is {say_usd(wanted.max_usd)}"
            change = (
                f"limits.max_usd: {_rounded_up(usd)}{self._or_fewer_steps(plan, wanted.max_usd / usd, ('waiting',))}"
            )
            return Rejected(plan.offer, what, change, usd / max(wanted.max_usd, 1e-9))
        if wanted.max_hours is not None and hours > wanted.max_hours:
            what = f"takes {say_seconds(hours * 3600)}, the cap is {say_seconds(wanted.max_hours * 3600)}"
            change = f"limits.max_hours: {_rounded_up(hours)}{self._or_fewer_steps(plan, wanted.max_hours / hours)}"
            return Rejected(plan.offer, what, change, hours / max(wanted.max_hours, 1e-9))
        least_s = plan.wall_s - plan.seconds.get("waiting", 0.0)  # where spot waits, on demand may step in
        if wanted.deadline_s is not None and least_s > wanted.deadline_s:
            late = say_seconds(plan.wall_s - max(0.0, wanted.deadline_s))
            needed_s = _sure_s(plan, wanted.sure)
            change = _later(needed_s - wanted.deadline_s)
            return Rejected(
                plan.offer, f"ends {late} after the deadline", change, needed_s / max(wanted.deadline_s, 1.0)
            )
        return plan

    def _or_fewer_steps(self, plan: Plan, share: float, free: tuple[str, ...] = ()) -> str:
        """The job that keeps the limit: as many steps as the share leaves room for beside what may not shrink.

        Of spot that is also what interruptions take: it does shrink with the job, but not evenly.
        """
        wanted = self.wanted
        moving_s = sum(plan.seconds.get(name, 0.0) for name in ("training", "evaluation", "checkpoints"))
        counted_s = plan.wall_s - sum(plan.seconds.get(name, 0.0) for name in free)
        left_s = share * counted_s - (counted_s - moving_s)
        n = int(wanted.n_steps * max(0.0, left_s) / max(moving_s, 1e-9) * 0.95)
        once_s = plan.seconds.get("evaluation", 0.0) / max(1, wanted.n_evaluations)
        per_step_s = (moving_s - plan.seconds.get("evaluation", 0.0)) / wanted.n_steps
        while n >= 1:  # evaluations do not shrink evenly
            fewer = replace(wanted, max_steps=n)
            if n * per_step_s + fewer.n_evaluations * once_s <= 0.97 * left_s:
                return f", or train.max_steps: {n} of {wanted.n_steps}"
            n = int(n * 0.9)
        return ""

    def meet_deadline(self, plans: Sequence[Plan]) -> tuple[list[Plan], list[Rejected]]:
        """Plans with their chance to be done in time; spot that is not sure enough is rejected."""
        deadline_s = self.wanted.deadline_s
        assert deadline_s is not None
        kept: list[Plan] = []
        late: list[Rejected] = []
        on_demand: dict[Any, Plan] = {}
        for plan in plans:  # the cheapest come first
            if plan.spot is None:
                on_demand.setdefault(_machine_key(plan.offer), plan)
        choices: dict[Any, Choice] = {}
        for n, plan in enumerate(plans):
            if plan.spot is None:
                chance = NormalDist(plan.wall_s, _spread_s(plan)).cdf(deadline_s)
                if chance >= self.wanted.sure:
                    kept.append(replace(plan, chance=chance))
                else:
                    late.append(_late(plan, chance, deadline_s, self.wanted.sure))
                continue
            busy_s = sum(plan.seconds.get(name, 0.0) for name in ("frozen layers", "training", "evaluation"))
            before_s = sum(plan.seconds.get(name, 0.0) for name in ("setup", "download", "start-up", "tokenizing"))
            own = on_demand.get(_machine_key(plan.offer))
            own_usd = own.offer.usd_per_hour if own is not None else None
            key = round(busy_s), round(before_s), plan.offer.n_gpus, own_usd, self.hazard(plan.offer)
            if key not in choices and n < N_DRAWN:
                n_saves = max(1.0, math.ceil(busy_s / plan.interval_s))
                save_s = max(1e-3, plan.seconds.get("checkpoints", 0.0) / n_saves)
                choices[key] = choose(
                    busy_s,
                    Rhythm(plan.interval_s, save_s, before_s),
                    self.hazard(plan.offer),
                    spot_usd_per_h=plan.offer.usd_per_hour or 0.0,
                    on_demand_usd_per_h=own_usd if own_usd is not None else math.inf,
                    deadline_s=max(1.0, deadline_s - before_s),
                    sure=self.wanted.sure,
                )
            choice = choices.get(key)
            if choice is None:  # not drawn: too far down the list
                if plan.wall_s <= deadline_s:
                    kept.append(plan)
                else:
                    late.append(_late(plan, None, deadline_s, self.wanted.sure))
                continue
            alone = next(way for way in choice.ways if way.kind == "spot")
            if alone.chance >= self.wanted.sure:
                kept.append(replace(plan, chance=alone.chance))
            elif own is not None and choice.best.kind == "mixture" and choice.best.chance >= self.wanted.sure:
                kept.append(_mixed(plan, choice, before_s))
            else:
                late.append(_late(plan, alone.chance, deadline_s, self.wanted.sure))
        return kept, late


def budgets(wanted: Wanted, n_gpus: int, is_cuda: bool) -> list[int]:
    """Tokens of a micro-batch that are worth a look: the job's own, or as few as can be and powers of two above that."""
    if wanted.micro_tokens is not None:
        return [wanted.micro_tokens]
    longest = wanted.lengths.longest_example
    if not is_cuda:
        return sorted({longest, max(longest, FEWEST_TOKENS), max(longest, CPU_TOKENS)})
    found, most = [longest], FEWEST_TOKENS
    of_step = wanted.lengths.largest_step(-(-wanted.global_batch // n_gpus))
    while most <= MOST_TOKENS and found[-1] < of_step:
        if most > longest:
            found.append(most)
        most *= 2
    return found


def _memory_savers(wanted: Wanted, is_cuda: bool) -> list[dict[str, Any]]:
    """Settings to change: the mildest first, each with those before."""
    lengths = wanted.lengths
    milder: dict[str, Any] = {}
    ways: list[dict[str, Any]] = []
    if wanted.micro_tokens is not None and wanted.micro_tokens > lengths.longest_example:
        milder["micro_tokens"] = lengths.longest_example
        ways.append(dict(milder))
    if wanted.every_n_layers not in (None, 1):
        milder["every_n_layers"] = 1
        ways.append(dict(milder))
    if wanted.method == "full" and is_cuda and "8bit" not in wanted.optim:
        ways.append(milder | {"optim": "adamw_8bit"})
    methods = [name for name in (["lora", "qlora"] if is_cuda else ["lora"]) if name != wanted.method]
    if wanted.method == "qlora":
        methods = []
    ways += [milder | {"method": name} for name in methods]
    shorter = [_shortened(wanted, milder, int(lengths.longest * share)) for share in (0.5, 0.25)]
    ways += [one for one in shorter if one["lengths"].longest >= 64]
    ways += [shorter[1] | {"method": name} for name in methods[-1:] if shorter[1]["lengths"].longest >= 64]
    return ways


def _shortened(wanted: Wanted, milder: dict[str, Any], longest: int) -> dict[str, Any]:
    """Changes with inputs of at most `longest` tokens besides."""
    held_out = wanted.eval_lengths
    found = milder | {"lengths": wanted.lengths.truncated(max(1, longest))}
    if wanted.micro_tokens is not None:
        found["micro_tokens"] = min(wanted.micro_tokens, found["lengths"].longest_example)
    return found | {"eval_lengths": None if held_out is None else held_out.truncated(max(1, longest))}


def _in_words(changed: dict[str, Any]) -> str:
    """The settings as a job file has them."""
    says: dict[str, Callable[[Any], str]] = {
        "method": lambda name: f"method: {name}",
        "optim": lambda name: f"train.optim: {name}",
        "every_n_layers": lambda _: "train.gradient_checkpointing: true",
        "micro_tokens": lambda n: f"train.micro_batch_tokens: {n}",
        "lengths": lambda lengths: f"data.max_length: {lengths.longest}",
    }
    return " with ".join(say(changed[name]) for name, say in says.items() if name in changed)


def recipe_of(
    wanted: Wanted, precision: str, most_tokens: int, every: int, n_gpus: int = 1, sharding: str = "none"
) -> Recipe:
    """The recipe that the trainer would run with these choices."""
    is_full = wanted.method == "full"
    return Recipe(
        method=wanted.method,
        precision=precision,
        optim=wanted.optim,
        global_batch=wanted.global_batch,
        every_n_layers=every,
        lora_r=0 if is_full else wanted.lora_r,
        lora_dropout=0.0 if is_full else wanted.lora_dropout,
        target_modules=() if is_full else wanted.target_modules,
        modules_to_save=() if is_full else wanted.modules_to_save,
        use_dora=not is_full and wanted.use_dora,
        n_gpus=n_gpus,
        sharding=sharding,
        stack=wanted.stack(precision),
        micro_tokens=most_tokens,
        caches_prefix=wanted.cache_bytes > 0,
        mean_passes=wanted.cut(most_tokens, n_gpus).n_micro_batches,
    )


def place_of(offer: Offer, precision: str | None = None, calibration: Calibration | None = None) -> Place | Rejected:
    """An offer as a place: bf16 where the GPU has it, else fp16, else fp32. The precision of a job has to be there."""
    gpu: Gpu = gpus()[offer.gpu]
    wanted = precision or ("bf16" if gpu.has_bf16 else "fp16" if "fp16" in gpu.flops else "fp32")
    device = device_of(gpu, wanted)
    if device is None or (wanted == "bf16" and not gpu.has_bf16):
        setting = {"bf16": "train.bf16", "fp16": "train.fp16"}.get(wanted, "the precision")
        found = "bf16" if gpu.has_bf16 else "fp16" if "fp16" in gpu.flops else "fp32"
        return Rejected(offer, f"{gpu.name} does not compute in {wanted}", f"leave {setting} out: {found} is used", 1.5)
    return Place(offer, device, wanted, gpu.memory_bytes, calibration or Calibration())


def memory_error(place: Place) -> float:
    """Relative error of the bytes that a place is predicted to need, 80 % of cases."""
    if place.calibration.extra_bytes is None:
        return MEMORY_ERROR
    return 0.05 if place.is_cuda else 0.08  # a process keeps more than it needs: 4 and 6 % more than a shorter run's


def quiet_interval_s(save_s: float) -> float:
    """Between checkpoints where nobody takes the machine away: Young's interval for one crash in `CRASH_EVERY_S`."""
    return min(LONGEST_INTERVAL_S, max(SHORTEST_INTERVAL_S, young_interval_s(save_s, CRASH_EVERY_S)))


def speed_error(place: Place) -> float:
    """Relative error of the seconds that a place is predicted to take, 80 % of cases."""
    if place.calibration.n_runs:
        return place.calibration.spread
    if not place.is_cuda:
        return 0.6
    return SPEED_ERROR.get(place.device.name, SPEED_ERROR_UNKNOWN)


def _late(plan: Plan, chance: float | None, deadline_s: float, sure: float) -> Rejected:
    """A plan that is not sure enough to be done in time."""
    kind = "spot" if plan.spot is not None else "it"
    what = (
        f"{kind} is done by the deadline with {chance:.0%} only"
        if chance is not None
        else "spot ends after the deadline"
    )
    needed_s = _sure_s(plan, sure)
    return Rejected(plan.offer, what, _later(needed_s - deadline_s), max(1.0, needed_s / max(deadline_s, 1.0)))


def _spread_s(plan: Plan) -> float:
    """Standard deviation of the end: the range holds 80 % of cases."""
    return max(1e-6, (plan.hours_range.high - plan.hours_range.likely) * 3600 / _80_PERCENT)


def _sure_s(plan: Plan, sure: float) -> float:
    """Time after which a plan is done with this chance."""
    return plan.wall_s + max(0.0, NormalDist().inv_cdf(min(max(sure, 1e-6), 1 - 1e-6))) * _spread_s(plan)


def _later(seconds: float) -> str:
    """A deadline that is so much later, in whole minutes and not too few."""
    minutes = max(1, math.ceil(seconds / 60 + 1e-6))
    return f"a deadline {say_seconds(60.0 * minutes)} later"


def _machine_key(offer: Offer) -> tuple[str, str, int]:
    return offer.provider, offer.gpu, offer.n_gpus


def _mixed(plan: Plan, choice: Choice, before_s: float) -> Plan:
    """The spot plan with the same machine on demand whenever it falls behind the deadline."""
    way = choice.best
    rate = plan.offer.usd_per_hour or 0.0
    usd = {"compute": way.usd + before_s / 3600 * rate}
    usd |= {name: value for name, value in plan.usd.items() if name not in ("compute", "rounding")}
    waiting_s = (
        way.wall_s + before_s - sum(v for name, v in plan.seconds.items() if name not in ("waiting", "lost work"))
    )
    seconds = {name: value for name, value in plan.seconds.items() if name not in ("waiting", "lost work")}
    seconds["waiting"] = max(0.0, waiting_s)
    total, hours = sum(usd.values()), sum(seconds.values()) / 3600
    wide = plan.usd_range.high / max(plan.usd_range.likely, 1e-9)
    return replace(
        plan,
        usd=usd,
        seconds=seconds,
        usd_range=Range(total / wide, total, total * wide),
        hours_range=Range(min(hours, plan.hours_range.low), hours, max(hours, plan.hours_range.high)),
        chance=way.chance,
        mixture=choice.why,
    )


class _Placed(NamedTuple):
    """A plan with what it is ranked by, worked out once."""

    usd: float
    wall_s: float
    name: tuple[str, ...]
    plan: Plan


def _ranked(plans: Iterable[Plan]) -> list[Plan]:
    """The cheapest first; among dollars that can't be told apart, the sooner. Each says why it stands where it does."""
    ordered = sorted((_Placed(p.total_usd, p.wall_s, _name_key(p.offer), p) for p in plans), key=lambda one: one[:3])
    soonest, front = math.inf, set()
    for one in ordered:
        if one.wall_s < soonest:
            soonest = one.wall_s
            front.add(id(one.plan))
    ranked: list[_Placed] = []
    start = 0
    while start < len(ordered):
        most = ordered[start].usd * (1 + TIE) + 1e-9
        end = next((i for i in range(start, len(ordered)) if ordered[i].usd > most), len(ordered))
        near = ordered[start:end]
        ranked += sorted(near, key=lambda one: (not one.plan.is_runnable, one.wall_s, one.usd, one.name))
        start = end
    return [
        replace(one.plan, on_front=id(one.plan) in front, why=_why(one, ranked[0], ordered[0], i == 0))
        for i, one in enumerate(ranked)
    ]


def _why(one: _Placed, first: _Placed, cheapest: _Placed, is_first: bool) -> str:
    if is_first:
        if one.usd > cheapest.usd:
            better = "sooner" if one.wall_s < cheapest.wall_s else "on one GPU"
            return (
                f"within {TIE:.0%} of the cheapest ({say_usd(cheapest.usd)}), which estimates can't tell apart, "
                f"and {better}"
            )
        return "the cheapest"
    more = one.usd / first.usd - 1 if first.usd else 0.0
    faster = first.wall_s / one.wall_s
    words = f"{more:+.0%} dollars" if abs(more) >= 0.005 else "as dear"
    return f"{words} against the first, " + (
        f"{faster:.1f} x as fast" if faster >= 1 else f"{1 / faster:.1f} x as slow"
    )


def _rounded_up(usd: float) -> str:
    digits = 2 if usd < 100 else 0
    return f"{math.ceil(usd * 10**digits) / 10**digits:.{digits}f}"


def _usd_key(offer: Offer) -> float:
    return offer.usd_per_hour if offer.usd_per_hour is not None else math.inf


def _name_key(offer: Offer) -> tuple[str, ...]:
    return offer.provider, offer.gpu, str(offer.n_gpus), offer.region, offer.zone, offer.kind, offer.instance


def up_front(plan: Plan) -> float:
    """What has to be paid before: whole packs of credits, where those are sold."""
    return up_front_usd(plan.offer, plan.total_usd)
