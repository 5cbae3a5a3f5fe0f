"""How large micro-batches are, and how many layers are computed again, by the memory that small
forward passes take.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from farthing.dist.ranks import Ranks
from farthing.dist.reduce import reduce_bytes
from farthing.events import Emit, Note
from farthing.model.activation_checkpointing import (
    Beside,
    Gathered,
    Linear,
    MemoryNeed,
    Sample,
    choose_checkpointing,
)
from farthing.train.optim import state_bytes
from farthing.train.resolve import Examples
from farthing.train.step_feed import StepFeed
from farthing.train.update import update_bytes


def settle_checkpointing(
    wanted: Any,
    feed: StepFeed,
    train: Examples,
    optimizer: torch.optim.Optimizer,
    free_bytes: int,
    emit: Emit,
) -> MemoryNeed:
    """Measure small forward passes and switch on as much activation checkpointing as the largest
    micro-batch needs.

    With `wanted` "auto" no less is tried than the settings have. `free_bytes` are those before the
    optimizer's state was made.
    """
    forward, settings, ranks = feed.forward, feed.settings, feed.ranks
    lengths = forward.lengths_of(train.tokens).astype(np.int64)
    (largest, has_several), of_all = feed.first_steps(), lengths[train.indices]
    # as many pairs for each token as all have together: where scores are kept, they grow with the
    # squares of lengths
    middle = np.argmin(abs(of_all - (of_all**2).sum() / of_all.sum()))
    sorted_largest = largest[np.argsort(lengths[largest])]
    some = train.indices[:: max(1, len(of_all) // 4096)]
    n_scored, n_all = train.tokens.target_lengths[some].sum(), train.tokens.lengths[some].sum()
    scored = float(n_scored) / max(1.0, float(n_all))

    def sample_of(size: int) -> Sample:
        sample = np.full(size, train.indices[middle])
        if forward.of.is_pair and len(largest) >= 8:  # padded in groups, as all of them will be
            sample = sorted_largest[2 // size :: 4 // size]
        arrays = forward.collate(train.tokens, sample)
        batch = forward.to_device(arrays)
        return Sample(forward.n_computed(arrays), lambda: forward.before_head(batch))

    n_tokens = forward.n_tokens_of(train.tokens, largest)
    head, twice = forward.head_bytes(n_tokens, scored), forward.head_bytes(2 * n_tokens, scored)
    trained = [weight for group in optimizer.param_groups for weight in group["params"]]
    beside_update = 0
    if forward.numerics.device.type == "cuda":
        beside_update = max(update_bytes(optimizer), reduce_bytes(ranks, trained))
    fsdp = ranks.fsdp
    need = choose_checkpointing(
        forward.model,
        (sample_of(1), sample_of(2)),
        Beside(
            n_tokens=n_tokens,
            accumulates=has_several or settings.slots > ranks.n,
            optimizer_bytes=state_bytes(optimizer, forward.numerics.device),
            update_bytes=beside_update,
            free_bytes=free_bytes,
            head=Linear(2 * head - twice, (twice - head) / max(1, n_tokens)),
            autocast=None if fsdp is not None and fsdp.casts_rows else forward.numerics.autocast,
            casts_once=forward.casts is not None and bool(forward.casts.weights),
            gathered=Gathered() if fsdp is None else fsdp.gathered,
        ),
        wanted=wanted if wanted == "auto" else int(wanted),
        planned=settings.checkpoint_every,
        fits_all=lambda fits: fits if fsdp is None else bool(ranks.least(int(fits))),
    )
    if fsdp is None:
        return need
    fsdp.let_go()  # no backward pass has come after
    if has_several and fsdp.trains_rows and ranks.n > 1:
        need = _accumulating(need, ranks, emit)
    return need


def _accumulating(need: MemoryNeed, ranks: Ranks, emit: Emit) -> MemoryNeed:
    """Add gradients of several micro-batches up whole where all ranks have room for that."""
    fsdp = ranks.fsdp
    assert fsdp is not None
    more = fsdp.whole_gradients_bytes
    whole = replace(need, gathered=Gathered(*(each + more for each in need.gathered)))
    fsdp.accumulates_whole = bool(ranks.least(int(whole.fits)))
    how = "whole, and sent once a step"
    if not fsdp.accumulates_whole:
        how = "by rows, as whole ones do not fit"
    emit(Note(f"gradients of several micro-batches are added up {how}"))
    return whole if fsdp.accumulates_whole else need


def share_prefix(feed: StepFeed, memory: MemoryNeed, *, may_grow: bool, emit: Emit) -> MemoryNeed:
    """Compute once in a micro-batch what its examples begin with, where the data has enough of
    that. Changes the settings of `feed`.

    Decided by the first attempt, as it changes rounding. A prefix is computed once in each
    micro-batch, so they grow, up to a step, while that saves more and needs no more activation
    checkpointing; unless somebody else has said how large they are (`may_grow`).
    """
    settings, tokens, batches = feed.settings, feed.tokens, feed.batches

    def need_of(micro_batch_tokens: int) -> MemoryNeed:
        """The memory of this run with larger micro-batches than those it was judged by."""
        several = feed.first_steps(micro_batch_tokens)[1]
        return replace(memory, n_tokens=micro_batch_tokens, accumulates=several)

    if settings.shares_prefix is None:
        budgets = [settings.micro_batch_tokens]
        if may_grow:
            mean = tokens.lengths[batches.examples].mean()
            of_a_step = int(mean * batches.global_batch_size)
            while budgets[-1] < of_a_step and need_of(2 * budgets[-1]).fits:
                budgets.append(2 * budgets[-1])
        saved, n_tokens = feed.forward.share(tokens, batches, budgets)
        settings = replace(settings, shares_prefix=n_tokens > 0)
        if n_tokens:
            text = (
                f"{saved:.0%} of the tokens are beginnings that examples share: computed once in"
                " each micro-batch"
            )
            emit(Note(text))
            settings = replace(settings, micro_batch_tokens=n_tokens)
            memory = need_of(n_tokens)
    feed.forward.shares = bool(settings.shares_prefix)
    feed.settings = settings
    return memory
