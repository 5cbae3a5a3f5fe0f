"""The study's shapes against the real thing: models on the meta device, peft's adapters, torch's
count of FLOPs.
"""

from typing import Any

import peft
import pytest
import torch
import transformers
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from farthing.errors import InputError
from farthing.model.adapters import Adapter, add_adapter, count_parameters
from farthing.model.load import auto_class
from farthing.model.positions import max_positions
from farthing.models.families import FAMILIES
from farthing.models.model_config import known_config
from farthing.models.shapes import Shape, read_shape
from thinned import thinned
from workshop import read_json

SMALL = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
ENCODER = SMALL | LAYERS | {"max_position_embeddings": 64}
DECODER = ENCODER | {"num_key_value_heads": 2}
WIDE = DECODER | {"head_dim": 16}  # heads that are wider together than the model
GPT2 = SMALL | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
T5 = SMALL | {
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 16,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
DISTILBERT = SMALL | {"dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
GATED = {"feed_forward_proj": "gated-gelu"}

BIASED, UNBIASED = {"attention_bias": True}, {"attention_bias": False}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3}
NARROW_EXPERTS = EXPERTS | {"moe_intermediate_size": 20}
SIZES = {  # by family, and what is unlike its other rows
    "llama": DECODER,
    "llama tied": WIDE | TIED,
    "llama biased": DECODER | BIASED | {"mlp_bias": True},
    "llama null": DECODER | {"head_dim": None, "num_key_value_heads": None},
    "mistral": WIDE | BIASED,
    "qwen2": DECODER,
    "qwen2 tied": DECODER | TIED,
    "qwen3": DECODER,
    "qwen3 biased": WIDE | TIED | BIASED,
    "gemma": WIDE,
    "gemma untied": DECODER | UNTIED,
    "gemma2": DECODER | BIASED,
    "gemma3_text": WIDE,
    "mixtral": DECODER | {"num_local_experts": 4},
    "qwen3_moe": WIDE | NARROW_EXPERTS,
    "qwen2_moe": WIDE | NARROW_EXPERTS | {"shared_expert_intermediate_size": 24},
    "olmoe": DECODER | EXPERTS,
    "gpt_oss": WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": DECODER | UNBIASED,
    "gpt2": GPT2,
    "gpt2 inner": GPT2 | UNTIED | {"n_inner": 40},
    "gpt_bigcode": GPT2 | {"multi_query": False},
    "gpt2 usual keys": ENCODER,
    "gpt_neox": ENCODER,
    "gpt_neox unbiased": ENCODER | TIED | UNBIASED,
    "t5": T5,
    "t5 gated untied": T5 | GATED | UNTIED | {"num_decoder_layers": 3},
    "mt5": T5,
    "bert": ENCODER,
    "roberta": ENCODER | {"type_vocab_size": 1, "pad_token_id": 1},
    "xlm-roberta": ENCODER | {"pad_token_id": 1},
    "distilbert": DISTILBERT,
    "granite": DECODER | {"mlp_bias": True},
    "smollm3": DECODER | {"pad_token_id": 1},
    "helium": DECODER,
    "glm": WIDE | UNBIASED,
    "olmo": DECODER,
    "olmo2": DECODER | BIASED,
    "arcee": DECODER,
    "cohere": DECODER | {"use_qk_norm": True},
    "starcoder2": DECODER,
    "phi": DECODER | {"qk_layernorm": True},
}
CONFIGS = {name: {"model_type": name.split()[0]} | sizes for name, sizes in SIZES.items()}
DEFAULTS = {
    name: {"model_type": name} for name in FAMILIES
}  # nothing said: all is the family's default
N_LABELS = 5
CASES = [
    (name, task)
    for name, config in CONFIGS.items()
    for task in FAMILIES[config["model_type"]].heads
]


def shape_of(config: dict[str, Any], task: str | None = None) -> Shape:
    return read_shape(config, task, N_LABELS if "classification" in (task or "") else 0)


def model_of(config: dict[str, Any], task: str, device: str = "meta"):
    """The model that transformers makes from the same configuration."""
    settings = AutoConfig.for_model(**config)
    torch.manual_seed(0)
    with torch.device(device):
        if task == "body":
            has_pooler = config["model_type"] in ("bert", "roberta", "xlm-roberta")
            model = transformers.AutoModel.from_config(
                settings, **{"add_pooling_layer": False} if has_pooler else {}
            )
        else:
            settings.num_labels = N_LABELS
            model = auto_class(task).from_config(settings, attn_implementation="eager")
        if task == "seq2seq" and config.get("tie_word_embeddings") is False:
            # transformers ties it in a model that is made from its configuration alone, and unties
            # it on loading
            model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    return model


def must_be_the_same(shape: Shape, model):
    """Every parameter by name and size, every linear layer by name, features and bias."""
    weights = [(name, weight) for weight in shape.weights for name in weight.names()]
    bare = {weight for weight in shape.weights if weight.kind in ("experts", "raw")}
    own = {
        name if w in bare else f"{name}.weight": w.n_weights for name, w in weights if not w.is_tied
    }
    own |= {f"{name}{'_' if w in bare else '.'}bias": w.n_bias for name, w in weights if w.has_bias}
    assert own == {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert shape.n_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sum(shape.parts.values()) == shape.n_parameters
    linear = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            linear[name] = (module.in_features, module.out_features, module.bias is not None)
        elif isinstance(module, Conv1D):
            linear[name] = (*module.weight.shape, module.bias is not None)
    layers = [(name, weight) for weight in shape.linear_layers for name in weight.names()]
    assert {name: (w.n_in, w.n_out, w.has_bias) for name, w in layers} == linear


# ---- parameters ----


@pytest.mark.parametrize(("name", "task"), thinned(CASES, 2))
def test_every_family_and_task_is_the_real_model(name, task):
    must_be_the_same(shape_of(CONFIGS[name], task), model_of(CONFIGS[name], task))


@pytest.mark.parametrize("model_type", thinned(FAMILIES, 3))
def test_what_a_config_leaves_out_is_the_librarys_default(model_type):
    shape = shape_of(DEFAULTS[model_type])
    must_be_the_same(shape, model_of(DEFAULTS[model_type], shape.task))


def test_real_models_are_the_real_model(data_dir):
    """Their makers' counts are those of `known_models.json`, which these are compared with."""
    paths = sorted(data_dir.glob("model_configs/*/config.json"))
    assert len(paths) >= 17
    for path in paths:
        config = read_json(path)
        shape = shape_of(config)
        must_be_the_same(shape, model_of(config, shape.task))


@pytest.mark.parametrize(
    "config", [*CONFIGS.values(), *DEFAULTS.values()], ids=[*CONFIGS, *DEFAULTS]
)
def test_sizes_are_those_of_the_librarys_configuration(config):
    settings, shape = AutoConfig.for_model(**config), shape_of(config)
    assert (shape.hidden, shape.n_layers, shape.n_heads) == (
        settings.hidden_size,
        settings.num_hidden_layers,
        settings.num_attention_heads,
    )
    assert shape.n_kv_heads == getattr(settings, "num_key_value_heads", shape.n_heads)
    assert shape.vocab == settings.vocab_size
    assert shape.max_positions == max_positions(settings)
    kinds = getattr(settings, "layer_types", None)
    window = getattr(settings, "sliding_window", None)
    if kinds is None:
        assert set(shape.windows) == {window}
    else:
        assert shape.windows == tuple(
            window if kind == "sliding_attention" else None for kind in kinds
        )
    assert shape.window == (window if window in shape.windows else None)


FROM_LAYER = {"use_sliding_window": True, "sliding_window": 8}
KINDS = ["full_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("qwen2", FROM_LAYER | {"max_window_layers": 1}, (None, 8, 8)),
        ("qwen3", FROM_LAYER | {"max_window_layers": 0}, (8, 8, 8)),
        ("gemma2", {"sliding_window": 8}, (8, None, 8)),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, None)),
        ("gemma3_text", {"layer_types": KINDS}, (None, None, 4096)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("phi3", {"sliding_window": 7}, (7, 7, 7)),
    ],
)
def test_sliding_windows_by_layer(family, changes, windows):
    config = CONFIGS[family] | changes
    assert shape_of(config).windows == windows
    kinds = getattr(AutoConfig.for_model(**config), "layer_types", None)
    slides = [kind == "sliding_attention" for kind in kinds or []]
    assert kinds is None or slides == [window is not None for window in windows]


# ---- adapters ----

ALL = ("all-linear",)
TARGETS = [
    (),
    ALL,
    ("v_proj",),
    ("c_proj",),
    ("dense",),
    ("q", "wo"),
    ("wte",),
    ("lm_head", "q_proj"),
    ("model.layers.1.self_attn.q_proj", "0.mlp.up_proj"),
    ("embed_tokens",),
    ("key",),
]
SAVED = [
    ("lm_head",),
    ("norm",),
    ("embed_tokens", "lm_head"),
    ("mlp",),
    ("o_proj",),
    ("output.dense",),
]
CHOICES = [(targets, ()) for targets in TARGETS] + [(ALL, saved) for saved in SAVED]
CHOICES += [
    (("q_proj", "down_proj"), ("mlp",)),
    (("dense", "query"), ("attention.output",)),
    (("q",), ("EncDecAttention",)),
]


def must_count_the_same(shape: Shape, model, adapter: Adapter):
    """Counts of the study against those of the real adapters."""
    with torch.device("meta"):
        counts = count_parameters(add_adapter(model, adapter, shape.task, seed=0))
    lora = shape.with_lora(
        adapter.r, adapter.target_modules, adapter.modules_to_save, use_dora=adapter.use_dora
    )
    assert counts == {
        "total": lora.n_total,
        "trainable": lora.n_trainable,
        "adapter": lora.n_adapter,
        "saved_modules": lora.n_saved,
    }


@pytest.mark.parametrize("use_dora", thinned([False, True], 8))
@pytest.mark.parametrize(
    ("name", "task"), thinned(((name, task) for name, task in CASES if task != "body"), 24)
)
def test_adapters_are_pefts_own(name, task, use_dora):
    """Every choice of targets and of saved modules that the model has."""
    config = CONFIGS[name]
    shape = shape_of(config, task)
    n_counted = 0
    for targets, saved in CHOICES if not use_dora else CHOICES[: len(TARGETS)]:
        if shape.n_active and saved:
            continue  # peft adapts experts also where the layer that they are in is saved whole
        try:
            has_adapters = shape.with_lora(3, targets, saved, use_dora=use_dora).adapted
        except InputError:
            continue  # names of other families, or DoRA of experts
        if has_adapters:
            adapter = Adapter(r=3, target_modules=targets, modules_to_save=saved, use_dora=use_dora)
            must_count_the_same(shape, model_of(config, task), adapter)
            n_counted += 1
    assert n_counted >= (1 if use_dora and shape.n_active else 2)


def test_a_mixture_counts_all_experts_and_computes_with_those_that_a_token_goes_to():
    config = known_config("mistralai/Mixtral-8x7B-v0.1")
    shape = read_shape(config)
    # with embeddings and norms the 12.9 billion of Jiang et al. 2024, arXiv 2401.04088
    active = 12_748_587_008
    assert shape.forward_flops(1).body + shape.forward_flops(1).head == 2 * active
    assert (shape.n_active, shape.ffn) == (2, 2 * 14336)
    assert shape.n_matmul - shape.n_packed == 32 * (8 * 3 * 4096 * 14336 + 8 * 4096), (
        "NF4 packs linear layers only"
    )
    assert shape.n_met(1) == pytest.approx(active - shape.n_head_matmul)
    assert shape.n_met(64) == pytest.approx(shape.n_matmul, rel=1e-6), (
        "every expert has a token of some stream"
    )
    lora = shape.with_lora(16)
    assert lora.n_merged == 32 * 8 * 3 * 4096 * 14336
    frozen, merged = (
        shape.training_flops(128, adapters=each).body
        for each in (shape.with_lora(16, ("q_proj",)), lora)
    )
    assert frozen < merged < shape.training_flops(128).body
    assert shape.with_lora(16, ("w1", "w2", "w3")).n_merged == lora.n_merged
    with pytest.raises(InputError, match="w1 and w3 are one layer"):
        shape.with_lora(16, ("w1",))
    with pytest.raises(InputError, match="no DoRA for experts"):
        shape.with_lora(16, use_dora=True)
    with pytest.raises(InputError, match="with and without experts"):
        read_shape(CONFIGS["qwen3_moe"] | {"decoder_sparse_step": 2})


@pytest.mark.parametrize("name", thinned([name for name in CONFIGS if name != "phi"], 4))
def test_query_and_value_are_pefts_own_default(name):
    """But for phi, of which peft adapts the feed-forward too."""
    shape = shape_of(CONFIGS[name])
    wrapper = peft.LoraConfig(r=3)
    try:
        wrapped = peft.get_peft_model(model_of(CONFIGS[name], shape.task), wrapper)
    except ValueError:
        known = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        has_none = shape.model_type not in known or shape.model_type == "mixtral"
        assert has_none, "families that peft has no default for"
        return
    n_adapter = sum(p.numel() for key, p in wrapped.named_parameters() if ".lora_" in key)
    assert shape.with_lora(3, shape.query_and_value).n_adapter == n_adapter


@pytest.mark.parametrize(
    ("model", "task", "targets", "saved", "first"),
    [
        ("llama", "causal-lm", ("layers.1.mlp.up_proj",), (), 1),
        ("llama", "causal-lm", ("model.layers.1.mlp.up_proj", "layers.0.self_attn.q_proj"), (), 0),
        ("llama", "causal-lm", ("layers.1.mlp.up_proj",), ("embed_tokens",), 0),
        ("llama", "causal-lm", ("layers.1.mlp.up_proj",), ("lm_head",), 1),
        ("t5", "seq2seq", ("encoder.block.1.layer.0.SelfAttention.q",), (), 1),
        ("t5", "seq2seq", ("decoder.block.1.layer.0.SelfAttention.q",), (), 3),
        ("t5", "seq2seq", ("decoder.block.0.layer.1.EncDecAttention.k",), (), 2),
    ],
)
def test_the_first_trained_layer(model, task, targets, saved, first):
    shape = shape_of(CONFIGS[model], task)
    assert (shape.n_layers, shape.n_decoder_layers) == ((2, 2) if model == "t5" else (3, 0))
    found = shape.with_lora(4, targets, saved)
    assert found.first_layer == first
    assert sum(shape.n_above(first)) == sum(shape.n_above(0)) - first


# ---- FLOPs and cache ----

N_ROWS, N_TOKENS, N_TARGETS = 2, 12, 7
COUNTED = [
    "llama",
    "qwen2 tied",
    "qwen3",
    "gemma2",
    "phi3",
    "gpt2",
    "gpt_neox",
    "t5",
    "t5 gated untied",
    "bert",
    "roberta",
    "distilbert",
]
WITHOUT_ROTATIONS = {"gpt2", "t5", "t5 gated untied", "bert", "roberta", "distilbert"}


def products(name: str, train: bool, adapter: Adapter | None = None) -> tuple[Shape, float, float]:
    """The shape; FLOPs of linear layers and of attention, by torch's own counter, for one sequence."""  # noqa: E501
    task = {"causal": "causal-lm", "encoder-decoder": "seq2seq"}.get(
        shape_of(CONFIGS[name]).attention, "classification"
    )
    model = model_of(CONFIGS[name], task, "cpu")
    if adapter is not None:
        model = add_adapter(model, adapter, task, seed=0)
        model.enable_input_require_grads()  # gradients reach the embeddings, as in a full fine-tune
    batch = {"input_ids": torch.full((N_ROWS, N_TOKENS), 5)}
    if task == "seq2seq":
        batch["decoder_input_ids"] = torch.full((N_ROWS, N_TARGETS), 5)
    with FlopCounterMode(display=False) as counter:
        logits = (
            model(**batch, use_cache=False).logits
            if "classification" not in task
            else model(**batch).logits
        )
        if train:
            logits.sum().backward()
    by_kind = {str(kind): n for kind, n in counter.get_flop_counts()["Global"].items()}
    linear = by_kind.get("aten.mm", 0) + by_kind.get("aten.addmm", 0)
    return shape_of(CONFIGS[name], task), linear / N_ROWS, by_kind.get("aten.bmm", 0) / N_ROWS


def of_sequence(shape: Shape) -> tuple[int, int]:
    return N_TOKENS, N_TARGETS if shape.task == "seq2seq" else 0


@pytest.mark.parametrize("name", thinned(COUNTED, 4))
@pytest.mark.parametrize("train", [False, True])
def test_flops_are_those_that_torch_counts(name, train):
    shape, linear, attention = products(name, train)
    n_tokens, n_targets = of_sequence(shape)
    flops = (shape.training_flops if train else shape.forward_flops)(n_tokens, n_targets)
    assert flops.body + flops.head == linear
    if name in WITHOUT_ROTATIONS:
        n = n_targets or n_tokens  # eager attention also computes what a causal mask then hides
        is_causal = shape.attention != "bidirectional"
        hidden = is_causal * len(shape.windows) * n * (n - 1) // 2 * 4 * shape.n_heads
        hidden *= shape.head_dim
        assert flops.attention + (3 * hidden if train else hidden) == attention


@pytest.mark.parametrize(
    ("name", "saved"),
    thinned(
        [
            *((name, ()) for name in COUNTED),
            ("llama", ("lm_head",)),
            ("t5", ("wo",)),
            ("gpt2", ("h.1.mlp",)),
            ("bert", ("key",)),
        ],
        3,
    ),
)
def test_flops_of_lora_are_those_that_torch_counts(name, saved):
    adapter = Adapter(r=3, target_modules=ALL, modules_to_save=saved)
    shape, linear, _ = products(name, train=True, adapter=adapter)
    lora = shape.with_lora(3, ALL, saved)
    flops = shape.training_flops(*of_sequence(shape), adapters=lora)
    assert flops.body + flops.head + flops.adapters == linear


@pytest.mark.parametrize("window", [None, 1, 4, 12, 20])
def test_causal_attention_counts_what_the_mask_lets_through(window):
    shape = shape_of(CONFIGS["mistral"] | {"sliding_window": window})
    n_pairs = sum(
        1 for i in range(12) for j in range(12) if j <= i and (window is None or j > i - window)
    )
    assert (
        shape.forward_flops(12).attention == 3 * n_pairs * 2 * 2 * 4 * 16
    )  # layers, two products, heads of 16


# ---- mistakes ----


@pytest.mark.parametrize(
    ("config", "where", "words"),
    [
        (
            {"model_type": "lama"},
            "model_type",
            ["`lama`", "did you mean `llama`?", "xlm-roberta", "t5"],
        ),
        ({}, "model_type", ["names no model_type", "known: llama"]),
        ({"model_type": "llama", "hidden_size": "wide"}, "hidden_size", ["'wide'"]),
        ({"model_type": "gpt2", "n_embd": 0}, "n_embd", ["0", "above 0"]),
        (
            {"model_type": "bert", "hidden_size": 30},
            "num_attention_heads",
            ["30", "num_attention_heads: 12"],
        ),
        (
            {"model_type": "qwen3", "num_key_value_heads": 3},
            "num_key_value_heads",
            ["32", "heads: 3"],
        ),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention", ["not known"]),
    ],
)
def test_configs_that_cant_be_read_are_refused_in_words(config, where, words):
    with pytest.raises(InputError) as caught:
        read_shape(config)
    assert caught.value.where == f"config.json: {where}"
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_task_the_family_has_not_is_refused():
    with pytest.raises(InputError, match="llama is not known for seq2seq"):
        read_shape(CONFIGS["llama"], "seq2seq")
    with pytest.raises(InputError, match="number of labels"):
        read_shape(CONFIGS["llama"], "classification")


@pytest.mark.parametrize(
    ("targets", "saved", "where", "word"),
    [
        (("q_porj",), (), "method.target_modules", "did you mean `q_proj`"),
        (("q_proj", "input_layernorm"), (), "method.target_modules", "no linear layer"),
        ((), ("lm_haed",), "method.modules_to_save", "did you mean `lm_head`"),
    ],
)
def test_modules_the_model_has_not_are_refused(targets, saved, where, word):
    with pytest.raises(InputError, match=word) as caught:
        shape_of(CONFIGS["llama"]).with_lora(4, targets, saved)
    assert caught.value.where == where
