"""What a layer of a family keeps besides its matrix products' inputs: rows of `facts/blocks.csv`.

In numbers of a token, of as many bytes as the run computes in. A family without a row is planned
as a usual one of its kind, with a note in the plan.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from farthing.models.shapes import Shape
from farthing.tables import facts


class Block(NamedTuple):
    """A layer's traits."""

    n_norms: int
    """Of the stream's width."""
    activation: float
    """Copies of the feed-forward's width that its activation keeps."""
    is_gated: bool
    n_attention_inputs: int
    """Separate products that read the first norm's output."""
    n_mlp_inputs: int
    dropouts: int
    """Of the stream's width."""
    has_norm_copies: bool
    """RMS norms of transformers keep what they normalized in fp32."""
    has_head_norms: bool
    scales_fp32: bool
    """Norms multiply with their weight in fp32, and keep that copy too."""
    is_sliced: bool
    """Values are a slice of one product, which stays whole, while queries and keys are rotated."""
    has_eager_scores: bool
    """Soft caps or sinks: scores are computed and kept whole."""
    has_sinks: bool
    """A score for no token at all, beside those of the others."""
    drops_scores: bool
    caps_logits: bool
    """A tanh of them is kept."""
    is_traced: bool
    """Held against code that runs, on tensors without data."""
    launches: int
    """Kernels of a layer, forward and backward, counted in farthing's own loop."""


@cache
def _rows() -> dict[str, Block]:
    ints = ("n_norms", "n_attention_inputs", "n_mlp_inputs", "dropouts", "launches")

    def read(name: str, cell: str) -> Any:
        return int(cell) if name in ints else float(cell) if name == "activation" else bool(cell)

    return {
        row["model_type"]: Block(*(read(name, row[name]) for name in Block._fields))
        for row in facts("blocks")
    }


def block_of(shape: Shape) -> Block:
    """The block of a model; of an unknown family the usual one of its kind."""
    has_gate = any(
        w.name.rsplit(".", 1)[-1] in ("gate_proj", "gate_up_proj") for w in shape.weights
    )
    usual = "*gated" if has_gate else "*pairs" if shape.n_decoder_layers else "*plain"
    block = _rows().get(shape.model_type) or _rows()[usual]
    if (
        block.is_gated
        and shape.n_decoder_layers
        and not any("wi_1" in w.name for w in shape.weights)
    ):
        return block._replace(activation=2, is_gated=False, n_mlp_inputs=1)  # the first T5
    return block
