"""Which kernel attends to documents laid end to end: a pure function of what is asked and of the
machine. `padded_groups` cuts documents for the one that can do anything. docs/explanation/gpu.md
has the table. No torch: `attention_kernels.here` asks the machine.

Sources: what torch's flash kernels take is by the checks in its flash_api.cpp and, of
FlashAttention 3, in torch/nn/attention/_fa3.py (2.13); flex was compiled by torch 2.13's Inductor,
Triton and ptxas. No kernel of CUDA was ever run by farthing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

AMPERE = (8, 0)
WIDE_HEADS_ON = (
    (8, 0),
    (9, 0),
)  # whose shared memory is large enough for the backward pass of 193 to 224 wide heads
# flex for heads of 129 to 256 in half takes 114,688 bytes of shared memory in the backward pass
# (torch 2.13, compiled 2026-11-22), where GPUs of 8.6, 8.9 and 12.0 have 101,376
WIDE_FLEX_ON = (*WIDE_HEADS_ON, (10, 0), (10, 3))
# of a head: for 96 and more it compiles on all, with 10 KB of a thread's registers spilled to
# memory
MOST_FLEX_FP32 = 64

# Launching and feeding one more call takes the host about 75 µs forward and backward, in which a
# GPU computes 6 GFLOP of attention at 80 TFLOP/s: estimates, never measured
CALL_FLOPS = 6e9
CPU_CALL_FLOPS = 2e7  # on a CPU: about 20 small operations, forward and backward
FLOPS_PER_SCORE = (
    14  # times the width of all heads: two products forward, five backward, each 2 FLOP
)


@dataclass(frozen=True)
class Machine:
    """What there is to attend with."""

    device: str
    """cpu or cuda."""
    capability: tuple[int, int] = (0, 0)
    """Of the GPU: (7, 5) is a T4, (8, 0) an A100, (9, 0) an H100."""
    has_flash: bool = False
    """torch is built with its flash kernels."""
    has_flash_3: bool = False
    """Those are FlashAttention 3's."""
    has_flex: bool = False
    """Triton and a C compiler are installed."""
    is_deterministic: bool = False
    """Only kernels that give the same bits each time may run."""


@dataclass(frozen=True)
class Asked:
    """What a layer's attention has to do. Windows and query heads that share keys (GQA) are no
    reason for or against a kernel.
    """

    dtype: str
    """fp32, bf16 or fp16."""
    head_size: int
    has_softcap: bool = False
    has_dropout: bool = False


@functools.lru_cache(maxsize=64)  # every layer asks
def choose(asked: Asked, machine: Machine) -> str:
    """The quickest kernel that can do what is asked on this machine: flash, flex, padded, or on a
    CPU documents.
    """
    if machine.device != "cuda":
        return "documents"
    if machine.capability < AMPERE or asked.head_size > 256:
        return "padded"
    size, is_half = asked.head_size, asked.dtype != "fp32"
    is_tight = size > 192 and (size <= 224 or asked.has_dropout)
    if (
        machine.has_flash
        and is_half
        and size % 8 == 0
        and not asked.has_softcap
        and not (asked.has_dropout and machine.has_flash_3)
        and (not is_tight or machine.capability in WIDE_HEADS_ON)
    ):
        return "flash"
    if (
        machine.has_flex
        and not asked.has_dropout
        and not machine.is_deterministic  # torch does not promise it of its gradients
        and size >= 16
        and (is_half or size <= MOST_FLEX_FP32)
        and (size <= 128 or machine.capability in WIDE_FLEX_ON)
    ):
        return "flex"
    return "padded"


# ---- documents in padded calls ----

ALIGNED = 16
"""Numbers: where rows of a bias begin that a fused kernel takes."""


@dataclass(frozen=True)
class Group:
    """Documents that are padded to the longest of them and attended to in one call."""

    documents: tuple[int, ...]
    """Their numbers."""
    n_tokens: int
    n_keys: int
    is_even: bool
    """All have as many tokens, and as many keys: nothing is padded."""


def padded_groups(
    lengths: Sequence[int], key_lengths: Sequence[int], width: int, call_flops: float = CALL_FLOPS
) -> list[Group]:
    """Documents in groups such that calls and padding together cost least; `width` is that of all
    heads of a token.

    A call costs `call_flops`, a score of a query and a key `FLOPS_PER_SCORE` times the width,
    padding too; lengths are taken in steps of `ALIGNED`. The best cut of the documents sorted by
    keys: each group is a stretch of them. Every document is in one group; order does not matter.
    """
    exact = np.stack([key_lengths, lengths], 1).astype(np.int64)
    steps = exact + -exact % ALIGNED
    order = np.lexsort((steps[:, 1], steps[:, 0]))
    sizes, first, n_of = np.unique(
        steps[order], axis=0, return_index=True, return_counts=True
    )  # documents alike stay together
    starts = _best_cuts(sizes, n_of, width, call_flops)
    groups = []
    for start, stop in itertools.pairwise([*starts, len(sizes)]):
        members = order[first[start] : first[stop - 1] + n_of[stop - 1]]
        is_even = bool((exact[members] == exact[members[0]]).all())
        n_keys, n_tokens = (int(most) for most in exact[members].max(0))
        groups.append(Group(tuple(members.tolist()), n_tokens, n_keys, is_even))
    return groups


def _best_cuts(
    sizes: NDArray[np.int64], n_of: NDArray[np.int64], width: int, call_flops: float
) -> list[int]:
    """Where groups begin among sizes [m, 2] (keys, tokens), of which there are n_of [m] documents
    each.
    """
    m = len(sizes)
    n_before = np.concatenate([[0], np.cumsum(n_of)])
    cost, begins = np.zeros(m + 1), np.zeros(m + 1, np.int64)
    for stop in range(1, m + 1):
        n = (n_before[stop] - n_before[:stop]).astype(np.float64)
        most_tokens = np.maximum.accumulate(sizes[stop - 1 :: -1, 1])[::-1]
        of_group = (
            call_flops + FLOPS_PER_SCORE * width * n * float(sizes[stop - 1, 0]) * most_tokens
        )
        total = cost[:stop] + of_group
        begins[stop] = int(total.argmin())
        cost[stop] = total[begins[stop]]
    found, at = [], m
    while at > 0:
        at = int(begins[at])
        found.append(at)
    return found[::-1]
