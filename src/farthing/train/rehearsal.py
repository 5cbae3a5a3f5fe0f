"""The dearest micro-batch of the run, taken forward and backward before the first step: memory that
is not there is missed where nothing is lost yet, and not in the middle of a run.

The largest of what is cut is known beforehand: a step's examples follow from the seed. Gradients
are thrown away, random generators are set anew by each step.
"""

from __future__ import annotations

import time

from farthing.events import Note
from farthing.train.built import Run
from farthing.units import plural

N_STEPS = 8
"""With the longest examples, and as many of the first, whose cuts are looked at."""
LOOKS_S = 2.0


def rehearse(run: Run) -> None:
    """On a GPU, or where ranks wait for each other in every layer: rehearse before the first step
    of an attempt.

    Where it does not fit the micro-batch is lowered, as in a step. Raises as a step does.
    """
    context, steps = run.context, run.steps
    if steps.step.device.type != "cuda" and not context.ranks.is_fsdp:
        return
    step = context.ranks.tell_all(dearest_step(run) if context.ranks.is_first else None)
    if step is None:
        return
    with context.meter.span("probe"):
        n_examples, n_tokens = steps.rehearse(step)
    text = (
        f"the largest micro-batch was rehearsed: {plural(n_examples, 'example')} of step"
        f" {step + 1}, {n_tokens:,} tokens"
    )
    context.emit(Note(text))


def dearest_step(run: Run) -> int | None:
    """The step that has the largest micro-batch of what is left of the run, as far as was looked;
    None where none is taken.
    """
    at, feed, n_steps = run.progress, run.steps.feed, run.schedule.n_steps
    if run.forecast.is_done or run.context.over_limit(0.0) is not None or at.step >= n_steps:
        return None
    until, longest = time.monotonic() + LOOKS_S, []
    for step in range(at.step, n_steps):
        longest.append((-int(feed.tokens.lengths[feed.batches.examples_of(step)].max()), step))
        if time.monotonic() > until:
            break
    looked_at = {step for _, step in sorted(longest)[:N_STEPS]}
    looked_at |= set(range(at.step, min(at.step + N_STEPS, n_steps)))
    return max(sorted(looked_at), key=lambda step: feed.largest_of(step)[1])
