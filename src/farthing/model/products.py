"""Products of few shapes where each shape costs: in bf16 on a CPU.

oneDNN, by which torch multiplies matrices of bf16 there, makes code for every shape of a product
and keeps some of it for the life of the process: 0.4 to 0.8 MiB and 1 to 8 ms each. A micro-batch
has another number of tokens each time, so products are made with rows of zeros up to `few_sizes`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def few_sizes(n: int) -> int:
    """The least size that is as large: multiples of 16, from 256 on eight for each doubling."""
    step = max(16, 1 << max(0, n - 1).bit_length() >> 4)
    return -(-n // step) * step


def with_zeros(rows: Tensor) -> Tensor:
    """[n, i] -> [`few_sizes` of n, i] where shapes cost; else the rows themselves."""
    if rows.dtype != torch.bfloat16 or rows.device.type != "cpu" or torch.compiler.is_compiling():
        return rows
    more = few_sizes(len(rows)) - len(rows)
    return F.pad(rows, (0, 0, 0, more)) if more else rows
