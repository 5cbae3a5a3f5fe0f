"""Models with an encoder and a decoder over documents laid end to end: sources one after another,
and so their targets.

A source sees itself, a target what is before it and its own source. The model's own stacks are gone
through; what they could not know of documents is given to them: positions that begin again
(`_placed`), and T5's bias by distance, which is made for the longest document instead of for all
tokens by all tokens (`take_documents`).

The same operations serve CUDA.

Shapes: S tokens of N sources, T tokens of their targets, H heads of width D, h hidden size.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from farthing.arrays import Ints
from farthing.data.batches import collate
from farthing.data.token_set import TokenSet
from farthing.model.attention_kernels import AttentionSettings, over_documents, up_to_aligned
from farthing.model.documents import Batch, Documents
from farthing.model.loss import decoder_inputs
from farthing.objectives.objective import IGNORED


class Sides(NamedTuple):
    """What a decoder's layers get as `documents`."""

    own: Documents
    """Targets that see themselves."""
    across: Documents
    """Targets that see their sources."""


# ---- batches ----


def collate_pairs(
    inner: Any, tokens: TokenSet, examples: Ints, task: str, pad_id: int
) -> dict[str, Ints]:
    """Arrays of a micro-batch of `examples`, sources and targets each end to end.

    input_ids, position_ids [1, S]; labels, decoder_ids, decoder_position_ids [1, T]; source_lengths
    and lengths (of the targets) [N]: int64. What the decoder reads is made by the model's own
    function, of each target alone. An empty source is read as one token of padding, as it is alone;
    raises `ValueError` for an empty target.
    """
    padded = collate(tokens, examples, task, pad_id)
    is_source, is_target = padded["attention_mask"].astype(bool), padded["labels"] != IGNORED
    is_source[:, :1] = True
    n_source, n_target = is_source.sum(1), is_target.sum(1)
    if not n_target.all():
        raise ValueError("a packed batch needs documents of at least one token")
    read = decoder_inputs(inner, torch.from_numpy(padded["labels"])).numpy()
    sources, reads = padded["input_ids"][is_source], read[is_target]
    return {
        "input_ids": sources[None],
        "position_ids": _positions(inner, sources, n_source)[None],
        "labels": padded["labels"][is_target][None],
        "decoder_ids": reads[None],
        "decoder_position_ids": _positions(inner, reads, n_target)[None],
        "source_lengths": n_source,
        "lengths": n_target,
    }


def _positions(inner: Any, ids: Ints, lengths: Ints) -> Ints:
    """[tokens]: the place of each in its document; where a family counts no padding, -1 for
    padding.
    """
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    if not _passes_padding(inner.get_encoder()):
        return np.arange(len(ids)) - starts
    is_text = ids != inner.config.pad_token_id
    n_before = np.concatenate([[0], np.cumsum(is_text)])
    return np.where(is_text, n_before[:-1] - n_before[starts], -1)


# ---- the model ----


def decoder_states(inner: Any, batch: Batch) -> Tensor:
    """Hidden states [1, T, h] of the decoder after its last norm, from a packed batch."""
    decoder, targets, across = inner.get_decoder(), batch["documents"], batch["across"]
    source = source_states(inner, batch)
    with _placed(decoder, batch["decoder_position_ids"], targets.longest):
        states: Tensor = decoder(
            input_ids=batch["decoder_ids"],
            attention_mask=targets.no_mask,
            encoder_hidden_states=source,
            encoder_attention_mask=across.no_mask,
            use_cache=False,
            documents=Sides(targets, across),
        ).last_hidden_state
    return states


def source_states(inner: Any, batch: Batch) -> Tensor:
    """Hidden states [1, S, h] of the encoder, from a packed batch."""
    encoder, sources = inner.get_encoder(), batch["sources"]
    with _placed(encoder, batch["position_ids"], sources.longest):
        found = encoder(
            input_ids=batch["input_ids"], attention_mask=sources.no_mask, documents=sources
        )
    return found.last_hidden_state


def take_documents(inner: Any) -> None:
    """Let attention that has a bias by distance take documents; without them it computes as before.

    By itself it makes a bias of all tokens by all tokens, and hands it to every layer.
    """
    for kind in {type(module) for module in inner.modules() if hasattr(module, "compute_bias")}:
        if not hasattr(kind.forward, "without_documents"):
            kind.forward = _biased_forward(kind.forward)


def _biased_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward pass of T5's attention, or of one of its kin, that knows what to do with
    `documents`.
    """
    hands_bias_on = "position_bias" in inspect.signature(original).parameters

    def forward(
        self: Any,
        hidden_states: Tensor,
        *args: Any,
        documents: Documents | Sides | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if documents is None:
            bias = {"position_bias": position_bias} if hands_bias_on else {}
            return original(self, hidden_states, *args, **bias, **kwargs)
        others = kwargs.get("key_value_states", kwargs.get("encoder_hidden_states"))
        seen = hidden_states if others is None else others
        if isinstance(documents, Sides):
            documents = documents.own if self.is_causal else documents.across
        if others is None and position_bias is None:
            position_bias = _bias(self, documents.longest)
        query, key, value = (
            layer(given).view(given.shape[1], -1, self.key_value_proj_dim)
            for layer, given in ((self.q, hidden_states), (self.k, seen), (self.v, seen))
        )
        dropout = self.dropout if self.training else 0.0
        how = AttentionSettings(self.is_causal, self.scaling, None, dropout, None, position_bias)
        found = self.o(over_documents(query, key, value, documents, how).flatten(1)[None])
        return (found, position_bias, None) if hands_bias_on else (found, None)

    forward.without_documents = original  # type: ignore[attr-defined]
    return forward


def _bias(attention: Any, longest: int) -> Tensor:
    """[1, H, L, L], L at least `longest`: a layer's bias by distance, minus infinity where it does
    not look. As a fused kernel takes it on CUDA: there layers add up its gradients in the precision
    of the run.
    """
    device = attention.relative_attention_bias.weight.device
    n = up_to_aligned(longest)
    bias: Tensor = attention.compute_bias(n, n, device=device)
    if attention.is_causal:
        hidden = torch.full((n, n), -torch.inf, dtype=bias.dtype, device=device)
        bias = bias + hidden.triu_(1)
    if device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        bias = bias.to(torch.get_autocast_dtype("cuda"))
    return bias.contiguous()


def _passes_padding(stack: Any) -> bool:
    """Whether a stack's positions count no padding, wherever it stands: M2M100's and NLLB's, which
    are given the tokens.
    """
    places = getattr(stack, "embed_positions", None)
    places = getattr(places, "original_module", places)  # which peft wraps to train it whole
    return (
        places is not None
        and "position_ids" not in inspect.signature(type(places).forward).parameters
    )


def _placed(stack: Any, positions: Tensor, longest: int) -> contextlib.AbstractContextManager[None]:
    """Within the block a stack's positions [1, tokens] are these, if it has any; no document is
    longer than `longest`.
    """
    places = getattr(stack, "embed_positions", None)
    original: Any = getattr(places, "forward", None)

    def embed(first: Any, hidden: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        if not _passes_padding(stack):
            return original(first, position_ids=positions[0])
        assert hidden is not None
        table = original(None, hidden[:, :longest])[0]
        # padding has no place
        return table[positions.clamp(min=0)] * (positions >= 0)[..., None]

    return answering(places, embed)


@contextlib.contextmanager
def answering(module: nn.Module | None, answer: Callable[..., Tensor]) -> Iterator[None]:
    """Calls of a module are answered by `answer` within the block, compiled ones too; hooks and
    names stay.
    """
    own: dict[str, Any] = {} if module is None else vars(module)
    kept = [name for name in ("forward", "_compiled_call_impl") if name in own]
    before: dict[str, Any] = {name: own[name] for name in kept}
    own.update(forward=answer, _compiled_call_impl=None)
    try:
        yield
    finally:
        del own["forward"], own["_compiled_call_impl"]
        own.update(before)
