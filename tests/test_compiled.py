"""Compiled layers compute what the plain ones do, once for all lengths, and only where that pays.

Most is tried with a backend that traces and generates no code, which is quick; real code for this
CPU is in the slow tests.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers import (
    AutoConfig,
)

from farthing.events import Decided
from farthing.model.activation_checkpointing import checkpoint_layers, saved_bytes
from farthing.model.attention import go_packed, packed_logits
from farthing.model.attention_kernels import AttentionSettings, over_documents, padded
from farthing.model.compiled import (
    compile_blocks,
    find_compiler,
    n_graphs,
    why_not_compiled,
)
from farthing.model.documents import Documents, packed_batch
from farthing.model.norms import leave_to_compiler
from farthing.model.programs import in_programs
from heads import assert_same, gradients_of
from packed_models import by_kernel, model_of, with_adapter
from workshop import Heard, losses_of, make_job, train


@pytest.fixture(autouse=True)
def from_scratch():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def causal_model():
    return model_of("llama", num_hidden_layers=3)


def flat(model):
    go_packed(model)
    return model


def flat_loss(model, seed: int) -> Tensor:
    """Of a packed batch whose number of documents and their lengths are drawn from `seed`."""
    chance = np.random.default_rng(seed)
    lengths = chance.integers(1, 30, chance.integers(2, 9))
    ids = chance.integers(3, 96, (1, lengths.sum()))
    places = np.concatenate([np.arange(n) for n in lengths])[None]
    logits = packed_logits(
        model, packed_batch({"input_ids": ids, "position_ids": places, "lengths": lengths})
    )
    return torch.nn.functional.cross_entropy(logits[0, :-1].float(), torch.from_numpy(ids[0, 1:]))


def gradients(
    model, loss_of: Callable[[Any, int], Tensor], seed: int
) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(seed)
    loss = loss_of(model, seed)
    return loss.detach(), gradients_of(model, loss)


def must_agree(
    model, plain, loss_of: Callable[[Any, int], Tensor], seed: int, within: float = 1e-5
):
    """Losses within `within`, each gradient within five times that of its own length: of a sum,
    small ones are noisier.
    """
    (loss, found), (expected_loss, expected) = (
        gradients(one, loss_of, seed) for one in (model, plain)
    )
    torch.testing.assert_close(loss, expected_loss, rtol=within, atol=within)
    assert_same(found, expected, 5 * within)


def must_serve_all_lengths(
    model, plain, loss_of: Callable[[Any, int], Tensor], n: int = 12, within: float = 1e-5
) -> int:
    """Agree on `n` batches of which only the first two may compile; how many programs that took."""
    before = n_graphs()
    for seed in range(n):
        must_agree(model, plain, loss_of, seed, within)
        if seed == 1:
            made = n_graphs() - before
    assert n_graphs() - before == made
    return made


# ---- what is refused ----


def test_without_a_compiler_nothing_is_compiled_and_the_reason_is_said(monkeypatch):
    model = flat(causal_model())
    assert why_not_compiled(model) is None
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert find_compiler("cpu") is None
    assert compile_blocks(model) == "there is no C++ compiler"
    before = n_graphs()
    flat_loss(model, 0).backward()
    assert n_graphs() == before


def test_the_compiler_of_the_environment_comes_first(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setenv("CXX", "icpx")
    monkeypatch.delenv("CC", raising=False)
    assert find_compiler("cpu") == "/usr/bin/icpx"
    assert find_compiler("cuda") == "/usr/bin/gcc"


def test_a_model_without_known_layers_is_left_as_it_is():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.config = AutoConfig.for_model("llama")
    assert "layers are not known" in str(compile_blocks(model))


# ---- what is traced ----


@pytest.fixture
def traced(monkeypatch):
    monkeypatch.setattr("farthing.model.compiled.HOW", {"backend": "eager"})


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1])
def test_documents_of_any_lengths_are_served_by_the_first_programs_in_any_thread(every, traced):
    """torch keeps settings by thread, and on CUDA a thread of autograd recomputes."""
    plain = flat(causal_model())
    model = copy.deepcopy(plain)
    names = list(model.state_dict())
    checkpoint_layers(model, every)
    assert compile_blocks(model) == 3
    assert list(model.state_dict()) == names
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(must_serve_all_lengths, model, plain, flat_loss).result()
    assert 2 <= made <= 4, "a graph on each side of attention, for all three layers together"


@pytest.mark.slow
def test_evaluation_is_computed_as_ever_and_compiles_nothing(traced):
    plain = flat(causal_model())
    leave_to_compiler(plain)
    model = copy.deepcopy(plain)
    compile_blocks(model)
    before = n_graphs()
    with torch.no_grad():
        assert torch.equal(flat_loss(model.eval(), 1), flat_loss(plain.eval(), 1))
    prompt = torch.tensor([[5, 6, 7]])
    outputs = [m.generate(prompt, max_new_tokens=4, do_sample=False) for m in (model, plain)]
    assert torch.equal(*outputs)
    assert n_graphs() == before
    gradients(model.train(), flat_loss, 0)
    assert n_graphs() > before


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
def test_fused_adapters_in_checkpointed_layers_compile_and_agree(every, traced):
    """In bf16 over an fp32 base every input is cast, which is where the layers share what they
    cast.
    """
    plain = flat(
        with_adapter(
            causal_model(), target_modules=("q_proj", "k_proj", "up_proj")[: 3 * (every == 1)]
        )
    )
    model, kept = copy.deepcopy(plain), copy.deepcopy(plain)
    for one in (plain, model):
        checkpoint_layers(one, every)
    assert compile_blocks(model) == 3
    assert compile_blocks(model) == 3  # again: the same as once

    def loss_of(one, seed):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return flat_loss(one, seed)

    made = must_serve_all_lengths(model, plain, loss_of, n=6, within=0.005)  # of bf16
    assert 4 <= made <= (8 if every == 1 else 14)
    of_checkpointed, of_kept = (
        saved_bytes(one, lambda one=one: loss_of(one, 5)) for one in (model, kept)
    )
    assert of_checkpointed < 0.8 * of_kept


@pytest.mark.slow
def test_flex_attention_is_one_program_also_with_as_many_blocks_as_heads(monkeypatch):
    """Four heads, and four blocks of 128 tokens in the first batch: torch takes sizes that are
    equal once for one size.
    """
    flex = in_programs(flex_attention, backend="aot_eager", fullgraph=True)
    how = AttentionSettings(causal=True, scale=0.25, window=200, softcap=5.0)
    before = n_graphs()
    by_kernel("flex", monkeypatch, flex)
    for lengths in ([300, 196], [500, 180], [900, 20]):
        documents = Documents.of(lengths, "cpu")
        tensors = [torch.randn(sum(lengths), heads, 16) for heads in (4, 2, 2)]
        found = over_documents(*tensors, documents, how)
        expected = padded(*tensors, documents, how)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert n_graphs() - before == 1


# ---- real code for this machine ----


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return tmp_path / "inductor"


@pytest.mark.slow
def test_generated_code_drops_what_the_plain_model_drops(own_cache):
    plain = model_of("bert", "classification", hidden_dropout_prob=0.2)
    model = copy.deepcopy(plain)
    assert compile_blocks(model) == 2

    def loss_of(one, seed):
        chance = np.random.default_rng(seed)
        ids = torch.from_numpy(chance.integers(3, 96, (4, chance.integers(5, 20))))
        return one(
            input_ids=ids, attention_mask=torch.ones_like(ids), labels=torch.tensor([0, 1, 2, 0])
        ).loss

    for seed in range(4):  # softmax takes away what all keys have in common: rounding is left
        must_agree(model, plain, loss_of, seed, within=1e-3)
    dropping, whole = (
        gradients(one, loss_of, 0)[0] for one in (model, copy.deepcopy(model).eval())
    )
    assert not torch.equal(dropping, whole)


@pytest.mark.slow
def test_a_run_with_compiled_layers_ends_as_one_without_and_keeps_warm_up_apart(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    keys = {"max_steps": 8, "n_rows": 40, "global_batch_size": 8}
    plain = make_job(tmp_path / "plain", **keys)
    train(plain)
    job, heard = (
        make_job(tmp_path / "compiled", torch_compile=True, **keys),
        Heard(),
    )
    outcome = train(job, heard)
    assert "layers compiled" in heard.of(Decided)[0].computed
    spans = {span.name: span.seconds for span in outcome.receipt.spans}
    assert spans["compile"] > 0
    assert losses_of(job) == pytest.approx(losses_of(plain), rel=1e-4)


def test_a_run_says_why_it_is_not_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr("farthing.model.compiled.find_compiler", lambda device: None)
    heard = Heard()
    train(make_job(tmp_path, max_steps=2, torch_compile=True, use_liger_kernel=True), heard)
    said = heard.of(Decided)[0].computed
    assert "not compiled: there is no C++ compiler" in said
    assert "no Liger kernels: they are for GPUs" in said
