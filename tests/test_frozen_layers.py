"""Layers that are frozen are computed once: the same losses and gradients, and a cache that is
right or not there.
"""

from __future__ import annotations

import copy
import errno
import itertools
import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

import workshop
from farthing.data.packing import collate_packed
from farthing.data.token_set import TokenSet
from farthing.errors import RunInterruptedError
from farthing.events import Note
from farthing.model import frozen_cache as prefix_cache
from farthing.model.activation_checkpointing import checkpoint_layers
from farthing.model.adapters import Adapter, add_adapter
from farthing.model.attention import DECODERS, ENCODERS, first_position, go_packed, packed_logits
from farthing.model.documents import packed_batch
from farthing.model.frozen_cache import FrozenCache, open_frozen_cache
from farthing.model.frozen_layers import FrozenLayers, find_frozen_layers
from farthing.model.hardware import Numerics
from farthing.model.head import language_model_loss
from farthing.model.lora_kernels import use_low_rank
from farthing.models.frozen_cache_cost import DISK_SHARE, FrozenCacheCost, frozen_cache_bytes
from farthing.storage.files import only_writer
from farthing.train.step import Steps
from test_attention import MAIN, OWN, assert_same, gradients, model_of
from test_packing import token_set
from thinned import thinned

CLOSE = 1e-5
N_LAYERS = 3
FP32 = Numerics(torch.device("cpu"), None)
BF16 = Numerics(torch.device("cpu"), torch.bfloat16)
CAUSAL, LABELS = "causal-lm", "classification"
KINDS = {CAUSAL: "CAUSAL_LM", LABELS: "SEQ_CLS"}
BIG = 1 << 20


def deep_model(family: str, task: str = CAUSAL, seed: int = 0, **keys: Any) -> Any:
    """A tiny model of three layers, windowed and full ones in turn where the family has them."""
    own: dict[str, Any] = {"num_hidden_layers": N_LAYERS}
    if family in ("gpt2", "gpt_bigcode"):
        own["n_layer"] = N_LAYERS
    if "layer_types" in OWN.get(family, {}):
        own["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    return model_of(family, task, seed, **{**own, **keys})


def layers_of(model: Any) -> nn.ModuleList:
    """The layers of a model, wrapped or not."""
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == N_LAYERS)


def linear_names(model: Any, layers: range) -> list[str]:
    """Full names of the linear modules of these layers."""
    wanted = {id(module) for number in layers for module in layers_of(model)[number].modules()}
    kinds = (nn.Linear, Conv1D)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, kinds) and id(module) in wanted
    ]


def with_lora(model: Any, first: int, task: str = CAUSAL, **settings: Any) -> Any:
    """Adapters that do something on the layers from `first` on; a classification head is trained
    too. Goes flat.
    """
    names = linear_names(model, range(first, N_LAYERS))
    heads = ["score" if hasattr(model, "score") else "classifier"] if task == LABELS else None
    config = peft.LoraConfig(
        r=2,
        lora_alpha=2,
        target_modules=names,
        modules_to_save=heads,
        init_lora_weights=False,
        task_type=KINDS[task],
    )
    wrapped = peft.get_peft_model(model, config).train()
    go_packed(wrapped)
    return wrapped


def frozen_layers_of(model: Any, task: str = CAUSAL) -> FrozenLayers:
    """Its frozen layers; there must be some."""
    found = find_frozen_layers(model, task)
    assert isinstance(found, FrozenLayers), found
    return found


def some_tokens(seed: int = 0, n: int = 12, n_labels: int = 0) -> TokenSet:
    """Random examples of one to thirty tokens."""
    draw = np.random.default_rng(seed)
    return token_set(
        draw.choice([1, 2, 5, 9, 30, *draw.integers(1, 31, 4)], n).astype(np.int64), seed, n_labels
    )


def batch_of(model: Any, tokens: TokenSet, examples: Any, task: str = CAUSAL) -> dict[str, Any]:
    """A packed batch."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return packed_batch(collate_packed(tokens, examples, task, first_position(inner.config)))


def loss_of(model: Any, batch: dict[str, Any], task: str = CAUSAL) -> Tensor:
    """As training will ask for it: by the body alone where the head is known, else by the whole
    model.
    """
    if task == CAUSAL:
        return language_model_loss(model, batch, task)
    return F.cross_entropy(
        packed_logits(model, batch, task).float(), batch["labels"], reduction="sum"
    )


def cache_of(
    frozen: FrozenLayers,
    tokens: TokenSet,
    folder: Path,
    micro_batch_tokens: int = BIG,
    **options: Any,
) -> FrozenCache:
    """The cache of all examples; there must be one."""
    options = {"numerics": FP32, "examples": np.arange(len(tokens)), **options}
    found = open_frozen_cache(
        frozen, tokens, cache_dir=folder, micro_batch_tokens=micro_batch_tokens, **options
    )
    assert isinstance(found, FrozenCache), found
    return found


def all_rows(cache: FrozenCache) -> Tensor:
    return torch.cat(list(cache.parts))


def one_folder(folder: Path) -> Path:
    """Of the only cache in `folder`."""
    (found,) = (folder / "prefix").iterdir()
    return found


def part_folders(folder: Path) -> list[Path]:
    return sorted(path for path in one_folder(folder).iterdir() if path.is_dir())


class Computed(list[int]):
    """How many tokens were computed, call by call; raises `at` a certain call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails_at, self.error = -1, BaseException("killed")
        plain = FrozenLayers.hidden_states

        def counted(frozen: FrozenLayers, batch: dict[str, Any]) -> Tensor:
            if len(self) == self.fails_at:
                raise self.error
            self.append(batch["input_ids"].numel())
            return plain(frozen, batch)

        monkeypatch.setattr(FrozenLayers, "hidden_states", counted)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Computed:
    return Computed(monkeypatch)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 60 rows of 32 numbers."""
    monkeypatch.setattr(prefix_cache, "PART_BYTES", 60 * 32 * 4)


# ---- equality ----


def check_equality(family: str, task: str, seed: int, folder: Path) -> None:
    """A cache cut in one way, micro-batches cut in another, against the whole model."""
    draw = random.Random(f"{family} {seed}")
    first = draw.randint(1, N_LAYERS - 1)
    model = with_lora(deep_model(family, task, seed), first, task)
    if draw.random() < 0.5:
        use_low_rank(model)
    tokens = some_tokens(seed, draw.randint(3, 14), 3 if task == LABELS else 0)
    frozen = frozen_layers_of(model, task)
    assert frozen.n_layers == first
    cache = cache_of(frozen, tokens, folder, draw.choice([1, 20, 45, BIG]))
    checkpoint_layers(model, draw.choice([0, 1, 2]))
    for _ in range(2):
        examples = np.array(draw.sample(range(len(tokens)), draw.randint(1, len(tokens))))
        batch = batch_of(model, tokens, examples, task)
        theirs = loss_of(model, batch, task)
        their_gradients = gradients(model, theirs)
        with frozen.resume(cache.rows(examples)):
            ours = loss_of(model, batch, task)
        our_gradients = gradients(
            model, ours
        )  # after the block: layers are computed again without it
        assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=CLOSE, abs=CLOSE)
        if their_gradients and float(theirs.detach()):
            assert_same(our_gradients, their_gradients)


@pytest.mark.parametrize("seed", thinned(range(3), 3))
@pytest.mark.parametrize("family", MAIN)
def test_losses_and_gradients_from_the_cache_are_those_of_the_whole_model(
    family: str, seed: int, tmp_path: Path
) -> None:
    check_equality(family, CAUSAL, seed, tmp_path)


@pytest.mark.parametrize("family", thinned(sorted(DECODERS - set(MAIN)), 2))
def test_every_other_decoder_is_right(family: str, tmp_path: Path) -> None:
    check_equality(family, CAUSAL, 5, tmp_path)


@pytest.mark.parametrize("family", [*sorted(ENCODERS), "llama", "gemma2", "gpt2"])
def test_classifiers_are_right(family: str, tmp_path: Path) -> None:
    check_equality(family, LABELS, 7, tmp_path)


@pytest.mark.parametrize(
    ("family", "keys"), [("opt", {"word_embed_proj_dim": 16}), ("electra", {"embedding_size": 16})]
)
def test_embeddings_of_another_width_are_right(
    family: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    task = CAUSAL if family == "opt" else LABELS
    model = with_lora(deep_model(family, task, **keys), 2, task)
    tokens, examples = some_tokens(n_labels=3 if task == LABELS else 0), np.arange(8)
    frozen = frozen_layers_of(model, task)
    cache, batch = cache_of(frozen, tokens, tmp_path), batch_of(model, tokens, examples, task)
    theirs = loss_of(model, batch, task)
    with frozen.resume(cache.rows(examples)):
        ours = loss_of(model, batch, task)
    assert_same(gradients(model, ours), gradients(model, theirs))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma3_text"])
def test_the_same_batch_gives_the_same_bits(family: str, tmp_path: Path) -> None:
    model = with_lora(deep_model(family), 1)
    for weight in model.parameters():
        if not weight.requires_grad:
            weight.data = weight.data.bfloat16()
    tokens = some_tokens()
    frozen = frozen_layers_of(model)
    cache = cache_of(frozen, tokens, tmp_path, numerics=BF16)
    examples = np.argsort(-tokens.lengths, kind="stable")  # as they were computed
    batch = batch_of(model, tokens, examples)
    with BF16.autocasting():
        alone = frozen.hidden_states(batch)
        theirs = loss_of(model, batch)
        with frozen.resume(cache.rows(examples)):
            ours = loss_of(model, batch)
    assert cache.rows(examples).dtype == alone.dtype
    assert torch.equal(cache.rows(examples), alone)
    assert torch.equal(ours, theirs)
    our_gradients = gradients(model, ours)
    assert all(
        torch.equal(our_gradients[name], one) for name, one in gradients(model, theirs).items()
    )


def test_rows_are_kept_in_the_numbers_that_the_layers_give() -> None:
    model = with_lora(deep_model("llama"), 2)
    batch = batch_of(model, some_tokens(), np.arange(4))
    with BF16.autocasting():
        assert frozen_layers_of(model).hidden_states(batch).dtype == torch.float32, (
            "a stream in fp32 is not rounded"
        )


def test_a_prefix_of_all_layers_leaves_the_head(tmp_path: Path) -> None:
    model = deep_model("llama", LABELS)
    for name, weight in model.named_parameters():
        weight.requires_grad = name in ("score.weight", "model.norm.weight")
    go_packed(model)
    frozen = frozen_layers_of(model, LABELS)
    assert frozen.n_layers == N_LAYERS
    tokens, examples = some_tokens(n_labels=3), np.arange(6)
    cache, batch = cache_of(frozen, tokens, tmp_path), batch_of(model, tokens, examples, LABELS)
    theirs = loss_of(model, batch, LABELS)
    with frozen.resume(cache.rows(examples)):
        ours = loss_of(model, batch, LABELS)
    assert_same(gradients(model, ours), gradients(model, theirs))


@pytest.mark.parametrize("every", [0, 1, 2])
def test_two_batches_forward_before_either_goes_backward(every: int, tmp_path: Path) -> None:
    model = with_lora(deep_model("qwen3"), 1)
    tokens, frozen = some_tokens(), frozen_layers_of(model)
    cache = cache_of(frozen, tokens, tmp_path)
    pieces = [np.arange(5), np.arange(5, 12)]
    theirs = gradients(
        model, sum(loss_of(model, batch_of(model, tokens, piece)) for piece in pieces)
    )
    checkpoint_layers(model, every)
    losses = []
    for piece in pieces:
        with frozen.resume(cache.rows(piece)):
            losses.append(loss_of(model, batch_of(model, tokens, piece)))
    loss_of(model, batch_of(model, tokens, pieces[0]))  # a pass of the whole model in between
    assert_same(gradients(model, sum(losses)), theirs)


def test_epochs_of_training_end_at_the_same_weights(tmp_path: Path) -> None:
    plain = with_lora(deep_model("llama"), 2)
    resumed = copy.deepcopy(plain)
    tokens, frozen = some_tokens(n=16), frozen_layers_of(resumed)
    cache = cache_of(frozen, tokens, tmp_path, 40)
    order = np.random.default_rng(0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (plain, resumed)]
    before = {name: p.detach().clone() for name, p in resumed.named_parameters()}
    for _ in range(3):
        for piece in order.permutation(16).reshape(4, 4):
            for model, optimizer in zip((plain, resumed), optimizers, strict=True):
                optimizer.zero_grad()
                with frozen.resume(cache.rows(piece)):  # a block of one model is nothing to another
                    loss = loss_of(model, batch_of(model, tokens, piece))
                loss.backward()
                optimizer.step()
    after = dict(resumed.named_parameters())
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(after[name], weight, rtol=CLOSE, atol=1e-6)
    assert any(not torch.equal(before[name], weight) for name, weight in after.items())


def test_evaluation_disabling_and_merging_above_are_right(tmp_path: Path) -> None:
    model = with_lora(deep_model("llama"), 2)
    tokens, examples, frozen = some_tokens(), np.arange(12), frozen_layers_of(model)
    rows = cache_of(frozen, tokens, tmp_path).rows(examples)
    batch = batch_of(model, tokens, examples)

    @torch.no_grad()
    def both() -> float:
        theirs = float(loss_of(model, batch))
        with frozen.resume(rows):
            assert float(loss_of(model, batch)) == pytest.approx(theirs, rel=CLOSE)
        return theirs

    trained = both()
    model.eval()
    assert both() == pytest.approx(trained, rel=CLOSE)
    with model.disable_adapter():
        assert both() != pytest.approx(trained, rel=1e-3), "the adapter does something"
    model.merge_adapter()
    assert both() == pytest.approx(trained, rel=1e-4)
    model.unmerge_adapter()
    assert both() == pytest.approx(trained, rel=1e-4)


# ---- what is run, and what is left as it was ----


def flops(function: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_each_layer_is_computed_on_one_side_only() -> None:
    model = with_lora(deep_model("llama"), 2)
    frozen, batch = frozen_layers_of(model), batch_of(model, some_tokens(), np.arange(12))
    hidden = frozen.hidden_states(batch)
    assert not hidden.requires_grad
    assert hidden.shape == (1, batch["input_ids"].numel(), 32)

    def resumed() -> None:
        with frozen.resume(hidden):
            loss_of(model, batch)

    whole, below, above = (
        flops(lambda: loss_of(model, batch)),
        flops(lambda: frozen.hidden_states(batch)),
        flops(resumed),
    )
    assert whole == below + above
    shallow = flops(
        lambda: FrozenLayers(frozen.inner, CAUSAL, frozen.below, frozen.layers, 1).hidden_states(
            batch
        )
    )
    assert below == 2 * shallow > 0, "layers alike, and no head"


def test_names_saving_and_calls_outside_stay_as_they_are(tmp_path: Path) -> None:
    model = with_lora(deep_model("llama"), 2)
    frozen, batch = frozen_layers_of(model), batch_of(model, some_tokens(), np.arange(4))
    ids = torch.randint(3, 99, (2, 6))

    def written() -> Tensor:
        model.eval()
        text: Tensor = model.generate(
            input_ids=ids, max_new_tokens=4, do_sample=False, pad_token_id=1
        )
        model.train()
        return text

    before = written()
    names, modules = list(model.state_dict()), dict(model.named_modules())
    attributes = {name: dict(vars(module)) for name, module in modules.items()}
    hidden = frozen.hidden_states(batch)
    with frozen.resume(hidden):
        assert list(model.state_dict()) == names
        assert dict(model.named_modules()) == modules
        model.save_pretrained(tmp_path / "adapter")
    saved = peft.PeftModel.from_pretrained(deep_model("llama"), tmp_path / "adapter").state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="in the middle"), frozen.resume(hidden):
            raise RuntimeError("in the middle")
    assert {name: dict(vars(module)) for name, module in modules.items()} == attributes
    assert torch.equal(written(), before)


def test_layers_that_were_given_another_forward_or_compiled_keep_it() -> None:
    model = with_lora(deep_model("llama"), 2)
    frozen, batch = frozen_layers_of(model), batch_of(model, some_tokens(), np.arange(4))
    calls: list[int] = []
    layers = layers_of(model)
    for number, layer in enumerate(layers):  # as accelerate and `Module.compile` do

        def wrapped(
            *args: Any, number: int = number, plain: Any = layer.forward, **kwargs: Any
        ) -> Any:
            calls.append(number)
            return plain(*args, **kwargs)

        if number % 2:
            layer.forward = wrapped
        else:
            layer._compiled_call_impl = wrapped
    theirs = loss_of(model, batch)
    assert calls == [0, 1, 2]
    hidden = frozen.hidden_states(batch)
    assert calls == [0, 1, 2, 0, 1]
    with frozen.resume(hidden):
        ours = loss_of(model, batch)
    assert calls == [0, 1, 2, 0, 1, 2]
    assert torch.equal(ours, theirs)
    loss_of(model, batch)
    assert calls == [0, 1, 2, 0, 1, 2, 0, 1, 2]


def test_hidden_states_of_another_batch_are_refused() -> None:
    model = with_lora(deep_model("llama"), 2)
    tokens, frozen = token_set(np.array([4, 1, 7])), frozen_layers_of(model)
    hidden = frozen.hidden_states(
        batch_of(model, tokens, [1])
    )  # one token would be spread over any number
    with (
        frozen.resume(hidden),
        pytest.raises(ValueError, match=r"\[1, 1\] tokens for a batch of \[1, 7\]"),
    ):
        loss_of(model, batch_of(model, tokens, [2]))


def test_a_model_that_has_not_gone_flat_is_refused() -> None:
    model = deep_model("llama")
    for weight in model.parameters():
        weight.requires_grad = False
    with pytest.raises(ValueError, match="go_packed"):
        frozen_layers_of(model).hidden_states(batch_of(model, some_tokens(), [0, 1]))


# ---- which layers ----


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox"])
def test_the_prefix_ends_below_the_first_adapter(family: str, first: int) -> None:
    model = deep_model(family)
    chosen = linear_names(model, range(first, first + 1))[:1]
    wrapped = add_adapter(model, Adapter(r=2, target_modules=tuple(chosen)), CAUSAL, seed=0)
    found = find_frozen_layers(wrapped, CAUSAL)
    if first:
        assert isinstance(found, FrozenLayers)
        assert found.n_layers == first
        assert list(found.layers) == list(layers_of(wrapped))
    else:
        assert found == "the first layer has an adapter (Linear)"


def frozen_model(family: str = "llama", task: str = CAUSAL, **keys: Any) -> Any:
    """A model of which only the last layer is trained."""
    model = deep_model(family, task, **keys)
    for weight in model.parameters():
        weight.requires_grad = False
    for weight in layers_of(model)[-1].parameters():
        weight.requires_grad = True
    return model


def frozen_adapter() -> Any:
    model = with_lora(deep_model("llama"), 0)
    for name, weight in model.named_parameters():
        weight.requires_grad = "lora_" in name and ".layers.2." in name
    return model


def listened_to() -> Any:
    model = frozen_model()
    model.enable_input_require_grads()
    return model


def with_virtual_tokens() -> Any:
    return peft.get_peft_model(
        deep_model("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )


def frozen_as(family: str) -> Any:
    model = frozen_model()
    model.config.model_type = family
    return model


def with_shared_keys() -> Any:
    model = frozen_model()
    model.config.num_kv_shared_layers = 1
    return model


def with_saved_embeddings() -> Any:
    config = peft.LoraConfig(
        r=2,
        target_modules=["layers.2.mlp.up_proj"],
        modules_to_save=["embed_tokens"],
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(deep_model("llama"), config)


def with_trained_final_projection() -> Any:
    model = frozen_model("opt", word_embed_proj_dim=16)
    model.model.decoder.project_in.weight.requires_grad = True
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: deep_model("llama"), "the embeddings have a trained weight"),
        (with_saved_embeddings, "the embeddings have"),
        (with_trained_final_projection, "the embeddings have a trained weight (Linear)"),
        (
            lambda: add_adapter(deep_model("llama"), Adapter(r=2), CAUSAL, 0),
            "the first layer has an adapter",
        ),
        (frozen_adapter, "the first layer has an adapter"),
        (
            lambda: frozen_model("gpt2", resid_pdrop=0.1),
            "the first layer has dropout at work (Dropout)",
        ),
        (
            lambda: frozen_model("gpt2", embd_pdrop=0.1),
            "the embeddings have dropout at work (Dropout)",
        ),
        (
            lambda: frozen_model("llama", attention_dropout=0.1),
            "the first layer has dropout at work (LlamaAttention)",
        ),
        (
            lambda: frozen_model("opt", layerdrop=0.1),
            "the embeddings have dropout at work (OPTDecoder)",
        ),
        (
            lambda: frozen_model("mixtral", router_jitter_noise=0.1),
            "the first layer has dropout at work",
        ),
        (listened_to, "the embeddings have something that listens to it"),
        (with_virtual_tokens, "virtual tokens are trained"),
        (with_shared_keys, "its upper layers take more from below"),
        (lambda: frozen_as("bloom"), "ALiBi"),
    ],
)
def test_what_is_not_fixed_is_refused_in_words(make: Callable[[], Any], why: str) -> None:
    found = find_frozen_layers(make(), CAUSAL)
    assert isinstance(found, str)
    assert why in found


def test_what_is_above_may_be_anything() -> None:
    model = frozen_model("gpt2", summary_first_dropout=0.5)
    layers = layers_of(model)
    layers[2].mlp.dropout.p = 0.3
    layers[2].register_forward_hook(lambda *_: None)
    model.transformer.ln_f.weight.requires_grad = True
    assert frozen_layers_of(model).n_layers == 2
    layers[1].mlp.dropout.p = 0.3
    assert frozen_layers_of(model).n_layers == 1
    model.eval()
    assert frozen_layers_of(model).n_layers == 1, "training decides, in whatever mode it is asked"


def test_hooks_by_which_transformers_hands_out_states_are_no_hindrance() -> None:
    model = frozen_model()
    model(input_ids=torch.randint(3, 99, (1, 4)), output_hidden_states=True)
    assert any(layer._forward_hooks for layer in layers_of(model))
    assert frozen_layers_of(model).n_layers == 2


def test_tasks_that_are_not_packed_are_refused() -> None:
    assert "not among the families" in str(find_frozen_layers(frozen_model(), "seq2seq"))


# ---- the cache ----


def some_frozen_layers(seed: int = 0) -> FrozenLayers:
    return frozen_layers_of(with_lora(deep_model("llama", seed=seed), 2))


def test_rows_are_those_of_each_example_in_the_order_asked(
    tmp_path: Path, small_parts: None
) -> None:
    frozen, tokens = some_frozen_layers(), some_tokens(n=20)
    examples = np.array([3, 1, 17, 8, 3, 11, 0])
    cache = cache_of(frozen, tokens, tmp_path, 33, examples=examples)
    assert len(cache.parts) > 1
    single = [
        frozen.hidden_states(batch_of(frozen.inner, tokens, [index]))[0] for index in examples
    ]
    found = cache.rows(examples)
    assert found.shape == (1, tokens.lengths[examples].sum(), 32)
    torch.testing.assert_close(found[0], torch.cat(single), rtol=CLOSE, atol=CLOSE)
    assert cache.n_bytes == frozen_cache_bytes(
        int(tokens.lengths[np.unique(examples)].sum()), 32, 4
    )
    assert cache.n_bytes == sum(path.stat().st_size for path in tmp_path.rglob("rows.bin"))
    with pytest.raises(ValueError, match="not cached"):
        cache.rows(np.array([3, 2]))


@pytest.mark.parametrize("seed", range(8))
def test_every_example_is_computed_once_within_the_budget(
    seed: int, tmp_path: Path, computed: Computed, small_parts: None
) -> None:
    draw = np.random.default_rng(seed)
    tokens = token_set(draw.integers(0, 25, int(draw.integers(1, 40))))
    examples, most = np.flatnonzero(tokens.lengths), int(draw.integers(1, 80))
    if not len(examples):
        pytest.skip("nothing to compute")
    frozen = some_frozen_layers()
    progress: list[tuple[int, int]] = []
    cache = cache_of(
        frozen, tokens, tmp_path, most, progress=lambda *counts: progress.append(counts)
    )
    pieces = computed[1:]  # the first was one example, to see what a number takes
    assert sum(pieces) == tokens.lengths.sum() == len(all_rows(cache))
    assert max(pieces) <= max(most, tokens.lengths.max())
    assert progress[-1] == (sum(pieces), sum(pieces))
    assert [total - before for (before, total) in progress] == [
        *list(itertools.accumulate(pieces[:0:-1]))[::-1],
        0,
    ]
    assert all(len(part) <= max(60, *pieces) for part in cache.parts)


def test_a_cache_is_the_same_to_the_bit_whenever_and_for_whomever_it_is_made(
    tmp_path: Path, small_parts: None
) -> None:
    tokens = some_tokens(n=20)
    first = cache_of(some_frozen_layers(), tokens, tmp_path / "a", 50)
    again = cache_of(
        some_frozen_layers(),
        tokens,
        tmp_path / "b",
        50,
        examples=np.random.default_rng(1).permutation(20),
    )
    assert torch.equal(all_rows(first), all_rows(again))
    assert one_folder(tmp_path / "a").name == one_folder(tmp_path / "b").name
    for one, other in zip(part_folders(tmp_path / "a"), part_folders(tmp_path / "b"), strict=True):
        assert (one / "rows.bin").read_bytes() == (other / "rows.bin").read_bytes()


def test_what_is_there_is_used_and_nothing_computed(
    tmp_path: Path, computed: Computed, small_parts: None
) -> None:
    tokens = some_tokens(n=20)
    first = all_rows(cache_of(some_frozen_layers(), tokens, tmp_path))
    computed.clear()
    frozen = some_frozen_layers()
    for name, weight in frozen.inner.named_parameters():
        if "lora_" in name:
            weight.data.add_(1)  # what is trained above is nothing to it
    assert torch.equal(all_rows(cache_of(frozen, tokens, tmp_path)), first)
    assert computed == []


def changed(name: str) -> dict[str, Any]:
    """What `cache_of` is given once something is other than it was."""
    frozen, tokens, options = some_frozen_layers(), some_tokens(n=20), {}
    layer, body = frozen.layers[1], frozen.body
    with torch.no_grad():
        if name == "a weight":
            weight = layer.mlp.up_proj.weight
            weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(torch.inf))
        elif name == "an embedding":
            body.embed_tokens.weight[50, 0] += 1e-3
        elif name == "the weights' dtype":
            layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data.double()
        elif name == "a token":
            tokens.ids[7] = 3 if tokens.ids[7] != 3 else 4
        elif name == "the examples":
            options["examples"] = np.arange(19)
        elif name == "a boundary":
            tokens.offsets[1] += 1
        elif name == "precision":
            options["numerics"] = BF16
        elif name == "the budget":
            options["micro_batch_tokens"] = 77
        elif name == "layers":
            frozen = FrozenLayers(frozen.inner, CAUSAL, frozen.below, frozen.layers, 1)
        elif name == "a setting":
            frozen.inner.config.rope_parameters["rope_theta"] = 500.0
        elif name == "the code of a layer":
            layer.input_layernorm.__class__ = type("OtherNorm", (type(layer.input_layernorm),), {})
    return {"frozen": frozen, "tokens": tokens, **options}


@pytest.mark.parametrize(
    "name",
    [
        *(
            "a weight",
            "an embedding",
            "a token",
            "the examples",
            "a boundary",
            "precision",
            "the budget",
        ),
        *("layers", "a setting", "the code of a layer"),
    ],
)
def test_a_cache_of_something_else_is_not_used(
    name: str, tmp_path: Path, computed: Computed
) -> None:
    cache_of(**changed("nothing"), folder=tmp_path)
    assert sum(computed) > 0
    computed.clear()
    cache_of(**changed("nothing"), folder=tmp_path)
    assert sum(computed) == 0
    cache_of(**changed(name), folder=tmp_path)
    assert sum(computed) > 0
    assert len(list((tmp_path / "prefix").iterdir())) == 2


def test_weights_in_other_numbers_are_another_model() -> None:
    assert changed("nothing")["frozen"].sha256() == changed("nothing")["frozen"].sha256()
    assert changed("the weights' dtype")["frozen"].sha256() != changed("nothing")["frozen"].sha256()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def of_something_else(path: Path) -> None:
    """A whole part, moved here from another cache."""
    elsewhere = path.parent.parent.parent.parent / "elsewhere"
    cache_of(some_frozen_layers(seed=1), some_tokens(n=20), elsewhere, 50)
    shutil.rmtree(path.parent)
    shutil.copytree(part_folders(elsewhere)[1], path.parent)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "a bit": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-4]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0" * 128),
    "gone": lambda path: path.unlink(),
    "no manifest": lambda path: (path.parent / "manifest.json").unlink(),
    "a manifest's bit": lambda path: flip(path.parent / "manifest.json"),
    "of something else": of_something_else,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_part_is_made_again_and_only_that(
    kind: str, tmp_path: Path, computed: Computed, small_parts: None
) -> None:
    tokens, frozen = some_tokens(n=20), some_frozen_layers()
    cache = cache_of(frozen, tokens, tmp_path, 50)
    whole, n_rows = all_rows(cache).clone(), len(cache.parts[1])
    assert len(cache.parts) > 2
    del cache
    DAMAGE[kind](part_folders(tmp_path)[1] / "rows.bin")
    computed.clear()
    assert torch.equal(all_rows(cache_of(frozen, tokens, tmp_path, 50)), whole)
    assert sum(computed[1:]) == n_rows


@pytest.mark.parametrize("at", thinned([0, 1, 2, 3, 5], 2))
@pytest.mark.parametrize(
    "error", [BaseException("killed"), RuntimeError("out of memory"), KeyboardInterrupt()]
)
def test_a_fill_that_dies_goes_on_where_it_stopped(
    at: int, error: BaseException, tmp_path: Path, computed: Computed, small_parts: None
) -> None:
    tokens, frozen = some_tokens(n=20), some_frozen_layers()
    cache = cache_of(frozen, tokens, tmp_path / "whole", 30)
    whole = all_rows(cache).clone()
    ready = sum(computed[1:at])
    stops = itertools.accumulate(len(part) for part in cache.parts)
    whole_parts = [
        len(part) for part, stop in zip(cache.parts, stops, strict=True) if stop <= ready
    ]
    assert len(computed) > 6
    computed.clear()
    computed.fails_at, computed.error = at, error
    with pytest.raises(type(error)):
        cache_of(frozen, tokens, tmp_path / "half", 30)
    kept = [
        len(np.fromfile(path / "rows.bin", np.float32)) // 32
        for path in part_folders(tmp_path / "half")
    ]
    computed.clear()
    computed.fails_at = -1
    assert torch.equal(all_rows(cache_of(frozen, tokens, tmp_path / "half", 30)), whole)
    assert sum(computed[1:]) == len(whole) - sum(kept)
    assert kept == whole_parts
    assert kept or at < 5


def test_a_part_whose_writer_was_killed_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its manifest, and between its manifest and its name."""
    tokens, frozen = some_tokens(n=20), some_frozen_layers()
    whole = all_rows(cache_of(frozen, tokens, tmp_path / "whole")).clone()
    folder = tmp_path / "half" / "prefix" / one_folder(tmp_path / "whole").name
    folder.mkdir(parents=True)
    complete = part_folders(tmp_path / "whole")[0]
    shutil.copytree(complete, folder / "00000.draft-1234abcd")
    (folder / "00000.draft-9999abcd").mkdir()
    (folder / "00000.draft-9999abcd" / "rows.bin").write_bytes(
        (complete / "rows.bin").read_bytes()[:100]
    )
    assert torch.equal(all_rows(cache_of(frozen, tokens, tmp_path / "half")), whole)
    assert [path.name for path in part_folders(tmp_path / "half")] == ["00000"]


def test_a_fill_stops_when_asked_and_keeps_what_it_has(
    tmp_path: Path, computed: Computed, small_parts: None
) -> None:
    tokens, frozen = some_tokens(n=20), some_frozen_layers()
    whole = all_rows(cache_of(frozen, tokens, tmp_path / "whole", 30)).clone()
    computed.clear()
    with pytest.raises(RunInterruptedError, match="frozen layers"):
        cache_of(frozen, tokens, tmp_path / "half", 30, should_stop=lambda: len(computed) > 4)
    assert part_folders(tmp_path / "half")
    n_computed = sum(computed[1:])
    computed.clear()
    assert torch.equal(all_rows(cache_of(frozen, tokens, tmp_path / "half", 30)), whole)
    assert len(whole) <= n_computed + sum(computed[1:]) < 2 * len(whole)
    with pytest.raises(RunInterruptedError):
        cache_of(frozen, tokens, tmp_path / "half", 30, should_stop=lambda: True)


def why_none(
    folder: Path, frozen: FrozenLayers | None = None, tokens: TokenSet | None = None
) -> str:
    tokens = tokens or some_tokens(n=20)
    examples = np.arange(len(tokens))
    found = open_frozen_cache(
        frozen or some_frozen_layers(),
        tokens,
        examples,
        folder,
        numerics=FP32,
        micro_batch_tokens=30,
    )
    assert isinstance(found, str)
    return found


def free(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    usage = shutil.disk_usage("/")._replace(free=n_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computed: Computed
) -> None:
    needed = int(some_tokens(n=20).lengths.sum()) * 32 * 4
    free(monkeypatch, int(needed / DISK_SHARE) - 1)
    assert "half of the" in why_none(tmp_path)
    assert len(computed) == 1, "one example, to see what a number takes"
    assert list((tmp_path / "prefix").iterdir()) == []
    free(monkeypatch, int(needed / DISK_SHARE))
    cache_of(some_frozen_layers(), some_tokens(n=20), tmp_path, 30)
    free(monkeypatch, 0)
    cache_of(some_frozen_layers(), some_tokens(n=20), tmp_path, 30)  # it is there


def test_a_disk_that_fills_up_is_given_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_parts: None
) -> None:
    plain, calls = prefix_cache.commit_folder, []

    def full(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(*args)

    monkeypatch.setattr(prefix_cache, "commit_folder", full)
    assert "No space left on device" in why_none(tmp_path)
    assert list((tmp_path / "prefix").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_reason_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "prefix").write_text("a file")
    assert "can't be written" in why_none(tmp_path)


def test_nothing_to_keep_is_a_reason_too(tmp_path: Path) -> None:
    assert "no example" in why_none(tmp_path, tokens=token_set(np.zeros(3, np.int64)))


def test_a_cache_that_another_process_fills_is_waited_for(
    tmp_path: Path, computed: Computed
) -> None:
    tokens, frozen = some_tokens(n=20), some_frozen_layers()
    whole = all_rows(cache_of(frozen, tokens, tmp_path)).clone()
    computed.clear()
    release = threading.Event()
    held = threading.Event()

    def other() -> None:
        with only_writer(one_folder(tmp_path)):
            held.set()
            release.wait(120)

    thread = threading.Thread(target=other)
    thread.start()
    assert held.wait(120)
    with pytest.raises(RunInterruptedError):
        cache_of(frozen, tokens, tmp_path, should_stop=iter([False, False, True]).__next__)
    looks: list[bool] = []

    def look() -> bool:
        looks.append(False)
        if len(looks) == 2:
            release.set()
        return False

    assert torch.equal(all_rows(cache_of(frozen, tokens, tmp_path, should_stop=look)), whole)
    thread.join()
    assert computed == []


def test_a_cache_in_use_may_be_deleted_and_its_use_shows_in_its_time(tmp_path: Path) -> None:
    tokens, frozen = some_tokens(n=20), some_frozen_layers()
    cache_of(frozen, tokens, tmp_path)
    os.utime(one_folder(tmp_path), (1, 1))
    cache = cache_of(frozen, tokens, tmp_path)
    assert one_folder(tmp_path).stat().st_mtime > 1
    before = cache.rows(np.arange(20)).clone()
    shutil.rmtree(tmp_path / "prefix")
    assert torch.equal(cache.rows(np.arange(20)), before)


# ---- whether it pays ----


def terms(**changes: Any) -> dict[str, Any]:
    """A 1B model on a GPU: 12 of 16 layers frozen, 4 KB a token."""
    return {
        "n_epochs": 3,
        "n_frozen": 12,
        "n_layers": 16,
        "layers_s_per_token": 4e-6,
        "rest_s_per_token": 1e-6,
        "n_tokens": 10_000_000,
        "bytes_per_token": frozen_cache_bytes(1, 2048, 2),
        "free_bytes": 200 * 10**9,
        "read_bytes_per_s": 2e9,
        "write_bytes_per_s": 1e9,
    } | changes


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"n_frozen": 0}, "no layer is frozen"),
        ({"n_epochs": 1}, "at most once"),
        ({"n_epochs": 0.5}, "at most once"),
        ({"free_bytes": 81 * 10**9}, "half of the"),
        ({"free_bytes": 82 * 10**9}, None),
        ({"read_bytes_per_s": 1.02e9, "n_epochs": 1000}, "reading it takes longer"),
        ({"read_bytes_per_s": 1.03e9, "n_epochs": 1000}, None),
        ({"read_bytes_per_s": 1.03e9}, "filling it takes longer"),
        ({"write_bytes_per_s": 3e8}, "filling it takes longer"),
        ({"n_epochs": 1.5}, "filling it takes longer"),
    ],
)
def test_a_cache_pays_where_it_is_read_more_often_and_quicker_than_computed(
    changes: dict[str, Any], why: str | None
) -> None:
    found = FrozenCacheCost(**terms(**changes)).why_not()
    assert (why is None) == (found is None)
    assert why is None or why in str(found)


@pytest.mark.parametrize("seed", range(20))
def test_what_it_saves_is_the_difference_of_two_runs(seed: int) -> None:
    draw = random.Random(seed)
    n, epochs = draw.randint(1, 10**9), draw.uniform(0.1, 9)
    compute, rest = draw.uniform(1e-8, 1e-5), draw.uniform(1e-8, 1e-5)
    size, read, write = draw.randint(100, 30_000), draw.uniform(1e8, 1e10), draw.uniform(1e8, 1e10)
    plain = epochs * n * (compute + rest)
    cached = n * max(compute, size / write) + epochs * n * max(rest, size / read)
    cost = FrozenCacheCost(
        n_epochs=epochs,
        n_frozen=1,
        n_layers=1,
        layers_s_per_token=compute,
        rest_s_per_token=rest,
        n_tokens=n,
        bytes_per_token=size,
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        free_bytes=10**15,
    )
    assert cost.saved_s == pytest.approx(plain - cached, rel=1e-9, abs=1e-9)
    assert (cost.why_not() is None) == (cost.saved_s > 0 and epochs > 1)


# ---- in a run ----


def upper(folder: Path, name: str, **keys: Any) -> Any:
    """A job that adapts the uppermost of three layers, over several epochs."""
    targets = [f"model.layers.2.{part}" for part in ("self_attn.q_proj", "mlp.down_proj")]
    method = {"name": "lora", "lora_r": 4, "target_modules": targets}
    keys = {"n_rows": 24, "max_steps": 9, "eval_rows": workshop.rows_of("llama", 6, 5)} | keys
    if not (folder / "base").exists():
        keys["size"] = {"layers": 3}
    return workshop.make_job(folder, "llama", method=method, output_dir=f"./{name}", **keys)


def test_a_run_computes_frozen_layers_once_and_ends_as_one_that_computes_them_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = workshop.Watched(monkeypatch)
    kept = upper(tmp_path, "kept")
    workshop.train(kept)
    frozen_calls = _calls_of_the_first_layer(monkeypatch)
    ends = {name: p.detach().clone() for name, p in watched.model.named_parameters()}
    assert json.loads((tmp_path / "kept/settings.json").read_text())["caches_frozen"] is True
    again = upper(tmp_path, "again")
    # the cache is there: the first layer is asked whether the model looks ahead, whether all that
    # is trained is reached, and twice for what a forward pass keeps
    workshop.train(again)
    assert len(frozen_calls) == 4
    assert all(torch.equal(p, ends[name]) for name, p in watched.model.named_parameters())
    monkeypatch.setattr(FrozenCacheCost, "why_not", lambda _: "not today")
    heard = workshop.Heard()
    plain = upper(tmp_path, "plain")
    workshop.train(plain, heard)
    assert len(frozen_calls) > 9
    assert "is not kept: not today" in str(heard.of(Note))
    assert workshop.losses_of(kept) == pytest.approx(workshop.losses_of(plain), rel=1e-4)
    metrics = [
        [row["metrics"]["loss"] for row in workshop.log_of(job) if "metrics" in row]
        for job in (kept, plain)
    ]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)


def _calls_of_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    calls: list[int] = []
    honest = LlamaDecoderLayer.forward

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if layer.self_attn.layer_idx == 0:
            calls.append(1)
        return honest(layer, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    return calls


def test_one_epoch_keeps_nothing_and_a_divided_set_is_one_cache(tmp_path: Path) -> None:
    workshop.train(upper(tmp_path / "one", "run", max_steps=2))
    assert json.loads((tmp_path / "one/run/settings.json").read_text())["caches_frozen"] is False
    assert not (tmp_path / "one/cache/prefix").exists()
    job = workshop.make_job(
        tmp_path / "two",
        "llama",
        method={"name": "lora", "target_modules": ["model.layers.2.mlp.down_proj"]},
        size={"layers": 3},
        n_rows=40,
        max_steps=12,
        data={"eval_fraction": 0.2},
    )
    workshop.train(job)
    assert len(list((tmp_path / "two/cache/prefix").iterdir())) == 1


def test_a_run_that_had_a_cache_goes_on_without_it_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = upper(tmp_path, "run", max_steps=12)
    take = Steps.take

    def stop(steps: Steps, step: int) -> Any:
        if step == 6:
            raise RunInterruptedError("here")
        return take(steps, step)

    monkeypatch.setattr(Steps, "take", stop)
    assert workshop.train(job).state == "interrupted"
    monkeypatch.setattr(Steps, "take", take)
    monkeypatch.setattr(
        "farthing.train.frozen.open_frozen_cache", lambda *_, **__: "the disk is gone"
    )
    heard = workshop.Heard()
    assert workshop.train(job, heard).state == "finished"
    assert "the disk is gone" in heard.warnings
    assert "equal to rounding, not to the bit" in heard.warnings
