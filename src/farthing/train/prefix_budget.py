"""How large micro-batches are where their examples begin alike, and that beginning is computed once
in each.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from farthing.data.batches import Batches
from farthing.events import Note
from farthing.model.activation_checkpointing import MemoryNeed
from farthing.model.forward import Forward
from farthing.train.attempt import Attempt
from farthing.train.resolve import Examples

LOOKED_AT_STEPS = 64  # of a run, before its first: whether they have several micro-batches


def share_prefix(attempt: Attempt) -> None:
    """Compute once in a micro-batch what its examples begin with, where the data has enough of
    that.

    Decided by the first attempt, as it changes rounding. A prefix is computed once in each
    micro-batch, so they grow, up to a step, while that saves more and needs no more activation
    checkpointing, where neither job nor probe has said how large they are.
    """
    settings, tokens = attempt.settings, attempt.train_examples.tokens
    if settings.shares_prefix is None:
        budgets = [settings.micro_batch_tokens]
        if not (attempt.job.says_micro_batch or settings.probed or attempt.ledger.out_of_memory):
            mean = tokens.lengths[attempt.train_examples.indices].mean()
            of_a_step = int(mean * attempt.job.global_batch_size)
            while budgets[-1] < of_a_step and _need_of(attempt, 2 * budgets[-1]).fits:
                budgets.append(2 * budgets[-1])
        saved, n_tokens = attempt.forward.share(tokens, attempt.batches, budgets)
        if n_tokens:
            text = (
                f"{saved:.0%} of the tokens are beginnings that examples share: computed once in"
                " each micro-batch"
            )
            attempt.emit(Note(text))
            need = _need_of(attempt, n_tokens)
            attempt.expected_bytes += need.total_bytes - attempt.memory.total_bytes
            attempt.memory, settings = need, replace(settings, micro_batch_tokens=n_tokens)
        attempt.steps.use(replace(settings, shares_prefix=n_tokens > 0))
    attempt.forward.shares = bool(attempt.settings.shares_prefix)


def _need_of(attempt: Attempt, micro_batch_tokens: int) -> MemoryNeed:
    """The memory of this run with larger micro-batches than those it was judged by."""
    n_steps = attempt.n_steps
    gradients = replace(
        attempt.memory.gradients,
        accumulate=accumulates(
            attempt.forward, attempt.train_examples, attempt.batches, n_steps, micro_batch_tokens
        ),
    )
    return replace(attempt.memory, n_tokens=micro_batch_tokens, gradients=gradients)


def accumulates(
    forward: Forward, examples: Examples, batches: Batches, n_steps: int, micro_batch_tokens: int
) -> bool:
    """Whether a step may have several micro-batches of so many tokens, by the first steps."""
    return micro_batches_of(forward, examples, batches, n_steps, micro_batch_tokens)[1]


def micro_batches_of(
    forward: Forward, examples: Examples, batches: Batches, n_steps: int, micro_batch_tokens: int
) -> tuple[NDArray[np.int64], bool]:
    """(examples of the largest micro-batch, whether a step has several), by the first steps of a
    run.
    """
    tokens, has_several = examples.tokens, False
    cells: list[NDArray[np.int64]] = []
    for step in range(min(n_steps, LOOKED_AT_STEPS)):
        of_step = forward.split(tokens, batches.examples_of(step), micro_batch_tokens)
        cells += of_step
        has_several = has_several or len(of_step) > 1
    return max(cells, key=lambda cell: forward.n_tokens_of(tokens, cell)), has_several
