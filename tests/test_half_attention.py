"""Attention in bf16 on a CPU: right to its rounding, in few shapes, and left to others where it
can't.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import workshop
from farthing.model import half_attention as half
from farthing.model import short_attention as short
from farthing.model.attention import attend
from farthing.model.documents import Documents

HEADS, WIDTH = 4, 16
CLOSE = 1e-2  # of the whole: bf16 has eight bits


def tokens(n: int, n_heads: int = HEADS) -> Tensor:
    """Random [n, heads, width] in bf16."""
    return torch.randn(n, n_heads, WIDTH).bfloat16().requires_grad_()


def by_formula(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, causal: bool, scale: float
) -> Tensor:
    """Softmax attention of each document in double precision."""
    found, groups = [], query.shape[1] // key.shape[1]
    parts = zip(
        query.split(documents.lengths),
        key.repeat_interleave(groups, 1).split(documents.key_lengths),
        value.repeat_interleave(groups, 1).split(documents.key_lengths),
        strict=True,
    )
    for q, k, v in parts:
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if causal:
            later = torch.ones(len(q), len(k), dtype=torch.bool).triu_(len(k) - len(q) + 1)
            scores = scores.masked_fill(later, -torch.inf)
        found.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(found)


@pytest.mark.parametrize(
    ("lengths", "key_lengths", "n_shared"),
    [
        ((1, 143, 20, 300, 64, 65), None, 1),
        ((2, 130, 1), (70, 141, 300), 2),
        ((700,), None, 4),
        ((3, 2), None, 1),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_answers_and_gradients_are_those_of_the_formula(
    lengths: tuple[int, ...], key_lengths: tuple[int, ...] | None, n_shared: int, causal: bool
) -> None:
    torch.manual_seed(0)
    documents = Documents.of(lengths, "cpu", key_lengths, reads_others=True)
    n_keys = sum(documents.key_lengths)
    given = [
        tokens(sum(lengths)),
        tokens(n_keys, HEADS // n_shared),
        tokens(n_keys, HEADS // n_shared),
    ]
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    passed = torch.randn(sum(lengths), HEADS, WIDTH).bfloat16()
    out = half.half_attention(*given, documents, causal=causal, scale=0.3)  # type: ignore[call-arg]
    right = by_formula(*exact, documents, causal, 0.3)  # type: ignore[call-arg]
    found = [out, *torch.autograd.grad(out, given, passed)]
    wanted = [right, *torch.autograd.grad(right, exact, passed.double())]
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        assert one.isfinite().all()
        assert float((one.detach() - other.detach()).norm() / other.detach().norm()) < CLOSE


def test_a_document_has_nothing_of_the_next() -> None:
    torch.manual_seed(0)
    documents = Documents.of((130, 90))
    given = [tokens(220) for _ in range(3)]
    changed = [
        torch.cat([tensor[:130], tensor[130:] * 3 + 1]).detach().requires_grad_()
        for tensor in given
    ]
    passed = torch.randn(220, HEADS, WIDTH).bfloat16()
    found = []
    for tensors in (given, changed):
        out = half.half_attention(*tensors, documents, causal=False, scale=0.3)  # type: ignore[call-arg]
        found.append(
            [out[:130], *(grad[:130] for grad in torch.autograd.grad(out, tensors, passed))]
        )
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class Products(TorchDispatchMode):
    """Collects shapes of products in bf16 that are made in the block: oneDNN keeps code for each."""  # noqa: E501

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Does what was asked."""
        if "mm" in func.__name__ and args[0].dtype == torch.bfloat16:
            self.shapes.add(
                (
                    func.__name__,
                    *((one.shape, one.stride()) for one in args if torch.is_tensor(one)),
                )
            )
        return func(*args, **(kwargs or {}))


def entry(documents: Documents, *, causal: bool, bias: Tensor | None = None) -> Tensor:
    """Through the entry that models call, in bf16, and back: the gradient of the queries."""
    module = torch.nn.Module()
    n = sum(documents.lengths)
    query, key, value = (torch.randn(1, 8, n, 16, requires_grad=True) for _ in range(3))
    more = {} if bias is None else {"position_bias": bias}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = attend(
            module,
            query,
            key,
            value,
            None,
            is_causal=causal,
            documents=documents,
            scaling=0.25,
            **more,
        )
    out.float().sum().backward()
    assert query.grad is not None
    return query.grad


@pytest.mark.parametrize("kind", ["looks back", "looks both ways", "bias"])
def test_documents_of_all_lengths_are_multiplied_in_few_shapes(kind: str) -> None:
    """A shape costs 0.65 MiB until the process ends. These 87 lengths took 800 before, 768 where
    all is seen.
    """
    longest = 100 if kind == "bias" else 600
    bias = torch.randn(1, 8, longest, longest) if kind == "bias" else None
    lengths = [*range(1, longest, 7), longest]
    with Products() as products:
        for start in range(0, len(lengths), 9):
            entry(Documents.of(lengths[start : start + 9]), causal=kind == "looks back", bias=bias)
    assert len(products.shapes) <= (0 if kind == "bias" else 7 * 8 * 3)


def test_sizes_are_few_and_hardly_larger() -> None:
    for n in range(1, 5000):
        size = half.few_sizes(n)
        assert n <= size < n + max(16, n / 8)
        assert half.few_sizes(size) == size
    assert len({half.few_sizes(n) for n in range(1, 2049)}) == 40


@pytest.mark.parametrize("change", ["fp32", "long", "short", "meta"])
def test_other_attention_is_left_to_others(change: str) -> None:
    documents = Documents.of((2049 if change == "long" else 64 if change == "short" else 65, 3))
    query = torch.zeros(1, 1, 1, dtype=torch.float32 if change == "fp32" else torch.bfloat16)
    if change == "meta":
        query = query.to("meta")
    assert not half.is_for(query, documents, causal=False)
    assert half.is_for(query, documents, causal=True) == (change == "short")
    assert short.is_for(query, query, documents, has_bias=True, causal=False) == (change != "meta")


@pytest.mark.parametrize("bias", [None, torch.randn(1, HEADS, 40, 40)])
def test_short_documents_in_bf16_are_multiplied_in_fp32(bias: Tensor | None) -> None:
    torch.manual_seed(0)
    documents = Documents.of((7, 40, 1))
    given = [tokens(48) for _ in range(3)]
    passed = torch.randn(48, HEADS, WIDTH).bfloat16()

    def attended(tensors: list[Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = short.short_attention(*tensors, documents, 0.3, bias, 0.0)  # type: ignore[call-arg]
        return [out, *torch.autograd.grad(out, tensors, passed.to(out.dtype))]

    exact = attended([tensor.detach().float().requires_grad_() for tensor in given])
    for one, other in zip(attended(given), exact, strict=True):
        assert torch.equal(one, other.bfloat16())


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_run_in_bf16_that_was_stopped_has_the_losses_of_one_that_was_not(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {
        "family": family,
        "max_steps": 3,
        "save_steps": 1,
        "probe": False,
        "bf16": True,
    }
    stopped, whole = (workshop.make_job(tmp_path / name, **keys) for name in ("stopped", "whole"))
    with monkeypatch.context() as before:
        before.setattr("farthing.train.loop.is_done", lambda attempt: attempt.progress.step >= 1)
        workshop.train(stopped)
    workshop.change_facts(Path(stopped.output_dir), finished=None, sealed=None)
    assert {workshop.train(job).state for job in (stopped, whole)} == {"finished"}
    assert workshop.losses_of(stopped) == workshop.losses_of(whole)
