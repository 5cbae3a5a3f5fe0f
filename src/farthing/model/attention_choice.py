"""Which kernel attends to documents laid end to end: a pure function of what is asked and of the
machine.

`choose` goes from the quickest kernel to the one that can do anything, and says why it passes over
the others. `padded_groups` cuts documents for that last one. docs/explanation/gpu.md has the
table. No torch: `attention_kernels.here` asks the machine.

Sources: what torch's varlen takes in each version is by its Python sources of 2.10 to 2.15; what
its flash kernels take is by the checks in its flash_api.cpp; flash-attn is by its README; flex was
compiled by torch 2.13's Inductor, Triton and ptxas. No kernel of CUDA was ever run by farthing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HALVES = frozenset({"bf16", "fp16"})
# parameters of torch's varlen that matter here, from each version on
VARLEN = {
    (2, 10): frozenset({"is_causal"}),
    (2, 11): frozenset({"scale", "window_size"}),
    (2, 12): frozenset({"scale", "window_size", "enable_gqa"}),
}
FLASH_ATTN = frozenset({"window_size", "softcap", "deterministic"})  # flash-attn 2.6 and later
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
# GPU computes 2 GFLOP of attention at 27 TFLOP/s: estimates, never measured
CALL_FLOPS = 2e9
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
    varlen: frozenset[str] = frozenset()
    """Parameters of torch's `varlen_attn`; none where it has none. `VARLEN` has them by version."""
    flash: frozenset[str] = frozenset()
    """Parameters of flash-attn's `flash_attn_varlen_func`; none where it is not installed."""
    has_flex: bool = False
    """Triton and a C compiler are installed."""
    is_deterministic: bool = False
    """Only kernels that give the same bits each time may run."""


@dataclass(frozen=True)
class Asked:
    """What a layer's attention has to do. Query heads that share keys (GQA) are no reason for or
    against a kernel.
    """

    dtype: str
    """fp32, bf16 or fp16."""
    head_size: int
    has_window: bool = False
    has_softcap: bool = False
    has_dropout: bool = False


@dataclass(frozen=True)
class Choice:
    """A kernel, and why no quicker one."""

    kernel: str
    """varlen, flash, flex, padded, or on a CPU documents."""
    passed_over: tuple[tuple[str, str], ...] = ()
    """(kernel, why not), from the quickest on."""


@functools.lru_cache(maxsize=64)  # every layer asks
def choose(asked: Asked, machine: Machine) -> Choice:
    """The quickest kernel that can do what is asked on this machine; there always is one."""
    if machine.device != "cuda":
        return Choice("documents")
    passed_over: list[tuple[str, str]] = []
    for kernel, obstacles in _obstacles(asked, machine).items():
        reason = next((words for words, is_so in obstacles.items() if is_so), None)
        if reason is None:
            return Choice(kernel, tuple(passed_over))
        passed_over.append((kernel, reason))
    return Choice("padded", tuple(passed_over))


def _obstacles(asked: Asked, machine: Machine) -> dict[str, dict[str, bool]]:
    """What can keep each kernel, from the quickest on, from doing what is asked, and whether it
    does.
    """
    size, is_old = asked.head_size, machine.capability < (8, 0)
    wanted = {
        "window_size": asked.has_window,
        "softcap": asked.has_softcap,
        "deterministic": machine.is_deterministic,
    }
    missing = {
        f"this version of flash-attn has no {name}": name not in machine.flash
        for name in wanted
        if wanted[name]
    }
    is_tight = size > 192 and (size <= 224 or asked.has_dropout)
    of_both_flash = {  # torch's copy of the flash kernels, and flash-attn itself
        "it has no fp32": asked.dtype not in HALVES,
        "it needs Ampere or later": is_old,
        "its heads are multiples of 8 up to 256": size > 256 or size % 8 > 0,
        "heads this wide train on A100 and H100 only": is_tight
        and machine.capability not in WIDE_HEADS_ON,
    }
    return {
        "varlen": {
            "torch has none before 2.10": not machine.varlen,
            "it drops nothing": asked.has_dropout,
            "it caps nothing": asked.has_softcap,
            "it has no windows before torch 2.11": asked.has_window
            and "window_size" not in machine.varlen,
            **of_both_flash,
        },
        "flash": {"flash-attn is not installed": not machine.flash, **missing, **of_both_flash},
        "flex": {
            "it drops nothing": asked.has_dropout,
            "it needs Triton and a C compiler": not machine.has_flex,
            "it needs Ampere or later": is_old,
            "torch does not promise that its gradients are deterministic": machine.is_deterministic,
            "its heads are 16 or wider": size < 16,
            "heads this wide spill its registers in fp32": asked.dtype not in HALVES
            and size > MOST_FLEX_FP32,
            "its heads are up to 256 wide": size > 256,
            "heads this wide train on A100, H100 and B200 only": size > 128
            and machine.capability not in WIDE_FLEX_ON,
        },
    }


# ---- documents in padded calls ----


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
    padding too. The best cut of the documents sorted by keys: each group is a stretch of them.
    Every document is in one group; order does not matter.
    """
    own, seen = np.asarray(lengths, np.int64), np.asarray(key_lengths, np.int64)
    order = np.lexsort((own, seen))
    sizes, first, n_of = np.unique(
        np.stack([seen[order], own[order]], 1), axis=0, return_index=True, return_counts=True
    )  # documents alike stay together
    starts = _best_cuts(sizes, n_of, width, call_flops)
    groups = []
    for start, stop in itertools.pairwise([*starts, len(sizes)]):
        members = order[first[start] : first[stop - 1] + n_of[stop - 1]]
        n_keys, n_tokens = (int(most) for most in sizes[start:stop].max(0))
        groups.append(Group(tuple(members.tolist()), n_tokens, n_keys, stop - start == 1))
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
