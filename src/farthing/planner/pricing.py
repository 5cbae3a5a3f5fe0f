"""A recipe on an offer -> seconds and dollars by what they go to, with their ranges; interruptions
of spot counted.

Refuses to choose a recipe (search does) and to turn anything away but what interruptions keep from
ever ending.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from farthing.objectives.registry import objective_of
from farthing.planner.confidence import price_error
from farthing.planner.memory import Memory
from farthing.planner.recipe import Recipe
from farthing.planner.speed import StepTime, Work, forward_work, step_time
from farthing.planner.spot import (
    Interruptions,
    SaveSchedule,
    SpotRange,
    best_interval_s,
    expect_range,
    young_interval_s,
)
from farthing.planner.types import Assumptions, JobSpec, Place, Plan, Range, Rejected
from farthing.prices.offers import Offer, bill, boot_of

_STORES = {
    "s3": "AWS",
    "gs": "GCP",
    "az": "Azure",
}  # whose own machines pay no egress to them
WORST = 10.0  # of what is likely: the upper end of a range that has none
CRASH_EVERY_S = 7 * 86400.0  # of a machine that is not taken away, by assumption: a week
SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S = 60.0, 1800.0
GENERATED_S_PER_LAYER = 0.4e-3  # host time of one layer for one generated token


class Chosen(NamedTuple):
    """The recipe for a kind of machine, and the seconds of the whole job there, interruptions and
    checkpoints aside.
    """

    recipe: Recipe
    memory: Memory
    step: StepTime
    seconds: dict[str, float]
    speed_error: float
    memory_error: float
    host_bytes: int = 0
    """Of the machine's main memory, for rows of weights or an optimizer's state that are kept
    there.
    """


class _Timed(NamedTuple):
    """What a job takes on a kind of machine."""

    seconds: dict[str, float]
    """By what they go to."""
    wall_s: float
    waiting_s: float
    moving_s: float
    """Without what interruptions take."""
    interval_s: float
    """Between checkpoints."""
    n_saves: float
    spot: SpotRange | None


class _Swing(NamedTuple):
    """How much less and more than what is likely, in 80 % of cases."""

    less_s: float
    more_s: float
    less_usd: float
    more_usd: float


class Pricing:
    """What is worked out once for many offers: what interruptions do to a job, and the best
    interval between checkpoints.
    """

    def __init__(
        self, wanted: JobSpec, assumptions: Assumptions, hazard: Callable[[Offer], Interruptions]
    ) -> None:
        self.wanted = wanted
        self.assumptions = assumptions
        self.hazard = hazard
        self._timed: dict[Any, _Timed] = {}
        self._intervals: dict[tuple[float, float, Interruptions], float] = {}
        self._held_gb = (wanted.shape.n_parameters * 2 + 3 * wanted.save_bytes) / 1e9

    def price(self, place: Place, chosen: Chosen, needed_bytes: int) -> Plan | Rejected:
        """The plan for a place; a rejection where interruptions come faster than work is saved."""
        _wanted, offer = self.wanted, place.offer
        timed = self._timed_on(place, chosen)
        if not math.isfinite(timed.wall_s):
            return Rejected(
                offer,
                "interruptions come faster than work is saved",
                "the same machine on demand",
                10.0,
            )
        usd = bill(
            offer,
            (timed.wall_s - timed.waiting_s) / 3600,
            n_starts=1 + (math.ceil(timed.spot.likely.n_interruptions) if timed.spot else 0),
            storage_gb=0.0 if place.is_local else self._held_gb,
            storage_hours=timed.wall_s / 3600,
            egress_gb=self._leaving_gb(place, timed.n_saves),
        )
        total = sum(usd.values())
        swing = _swing(place, timed, chosen.speed_error)
        cheaper, dearer = price_error(place)
        around, wall_s = chosen.memory_error, timed.wall_s
        return Plan(
            place=place,
            recipe=chosen.recipe,
            memory=chosen.memory,
            memory_range=Range(
                needed_bytes * (1 - around), float(needed_bytes), needed_bytes * (1 + around)
            ),
            step=chosen.step,
            seconds=timed.seconds,
            usd=usd,
            hours_range=Range(
                max(0.0, wall_s - swing.less_s) / 3600,
                wall_s / 3600,
                (wall_s + swing.more_s) / 3600,
            ),
            usd_range=Range(
                max(0.0, (total - swing.less_usd) * (1 - cheaper)),
                total,
                (total + swing.more_usd) * (1 + dearer),
            ),
            interval_s=timed.interval_s,
            host_bytes=chosen.host_bytes,
            spot=timed.spot.likely if timed.spot else None,
        )

    def _timed_on(self, place: Place, chosen: Chosen) -> _Timed:
        """What the job takes there, worked out once for offers that differ in dollars alone."""
        setup = 0.0 if place.is_local else setup_s(place.offer, self.assumptions)
        save_s = self.save_s(place)
        zone = self.hazard(place.offer) if place.offer.is_spot else None
        key = id(chosen.seconds), setup, save_s, zone
        if key not in self._timed:
            self._timed[key] = self._time(chosen, setup, save_s, zone)
        return self._timed[key]

    def _time(
        self, chosen: Chosen, setup: float, save_s: float, zone: Interruptions | None
    ) -> _Timed:
        """Seconds with checkpoints and, in a `zone` of spot capacity, interruptions."""
        seconds = chosen.seconds | {"setup": setup}
        before_s = setup + seconds["download"] + seconds["start-up"]
        busy_s = seconds["training"] + seconds["evaluation"]
        interval_s = self._asked_interval_s(chosen.step)
        spot: SpotRange | None = None
        if zone is None:
            interval_s = interval_s or quiet_interval_s(save_s)
            seconds["checkpoints"] = (busy_s // interval_s + 1) * save_s
        else:
            spot, interval_s = self._on_spot(busy_s, before_s, save_s, interval_s, zone)
            likely = spot.likely
            seconds["checkpoints"] = likely.checkpoint_s
            seconds |= {
                "lost work": likely.lost_s,
                "restarts": likely.restart_s,
                "waiting": likely.waiting_s,
            }
        wall_s = (
            sum(seconds.values()) if spot is None or math.isfinite(spot.likely.wall_s) else math.inf
        )
        seconds = {name: value for name, value in seconds.items() if value > 0}
        # what interruptions cost has a range of its own; starts and saves are no surer than steps
        moving_s = wall_s - sum(
            seconds.get(name, 0.0) for name in ("waiting", "lost work", "restarts")
        )
        waiting_s = seconds.get("waiting", 0.0)
        return _Timed(
            seconds, wall_s, waiting_s, moving_s, interval_s, busy_s // interval_s + 1, spot
        )

    def _leaving_gb(self, place: Place, n_checkpoints: float) -> float:
        """What leaves the provider: the model, and checkpoints where their store is elsewhere."""
        if place.is_local:
            return 0.0
        wanted, scheme = self.wanted, self.wanted.store.partition("://")[0]
        is_elsewhere = wanted.store and _STORES.get(scheme) != place.offer.provider
        return (
            wanted.n_trainable * 4 + (n_checkpoints * wanted.save_bytes if is_elsewhere else 0.0)
        ) / 1e9

    def save_s(self, place: Place) -> float:
        """Seconds that training stands still for a checkpoint.

        Its copy goes to main memory where it takes no more than half of that, else straight to the
        disk.
        """
        if place.calibration.save_s is not None:
            return place.calibration.save_s
        ram_gib = place.offer.ram_gib
        has_room = (
            not place.is_cuda or ram_gib is None or self.wanted.save_bytes <= 0.5 * ram_gib * 2**30
        )
        rate = (
            self.assumptions.snapshot_bytes_per_s if has_room else self.assumptions.disk_bytes_per_s
        )
        return 0.05 + self.wanted.save_bytes / rate

    def seconds_of(
        self, place: Place, recipe: Recipe, step: StepTime, work: Work
    ) -> dict[str, float]:
        """Seconds of the whole job by what they go to, interruptions and checkpoints aside."""
        wanted, a, known = self.wanted, self.assumptions, place.calibration
        shape = wanted.shape
        weights_bytes = shape.n_parameters * 2.0
        start_s = known.start_s
        if start_s is None:
            start_s = a.import_s + weights_bytes / a.load_bytes_per_s
        tokens = objective_of(shape.task).n_tokens(
            wanted.lengths.n_tokens, wanted.lengths.n_target_tokens
        )
        export_s = (
            known.export_s
            if known.export_s is not None
            else 0.5 + wanted.n_trainable * 4 / a.disk_bytes_per_s
        )
        seconds = {
            "setup": 0.0,  # by provider: `price` has it
            "download": 0.0 if place.is_local else weights_bytes / a.download_bytes_per_s,
            "start-up": start_s,
            "tokenizing": 0.0
            if wanted.is_tokenized and place.is_local
            else tokens / a.tokenize_tokens_per_s,
            "training": wanted.n_steps * step.seconds,
            "evaluation": 0.0,
            "checkpoints": 0.0,
            "export": export_s,
        }
        if wanted.eval_lengths is not None:
            cut = wanted.eval_cut(recipe.settings.micro_batch_tokens, recipe.cost)
            n = wanted.eval_lengths.n_examples
            n_steps = (
                n * (cut.example.tokens + cut.example.targets) / max(1.0, work.n_padded_tokens)
            )
            once = (
                step_time(forward_work(work, n_steps), place.device).seconds
                * known.compute
                * known.evaluation
            )
            if wanted.max_new_tokens:
                n_words = min(wanted.max_new_tokens, max(1.0, wanted.eval_lengths.longest_target))
                of_word = 2.0 * shape.n_parameters / place.device.bandwidth_bytes_per_s
                host = GENERATED_S_PER_LAYER * (shape.n_decoder_layers or shape.n_layers)
                n_batches = -(
                    -n // wanted.written_at_once(recipe.settings.micro_batch_tokens).n_rows
                )
                once += n_batches * n_words * max(of_word, host)
            seconds["evaluation"] = wanted.n_evaluations * once
        return seconds

    def _asked_interval_s(self, step: StepTime) -> float | None:
        """The interval between checkpoints that the job asks for."""
        if self.wanted.save_steps:
            return self.wanted.save_steps * step.seconds
        return self.wanted.save_every_s

    def _on_spot(
        self,
        busy_s: float,
        before_s: float,
        save_s: float,
        asked_s: float | None,
        zone: Interruptions,
    ) -> tuple[SpotRange, float]:
        """What interruptions do to the job, and the interval between its checkpoints."""
        interval_s = asked_s
        if interval_s is None:
            key = save_s, before_s, zone
            if key not in self._intervals:
                self._intervals[key] = best_interval_s(*key)
            interval_s = max(30.0, min(self._intervals[key], busy_s))
        return expect_range(busy_s, SaveSchedule(interval_s, save_s, before_s), zone), interval_s


def setup_s(offer: Offer, assumptions: Assumptions) -> float:
    """Seconds from the request for a machine until it can begin: its provider's, where they are
    known.
    """
    boot = boot_of(offer.provider)
    return boot.seconds if boot.is_known else assumptions.setup_s


def _swing(place: Place, timed: _Timed, error: float) -> _Swing:
    """By the error of the speed, and by how long spot capacity lasts."""
    moving_s, wall_s, spot = error * timed.moving_s, timed.wall_s, timed.spot
    rate = (place.offer.usd_per_hour or 0.0) / 3600
    again_s = (
        timed.moving_s if place.precision == "fp16" and place.precision_note else 0.0
    )  # a run that overflows
    if spot is None:
        return _Swing(moving_s, moving_s + again_s, rate * moving_s, rate * (moving_s + again_s))
    good, likely, bad = spot
    less_s, less_usd = (
        moving_s + max(0.0, likely.wall_s - good.wall_s),
        max(0.0, likely.billed_s - good.billed_s),
    )
    less_usd = rate * (moving_s + less_usd)
    if not math.isfinite(bad.wall_s):  # a bad case that never ends: the range is only a warning
        return _Swing(
            moving_s, (WORST - 1) * wall_s, rate * moving_s, (WORST - 1) * rate * likely.billed_s
        )
    more_s, more_billed_s = (
        max(0.0, bad.wall_s - likely.wall_s),
        max(0.0, bad.billed_s - likely.billed_s),
    )
    more_s, more_billed_s = more_s + again_s, more_billed_s + again_s
    return _Swing(less_s, moving_s + more_s, less_usd, rate * (moving_s + more_billed_s))


def quiet_interval_s(save_s: float) -> float:
    """Between checkpoints where nobody takes the machine away: Young's interval for one crash in
    `CRASH_EVERY_S`.
    """
    return min(
        LONGEST_INTERVAL_S, max(SHORTEST_INTERVAL_S, young_interval_s(save_s, CRASH_EVERY_S))
    )
