"""The last layer of an encoder for the first token of each document, which a classifier reads.

Keys and values are of all tokens; queries, the output of attention and the feed-forward are of
those that are read. Shapes: T tokens of N documents, h hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from farthing.model.documents import Documents
from farthing.models.families import ENCODERS

RECORDING = "transformers.utils.output_capturing"


def last_layer(inner: Any) -> Any:
    """The last layer of an encoder; None where it has to be computed for all tokens, as something
    listens to it, answers for it or recomputes it.
    """
    if inner.config.model_type not in ENCODERS:
        return None
    layer = getattr(inner, inner.base_model_prefix).encoder.layer[-1]
    is_recomputed = layer.training and getattr(layer, "gradient_checkpointing", False)
    is_taken = "forward" in vars(layer) or layer._compiled_call_impl or _is_heard(layer)
    return None if is_recomputed or is_taken or layer.chunk_size_feed_forward else layer


def of_all_tokens(layer: Any) -> list[nn.Module]:
    """What of the layer is computed for all tokens."""
    return [layer.attention.self.key, layer.attention.self.value]


def of_first_tokens(layer: Any, hidden: Tensor, documents: Documents, attend: Any) -> Tensor:
    """The layer's output [1, N, h] for the first token of each document, from hidden [1, T, h]."""
    own = layer.attention.self
    first = hidden.index_select(1, documents.bounds[:-1].long())
    ones = [1] * len(documents.lengths)
    one_each = Documents.of(ones, hidden.device, documents.lengths)
    query, key, value = (
        project(given).unflatten(-1, (-1, own.attention_head_size)).transpose(1, 2)
        for project, given in ((own.query, first), (own.key, hidden), (own.value, hidden))
    )
    read, _ = attend(
        own,
        query,
        key,
        value,
        None,
        dropout=own.dropout.p if own.training else 0.0,
        scaling=own.scaling,
        is_causal=False,
        documents=one_each,
    )
    return layer.feed_forward_chunk(layer.attention.output(read.flatten(2), first))


def _is_heard(module: nn.Module) -> bool:
    """Whether something listens to a module, but for transformers' own recording of outputs."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(RECORDING not in str(getattr(hook, "__module__", "")) for hook in hooks)
