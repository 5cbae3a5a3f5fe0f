"""Learning-rate schedules by their Hugging Face names, as pure functions of the step.

Importing those of transformers would take half a second at each start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from farthing.errors import InputError

LAST_RATE = 1e-7  # of the polynomial schedule


def schedule(
    name: str,
    *,
    n_warmup_steps: int,
    n_steps: int,
    learning_rate: float = 1.0,
    kwargs: Mapping[str, Any] | None = None,
) -> Callable[[int], float]:
    """The factor on `learning_rate` at a step (from 0): to the bit that of
    `transformers.get_scheduler`, which would take half a second to import.

    `kwargs` are its `scheduler_specific_kwargs`. Raises `InputError` for a schedule that would have
    to rise, or that has no room for its decay.
    """
    given = dict(kwargs or {})
    n_cycles = given.get("num_cycles", 1 if name == "cosine_with_restarts" else 0.5)
    timescale = given.get("timescale") or n_warmup_steps or 10_000
    last, power = given.get("lr_end", LAST_RATE), given.get("power", 1.0)
    least = given.get("min_lr_rate", given.get("min_lr_ratio", 0.0))
    if "min_lr" in given:
        least = given["min_lr"] / learning_rate
    ends_at = last if name == "polynomial" else given.get("min_lr", 0.0)
    if ends_at > learning_rate or (name == "polynomial" and ends_at == learning_rate):
        raise InputError(
            f"{name} decays to {ends_at:g}, and the learning rate is {learning_rate:g}",
            where="train.lr_scheduler_type",
            to_do="use linear, which decays to 0, or a higher learning_rate",
        )
    if name == "warmup_stable_decay":
        return _warmup_stable_decay(n_warmup_steps, n_steps, least, n_cycles, given)

    def share(step: int) -> float:
        """Of the steps after the warm-up."""
        return (step - n_warmup_steps) / max(1, n_steps - n_warmup_steps)

    def cosine(step: int) -> float:
        factor = 0.5 * (1.0 + math.cos(math.pi * n_cycles * 2.0 * share(step)))
        return max(0.0, factor * (1 - least) + least)

    falls: dict[str, Callable[[int], float]] = {
        "constant": lambda step: 1.0,
        "constant_with_warmup": lambda step: 1.0,
        "linear": lambda step: max(0.0, (n_steps - step) / max(1, n_steps - n_warmup_steps)),
        "cosine": cosine,
        "cosine_with_min_lr": cosine,
        "cosine_with_restarts": lambda step: (
            max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((n_cycles * share(step)) % 1.0))))
            if share(step) < 1
            else 0.0
        ),
        "polynomial": lambda step: (
            ((learning_rate - last) * (1 - min(1, share(step))) ** power + last) / learning_rate
        ),
        "inverse_sqrt": lambda step: (
            1.0 / math.sqrt((step - n_warmup_steps + timescale) / timescale)
        ),
    }
    fall = falls[name]
    if name == "constant":
        return fall
    return lambda step: step / max(1, n_warmup_steps) if step < n_warmup_steps else fall(step)


def _warmup_stable_decay(
    n_warmup_steps: int, n_steps: int, least: float, n_cycles: float, given: Mapping[str, Any]
) -> Callable[[int], float]:
    """The rate rises, stays, and comes down in the last `num_decay_steps`."""
    n_decay = int(given["num_decay_steps"])
    begins = n_steps - n_decay
    if begins < n_warmup_steps:
        raise InputError(
            f"{n_warmup_steps} steps of warm-up and {n_decay} of decay are more than the run's"
            f" {n_steps}",
            where="train.lr_scheduler_kwargs",
            to_do="use a smaller num_decay_steps, or train longer",
        )
    rises: dict[str, Callable[[float], float]] = {
        "linear": lambda share: share,
        "cosine": lambda share: 0.5 * (1.0 - math.cos(math.pi * share)),
        "1-sqrt": lambda share: 1.0 - math.sqrt(1.0 - share),
    }
    falls: dict[str, Callable[[float], float]] = {
        "linear": lambda share: 1.0 - share,
        "cosine": lambda share: 0.5 * (1.0 + math.cos(math.pi * n_cycles * 2.0 * share)),
        "1-sqrt": lambda share: 1.0 - math.sqrt(share),
    }
    rise, fall = rises[given.get("warmup_type", "linear")], falls[given.get("decay_type", "cosine")]

    def factor(step: int) -> float:
        if n_warmup_steps <= step < begins:
            return 1.0
        if step >= n_steps:
            return least
        value = (
            rise(step / max(1, n_warmup_steps))
            if step < n_warmup_steps
            else fall((step - begins) / max(1, n_decay))
        )
        return max(0.0, value * (1.0 - least) + least)

    return factor


def fitted_schedule(
    name: str,
    *,
    n_warmup_steps: int,
    holds_until: int,
    n_steps: int,
    learning_rate: float = 1.0,
    kwargs: Mapping[str, Any] | None = None,
) -> Callable[[int], float]:
    """Like `schedule`, but the rate stays up after the warm-up until step `holds_until`, and comes
    down from there.

    What it is before `holds_until` does not depend on `n_steps`, so that the number can be settled
    there.
    """
    given = dict(kwargs or {})
    if n_decay := given.get("num_decay_steps"):  # as many as there are behind what is held
        given["num_decay_steps"] = min(int(n_decay), max(1, n_steps - holds_until))
    rise = schedule(
        "constant_with_warmup" if n_decay else name,
        n_warmup_steps=n_warmup_steps,
        n_steps=max(n_steps, n_warmup_steps + 1),
        learning_rate=learning_rate,
        kwargs={} if n_decay else given,
    )
    fall = schedule(
        name,
        n_warmup_steps=holds_until,
        n_steps=n_steps,
        learning_rate=learning_rate,
        kwargs=given,
    )
    return lambda step: rise(min(step, n_warmup_steps)) if step < holds_until else fall(step)
