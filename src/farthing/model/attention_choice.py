"""Which kernel attends to documents laid end to end: a pure function of what is asked and of the
machine, which `attention_kernels.here` asks. docs/explanation/gpu.md has the table.

Sources: what torch's flash kernels take is by the checks in its flash_api.cpp and, of
FlashAttention 3, in torch/nn/attention/_fa3.py (2.13); flex was compiled by torch 2.13's Inductor,
Triton and ptxas. On an H100 flash, flex and padded gave the same answers; none was timed.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

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


class AttentionHardware(NamedTuple):
    """What a GPU has to attend with."""

    capability: tuple[int, int]
    """Of the GPU: (7, 5) is a T4, (8, 0) an A100, (9, 0) an H100."""
    has_flash: bool = False
    """torch is built with its flash kernels."""
    has_flash_3: bool = False
    """Those are FlashAttention 3's."""
    has_flex: bool = False
    """Triton and a C compiler are installed."""
    is_deterministic: bool = False
    """Only kernels that give the same bits each time may run."""


class AttentionTask(NamedTuple):
    """What a layer's attention has to do. Windows and query heads that share keys (GQA) are no
    reason for or against a kernel.
    """

    dtype: str
    """fp32, bf16 or fp16."""
    head_size: int
    has_softcap: bool = False
    has_dropout: bool = False


@functools.lru_cache(maxsize=64)  # every layer asks
def choose(asked: AttentionTask, machine: AttentionHardware) -> str:
    """The quickest kernel that can do what is asked on this GPU: flash, flex or padded."""
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
