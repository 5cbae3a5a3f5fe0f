"""Fused LoRA layers: what peft computes, with less kept for the backward pass, and still peft's on
disk.
"""

import copy

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close

from every_family import make_framing_tokenizer, small_config, small_model, write_job
from farthing.config.load import load_job
from farthing.errors import ModelError
from farthing.model.activation_checkpointing import checkpoint_layers, saved_bytes
from farthing.model.adapters import Adapter, add_adapter
from farthing.model.lora_kernels import LowRankLinear, use_low_rank
from heads import (
    assert_same,
    gradients_of,
    leave_low_rank,
    make_batch,
    make_model,
    objective_of,
    one_mask,
    summed_loss,
)
from packed_models import model_of
from thinned import thinned
from workshop import train

CLOSE, CLOSE_BF16 = 1e-5, 3e-2
KINDS = {"causal-lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}


def with_lora(family: str = "llama", model=None, **settings):
    """A small model with adapters that do something: fresh ones would multiply by zero."""
    settings = {
        "r": 4,
        "lora_alpha": 12,
        "target_modules": "all-linear",
        "init_lora_weights": False,
    } | settings
    config = peft.LoraConfig(task_type=KINDS[objective_of(family)], **settings)
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(
        model if model is not None else make_model(family), config
    ).train()
    for name, weight in wrapped.named_parameters():
        if (
            ".lora_B." in name
        ):  # drawn as wide as kaiming would, adapters this strong are far from any that are trained
            weight.data.mul_(0.3)
    return wrapped


def in_bf16_with_fp32_adapters(model):
    """As a run has it: the frozen base in bf16, what is trained in fp32."""
    for weight in model.parameters():
        if not weight.requires_grad:
            weight.data = weight.data.bfloat16()
    return model


def outcome(
    model, family: str = "llama", *, is_bf16: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients of the loss."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
        loss, logits = summed_loss(model, make_batch(), objective_of(family))
    return logits.detach(), gradients_of(model, loss / 7)


def as_one(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize(
    ("family", "settings"),
    thinned(
        [
            ("llama", {}),
            ("qwen2", {"use_rslora": True, "r": 8}),  # with biases
            (
                "llama",
                {
                    "rank_pattern": {"q_proj": 2, "layers.1.*down_proj": 8},
                    "alpha_pattern": {"v_proj": 3},
                },
            ),
            (
                "llama",
                {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head", "norm"]},
            ),
            ("gpt2", {"fan_in_fan_out": True}),
            ("t5", {}),
        ],
        3,
    ),
    ids=str,
)
def test_outputs_and_gradients_are_those_of_peft(family, settings, is_bf16):
    model = with_lora(family, **settings)
    if is_bf16:
        in_bf16_with_fp32_adapters(model)
    names = list(model.state_dict())
    exact = copy.deepcopy(model).float()
    their_logits, their_gradients = outcome(model, family, is_bf16=is_bf16)
    replaced = use_low_rank(model)
    n_layers = sum(isinstance(module, LoraLayer) for module in model.modules())
    assert (replaced.n_fused, replaced.n_left, replaced.reasons) == (n_layers, 0, {})
    logits, gradients = outcome(model, family, is_bf16=is_bf16)
    assert logits.dtype == their_logits.dtype
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    assert list(model.state_dict()) == names
    if is_bf16:
        exact_logits, exact_gradients = outcome(exact, family)
        assert error(logits, exact_logits) < CLOSE_BF16
        assert error(as_one(gradients), as_one(exact_gradients)) < CLOSE_BF16
    else:
        assert error(logits, their_logits) < CLOSE
        assert_same(gradients, their_gradients)


def one_layer(**settings):
    """A single adapted layer, 12 -> 10."""
    torch.manual_seed(4)
    wrapped = peft.get_peft_model(
        nn.Sequential(nn.Linear(12, 10)),
        peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False, **settings),
    )
    return wrapped.base_model.model[0]


def fused_layer(**settings):
    layer = one_layer(**settings)
    layer.__class__ = LowRankLinear
    return layer


def test_inputs_of_any_form_and_order_in_memory():
    layer, fused = one_layer(), fused_layer()
    of_any_form = [torch.randn(size) for size in ((12,), (0, 12), (2, 3, 12), (1, 12))]
    for x in (*of_any_form, torch.randn(12, 5).t(), torch.randn(4, 24)[:, ::2]):
        assert_close(fused(x), layer(x))
    y = fused(torch.randn(2, 3, 12))
    y += 1  # what comes out is no view that may not be written to
    y.sum().backward()


def test_second_derivatives_are_refused():
    x = torch.randn(3, 12, requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(fused_layer()(x).sum(), x, create_graph=True)


# ---- what is kept ----


def test_layers_that_read_one_tensor_keep_one_copy_of_it():
    layers = [fused_layer() for _ in range(3)]
    x = torch.randn(96, 12, requires_grad=True)
    whole = nn.ModuleList(layers)

    def kept(is_bf16):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
            return saved_bytes(whole, lambda: sum(layer(x).float().sum() for layer in layers))

    assert kept(False) == 96 * (12 + 3 * 4) * 4
    assert kept(True) == 96 * (12 + 3 * 4) * 2 + 3 * 4 * (12 + 10) * 2, (
        "one input, three thin products, the adapters"
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = layers[0](x)
        with torch.no_grad():
            x.add_(1)
        after = layers[1](x)
        assert_close(after, layers[1](x.clone()))
    del before


@pytest.mark.parametrize("every", [0, 1])
def test_a_frozen_prefix_keeps_nothing_and_is_never_given_gradients(every):
    base = make_model("llama", num_hidden_layers=4)
    parts = {"self_attn": "qkvo", "mlp": ("gate", "up", "down")}
    top = tuple(f"layers.3.{part}.{name}_proj" for part in parts for name in parts[part])
    model = add_adapter(base, Adapter(r=4, target_modules=top), "causal-lm", seed=0).train()
    assert use_low_rank(model).n_fused == len(top) == 7
    checkpoint_layers(model, every)
    layers = model.get_base_model().model.layers
    need_gradients = []
    for layer in layers:
        layer.register_forward_hook(lambda _, __, out: need_gradients.append(out.requires_grad))
    loss = summed_loss(model, make_batch(), "causal-lm")[0]
    assert need_gradients[:4] == [False, False, False, True]
    loss.backward()
    assert all(".layers.3." in name for name, p in model.named_parameters() if p.grad is not None)


# ---- life with it ----


@pytest.mark.parametrize(("family", "is_bf16"), [("llama", True), ("gpt2", False)])
def test_dropout_is_that_of_peft(family, is_bf16, monkeypatch):
    one_mask(monkeypatch)
    model = with_lora(family, lora_dropout=0.3)
    if is_bf16:
        in_bf16_with_fp32_adapters(model)
    twin, plain = copy.deepcopy(model), copy.deepcopy(model).eval()
    assert use_low_rank(model).n_left == 0
    outcomes = []
    for one in (twin, model, plain):
        torch.manual_seed(5)
        outcomes.append(outcome(one, family, is_bf16=is_bf16))
    (theirs, their_gradients), (ours, our_gradients), (without, _) = outcomes
    close = CLOSE_BF16 if is_bf16 else CLOSE
    assert error(ours, theirs) < close
    assert error(as_one(our_gradients), as_one(their_gradients)) < 2 * close
    assert error(without, theirs) > 2 * close, "dropout does something"
    model.eval()
    assert error(outcome(model, family, is_bf16=is_bf16)[0], without) < close


def test_dropout_keeps_a_byte_a_number():
    layers = [fused_layer(lora_dropout=p) for p in (0.0, 0.5)]
    x = torch.randn(100, 12, requires_grad=True)
    kept = [saved_bytes(layer, lambda layer=layer: layer(x).sum()) for layer in layers]
    assert kept[1] - kept[0] == 100 * 12


def test_saving_loading_disabling_and_merging_are_pefts(tmp_path):
    base = make_model("llama")
    model = with_lora(model=copy.deepcopy(base), lora_alpha=4)
    before, _ = outcome(model)
    use_low_rank(model)
    fused, _ = outcome(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(
        copy.deepcopy(base), tmp_path / "adapter", is_trainable=True
    )
    assert torch.equal(outcome(loaded)[0], before)
    assert use_low_rank(loaded).n_left == 0
    assert torch.equal(outcome(loaded)[0], fused)

    def logits(one):
        with torch.no_grad():
            return summed_loss(one, make_batch(), "causal-lm")[1]

    with model.disable_adapter():
        disabled = logits(model)
    assert error(disabled, logits(base)) < CLOSE
    assert error(disabled, before) > CLOSE, "the adapter does something"
    model.merge_adapter()
    assert error(logits(model), before) < 1e-4


def test_what_is_not_plain_is_left_counted_and_computed_as_before():
    for settings, word in (({"use_dora": True}, "Dora"), ({"lora_bias": True}, "bias")):
        family = "qwen2" if "lora_bias" in settings else "llama"
        targets = ["q_proj"] if family == "qwen2" else "all-linear"
        model = with_lora(family, target_modules=targets, **settings)
        theirs = outcome(model, family)
        replaced = use_low_rank(model)
        assert replaced.n_fused == 0
        assert word in "".join(replaced.reasons)
        assert f"{replaced.n_left} left to peft" in str(replaced)
        assert torch.equal(outcome(model, family)[0], theirs[0])
    model = with_lora(target_modules=["q_proj", "embed_tokens"])
    replaced = use_low_rank(model)
    assert replaced.n_left == 1
    assert replaced.n_fused == 2
    assert "Embedding" in "".join(replaced.reasons)


def test_a_second_adapter_beside_the_first_is_computed_by_peft():
    model = with_lora()
    use_low_rank(model)
    config = peft.LoraConfig(
        r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model.add_adapter("other", config)
    model.base_model.set_adapter(["default", "other"])
    both, _ = outcome(model)
    assert "2 adapters at once" in use_low_rank(model).reasons
    leave_low_rank(model)
    assert torch.equal(outcome(model)[0], both)


def test_adapters_that_change_between_passes_are_seen():
    """By the optimizer, and by one that writes weights without telling torch."""
    model = with_lora()
    use_low_rank(model)
    first, _ = outcome(model, is_bf16=True)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data.mul_(1.5)
    second, _ = outcome(model, is_bf16=True)
    leave_low_rank(model)
    theirs, _ = outcome(model, is_bf16=True)
    assert error(second, theirs) < CLOSE_BF16 < error(first, theirs)


def test_mixed_precision_without_autocast_is_computed_by_peft():
    model = in_bf16_with_fp32_adapters(with_lora())
    theirs, _ = outcome(model)
    use_low_rank(model)
    assert torch.equal(outcome(model)[0], theirs)


@pytest.mark.parametrize("init", ["pissa_niter_4", "olora"])
def test_an_embedding_is_not_taken_apart(init):
    adapter = Adapter(r=2, target_modules=("embed_tokens", "q_proj"), init=init)
    with pytest.raises(ModelError, match="`embed_tokens` is an embedding"):
        add_adapter(model_of("llama"), adapter, "causal-lm", 0)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_layers_of_gpt2_begin_as_what_they_are(init):
    """Its weights stand the other way round, [in, out]."""
    plain, model = model_of("gpt2"), model_of("gpt2")
    model = add_adapter(model, Adapter(r=2, init=init), "causal-lm", 0)
    ids = torch.arange(3, 9)[None]
    assert_close(model.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits)
    layer = model.get_base_model().transformer.h[0].attn.c_attn
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    w = layer.get_base_layer().weight.T
    q, r = torch.linalg.qr(w.detach())
    if init == "olora":
        assert_close((b @ a).detach(), q[:, :2] @ r[:2])


def test_positions_of_bart_are_trained_whole(tmp_path):
    small_model("bart", "seq2seq", small_config("bart", "seq2seq")).save_pretrained(
        tmp_path / "base"
    )
    make_framing_tokenizer(tmp_path / "base", "seq2seq")
    path = write_job(tmp_path, "seq2seq", "lora", max_steps=1, predict_with_generate=False)
    text = path.read_text().replace("lora_r: 2", "lora_r: 2\n  modules_to_save: embed_positions")
    path.write_text(text)
    assert train(load_job(path)).state == "finished"
    saved = load_file(tmp_path / "run-lora/model/adapter_model.safetensors")
    assert any("embed_positions" in name for name in saved)
