"""A CPU's own kernels give what transformers and torch give: attention of short documents, norms,
gradients of embeddings.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farthing.model.attention_kernels import How, over_documents, plain_attention
from farthing.model.documents import Documents
from farthing.model.embedding_gradients import add_by_rows
from farthing.model.norms import KINDS, use_one_pass
from farthing.model.short_attention import is_for, short_attention

LENGTHS, SEEN = (5, 1, 9, 3), (4, 7, 1, 6)


def tokens(n: int, heads: int = 2, width: int = 4) -> Tensor:
    """[n, heads, width] of random numbers that are trained."""
    return torch.randn(n, heads, width, requires_grad=True)


def one_by_one(query: Tensor, key: Tensor, value: Tensor, documents: Documents, how: How) -> Tensor:
    """The same in plain operations, a document at a time."""
    found = []
    parts = (
        query.split(documents.lengths),
        key.split(documents.key_lengths),
        value.split(documents.key_lengths),
    )
    for q, k, v in zip(*parts, strict=True):
        one = plain_attention(*(each.transpose(0, 1)[None] for each in (q, k, v)), None, how)
        found.append(one[0].transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("reads_others", [False, True])
def test_short_documents_are_attended_to_as_one_at_a_time(
    has_bias: bool, reads_others: bool
) -> None:
    seen = SEEN if reads_others else LENGTHS
    documents = Documents.of(
        LENGTHS, "cpu", seen if reads_others else None, reads_others=reads_others
    )
    query, key, value = tokens(sum(LENGTHS)), tokens(sum(seen)), tokens(sum(seen))
    bias = torch.randn(1, 2, 9, 9)
    if not reads_others:
        bias = bias + torch.full((9, 9), -torch.inf).triu_(1)  # and looks back only
    bias.requires_grad_()
    how = How(False, 0.7, bias=bias if has_bias else None)
    inputs = (query, key, value, *([bias] if has_bias else []))
    assert is_for(query, key, documents, has_bias=has_bias, causal=False)
    wanted = one_by_one(query, key, value, documents, how)
    found = over_documents(query, key, value, documents, replace(how, is_short=True))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    given = torch.randn_like(wanted)
    pairs = zip(
        torch.autograd.grad(found, inputs, given),
        torch.autograd.grad(wanted, inputs, given),
        strict=True,
    )
    for own, plain in pairs:
        torch.testing.assert_close(own, plain, rtol=1e-4, atol=1e-6)


def test_what_is_dropped_of_weights_is_dropped_of_their_gradients() -> None:
    documents = Documents.of(LENGTHS)
    query, key, value = (tokens(sum(LENGTHS)).detach().double().requires_grad_() for _ in range(3))

    def drawn(*inputs: Tensor) -> Tensor:
        torch.manual_seed(3)
        return short_attention(*inputs, documents, 0.5, None, 0.4)

    # in double precision the softmax's backward pass is asked for fp32, so differences are taken of
    # the values alone
    direction = torch.randn_like(value)
    step = 1e-4
    numeric = (
        drawn(query, key, value + step * direction) - drawn(query, key, value - step * direction)
    ) / (2 * step)
    given = torch.randn_like(numeric)
    (of_value,) = torch.autograd.grad(drawn(query, key, value), value, given)
    torch.testing.assert_close((of_value * direction).sum(), (given * numeric).sum())
    assert not torch.equal(
        drawn(query, key, value), short_attention(query, key, value, documents, 0.5, None, 0.0)
    )


@pytest.mark.parametrize(
    "change",
    ["fp16", "long", "causal", "shared keys", "shared heads"],
)
def test_other_attention_is_left_to_others(change: str) -> None:
    lengths = (200, 4) if change == "long" else LENGTHS
    documents = Documents.of(lengths)
    if change == "shared keys":
        documents = Documents.of((2, 2), "cpu", (2, 4), torch.tensor([0, 1, 0, 1, 2, 3]).numpy())
    query = tokens(sum(lengths)).to(torch.float16 if change == "fp16" else torch.float32)
    key = query[:, :1] if change == "shared heads" else query
    assert not is_for(query, key, documents, has_bias=False, causal=change == "causal")


def kinds() -> list[Any]:
    """The classes that `KINDS` names, where this version of transformers has them."""
    families = (
        "exaone4",
        "granite",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "mt5",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "t5",
        "umt5",
    )
    found = {}
    for family in families:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        found |= {name: value for name, value in vars(module).items() if name in KINDS}
    return list(found.values())


def test_norms_are_those_of_transformers() -> None:
    classes = kinds()
    assert {each.__name__ for each in classes} == KINDS
    for kind in classes:
        plain = nn.Sequential(kind(24))
        with torch.no_grad():
            plain[0].weight.copy_(torch.randn(24))
        own = copy.deepcopy(plain)
        assert use_one_pass(own) == 1, kind
        hidden = torch.randn(3, 7, 24) * 5 + 2
        results = []
        for model in (plain, own):
            given = hidden.clone().requires_grad_()
            out = model(given)
            out.sin().sum().backward()
            results.append((out.detach(), given.grad, model[0].weight.grad))
        for left, right in zip(*results, strict=True):
            torch.testing.assert_close(left, right, rtol=2e-5, atol=2e-6)
        assert torch.equal(own(hidden.bfloat16()), plain(hidden.bfloat16()))  # left to transformers


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("is_tied", [False, True])
def test_gradients_of_embeddings_are_added_by_rows(padding: int | None, is_tied: bool) -> None:
    words = torch.tensor([[3, 5, 5, 9], [0, 3, 9, 1]])

    def gradient(by_rows: bool) -> Tensor:
        torch.manual_seed(0)
        embedding = nn.Embedding(2**14, 16, padding_idx=padding)
        if by_rows:
            assert add_by_rows(embedding) == 1
        for factor in (1.0, 2.0):  # two micro-batches
            first, second = embedding(words), embedding(words.flip(0))
            scores = (first * factor + second.tanh()).sin()
            if is_tied:
                scores = scores @ embedding.weight.t()
            scores.square().sum().backward()
        assert embedding.weight.grad is not None
        return embedding.weight.grad

    torch.testing.assert_close(
        gradient(True), gradient(False), rtol=1e-4, atol=1e-4 if is_tied else 1e-6
    )


def test_embeddings_that_are_small_or_frozen_are_left_alone() -> None:
    small, frozen = nn.Embedding(10, 4), nn.Embedding(2**14, 16).requires_grad_(requires_grad=False)
    assert add_by_rows(nn.ModuleList([small, frozen, nn.Embedding(2**14, 16, sparse=True)])) == 0
