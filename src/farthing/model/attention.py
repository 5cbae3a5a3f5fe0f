"""Attention over documents laid end to end: no padding, and no token of one document sees
another's.

One entry in transformers' `AttentionInterface`. A packed batch is [1, T]; where its documents begin
and end is computed once, on the CPU, and goes through the model as the keyword `documents`, which
every layer hands to its attention, also when a checkpointed layer is computed again. A batch that
comes without `documents` is treated as `sdpa` would, padding and all, so that a model set to this
entry still evaluates and generates.

A document may continue the beginning of another, whose tokens it sees before its own: what many
documents begin with is computed once. A layer that looks back only can't tell the difference, so
losses and gradients are the same. Keys and values are copied for each document that sees them, in
every layer; nothing else is.

Which kernel attends is chosen in `attention_choice.py`; they are in `attention_kernels.py`.

Attention dropout draws its masks in the shape of what is computed, so a packed batch and a padded
one drop other weights, as two micro-batch sizes do; in expectation they are the same. So it is
where documents share a beginning: what any dropout of the model drops there, it drops for all of
them. Dropout elsewhere in a model is not touched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from farthing.model.attention_kernels import AttentionSettings, over_documents, plain_attention
from farthing.model.documents import Batch, Documents, owners_of
from farthing.model.head import find_head
from farthing.model.last_layer import last_layer, of_first_tokens
from farthing.model.loss import has_decoder, inner_of, inputs_of
from farthing.model.norms import use_one_kernel
from farthing.model.pairs import Sides, answering, take_documents
from farthing.models.families import DECODERS, ENCODERS, PACKED, WHY_NOT_PACKED
from farthing.objectives.registry import objective_of

NAME = "farthing_varlen"

# ---- the model ----


def can_go_packed(model: Any, task: str) -> str | None:
    """Why this model can't take documents end to end for `task`; None if it can."""
    inner = inner_of(model)
    config, kind = inner.config, inner.config.model_type
    odd = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    why, wrapped = "", [each for each in inner.modules() if hasattr(each, "modules_to_save")]
    if any(hasattr(part, "is_causal") for each in wrapped for part in each.modules()):
        why = "attention that is trained whole beside an adapter has settings of its own"
    elif kind in WHY_NOT_PACKED:
        why = WHY_NOT_PACKED[kind]
    elif kind not in PACKED.get(objective_of(task).head, ()):
        why = "not among the families whose packed batches are tested"
    elif has_decoder(inner):
        return find_head(model, task).why_whole or None
    elif not getattr(inner, "_supports_attention_backend", False):
        why = "this version of transformers lets no other attention in"
    elif odd:
        why = f"layers of {', '.join(sorted(odd))}"
    elif getattr(config, "output_router_logits", False):
        why = "its configuration asks for the logits of its routers"
    elif kind in DECODERS and getattr(config, "use_bidirectional_attention", False):
        why = "it attends in both directions"
    elif kind in ENCODERS and config.is_decoder:
        why = "used as a decoder"
    elif _head_kind(inner) is None:
        why = "its classification head is not known"
    return f"{kind}: {why}" if why else None


def can_share(model: Any, task: str) -> str | None:
    """Why documents can't continue from others in this model; None if they can."""
    inner = inner_of(model)
    kind = inner.config.model_type
    if has_decoder(inner):
        return f"{kind}: its sources are read in both directions"
    if kind in ENCODERS:
        return f"{kind}: a token's meaning depends on what follows it"
    return can_go_packed(model, task)


def go_packed(model: Any) -> None:
    """Set the model's attention to this entry. It still takes padded batches, as `sdpa` does."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

    if (
        NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys()
    ):  # it may be there as an entry that is never compiled
        ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    # each part by itself: transformers 5.17 leaves out T5's, whose configurations are copies
    for part in inner_of(model).modules():
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation != NAME:
            part.set_attn_implementation(NAME)
    take_documents(inner_of(model))
    use_one_kernel(inner_of(model))


def packed_logits(model: Any, batch: Batch) -> Tensor:
    """Logits of a packed batch: [1, T, V or C], or [N, C], one row a document, where examples are
    scored.

    The last layer of an encoder is computed for the tokens alone that its classifier reads.
    """
    inner, documents = inner_of(model), batch["documents"]
    kind, inputs = _head_kind(inner), inputs_of(batch) | {"use_cache": False}
    if kind == "each":
        return model(**inputs).logits
    body = getattr(inner, inner.base_model_prefix)
    if kind == "last":
        hidden = body(**inputs).last_hidden_state[0]  # [T, H]
        return inner.score(hidden[_last_tokens(batch["input_ids"][0], documents, inner.config)])
    starts, last = documents.bounds[:-1].long(), last_layer(inner)

    def answer(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        read = of_first_tokens(last, hidden, documents, attend)
        return read.new_zeros(hidden.shape).index_copy(1, starts, read)

    with answering(last, answer):
        first = body(**inputs).last_hidden_state[0, starts, None]  # [N, 1, H]: N of one token
    return inner.classifier(first if kind == "first" else inner.dropout(body.pooler(first)))


def _head_kind(inner: Any) -> str | None:
    """How a head reads a document: each token; or, of classes, its last token, its first, or its
    first through the body's pooler. None where that is not known.
    """
    if not type(inner).__name__.endswith("ForSequenceClassification"):
        return "each"
    if inner.config.model_type in DECODERS:
        return "last" if hasattr(inner, "score") else None
    body = getattr(inner, inner.base_model_prefix, None)
    if getattr(body, "pooler", None) is not None:
        return "pooled" if hasattr(inner, "dropout") and hasattr(inner, "classifier") else None
    return "first" if hasattr(inner, "classifier") else None


def reads_first_tokens(inner: Any) -> bool:
    """Whether a packed classifier reads the first token of each document."""
    return _head_kind(inner) in ("first", "pooled")


def _last_tokens(ids: Tensor, documents: Documents, config: Any) -> Tensor:
    """[N]: where each document's last token is that is not padding, as transformers looks for it;
    else its first.
    """
    pad_id = config.get_text_config().pad_token_id
    rows, starts, owner = documents.key_rows, documents.key_bounds[:-1].long(), owners_of(documents)
    text = ids if rows is None else ids[rows]
    places = (torch.arange(len(text), device=ids.device) - starts[owner]) * (text != pad_id)
    last = starts + torch.zeros_like(starts).scatter_reduce(0, owner, places, "amax")
    return last if rows is None else rows[last]


# ---- the entry ----


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: query [B, Hq, T, D], key and value [B, Hk, T, D] -> ([B, T, Hq, D],
    no weights).

    Of the others `sliding_window` is how many tokens are seen, the token itself among them,
    `softcap` bends the scores,
    `is_causal` overrules the module's own. With `documents`, B is 1 and `attention_mask` is not
    looked at.
    """
    documents: Documents | Sides | None = others.pop("documents", None)
    window: int | None = others.pop("sliding_window", None)
    softcap: float | None = others.pop("softcap", None)
    is_causal: bool | None = others.pop("is_causal", None)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if documents is None and softcap is None:
        how = {"dropout": dropout, "scaling": scaling, "is_causal": causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **how, **others)
    if documents is None:
        n_queries, n_keys = query.shape[2], key.shape[2]
        if attention_mask is None and causal and n_queries > 1:  # which sdpa would imply
            mask = torch.ones(n_queries, n_keys, dtype=torch.bool, device=query.device)
            attention_mask = mask.tril(n_keys - n_queries)
        capped = AttentionSettings(causal, scale, window, dropout, softcap)
        out = plain_attention(query, key, value, attention_mask, capped)
        return out.transpose(1, 2).contiguous(), None
    if isinstance(documents, Sides):
        documents = documents.own if causal else documents.across
    bias: Tensor | None = others.pop("position_bias", None)
    unknown = [name for name in ("s_aux", "cache") if others.get(name) is not None]
    if unknown:
        raise ValueError(f"attention with {', '.join(unknown)} is not known here")
    # [T, H, D] with tokens outermost: how every kernel and the projections around it lay them out
    queries, keys, values = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    asked = AttentionSettings(causal, scale, window, dropout, softcap, bias)
    return over_documents(queries, keys, values, documents, asked)[None], None
