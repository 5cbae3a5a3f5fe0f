"""How large micro-batches are, where examples begin alike and that beginning is computed once in
each of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from farthing.data.batches import Batches
from farthing.data.token_set import TokenSet
from farthing.events import Emit, Note
from farthing.model.activation_checkpointing import MemoryNeed
from farthing.model.forward import Forward
from farthing.settings import Settings

LOOKED_AT_STEPS = 64  # of a run, before its first: whether they have several micro-batches


def share_prefix(
    forward: Forward,
    tokens: TokenSet,
    batches: Batches,
    n_steps: int,
    settings: Settings,
    memory: MemoryNeed,
    *,
    may_grow: bool,
    emit: Emit,
) -> tuple[Settings, MemoryNeed]:
    """Compute once in a micro-batch what its examples begin with, where the data has enough of
    that.

    Decided by the first attempt, as it changes rounding. A prefix is computed once in each
    micro-batch, so they grow, up to a step, while that saves more and needs no more activation
    checkpointing; unless somebody else has said how large they are (`may_grow`).
    """

    def need_of(micro_batch_tokens: int) -> MemoryNeed:
        """The memory of this run with larger micro-batches than those it was judged by."""
        several = accumulates(forward, tokens, batches, n_steps, micro_batch_tokens)
        return replace(memory, n_tokens=micro_batch_tokens, accumulates=several)

    if settings.shares_prefix is None:
        budgets = [settings.micro_batch_tokens]
        if may_grow:
            mean = tokens.lengths[batches.examples].mean()
            of_a_step = int(mean * batches.global_batch_size)
            while budgets[-1] < of_a_step and need_of(2 * budgets[-1]).fits:
                budgets.append(2 * budgets[-1])
        saved, n_tokens = forward.share(tokens, batches, budgets)
        settings = replace(settings, shares_prefix=n_tokens > 0)
        if n_tokens:
            text = (
                f"{saved:.0%} of the tokens are beginnings that examples share: computed once in"
                " each micro-batch"
            )
            emit(Note(text))
            settings = replace(settings, micro_batch_tokens=n_tokens)
            memory = need_of(n_tokens)
    forward.shares = bool(settings.shares_prefix)
    return settings, memory


def accumulates(
    forward: Forward, tokens: TokenSet, batches: Batches, n_steps: int, micro_batch_tokens: int
) -> bool:
    """Whether a step may have several micro-batches of so many tokens, by the first steps."""
    return micro_batches_of(forward, tokens, batches, n_steps, micro_batch_tokens)[1]


def micro_batches_of(
    forward: Forward, tokens: TokenSet, batches: Batches, n_steps: int, micro_batch_tokens: int
) -> tuple[NDArray[np.int64], bool]:
    """(examples of the largest micro-batch, whether a step has several), by the first steps of a
    run.
    """
    has_several, cells = False, list[NDArray[np.int64]]()
    for step in range(min(n_steps, LOOKED_AT_STEPS)):
        of_step = forward.split(tokens, batches.examples_of(step), micro_batch_tokens)
        cells += of_step
        has_several = has_several or len(of_step) > 1
    return max(cells, key=lambda cell: forward.n_tokens_of(tokens, cell)), has_several
