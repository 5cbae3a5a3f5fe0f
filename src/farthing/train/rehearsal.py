"""The dearest micro-batch of the run, taken forward and backward before the first step: memory that
is not there is missed where nothing is lost yet, and not in the middle of a run.

The largest of what is cut is known beforehand: a step's examples follow from the seed. Gradients
are thrown away, random generators are set anew by each step.
"""

from __future__ import annotations

import time

from farthing.events import Note
from farthing.train.attempt import Attempt
from farthing.train.budget import over_limit
from farthing.train.forecast import is_done
from farthing.train.prefix_budget import accumulates
from farthing.units import plural

N_STEPS = 8
"""With the longest examples, and as many of the first, whose cuts are looked at."""
LOOKS_S = 2.0


def rehearse(attempt: Attempt) -> None:
    """On a GPU, or where ranks wait for each other in every layer: rehearse before the first step
    of an attempt.

    Where it does not fit the micro-batch is lowered, as in a step. Raises as a step does.
    """
    steps, ranks = attempt.steps, attempt.ranks
    if attempt.numerics.device.type != "cuda" and not ranks.is_fsdp:
        return
    step = ranks.tell_all(dearest_step(attempt) if ranks.is_first else None)
    if step is None:
        return
    with attempt.meter.span("probe"):
        n_examples, n_tokens = steps.rehearse(step, lambda: _adds_up(attempt))
    text = (
        f"the largest micro-batch was rehearsed: {plural(n_examples, 'example')} of step"
        f" {step + 1}, {n_tokens:,} tokens"
    )
    attempt.emit(Note(text))


def _adds_up(attempt: Attempt) -> bool:
    """Whether a step has several micro-batches, by what is at once now."""
    budget = attempt.settings.micro_batch_tokens
    return accumulates(
        attempt.forward, attempt.train_examples, attempt.batches, attempt.n_steps, budget
    )


def dearest_step(attempt: Attempt) -> int | None:
    """The step that has the largest micro-batch of what is left of the run, as far as was looked;
    None where none is taken.
    """
    at, steps = attempt.progress, attempt.steps
    ended = is_done(attempt) or over_limit(attempt.job, attempt.ledger, reserve_s=0.0) is not None
    if ended or at.step >= attempt.n_steps:
        return None
    until, longest = time.monotonic() + LOOKS_S, []
    for step in range(at.step, attempt.n_steps):
        longest.append(
            (-int(steps.feed.tokens.lengths[steps.feed.batches.examples_of(step)].max()), step)
        )
        if time.monotonic() > until:
            break
    looked_at = {step for _, step in sorted(longest)[:N_STEPS]} | set(
        range(at.step, min(at.step + N_STEPS, attempt.n_steps))
    )
    return max(sorted(looked_at), key=lambda step: steps.feed.largest_of(step)[1])
