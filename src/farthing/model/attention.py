"""Attention over documents laid end to end: no padding, and no token of one document sees another's.

One entry in transformers' `AttentionInterface`. A flat batch is [1, T]; where its documents begin and end is computed
once, on the CPU, and goes through the model as the keyword `documents`, which every layer hands to its attention, also
when a checkpointed layer is computed again. A batch that comes without `documents` is treated as `sdpa` would, padding
and all, so that a model set to this entry still evaluates and generates.

A document may go on from the beginning of another, whose tokens it sees before its own: what many documents begin with
is computed once. A layer that looks back only can't tell the difference, so losses and gradients are the same. Keys and
values are copied for each document that sees them, in every layer; nothing else is.

On a CPU each run of equally long documents is one call of `scaled_dot_product_attention`. On CUDA one kernel takes all
documents: `torch.nn.attention.varlen`, else flash-attn, else flex attention, else the same calls as on a CPU. The three
kernels were never run on a GPU: what they are called with is tested, not what they answer.

Attention dropout draws its masks in the shape of what is computed, so a flat batch and a padded one drop other weights,
as two micro-batch sizes do; in expectation they are the same. So it is where documents share a beginning: what any
dropout of the model drops there, it drops for all of them. Dropout elsewhere in a model is not touched.

Refuses to choose pieces, and models whose flat batches were not shown to be right: `can_go_flat` says why.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from farthing.model.cpu_attention import blocked_attention, is_quicker_in_blocks
from farthing.planner.families import DECODERS, ENCODERS, FLAT, WHY_NOT_FLAT

NAME = "farthing_varlen"

PADDING_FIRST = frozenset({"camembert", "roberta", "xlm-roberta"})  # their positions begin after the padding index


# ---- the documents of a batch ----


@dataclass(frozen=True, eq=False)
class Documents:
    """Where the N documents of a flat batch of T tokens begin and end; computed once, used by every layer."""

    lengths: tuple[int, ...]
    """Tokens of each, in order."""
    bounds: Tensor
    """int32 [N + 1] on the batch's device: 0, then where each ends."""
    longest: int
    runs: tuple[tuple[int, int, int], ...]
    """(how many documents, tokens of each, keys of each) of neighbours alike in both, in order."""
    no_mask: Tensor
    """[1, 1, 1, 1]: transformers takes a mask of four dimensions as made, so it looks for no boundaries by itself."""
    key_bounds: Tensor
    """int32 [N + 1], as `bounds`, of the keys that each document sees; its own tokens are the last of them."""
    key_lengths: tuple[int, ...]
    key_rows: Tensor | None = None
    """int64 [K]: the token of each key, where a document goes on from another; else keys and tokens are the same."""
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        lengths: Sequence[int] | NDArray[np.int64],
        device: torch.device | str = "cpu",
        key_lengths: Sequence[int] | NDArray[np.int64] | None = None,
        key_rows: NDArray[np.int64] | None = None,
    ) -> Documents:
        """From the tokens of each document; nothing waits for the device.

        Where documents go on from others, `key_lengths` [N] are the tokens that each sees, its own among them, and
        `key_rows` [K], document by document, which those are.
        """
        sizes = tuple(int(length) for length in lengths)
        if not sizes or min(sizes) < 1:
            raise ValueError("a flat batch needs documents of at least one token")
        keys = sizes if key_lengths is None else tuple(int(length) for length in key_lengths)
        n_keys = sum(sizes) if key_rows is None else len(key_rows)
        if sum(keys) != n_keys or any(seen < own for own, seen in zip(sizes, keys, strict=True)):
            raise ValueError("a document sees its own tokens at least, and each of its keys is a token's")
        bounds = _ends(sizes, device)
        return cls(
            sizes,
            bounds,
            max(sizes),
            tuple((len(list(alike)), *each) for each, alike in itertools.groupby(zip(sizes, keys, strict=True))),
            torch.ones(1, 1, 1, 1, device=device),
            bounds if key_rows is None else _ends(keys, device),
            keys,
            None if key_rows is None else torch.from_numpy(key_rows).to(device, non_blocking=True),
        )

    @property
    def most_keys(self) -> int:
        """Keys of the document that sees most."""
        return max(self.key_lengths)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, made at the first call with this key: masks that several layers share."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _ends(sizes: Sequence[int], device: torch.device | str) -> Tensor:
    """int32 [N + 1]: 0, then where each ends."""
    return torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32).to(device, non_blocking=True)


def flat_batch(arrays: dict[str, NDArray[np.int64]], device: torch.device | str = "cpu") -> dict[str, Any]:
    """The arrays of `collate_flat` or `collate_shared`, and others beside them, as tensors on `device`.

    Those that say where documents are become `documents`. But for the labels it is what a model takes.
    """
    batch: dict[str, Any] = {
        name: torch.from_numpy(array).to(device, non_blocking=True)
        for name, array in arrays.items()
        if name not in ("lengths", "key_lengths", "key_rows")
    }
    documents = Documents.of(arrays["lengths"], device, arrays.get("key_lengths"), arrays.get("key_rows"))
    return {**batch, "attention_mask": documents.no_mask, "documents": documents}


# ---- the model ----


def can_go_flat(model: Any, task: str) -> str | None:
    """Why this model can't take documents end to end for `task`, in words; None if it can."""
    inner = _inner(model)
    config = inner.config
    kind = config.model_type
    known = FLAT.get(task)
    if kind in WHY_NOT_FLAT:
        return f"{kind}: {WHY_NOT_FLAT[kind]}"
    if known is None:
        return f"{task}: inputs and targets are padded apart"
    if kind not in known:
        return f"{kind}: not among the families whose flat batches are tested"
    if not getattr(inner, "_supports_attention_backend", False):
        return f"{kind}: this version of transformers lets no other attention in"
    odd = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if odd:
        return f"{kind}: layers of {', '.join(sorted(odd))}"
    if getattr(config, "output_router_logits", False):
        return f"{kind}: its configuration asks for the logits of its routers"
    if kind in DECODERS and getattr(config, "use_bidirectional_attention", False):
        return f"{kind}: it attends in both directions"
    if kind in ENCODERS and (getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False)):
        return f"{kind}: used as a decoder"
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        return f"{kind}: its scores are biased by the distance of tokens"
    if task == "classification" and _head_kind(inner) is None:
        return f"{kind}: its classification head is not known"
    return None


def can_share(model: Any, task: str) -> str | None:
    """Why documents can't go on from others in this model, in words; None if they can."""
    kind = _inner(model).config.model_type
    return f"{kind}: a token's meaning depends on what follows it" if kind in ENCODERS else can_go_flat(model, task)


def go_flat(model: Any) -> None:
    """Set the model's attention to this entry. It still takes padded batches, as `sdpa` does."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():  # it may be there as an entry that is never compiled
        ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    _inner(model).set_attn_implementation(NAME)


def first_position(config: Any) -> int:
    """The position of a document's first token."""
    return int(config.pad_token_id) + 1 if config.model_type in PADDING_FIRST else 0


def flat_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """What a model, or its body alone, is called with for a flat batch."""
    documents: Documents = batch["documents"]
    return {
        "input_ids": batch["input_ids"],
        "position_ids": batch["position_ids"],
        "attention_mask": documents.no_mask,
        "documents": documents,
        "use_cache": False,
    }


def flat_logits(model: Any, batch: dict[str, Any], task: str) -> Tensor:
    """Logits of a flat batch: causal-lm [1, T, V], classification [N, C], one row a document."""
    documents, inputs = batch["documents"], flat_inputs(batch)
    logits: Tensor
    if task != "classification":
        logits = model(**inputs).logits
        return logits
    inner = _inner(model)
    body = getattr(inner, inner.base_model_prefix)
    hidden = body(**inputs).last_hidden_state[0]  # [T, H]
    kind = _head_kind(inner)
    if kind == "last":
        logits = inner.score(hidden[_last_tokens(batch["input_ids"][0], documents, inner.config)])
        return logits
    first = hidden[documents.bounds[:-1].long()][:, None]  # [N, 1, H]: N documents of their first token
    logits = inner.classifier(first if kind == "first" else inner.dropout(body.pooler(first)))
    return logits


def _inner(model: Any) -> Any:
    """The model itself, out of its adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _head_kind(inner: Any) -> str | None:
    """How a classification head reads a document: its last token, its first, or its first through the body's pooler."""
    if inner.config.model_type in DECODERS:
        return "last" if hasattr(inner, "score") else None
    body = getattr(inner, inner.base_model_prefix, None)
    if getattr(body, "pooler", None) is not None:
        return "pooled" if hasattr(inner, "dropout") and hasattr(inner, "classifier") else None
    return "first" if hasattr(inner, "classifier") else None


def _last_tokens(ids: Tensor, documents: Documents, config: Any) -> Tensor:
    """[N]: where each document's last token is that is not padding, as transformers looks for it; else its first."""
    pad_id = config.get_text_config().pad_token_id
    if pad_id is None:
        return documents.bounds[1:].long() - 1
    rows, starts, owner = documents.key_rows, documents.key_bounds[:-1].long(), _owners(documents, ids.device)
    text = ids if rows is None else ids[rows]
    places = (torch.arange(len(text), device=ids.device) - starts[owner]) * (text != pad_id)
    last = starts + torch.zeros_like(starts).scatter_reduce(0, owner, places, "amax")
    return last if rows is None else rows[last]


def _owners(documents: Documents, device: Any) -> Tensor:
    """[K]: the number of each key's document; of each token's, where no document goes on from another."""

    def make() -> Tensor:
        owners = np.repeat(np.arange(len(documents.lengths)), documents.key_lengths)
        return torch.from_numpy(owners).to(device, non_blocking=True)

    owners: Tensor = documents.once(("owners", str(device)), make)
    return owners


# ---- the entry ----


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    documents: Documents | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: query [B, Hq, T, D], key and value [B, Hk, T, D] -> ([B, T, Hq, D], no weights).

    With `documents`, B is 1 and `attention_mask` is not looked at. `sliding_window` is how many tokens are seen, the
    token itself among them.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if documents is None:
        return _without_documents(
            module, query, key, value, attention_mask, dropout, scaling, sliding_window, softcap, causal, others
        ), None
    if not causal and sliding_window is not None:
        raise ValueError("a sliding window that looks ahead is not known here")
    unknown = [name for name in ("s_aux", "position_bias", "cache") if others.get(name) is not None]
    if unknown:
        raise ValueError(f"attention with {', '.join(unknown)} is not known here")
    if not causal and documents.key_rows is not None:
        raise ValueError("documents that look ahead can't go on from others")
    window = sliding_window if sliding_window is not None and documents.most_keys > sliding_window else None
    if torch.is_autocast_enabled(query.device.type):  # the kernels are no operations autocast knows
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    kernel = KERNELS[
        choose_kernel(query.device, query.dtype, query.shape[-1], dropout > 0, softcap is not None, window)
    ]
    # [T, H, D] with tokens outermost: how every kernel and the projections around it lay them out
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    keys, values = _as_seen(keys, documents), _as_seen(values, documents)
    out = kernel(
        queries, keys, values, documents, causal=causal, scale=scale, window=window, dropout=dropout, softcap=softcap
    )
    return out[None], None


def _as_seen(tokens: Tensor, documents: Documents) -> Tensor:
    """Keys or values [T, H, D] as the documents see them, one after another: [K, H, D].

    By way of fp32, so that the gradients of the many copies of a token are added up in it.
    """
    if documents.key_rows is None:
        return tokens
    wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    return wide.index_select(0, documents.key_rows).to(tokens.dtype)


@functools.lru_cache(maxsize=256)
def choose_kernel(
    device: torch.device, dtype: torch.dtype, head_size: int, has_dropout: bool, has_softcap: bool, window: int | None
) -> str:
    """The name in `KERNELS` of the quickest that is here and can do what is asked; "documents" always can."""
    if device.type != "cuda":
        return "documents"
    compute = torch.cuda.get_device_capability(device)
    fits_flash = (
        dtype in (torch.float16, torch.bfloat16) and compute >= (8, 0) and head_size <= 256 and head_size % 8 == 0
    )
    varlen, flash = _parameters_of(_varlen()), _parameters_of(_flash())
    if fits_flash and varlen and not has_dropout and not has_softcap and (window is None or "window_size" in varlen):
        return "varlen"
    if fits_flash and flash and (not has_softcap or "softcap" in flash) and (window is None or "window_size" in flash):
        return "flash"
    if compute >= (8, 0) and not has_dropout and _flex() is not None:
        return "flex"
    return "documents"


# ---- the kernels: query [T, Hq, D], key and value [K, Hk, D] -> [T, Hq, D]; the last query is at the last key ----


def _per_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    causal: bool,
    scale: float,
    window: int | None,
    dropout: float,
    softcap: float | None,
) -> Tensor:
    """Each run of equally long documents as one batch.

    `split` and not slices: the gradient of a slice is as long as the whole, and there would be one for every run.
    """
    sizes, key_sizes = [n * length for n, length, _ in documents.runs], [n * keys for n, _, keys in documents.runs]
    parts = zip(documents.runs, query.split(sizes), key.split(key_sizes), value.split(key_sizes), strict=True)
    outputs = []
    for (n, length, keys), q, k, v in parts:
        q = q.unflatten(0, (n, length)).transpose(1, 2)  # [n, H, length, D]
        k, v = (tensor.unflatten(0, (n, keys)).transpose(1, 2) for tensor in (k, v))
        mask, is_cut = None, causal and window is not None and keys > window
        in_blocks = softcap is None and not dropout and not is_cut and is_quicker_in_blocks(q, keys)
        is_plain = keys == length and softcap is None  # sdpa's own causal mask begins at the first key
        if is_cut or (causal and length > 1 and not is_plain and not in_blocks):
            mask = documents.once((length, keys, window), functools.partial(_seen, keys, window, q.device, length))
        if in_blocks:
            out = blocked_attention(q, k, v, causal=causal, scale=scale)
        elif softcap is not None:
            out = _in_steps(q, k, v, mask, scale, softcap, dropout)
        else:
            out = _sdpa(q, k, v, mask, causal and mask is None and length > 1, scale, dropout)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float, dropout: float
) -> Tensor:
    """Grouped heads as they are on a CPU, whose quick kernel takes them so; else repeated."""
    groups = query.shape[1] // key.shape[1]
    as_is = query.device.type == "cpu"
    if groups > 1 and not as_is:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out: Tensor = F.scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=groups > 1 and as_is
    )
    return out


def _in_steps(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float, dropout: float
) -> Tensor:
    """Attention in plain operations, scores squeezed by tanh into (-softcap, softcap).

    (Gemma 2, arXiv 2408.00118, section 2.)
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scale / softcap)) * softcap
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min  # and not -inf: a row of padding may see nothing at all
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    out: Tensor = F.dropout(weights, dropout, training=dropout > 0) @ value
    return out


def _seen(n_keys: int, window: int | None, device: Any, n_queries: int) -> Tensor:
    """bool [queries, keys]: which keys (columns) a query (row) sees; the last query is at the last key."""
    before = n_keys - n_queries
    seen = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(before)
    return seen if window is None else seen.triu(before + 1 - window)


def _varlen_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    causal: bool,
    scale: float,
    window: int | None,
    dropout: float,
    softcap: float | None,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn`, whose parameters differ from version to version. Never run on a GPU.

    More keys than queries: its causal mask ends at the lower right, as flash-attn's (pytorch/pytorch#193630 says so).
    """
    parameters = _parameters_of(_varlen())
    options: dict[str, Any] = {}
    if "scale" in parameters:
        options["scale"] = scale
    else:  # it divides by the root of the head's size
        query = query * (scale * query.shape[-1] ** 0.5)
    if "is_causal" in parameters:
        options["is_causal"] = causal
    if "window_size" in parameters and (window is not None or "is_causal" not in parameters):
        options["window_size"] = ((-1 if window is None else window - 1), 0) if causal else (-1, -1)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and "enable_gqa" in parameters:
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    bounds = documents.bounds, documents.key_bounds, documents.longest, documents.most_keys
    out: Tensor = _varlen()(query, key, value, *bounds, **options)  # type: ignore[misc]
    return out


def _flash_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    causal: bool,
    scale: float,
    window: int | None,
    dropout: float,
    softcap: float | None,
) -> Tensor:
    """`flash_attn.flash_attn_varlen_func`, which also drops and caps. Never run on a GPU.

    More keys than queries: its causal mask ends at the lower right, from version 2.1 on (its documentation).
    """
    options: dict[str, Any] = {"dropout_p": dropout, "softmax_scale": scale, "causal": causal}
    if window is not None:
        options["window_size"] = (window - 1, 0)
    if softcap is not None:
        options["softcap"] = softcap
    bounds = documents.bounds, documents.key_bounds, documents.longest, documents.most_keys
    out: Tensor = _flash()(query, key, value, *bounds, **options)  # type: ignore[misc]
    return out


def _flex_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    causal: bool,
    scale: float,
    window: int | None,
    dropout: float,
    softcap: float | None,
) -> Tensor:
    """`flex_attention`, compiled; its blocks are found once per batch and window. Never run on a GPU."""
    from torch.nn.attention.flex_attention import create_block_mask

    n_tokens, n_keys, device = len(query), len(key), query.device

    def capped(score: Tensor, batch: Tensor, head: Tensor, at: Tensor, other: Tensor) -> Tensor:
        assert softcap is not None
        return torch.tanh(score / softcap) * softcap

    def find_blocks() -> Any:
        owners = _owners(documents, device)
        own = torch.arange(n_tokens, device=device)  # where each token is among the keys
        if documents.key_rows is not None:
            gaps = documents.key_bounds[1:] - documents.bounds[1:]
            own = own + gaps.repeat_interleave(documents.bounds.diff(), output_size=n_tokens)

        def sees(batch: Tensor, head: Tensor, at: Tensor, other: Tensor) -> Tensor:
            at = own[at]
            seen = owners[at] == owners[other]
            if causal:
                seen = seen & (at >= other)
            return seen if window is None else seen & (at - other < window)

        # compiled it makes no mask of T by K on the way
        return create_block_mask(sees, None, None, n_tokens, n_keys, device, _compile=device.type == "cuda")

    blocks = documents.once(("blocks", causal, window), find_blocks)
    out: Tensor = _flex()(  # type: ignore[misc]
        *(tensor.transpose(0, 1)[None] for tensor in (query, key, value)),
        score_mod=None if softcap is None else capped,
        block_mask=blocks,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[0].transpose(0, 1)


KERNELS: dict[str, Callable[..., Tensor]] = {
    "documents": _per_document,
    "varlen": _varlen_kernel,
    "flash": _flash_kernel,
    "flex": _flex_kernel,
}


@functools.cache
def _varlen() -> Callable[..., Any] | None:
    """torch's own; from 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


@functools.cache
def _flash() -> Callable[..., Any] | None:
    """flash-attn 2, where someone has built it."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


@functools.cache
def _flex() -> Callable[..., Any] | None:
    """Compiled, as it computes all scores at once otherwise; needs Triton."""
    try:
        import triton  # noqa: F401
        from torch.nn.attention.flex_attention import flex_attention
    except ImportError:
        return None
    return torch.compile(flex_attention, dynamic=True)


@functools.cache
def _parameters_of(function: Callable[..., Any] | None) -> frozenset[str]:
    """The names of its parameters; none where there is no function."""
    return frozenset() if function is None else frozenset(inspect.signature(function).parameters)


# ---- batches without documents ----


def _without_documents(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    causal: bool,
    others: dict[str, Any],
) -> Tensor:
    """What `sdpa` does with the mask that was made for it, and soft-capping besides: [B, T, Hq, D]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if softcap is None:
        out: Tensor = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=causal, **others
        )[0]
        return out
    n_queries, n_keys = query.shape[2], key.shape[2]
    if mask is None and causal and n_queries > 1:  # sdpa_mask leaves a causal mask out where it can be implied
        mask = _seen(n_keys, window, query.device, n_queries)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return _in_steps(query, key, value, mask, scale, softcap, dropout).transpose(1, 2).contiguous()
