"""What a micro-batch takes whatever its size: measured once, by one forward pass over several of
them together.

Nothing is learned from it: a step begins with its own seed, and no gradient is kept. Refuses to
judge: a diagnosis does.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from farthing.device_memory import is_out_of_memory
from farthing.model.hardware import free_cached, wait_for
from farthing.train.attempt import Attempt

AFTER_STEPS, LEAST_STEPS = 3, 40
"""It is measured when so many steps have warmed up, in a run of at least so many: it takes about as
long as one.
"""
MOST_TOGETHER = 8


def compare_micro_batches(attempt: Attempt) -> None:
    """Where a step has several micro-batches: note what share of their seconds one micro-batch
    would spare.

    n micro-batches of T tokens in all take n a + b T, joined they take a + b T. Backward passes are
    taken to be alike. Memory that does not suffice for it is no fault: then nothing is known.
    """
    if attempt.pace.n_steps != AFTER_STEPS or attempt.n_steps < LEAST_STEPS:
        return
    steps = attempt.steps
    if steps.ranks.is_spread or isinstance(attempt.kernels.compiled, int):
        return
    examples = steps.batches.examples_of(attempt.progress.step)
    cells = [
        cell.examples
        for cell in steps.table_of(examples, attempt.settings.micro_batch_tokens).cells
    ]
    cells = [cell for cell in cells if len(cell)][:MOST_TOGETHER]
    if len(cells) < 2:
        return
    try:
        with attempt.context.meter.span("probe"):
            apart_s, joined_s = (
                _forward_s(attempt, cells),
                _forward_s(attempt, [np.concatenate(cells)]),
            )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        free_cached(attempt.numerics.device)
        return
    attempt.pace.fixed_share = min(
        1.0, max(0.0, (apart_s - joined_s) / (len(cells) - 1) * len(cells) / apart_s)
    )


@torch.no_grad()
def _forward_s(attempt: Attempt, micro_batches: list[NDArray[np.int64]]) -> float:
    """Seconds of a forward pass over each, by the meter; the less of two tries."""
    forward, meter, taken = attempt.forward, attempt.context.meter, []
    for _ in range(2):
        began_s = meter.wall_s
        for examples in micro_batches:
            forward.loss(forward.to_device(forward.collate(attempt.steps.tokens, examples)))
        wait_for(attempt.numerics.device)
        taken.append(meter.wall_s - began_s)
    return min(taken)
