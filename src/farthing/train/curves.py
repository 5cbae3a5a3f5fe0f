"""Learning-rate schedules by their Hugging Face names, as pure functions of the step."""

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
    `transformers.get_scheduler`, which takes a quarter of a second to import. The usual ones do
    without.

    `kwargs` are its `scheduler_specific_kwargs`. Raises `InputError` for a schedule that would have
    to rise, or that has no room for its decay.
    """
    given, is_polynomial = dict(kwargs or {}), name == "polynomial"
    last = given.get("lr_end", LAST_RATE) if is_polynomial else given.get("min_lr", 0.0)
    if last > learning_rate or (is_polynomial and last == learning_rate):
        raise InputError(
            f"{name} decays to {last:g}, and the learning rate is {learning_rate:g}",
            where="train.lr_scheduler_type",
            to_do="use linear, which decays to 0, or a higher learning_rate",
        )
    n_decay = int(given.get("num_decay_steps", 0))
    if n_decay and n_warmup_steps + n_decay > n_steps:
        raise InputError(
            f"{n_warmup_steps} steps of warm-up and {n_decay} of decay are more than the run's"
            f" {n_steps}",
            where="train.lr_scheduler_kwargs",
            to_do="use a smaller num_decay_steps, or train longer",
        )
    n_falling = max(1, n_steps - n_warmup_steps)
    n_cycles = given.get("num_cycles", 0.5)

    def cosine(step: int) -> float:
        share = (step - n_warmup_steps) / n_falling
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * n_cycles * 2.0 * share)))

    usual: dict[str, Callable[[int], float]] = {
        "constant": lambda step: 1.0,
        "constant_with_warmup": lambda step: 1.0,
        "linear": lambda step: max(0.0, (n_steps - step) / n_falling),
        "cosine": cosine,
    }
    if name not in usual:
        return _of_transformers(name, n_warmup_steps, n_steps, learning_rate, given)
    fall = usual[name]
    if name == "constant":
        return fall
    return lambda step: step / max(1, n_warmup_steps) if step < n_warmup_steps else fall(step)


def _of_transformers(
    name: str, n_warmup_steps: int, n_steps: int, learning_rate: float, kwargs: dict[str, Any]
) -> Callable[[int], float]:
    import torch
    from transformers.optimization import get_scheduler

    weight = torch.nn.Parameter(torch.zeros(1))
    found = get_scheduler(
        name,
        torch.optim.SGD([weight], lr=learning_rate),
        num_warmup_steps=n_warmup_steps,
        num_training_steps=n_steps,
        scheduler_specific_kwargs=kwargs,
    )
    factor: Callable[[int], float] = found.lr_lambdas[0]
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
