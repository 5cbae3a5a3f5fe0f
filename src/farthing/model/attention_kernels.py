"""The kernels that attend to documents laid end to end: `over_documents` takes the one that
`choose` names.

On CUDA one kernel takes all documents, torch's flash or flex attention. Where neither can, and on
a CPU, documents are padded in as few calls as pay. Of GPUs they ran on an H100.

All have one form: query [T, Hq, D], key and value [K, Hk, D], the documents and
`AttentionSettings` -> [T, Hq, D]; a document's last query is at its last key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from farthing.model.attention_choice import AttentionHardware, AttentionTask, choose
from farthing.model.documents import Documents, numbered, owners_of, sent
from farthing.model.hardware import find_compiler
from farthing.model.programs import in_programs

ALIGNED = 16
"""Numbers: where rows of a bias begin that a fused kernel takes, and steps of padded lengths."""
# What a call costs the host, in FLOP that the device computes meanwhile: on a GPU about 75 µs of 80
# TFLOP/s forward and backward, an estimate; on a CPU about 20 small operations
CALL_FLOPS = {"cuda": 6e9, "cpu": 2e7}
FLOPS_PER_SCORE = 14
"""Times the width of all heads: two products forward, five backward, each 2 FLOP."""
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class AttentionSettings:
    """How scores become weights."""

    causal: bool
    scale: float
    window: int | None = None
    """Keys that a query sees, the last of them at its own place."""
    dropout: float = 0.0
    softcap: float | None = None
    bias: Tensor | None = None
    """[1, Hq, L, L], added to scores by the places of query and key in their document, of which
    none is longer than L; minus infinity where a causal query does not see."""


def over_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, how: AttentionSettings
) -> Tensor:
    """Attention within each document by the quickest kernel: query [T, Hq, D], key and value [T,
    Hk, D] -> [T, Hq, D].
    """
    if not how.causal and how.window is not None:
        raise ValueError("a sliding window that looks ahead is not known here")
    if how.window is not None and documents.most_keys <= how.window:
        how = replace(how, window=None)
    if torch.is_autocast_enabled(query.device.type):  # the kernels are no operations autocast knows
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    key, value = keys_as_seen(key, documents), keys_as_seen(value, documents)
    return KERNELS[choose_kernel(query, how)](query, key, value, documents, how)


def keys_as_seen(tokens: Tensor, documents: Documents) -> Tensor:
    """Keys or values [T, H, D] as the documents see them, one after another: [K, H, D].

    By way of fp32, so that the gradients of the many copies of a token are added up in it.
    """
    if documents.key_rows is None:
        return tokens
    wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    return wide.index_select(0, documents.key_rows).to(tokens.dtype)


def choose_kernel(query: Tensor, how: AttentionSettings) -> str:
    """The name in `KERNELS` of the quickest that is here and can do what is asked of these
    queries.
    """
    if query.device.type == "cpu":
        return "cpu"
    if how.bias is not None:
        return "padded"
    asked = AttentionTask(
        DTYPES[query.dtype],
        query.shape[-1],
        how.softcap is not None,
        how.dropout > 0,
    )
    return choose(asked, here(query.device, torch.are_deterministic_algorithms_enabled()))


@functools.lru_cache(maxsize=16)
def here(device: torch.device, is_deterministic: bool) -> AttentionHardware:
    """What there is to attend with on a GPU."""
    capability = torch.cuda.get_device_capability(device)
    return AttentionHardware(
        capability,
        torch.backends.cuda.is_flash_attention_available(),
        capability == (9, 0) and not is_deterministic and use_flash_3(),
        _flex() is not None,
        is_deterministic,
    )


# ---- one call ----


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    how: AttentionSettings,
    *,
    is_causal: bool,
) -> Tensor:
    """Grouped heads as they are on a CPU, whose quick kernel takes them so; else repeated."""
    groups = query.shape[1] // key.shape[1]
    as_is = query.device.type == "cpu"
    if groups > 1 and not as_is:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        how.dropout,
        is_causal,
        scale=how.scale,
        enable_gqa=groups > 1 and as_is,
    )


def _biased(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: AttentionSettings
) -> Tensor:
    """Attention whose scores have a bias, which learns: on GPUs the one fused operation that has
    gradients for it.

    Its rows begin at multiples of `ALIGNED` numbers: the kernel takes no others.
    """
    assert how.bias is not None
    n_queries, n_keys = query.shape[2], key.shape[2]
    if query.device.type != "cuda" or query.shape[-1] % ALIGNED:
        return plain_attention(query, key, value, mask, how)
    bias = how.bias[:, :, :n_queries].to(query.dtype)
    if mask is not None:
        bias = bias[..., : up_to_aligned(n_keys)] + F.pad(mask, (0, -n_keys % ALIGNED))
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query,
        key,
        value,
        bias[..., :n_keys].expand(len(query), -1, -1, -1),
        torch.is_grad_enabled(),
        how.dropout,
        False,
        scale=how.scale,
    )[0]


def up_to_aligned(n: int) -> int:
    """The next multiple of `ALIGNED`."""
    return n + -n % ALIGNED


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: AttentionSettings
) -> Tensor:
    """Attention in plain operations: for scores with a bias, or squeezed by tanh into (-softcap,
    softcap).

    (T5, arXiv 1910.10683, section 2.1; Gemma 2, arXiv 2408.00118, section 2.)
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = how.scale if how.softcap is None else how.scale / how.softcap
    scores = query @ key.transpose(-1, -2)
    if scale != 1:
        scores = scores * scale
    if how.softcap is not None:
        scores = torch.tanh(scores) * how.softcap
    if how.bias is not None:
        scores = scores + how.bias[:, :, : scores.shape[2], : scores.shape[3]]
    if mask is not None:
        lowest = torch.finfo(
            scores.dtype
        ).min  # and not -inf: a row of padding may see nothing at all
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return F.dropout(weights, how.dropout, training=how.dropout > 0) @ value


# ---- documents padded in as few calls as pay ----


def padded(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, how: AttentionSettings
) -> Tensor:
    """Documents of similar lengths in one call each, padded at their ends; nothing is computed but
    attention.
    """
    plan = documents.once(
        ("padded", query.shape[1:]),
        lambda: _plan(documents, query.shape[1] * query.shape[2], query.device),
    )
    query, key = query.index_select(0, plan.tokens), key.index_select(0, plan.keys)
    value = value.index_select(0, plan.keys)
    sizes = [group.n * group.n_tokens for group in plan.groups]
    key_sizes = [group.n * group.n_keys for group in plan.groups]
    parts = query.split(sizes), key.split(key_sizes), value.split(key_sizes)
    outputs = []
    for group, q, k, v in zip(plan.groups, *parts, strict=True):
        q = q.unflatten(0, (group.n, -1)).transpose(1, 2)  # [n, H, L, D]
        k, v = (each.unflatten(0, (group.n, -1)).transpose(1, 2) for each in (k, v))
        mask = _mask(group, documents, how, q)
        if how.bias is not None:
            out = _biased(q, k, v, mask, how)
        elif how.softcap is not None:
            out = plain_attention(q, k, v, mask, how)
        else:
            out = _sdpa(q, k, v, mask, how, is_causal=how.causal and mask is None)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    found = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return found.index_select(0, plan.back)


class _Group(NamedTuple):
    """Documents that are padded to the longest of them and attended to in one call."""

    n: int
    n_tokens: int
    n_keys: int
    places: Tensor
    """int64 [2, n]: the key that each document's first query is at, and its last key."""
    is_even: bool
    """Nothing is padded."""


def _mask(
    group: _Group, documents: Documents, how: AttentionSettings, query: Tensor
) -> Tensor | None:
    """[n or 1, 1, L or 1, K] to add to scores; none where padding comes after all that is looked
    at, and where nothing is hidden.
    """
    if how.causal:
        is_plain = how.window is None and how.softcap is None and documents.key_rows is None
        if is_plain or how.bias is not None:  # which hides what comes later
            return None
    elif group.is_even:
        return None
    first, last = group.places[:, :1] if group.is_even else group.places

    def make() -> Tensor:
        columns = torch.arange(group.n_keys, device=query.device)
        if not how.causal:
            seen = (columns <= last[:, None])[:, None]  # [n, 1, K]
        else:  # padding sees what the last token sees: never nothing
            at = first[:, None] + torch.arange(group.n_tokens, device=query.device)
            at = torch.minimum(at, last[:, None])[..., None]
            seen = columns <= at  # [n, L, K]
            if how.window is not None:
                seen &= columns > at - how.window
        mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
        return mask.masked_fill_(~seen, -torch.inf)[:, None]

    return documents.once((id(group), query.dtype, how.causal, how.window), make)


class _Plan(NamedTuple):
    """Where the tokens and keys of documents go when they are padded in groups, and where they come
    back from.
    """

    groups: list[_Group]
    tokens: Tensor
    """int64: the token at each place of all groups, one after another; padding repeats a document's
    last.
    """
    keys: Tensor
    """The same of keys."""
    back: Tensor
    """int64 [T]: the place of each token."""


def _plan(documents: Documents, width: int, device: torch.device) -> _Plan:
    """On the host, from lengths it knows; what is sent is not waited for."""
    lengths, seen = np.asarray(documents.lengths), np.asarray(documents.key_lengths)
    starts, key_starts = np.cumsum(lengths) - lengths, np.cumsum(seen) - seen
    tokens, keys, groups = [], [], []
    back, n_before = np.empty(int(lengths.sum()), np.int64), 0
    for members in padded_groups(
        documents.lengths, documents.key_lengths, width, CALL_FLOPS[device.type]
    ):
        own, other = lengths[members, None], seen[members, None]
        columns = np.arange(own.max())
        rows = starts[members, None] + np.minimum(columns, own - 1)
        is_real = columns < own
        back[rows[is_real]] = n_before + np.flatnonzero(is_real)
        n_before += rows.size
        tokens.append(rows.ravel())
        keys.append(
            (key_starts[members, None] + np.minimum(np.arange(other.max()), other - 1)).ravel()
        )
        places = np.stack([(other - own)[:, 0], other[:, 0] - 1])
        is_even = bool(np.ptp(own) == np.ptp(other) == 0)
        shape = len(members), int(own.max()), int(other.max())
        groups.append(_Group(*shape, sent(places, device), is_even))
    of_tokens, of_keys = (sent(np.concatenate(each), device) for each in (tokens, keys))
    return _Plan(groups, of_tokens, of_keys, sent(back, device))


def padded_groups(
    lengths: Iterable[int], key_lengths: Iterable[int], width: int, call_flops: float
) -> list[list[int]]:
    """The numbers of documents that go together, the longest first: a group ends where what it pads
    costs more than a call. `width` is that of all heads of a token.
    """
    sizes = [
        (up_to_aligned(k), up_to_aligned(n)) for k, n in zip(key_lengths, lengths, strict=True)
    ]
    groups: list[list[int]] = []
    most_keys, most_tokens, padding = 0, 0, 0
    for number in sorted(range(len(sizes)), key=lambda number: sizes[number], reverse=True):
        n_keys, n_tokens = sizes[number]
        most_tokens = max(most_tokens, n_tokens)
        padding += FLOPS_PER_SCORE * width * (most_keys * most_tokens - n_keys * n_tokens)
        if not groups or padding > call_flops:
            groups.append([])
            most_keys, most_tokens, padding = n_keys, n_tokens, 0
        groups[-1].append(number)
    return groups


# ---- one kernel for all documents, on CUDA ----


def _flash(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, how: AttentionSettings
) -> Tensor:
    """The operation below `scaled_dot_product_attention` and `varlen_attn`, for documents: autograd
    knows it by itself, and it drops.

    More keys than queries: its causal mask ends at the lower right (pytorch/pytorch#193630 says
    so). Query heads that share keys are taken as they are.
    """
    return torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        documents.bounds,
        documents.key_bounds,
        documents.longest,
        documents.most_keys,
        how.dropout,
        how.causal and how.window is None,
        False,
        scale=how.scale,
        window_size_left=-1 if how.window is None else how.window - 1,
        window_size_right=0 if how.causal else -1,
    )[0]


def _flex_kernel(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, how: AttentionSettings
) -> Tensor:
    """`flex_attention`, compiled; its blocks are found once per batch and window."""
    from torch.nn.attention.flex_attention import create_block_mask

    n_tokens, n_keys, device = len(query), len(key), query.device

    cap = torch.full(
        (), how.softcap or 0.0, device=device
    )  # torch 2.11 compiles no function that closes over a float

    def capped(score: Tensor, batch: Tensor, head: Tensor, at: Tensor, other: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    @torch.no_grad()  # one program for training and for evaluation
    def find_blocks() -> Any:
        owners = owners_of(documents)
        reading = numbered(documents.bounds, n_tokens)
        gaps = documents.key_bounds[1:] - documents.bounds[1:]
        own = (
            torch.arange(n_tokens, device=device) + gaps[reading]
        )  # where each token is among the keys

        def sees(batch: Tensor, head: Tensor, at: Tensor, other: Tensor) -> Tensor:
            seen = reading[at] == owners[other]
            if how.causal:
                seen = seen & (own[at] >= other)
            return seen if how.window is None else seen & (own[at] - other < how.window)

        # compiled it makes no mask of T by K on the way
        return create_block_mask(
            sees, None, None, n_tokens, n_keys, device, _compile=device.type == "cuda"
        )

    blocks = documents.once(("blocks", how.causal, how.window), find_blocks)
    out: Tensor = _flex()(  # type: ignore[misc]
        *(tensor.transpose(0, 1)[None] for tensor in (query, key, value)),
        score_mod=None if how.softcap is None else capped,
        block_mask=blocks,
        scale=how.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[0].transpose(0, 1)


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, Documents, AttentionSettings], Tensor]] = {
    "cpu": padded,
    "padded": padded,
    "flash": _flash,
    "flex": _flex_kernel,
}


@functools.cache
def use_flash_3() -> bool:
    """Let torch's flash attention be FlashAttention 3; whether it is installed
    (`flash_attn_interface`) and torch takes it. Never run on a GPU.
    """
    try:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, ValueError):
        return False
    return True


@functools.cache
def _flex() -> Callable[..., Any] | None:
    """Compiled, as it computes all scores at once otherwise; needs Triton and a C compiler."""
    try:
        import triton  # noqa: F401
        from torch.nn.attention.flex_attention import flex_attention
    except ImportError:
        return None
    return None if find_compiler("cuda") is None else in_programs(flex_attention, fullgraph=True)
