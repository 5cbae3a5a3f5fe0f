"""Operations of the hollow GPU, computed by torch's own kernels for CPUs on the same memory.

A tensor of the hollow GPU lies in the host's memory, so its bytes can be read and written in place.
Every operation that torch registers for CUDA gets one in its stead that calls the CPU's on those
bytes; operations that only lay out memory stay, those of attention that CPUs lack (varlen) are
written here by their definition. What is above the kernels is the real one: autograd, autocast, the
allocator, streams, random generators with their seeds and offsets (numbers are drawn by the CPU's
generator, seeded with both). Triton's kernels run in its interpreter.

So values are right where the GPU's kernels are, and equal in bits from run to run. It says nothing
of rounding on a GPU, of kernels that are wrong or not deterministic, or of speed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# laid out or answered by torch itself: no kernel is launched, or only a copy that the hollow GPU
# makes
NATIVE = (
    "empty",
    "resize",
    "set_",
    "record_stream",
    "_local_scalar_dense",
    "is_pinned",
    "_pin_memory",
    "_efficientzerotensor",
    "is_set_to",
)
LEFT = (
    "cudnn",
    "miopen",
    "nested",
    "_efficient_attention",
    "_scaled_dot_product",
    "_flash_attention",
    "_triton_",
    "_use_cudnn",
)
_kept: list[torch.library.Library] = []


def take_over(namespace: str) -> None:
    """Register the operations of `namespace` ("aten", "bitsandbytes") that have a kernel for CUDA."""  # noqa: E501
    library = torch.library.Library(namespace, "IMPL")
    _kept.append(library)
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        space, _, op = name.partition("::")
        if space != namespace or op.startswith(NATIVE) or any(part in op for part in LEFT):
            continue
        packet, _, overload = op.partition(".")
        found = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
        views = any(
            each.alias_info is not None and not each.alias_info.is_write
            for each in found._schema.returns
        )
        if not views:
            library.impl(op, SPECIAL.get(packet, _on_host)(found), "CUDA")
    if namespace == "aten":
        for packet, kernel in (
            ("_flash_attention_forward", _flash_forward),
            ("_flash_attention_backward", _flash_backward),
            ("_scaled_dot_product_efficient_attention", _biased_forward),
            ("_scaled_dot_product_efficient_attention_backward", _biased_backward),
        ):
            library.impl(packet, kernel, "CUDA")
        library.impl("copy_", _copy, "CUDA")  # for CUDA as for others registered once for all
        for enable in (
            torch.backends.cuda.enable_flash_sdp,
            torch.backends.cuda.enable_mem_efficient_sdp,
        ):
            enable(False)  # padded attention by its definition
        torch.backends.cuda.enable_cudnn_sdp(False)


def on_host(tensor: Tensor) -> Tensor:
    """The same bytes as a tensor of the CPU."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    buffer = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    base = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(
        base, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def drawn(generator: torch.Generator | None = None) -> torch.Generator:
    """A generator of the CPU for the next numbers of this one of the GPU (the current GPU's, if
    None).
    """
    generator = generator or torch.cuda.default_generators[torch.cuda.current_device()]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return torch.Generator().manual_seed((generator.initial_seed() * 1_000_003 + offset) % 2**63)


@contextmanager
def _below() -> Iterator[None]:
    with torch._C._AutoDispatchBelowAutograd(), torch.autocast("cpu", enabled=False):
        yield


def _on_host(op: Any) -> Callable[..., Any]:
    draws = any(each.name == "generator" for each in op._schema.arguments)
    is_tensor = [str(each.type) in ("Tensor", "Optional[Tensor]") for each in op._schema.arguments]

    def kernel(*args: Any, **settings: Any) -> Any:
        pairs: list[tuple[Tensor, Tensor]] = []

        def down(value: Any) -> Any:
            if isinstance(value, Tensor):
                if not value.is_cuda:
                    return value
                pairs.append((on_host(value), value))
                return pairs[-1][0]
            if isinstance(value, list | tuple):
                return type(value)(map(down, value))
            if isinstance(value, torch.Generator):
                return drawn(value) if value.device.type == "cuda" else value
            return torch.device("cpu") if isinstance(value, torch.device) else value

        def up(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(map(up, value))
            if not isinstance(value, Tensor):
                return value
            for below, above in pairs:
                if below is value:
                    if above.shape != below.shape:
                        above.resize_(below.shape)
                    if on_host(above).data_ptr() != below.data_ptr():
                        on_host(above).copy_(below)
                    return above
            made = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="cuda"
            )
            on_host(made).copy_(value)
            return made

        with _below():
            args, settings = down(args), {name: down(value) for name, value in settings.items()}
            if draws and settings.get("generator") is None:
                settings["generator"] = drawn()
            # torch hands a number over where the operation has a tensor that was one
            has_numbers = any(
                a and isinstance(b, int | float) for a, b in zip(is_tensor, args, strict=False)
            )
            return up((op._overloadpacket if has_numbers else op)(*args, **settings))

    return kernel


def _dropout(op: Any) -> Callable[..., Any]:
    def kernel(given: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
        with _below():
            kept = torch.ones(given.shape, dtype=torch.bool)
            if train is not False and p > 0:
                kept.bernoulli_(1 - p, generator=drawn())
            scale = 0.0 if p == 1 else 1 / (1 - p) if train is not False else 1.0
            result, mask = torch.empty_like(given), torch.empty_like(given, dtype=torch.bool)
            on_host(mask).copy_(kept)
            on_host(result).copy_(on_host(given) * kept * scale)
            return result, mask

    return kernel


def _copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    with _below():
        (on_host(to) if to.is_cuda else to).copy_(on_host(source) if source.is_cuda else source)
    return to


def _softmax(op: Any) -> Callable[..., Any]:
    def kernel(
        given: Tensor, dim: int, half_to_float: bool, **settings: Any
    ) -> Any:  # CPUs do not convert on the way
        return _on_host(op)(given.float() if half_to_float else given, dim, False, **settings)

    return kernel


def _softmax_backward(op: Any) -> Callable[..., Any]:
    def kernel(
        upper: Tensor, result: Tensor, dim: int, input_dtype: torch.dtype, **settings: Any
    ) -> Any:
        return _on_host(op)(upper, result, dim, result.dtype, **settings).to(input_dtype)

    return kernel


def _rms_norm_backward(op: Any) -> Callable[..., Any]:  # CPUs have none
    def kernel(
        upper: Tensor,
        given: Tensor,
        shape: list[int],
        rstd: Tensor,
        weight: Tensor | None,
        wanted: list[bool],
    ) -> tuple[Tensor | None, Tensor | None]:
        with _below():
            above, x, scale = (on_host(each).float() for each in (upper, given, rstd))
            normed = x * scale
            scaled = above if weight is None else above * on_host(weight).float()
            dims = list(range(x.ndim - len(shape), x.ndim))
            found = (
                (scaled - normed * (scaled * normed).mean(dims, keepdim=True)) * scale,
                (
                    None
                    if weight is None
                    else (above * normed).flatten(0, x.ndim - len(shape) - 1).sum(0)
                ),
            )
            made: list[Tensor | None] = []
            for one, like, is_wanted in zip(found, (given, weight), wanted, strict=True):
                made.append(
                    torch.empty_like(like)
                    if is_wanted and one is not None and like is not None
                    else None
                )
                if made[-1] is not None and one is not None:
                    on_host(made[-1]).copy_(one)
            return made[0], made[1]

    return kernel


SPECIAL = {
    "native_dropout": _dropout,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
    "_fused_rms_norm_backward": _rms_norm_backward,
}


# ---- attention of documents laid end to end, by its definition ----


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    kept: Tensor | None,
    p: float,
    scale: float,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor]:
    """Results [Q, H, D] and logsumexp [H, Q] of one document, [Q or K, H, D] in float32; the last
    query sees the last key.
    """
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(groups, 1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
    rows = torch.arange(len(queries))[:, None] + len(keys) - len(queries)
    columns = torch.arange(len(keys))[None]
    hidden = torch.zeros(len(queries), len(keys), dtype=torch.bool)
    if left >= 0:
        hidden |= columns < rows - left
    if right >= 0:
        hidden |= columns > rows + right
    scores = scores.masked_fill(hidden, -math.inf)
    total = scores.logsumexp(-1)
    weights = (scores - total.masked_fill(total == -math.inf, 0.0)[..., None]).exp()
    if kept is not None:
        weights = weights * kept / (1 - p)
    return torch.einsum("hqk,khd->qhd", weights, values), total


def _documents(
    n_heads: int, first: Tensor, second: Tensor, state: Tensor, p: float
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Rows of queries and of keys of each document, and what dropout keeps."""
    starts, others = on_host(first).tolist(), on_host(second).tolist()
    seed, offset = on_host(state).view(torch.int64).tolist()[:2]
    generator = torch.Generator().manual_seed((seed * 1_000_003 + offset) % 2**63)
    for a, b, c, d in zip(starts, starts[1:], others, others[1:], strict=False):
        kept = (
            torch.empty(n_heads, b - a, d - c).bernoulli_(1 - p, generator=generator) if p else None
        )
        yield slice(a, b), slice(c, d), kept


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    if cum_seq_q is None or cum_seq_k is None or seqused_k is not None or alibi_slopes is not None:
        raise NotImplementedError("the hollow GPU attends only documents laid end to end")
    _must_fit(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    with _below():
        generator = torch.cuda.default_generators[query.device.index]
        state = torch.empty(2, dtype=torch.uint64, device=query.device)
        on_host(state).view(torch.int64).copy_(
            torch.tensor([generator.initial_seed() % 2**62, generator.get_offset()])
        )
        if dropout_p:
            generator.set_offset(generator.get_offset() + 4)
        result = torch.empty_like(query)
        totals = torch.empty(query.shape[1], len(query), dtype=torch.float32, device=query.device)
        q, k, v = (on_host(each).float() for each in (query, key, value))
        left = -1 if window_size_left is None else window_size_left
        right = 0 if is_causal else -1 if window_size_right is None else window_size_right
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        for rows, columns, kept in _documents(
            query.shape[1], cum_seq_q, cum_seq_k, state, dropout_p
        ):
            one, total = _attend(
                q[rows], k[columns], v[columns], kept, dropout_p, scale, left, right
            )
            on_host(result)[rows] = one.to(query.dtype)
            on_host(totals)[:, rows] = total
        unused = torch.empty(0, dtype=torch.uint64, device=query.device)
        return result, totals, state, unused, torch.empty(0, dtype=query.dtype, device=query.device)


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    _must_fit(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    left = -1 if window_size_left is None else window_size_left
    right = 0 if is_causal else -1 if window_size_right is None else window_size_right
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    gradients = [torch.zeros_like(each) for each in (query, key, value)]
    given = [on_host(each).float() for each in (query, key, value)]
    upper = on_host(grad_out).float()
    for rows, columns, kept in _documents(
        query.shape[1], cum_seq_q, cum_seq_k, rng_state, dropout_p
    ):
        places = (rows, columns, columns)
        with _above():
            leaves = [
                each[place].detach().requires_grad_()
                for each, place in zip(given, places, strict=True)
            ]
            one, _ = _attend(leaves[0], leaves[1], leaves[2], kept, dropout_p, scale, left, right)
            found = torch.autograd.grad(one, leaves, upper[rows])
        for to, place, gradient in zip(gradients, places, found, strict=True):
            on_host(to)[place] = gradient.to(to.dtype)
    return gradients[0], gradients[1], gradients[2]


@contextmanager
def _above() -> Iterator[None]:
    """Autograd again, within an operation."""
    include, exclude = (
        torch._C._dispatch_tls_local_include_set(),
        torch._C._dispatch_tls_local_exclude_set(),
    )
    kept = exclude
    for key in ("AutogradCPU", "AutogradOther", "ADInplaceOrView", "AutogradFunctionality"):
        if hasattr(torch._C.DispatchKey, key):
            kept = kept.remove(getattr(torch._C.DispatchKey, key))
    with (
        torch._C._ForceDispatchKeyGuard(include, kept),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def _must_fit(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, second: Tensor, max_q: int, max_k: int
) -> None:
    """What the kernel itself asks for, and what it would read beyond."""
    if (
        query.dtype not in (torch.float16, torch.bfloat16)
        or not query.dtype == key.dtype == value.dtype
    ):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if query.shape[-1] % 8 or query.shape[-1] > 256 or query.shape[1] % key.shape[1]:
        raise RuntimeError("FlashAttention does not take heads of these sizes")
    for starts, rows, most in ((first, query, max_q), (second, key, max_k)):
        found = on_host(starts)
        if found.dtype != torch.int32 or not starts.is_contiguous():
            raise RuntimeError("cu_seqlens must be contiguous int32")
        lengths = found.diff()
        if found[0] != 0 or found[-1] > len(rows) or (lengths < 0).any() or lengths.max() > most:
            raise RuntimeError(
                f"cu_seqlens {found.tolist()} do not fit {len(rows)} rows, at most {most} of one"
                " document"
            )


# ---- attention with a bias, by its definition ----


def _weights(
    query: Tensor, key: Tensor, bias: Tensor, state: tuple[Tensor, Tensor], p: float, scale: float
) -> tuple[Tensor, Tensor | float, Tensor]:
    """Softmax of the scores [B, H, Q, K] in float32, what dropout makes of it, logsumexp."""
    scores = query.float() @ key.float().mT * scale + bias.float()
    seed, offset = (int(on_host(each)) for each in state)
    generator = torch.Generator().manual_seed((seed * 1_000_003 + offset) % 2**63)
    kept = torch.empty_like(scores).bernoulli_(1 - p, generator=generator) / (1 - p) if p else 1.0
    return scores.softmax(-1), kept, scores.logsumexp(-1)


def _biased_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    if bias is None or is_causal or scale is None:
        raise NotImplementedError("the hollow GPU attends so with a bias only")
    if any(stride % 8 for stride in bias.stride()[:-1]) or bias.stride(-1) != 1:
        raise RuntimeError("a bias that is not aligned")
    with _below():
        generator = torch.cuda.default_generators[query.device.index]
        state = tuple(
            torch.tensor(number, device=query.device)
            for number in (generator.initial_seed() % 2**62, generator.get_offset())
        )
        if dropout_p:
            generator.set_offset(generator.get_offset() + 4)
        q, k, v, added = (on_host(each) for each in (query, key, value, bias))
        weights, kept, totals = _weights(q, k, added, (state[0], state[1]), dropout_p, scale)
        result = torch.empty_like(query.transpose(1, 2)).transpose(1, 2)
        on_host(result).copy_((weights * kept) @ v.float())
        return result, totals.to(query.device), *state


def _biased_backward(
    upper: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    out: Tensor,
    totals: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    wanted: list[bool],
    is_causal: bool = False,
    *,
    scale: float,
) -> tuple[Tensor | None, ...]:
    with _below():
        q, k, v, added = (on_host(each).float() for each in (query, key, value, bias))
        weights, kept, _ = _weights(q, k, added, (seed, offset), dropout_p, scale)
        above = on_host(upper).float()
        through = (above @ v.mT) * kept
        through = weights * (through - (through * weights).sum(-1, keepdim=True))
        found = (
            through @ k * scale,
            through.mT @ q * scale,
            (weights * kept).mT @ above,
            through,
        )
        made: list[Tensor | None] = []
        for one, like, is_wanted in zip(found, (query, key, value, bias), wanted, strict=True):
            made.append(torch.empty(one.shape, dtype=like.dtype, device=like.device))
            on_host(made[-1]).copy_(one)  # type: ignore[arg-type]
            made[-1] = made[-1] if is_wanted else None
        return tuple(made)
