"""What a layer of a family keeps besides its matrix products' inputs, for `memory` and `speed`.
Refuses to add it up.
"""

from __future__ import annotations

from typing import NamedTuple

from farthing.models.shapes import Shape


class Block(NamedTuple):
    """What a layer of a family keeps besides its matrix products' inputs, in numbers of that many
    bytes a token.
    """

    n_norms: int  # of the stream's width, in a layer
    activation: float  # copies of the feed-forward's width that its activation keeps
    is_gated: bool
    n_attention_inputs: int  # separate products that read the first norm's output
    n_mlp_inputs: int
    dropouts: int  # of the stream's width
    has_norm_copies: bool  # RMS norms of transformers keep what they normalized in fp32
    has_head_norms: bool = False  # queries and keys are normalized head by head
    scales_fp32: bool = False  # norms multiply with their weight in fp32, and keep that copy too
    # values are a slice of one product, which stays whole, while queries and keys are rotated
    is_sliced: bool = False
    takes_powers: bool = (
        False  # in its activation (gelu_new), which autocast computes in fp32 on GPUs from there on
    )


_GATED = Block(2, 3, True, 3, 2, 0, True)
BLOCKS = {
    "gemma": _GATED._replace(scales_fp32=True),
    "gemma2": _GATED._replace(n_norms=4, scales_fp32=True),
    "gemma3_text": _GATED._replace(n_norms=4, has_head_norms=True, scales_fp32=True),
    "qwen3": _GATED._replace(has_head_norms=True),
    "qwen3_moe": _GATED._replace(has_head_norms=True),
    "olmoe": _GATED._replace(has_head_norms=True),
    "gpt_oss": _GATED._replace(activation=6),  # clamped halves, a sigmoid, and both factors
    "phi3": _GATED._replace(n_attention_inputs=1, n_mlp_inputs=1, is_sliced=True),
    "gpt2": Block(2, 4, False, 1, 1, 2, False, takes_powers=True),
    "gpt_bigcode": Block(2, 1, False, 1, 1, 2, False),
    "gpt_neox": Block(1, 1, False, 1, 1, 0, False, is_sliced=True),  # two norms of one input
    "t5": Block(2, 7, True, 3, 2, 2, True),
    "mt5": Block(2, 7, True, 3, 2, 2, True),
    "bert": Block(2, 1, False, 3, 1, 2, False),
    "roberta": Block(2, 1, False, 3, 1, 2, False),
    "xlm-roberta": Block(2, 1, False, 3, 1, 2, False),
    "distilbert": Block(2, 1, False, 3, 1, 1, False),
}


def block_of(shape: Shape) -> Block:
    """What a layer of this model keeps. The first T5 has no gate."""
    block = BLOCKS.get(shape.model_type, _GATED)
    if (
        block.is_gated
        and shape.n_decoder_layers
        and not any(w.name.endswith("wi_1") for w in shape.weights)
    ):
        return block._replace(activation=2, is_gated=False, n_mlp_inputs=1)
    return block
