"""What an optimizer keeps and moves for each trained weight: rows of `facts/optimizers.csv`."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from farthing.tables import typed

BF16_WEIGHTS = "adamw_bf16_stochastic_round"


class Optimizer(NamedTuple):
    """Bytes and accesses for one trained weight."""

    name: str
    moments: float  # kept on the GPU in the dtype of the weight
    own_bytes: float  # kept on the GPU beside them
    saved_bytes: float  # in a checkpoint, beside the weight
    moved_widths: float  # numbers of the weight's width that an update reads and writes
    moved_bytes: float
    times: float  # as long as from the GPU's own memory: pages come over the bus
    needs_bitsandbytes: bool
    is_on_host: bool
    is_factored: bool  # a row and a column stand for the moments of a matrix
    has_bf16_weights: bool  # without fp32 masters: weights, gradients and moments are bf16
    quality: str  # what it may cost in quality, by its source

    @property
    def has_rows(self) -> bool:
        """Whether its state can be cut into rows: not what lies in blocks, nor factors."""
        return not (self.needs_bitsandbytes or self.is_factored)

    def state_bytes(self, trained_bytes: int, rank: int | None = None) -> float:
        """On the GPU. Of adapters of a rank r, A [r, in] and B [out, r], factors are an r-th."""
        if self.is_factored and rank:
            return 4.0 / rank
        return self.moments * trained_bytes + self.own_bytes

    def update_bytes(self, trained_bytes: int) -> float:
        """Moved by one update, clipping included: it reads a gradient twice and writes it once."""
        return self.times * ((self.moved_widths + 3.0) * trained_bytes + self.moved_bytes)


@cache
def optimizer(name: str) -> Optimizer:
    return next(one for one in typed("optimizers", Optimizer) if one.name == name)
