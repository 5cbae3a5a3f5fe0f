"""flash-attn for the peers, made of the same kernel in torch, where flash-attn is not installed.

transformers takes `flash_attention_2`, and with it TRL's packing without padding, where a package
flash_attn is found. It is seldom there, as it has to be built for hours; its kernels of version 2
are in torch, as `varlen_attn`. `install` writes a package of that name with the functions that
transformers 5 calls, for the peers' processes alone. Refuses dropout and windows.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

VERSION = "2.8.3"


def install(folder: Path) -> Path:
    """A folder for PYTHONPATH with a package flash_attn that is this file; returns it."""
    package, facts = folder / "flash_attn", folder / f"flash_attn-{VERSION}.dist-info"
    package.mkdir(parents=True)
    facts.mkdir()
    shutil.copy(__file__, package / "__init__.py")
    (package / "bert_padding.py").write_text(
        "from flash_attn import index_first_axis, pad_input, unpad_input\n"
    )
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n"
    )
    (facts / "top_level.txt").write_text("flash_attn\n")
    (facts / "RECORD").write_text("flash_attn/__init__.py,,\nflash_attn/bert_padding.py,,\n")
    return folder


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **others: Any,
) -> Any:
    """[T, H, D] of documents end to end: torch's `varlen_attn`, with the keyword for causal that
    this torch has.
    """
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    window = others.get("window_size")
    if dropout_p or window not in (None, (-1, -1)):
        raise NotImplementedError("no dropout and no window here")
    known = inspect.signature(varlen_attn).parameters
    how: dict[str, Any] = (
        {"is_causal": causal}
        if "is_causal" in known
        else {"window_size": (-1, 0 if causal else -1)}
    )
    if softmax_scale is not None and "scale" in known:
        how["scale"] = softmax_scale
    if "enable_gqa" in known and k.shape[1] != q.shape[1]:
        how["enable_gqa"] = True
    bounds = (cu_seqlens_q.to(q.device), cu_seqlens_k.to(q.device))
    return varlen_attn(q, k, v, *bounds, int(max_seqlen_q), int(max_seqlen_k), **how)


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **others: Any,
) -> Any:
    """[B, L, H, D] of rows of one length."""
    import torch

    n, length = q.shape[:2]
    bounds = torch.arange(n + 1, dtype=torch.int32, device=q.device) * length
    flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    more = {"softmax_scale": softmax_scale, "causal": causal, **others}
    return flash_attn_varlen_func(*flat, bounds, bounds, length, length, dropout_p, **more).view(
        q.shape
    )


def flash_attn_with_kvcache(*_: Any, **__: Any) -> Any:
    """Of generation: not made here."""
    raise NotImplementedError("nothing is generated here")


def index_first_axis(tensor: Any, indices: Any) -> Any:
    """Rows of a tensor."""
    return tensor[indices]


def unpad_input(hidden: Any, mask: Any, unused_mask: Any = None) -> tuple[Any, Any, Any, int, Any]:
    """(tokens that are not padding, their places, bounds, longest, tokens of each row) of [B, L,
    ...].
    """
    import torch.nn.functional as F

    lengths = mask.sum(-1).int()
    indices = mask.flatten().nonzero().flatten()
    bounds = F.pad(lengths.cumsum(0).int(), (1, 0))
    return hidden.flatten(0, 1)[indices], indices, bounds, int(lengths.max()), lengths


def pad_input(hidden: Any, indices: Any, batch: int, length: int) -> Any:
    """[B, L, ...] of tokens that are not padding."""
    whole = hidden.new_zeros(batch * length, *hidden.shape[1:])
    whole[indices] = hidden
    return whole.view(batch, length, *hidden.shape[1:])
