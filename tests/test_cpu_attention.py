"""Attention in blocks of queries against the formula in double precision, and when it is used."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from farthing.model import attention_kernels
from farthing.model.attention import Documents
from farthing.model.cpu_attention import blocked_attention, is_quicker_in_blocks

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def by_formula(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
    groups, (length, n_keys) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * scale
    if causal:
        seen = torch.ones(length, n_keys, dtype=torch.bool).tril(n_keys - length)
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, -1) @ value


def drawn_of(seed: int, dtype: torch.dtype) -> tuple[list[Tensor], bool, float]:
    """Query, key and value of a drawn shape, some with more keys than queries, and how to attend."""  # noqa: E501
    draw = random.Random(seed)
    torch.manual_seed(seed)
    groups, to_a_key, width = draw.choice([1, 2, 3]), draw.choice([1, 2, 4]), draw.choice([8, 16])
    length = draw.choice([1, 2, 63, 64, 65, 128, 150, 300])
    n_keys = length + draw.choice([0, 0, 1, 40, 200])
    shapes = [
        (draw.choice([1, 2]), groups * to_a_key, length, width),
        *[(0, groups, n_keys, width)] * 2,
    ]
    tensors = [torch.randn(shapes[0][0], *shape[1:]).to(dtype).requires_grad_() for shape in shapes]
    return tensors, draw.random() < 0.7, draw.choice([width**-0.5, 0.3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(25))
def test_blocks_give_what_the_formula_gives(seed: int, dtype: torch.dtype) -> None:
    tensors, causal, scale = drawn_of(seed, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    out, right = (
        blocked_attention(*tensors, causal=causal, scale=scale),
        by_formula(*exact, causal, scale),
    )  # type: ignore[call-arg]
    assert out.dtype == dtype
    weight = torch.randn(right.shape, dtype=torch.float64)
    gradients = torch.autograd.grad((out.double() * weight).sum(), tensors)
    for found, wanted in zip(
        (out, *gradients), (right, *torch.autograd.grad((right * weight).sum(), exact)), strict=True
    ):
        assert (found.double() - wanted).abs().max() < CLOSE[dtype] * max(
            1.0, wanted.abs().max().item()
        )


def test_the_scores_of_a_document_are_not_kept() -> None:
    query, key, value = (torch.randn(1, 4, 512, 8, requires_grad=True) for _ in range(3))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    ):  # type: ignore[func-returns-value]
        blocked_attention(query, key, value, causal=True, scale=1.0)
    assert sum(kept) == 4 * query.numel()  # scaled queries, keys, values and what came out


def test_autocast_changes_nothing_within() -> None:
    query, key, value = (torch.randn(1, 2, 70, 8) for _ in range(3))
    plain = blocked_attention(query, key, value, causal=True, scale=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(blocked_attention(query, key, value, causal=True, scale=1.0), plain)


def test_when_it_is_expected_to_be_quicker() -> None:
    def query(dtype: torch.dtype, device: str = "cpu") -> Tensor:
        return torch.empty(1, 1, 1, 8, dtype=dtype, device=device)

    assert is_quicker_in_blocks(query(torch.bfloat16), 1)
    assert is_quicker_in_blocks(query(torch.float32), 500)
    assert not is_quicker_in_blocks(query(torch.float32), 200)
    assert not is_quicker_in_blocks(query(torch.bfloat16), 5000)
    assert not is_quicker_in_blocks(query(torch.float16), 500)
    assert not is_quicker_in_blocks(query(torch.bfloat16, "meta"), 100)


@pytest.mark.parametrize(
    ("keys", "is_used"),
    [
        ({}, True),
        ({"window": 8}, False),
        ({"window": 900}, True),
        ({"softcap": 2.0}, False),
        ({"dropout": 0.5}, False),
    ],
)
def test_documents_go_through_it_where_nothing_stands_against_it(
    keys: dict[str, float], is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[int, ...]] = []

    def seen(query: Tensor, *tensors: Tensor, **options: object) -> Tensor:
        used.append(tuple(query.shape))
        return blocked_attention(query, *tensors, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_kernels, "blocked_attention", seen)
    lengths = [50, 50, 9]
    query, key, value = (torch.randn(sum(lengths), 2, 8, dtype=torch.bfloat16) for _ in range(3))
    how = attention_kernels.How(**{"causal": True, "scale": 0.3} | keys)  # type: ignore[arg-type]
    out = attention_kernels.KERNELS["documents"](query, key, value, Documents.of(lengths), how)
    assert used == ([(2, 2, 50, 8), (1, 2, 9, 8)] if is_used else [])
    monkeypatch.setattr(attention_kernels, "is_quicker_in_blocks", lambda *_: False)
    if not keys.get("dropout"):
        other = attention_kernels.KERNELS["documents"](
            query, key, value, Documents.of(lengths), how
        )
        assert torch.allclose(out.float(), other.float(), atol=2e-2)
