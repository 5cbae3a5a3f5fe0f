"""What llama.cpp computes of a model: for each family its architecture, its settings, and how its
weights are laid out.

Settings are those of `general.architecture` in
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and of llama.cpp's graphs. Refuses, by its
key, what llama.cpp would compute otherwise. Needs no `gguf` package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from farthing.errors import InputError
from farthing.objectives.registry import objective_of
from farthing.storage.files import Json
from farthing.units import plural

Array = NDArray[np.float32]
SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Of this many layers llama.cpp scales the scores by the width of the model over its heads, else by
the width of a head.
"""


@dataclass(frozen=True)
class Family:
    """How llama.cpp computes models of one `model_type`."""

    architecture: str
    activations: tuple[str, ...] = SILU
    pairs_neighbours: bool = False
    """Its rotary embedding turns neighbouring numbers, that of transformers the two halves: queries
    and keys are reordered.
    """
    norms_add_one: bool = False
    """Its norms multiply by the weight, those of transformers by one more."""
    conv_weights: bool = False
    """transformers has its matrices as [in, out]."""
    full_every: int = 0
    """Each so many layers one attends to everything, the others within a window; 0: all attend to
    everything.
    """


FAMILIES = {
    "llama": Family("llama", pairs_neighbours=True),
    "mistral": Family("llama", pairs_neighbours=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gemma": Family("gemma", GELU, norms_add_one=True),
    "gemma2": Family("gemma2", GELU, norms_add_one=True, full_every=2),
    "gemma3_text": Family("gemma3", GELU, norms_add_one=True, full_every=6),
    "phi3": Family("phi3"),
    "gpt2": Family("gpt2", GELU, conv_weights=True),
}
"""By `model_type` of the configuration."""


def refuse(why: str, key: str, config: Any) -> None:
    """Raise the `InputError` of a model that can't become a GGUF file."""
    raise InputError(
        f"llama.cpp does not compute this model as it was trained: {why}",
        where=f"{key} of {config.model_type}",
        to_do="use --format merged, fp8, w8a16 or w4a16",
    )


def family_of(config: Any, task: str) -> Family:
    """The family of a model for a task. Raises `InputError` where llama.cpp has none, or computes
    another model.
    """
    if not objective_of(task).predicts_next or config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        refuse(
            f"GGUF is written of models that continue a text, of the families {known}",
            f"task {task}",
            config,
        )
    family = FAMILIES[config.model_type]
    activation = next(
        getattr(config, key)
        for key in ("hidden_activation", "hidden_act", "activation_function")
        if getattr(config, key, None)
    )
    if activation not in family.activations:
        refuse(
            f"its activation is {activation}, that of llama.cpp {family.activations[0]}",
            "activation",
            config,
        )
    if getattr(config, "use_bidirectional_attention", None):
        refuse("its attention looks ahead", "use_bidirectional_attention", config)
    if getattr(config, "attention_bias", False) and family.architecture != "llama":
        refuse("llama.cpp reads no biases of its attention", "attention_bias", config)
    if config.model_type == "gpt2":
        _refuse_gpt2(config)
    else:
        _refuse_scales(config, family)
        _rope(config, family)  # raises
    return family


def _refuse_gpt2(config: Any) -> None:
    """Variants of GPT-2 that only transformers has."""
    if (
        not config.scale_attn_weights
        or config.scale_attn_by_inverse_layer_idx
        or config.add_cross_attention
    ):
        refuse(
            "its attention is scaled in another way, or looks at an encoder",
            "scale_attn_weights",
            config,
        )


def _refuse_scales(config: Any, family: Family) -> None:
    """Windows and scales of the scores that llama.cpp fixes by the family."""
    layers, every = getattr(config, "layer_types", None) or [], family.full_every
    expected = (
        [("full" if (i + 1) % every == 0 else "sliding") + "_attention" for i in range(len(layers))]
        if every
        else []
    )
    if every and (list(layers) != expected or not config.sliding_window):
        refuse(
            f"its layers are not {every - 1} with a window and one without, in turn",
            "layer_types",
            config,
        )
    scalar = getattr(config, "query_pre_attn_scalar", None)
    is_27b = config.num_hidden_layers == GEMMA_27B_LAYERS.get(family.architecture)
    own = config.hidden_size // config.num_attention_heads if is_27b else head_width(config)
    if scalar is not None and not math.isclose(scalar, own):
        refuse(
            f"its scores are divided by the root of {scalar}, in llama.cpp of {own}",
            "query_pre_attn_scalar",
            config,
        )
    if family.architecture == "gemma3" and (
        config.final_logit_softcapping or config.attn_logit_softcapping
    ):
        refuse("its logits or scores are capped", "logit_softcapping", config)
    if family.architecture == "gemma2" and not (
        config.final_logit_softcapping and config.attn_logit_softcapping
    ):
        refuse("its logits or scores are not capped", "logit_softcapping", config)


def head_width(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def settings_of(
    config: Any, family: Family
) -> tuple[dict[str, object], dict[str, Array], list[str]]:
    """(settings by the name of the method of `gguf.GGUFWriter` that writes them, further tensors,
    what is to be said).
    """
    if config.model_type == "gpt2":
        return _gpt2_settings(config), {}, []
    width, notes = head_width(config), []
    context, window = config.max_position_embeddings, getattr(config, "sliding_window", None)
    windowed = getattr(config, "layer_types", None) or ["sliding_attention"]
    if not family.full_every and window and "sliding_attention" in windowed and window < context:
        context = window
        notes.append(
            f"llama.cpp has no sliding window for it: the context is {plural(window, 'token')}, up"
            " to which both agree"
        )
    values: dict[str, object] = {
        "context_length": context,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads or config.num_attention_heads,
        "key_length": width,
        "value_length": width,
        "layer_norm_rms_eps": config.rms_norm_eps,
    }
    if family.full_every:
        values |= {"sliding_window": window}
    if family.architecture == "gemma2":
        values |= {"attn_logit_softcapping": config.attn_logit_softcapping}
        values |= {"final_logit_softcapping": config.final_logit_softcapping}
    rope, tensors = _rope(config, family)
    return values | rope, tensors, notes


def _gpt2_settings(config: Any) -> dict[str, object]:
    return {
        "context_length": config.n_positions,
        "embedding_length": config.n_embd,
        "block_count": config.n_layer,
        "feed_forward_length": config.n_inner or 4 * config.n_embd,
        "head_count": config.n_head,
        "layer_norm_eps": config.layer_norm_epsilon,
    }


def _rope(config: Any, family: Family) -> tuple[dict[str, object], dict[str, Array]]:
    """Rotary embeddings: settings, and the factors that divide each frequency where they are no
    rule of llama.cpp.
    """
    every = config.rope_parameters
    main = every.get("full_attention", every)
    turned = int(head_width(config) * main.get("partial_rotary_factor", 1.0))
    values: dict[str, object] = {
        "rope_freq_base": float(main["rope_theta"]),
        "rope_dimension_count": turned,
    }
    if turned != head_width(config) and family.architecture != "phi3":
        refuse("only a part of each head is turned by position", "partial_rotary_factor", config)
    if "sliding_attention" in every:
        local = every["sliding_attention"]
        values["rope_freq_base_swa"] = float(local["rope_theta"])
        if local.get("rope_type", "default") != "default":
            refuse("positions of its windowed layers are scaled", "rope_parameters", config)
    kind = main.get("rope_type", "default")
    if kind == "linear":
        values |= {"rope_scaling_type": "linear", "rope_scaling_factor": float(main["factor"])}
    elif kind == "llama3" and family.architecture == "llama":
        return values, {"rope_freqs.weight": _slowed(config)}
    elif kind == "longrope" and family.architecture == "phi3":
        return values | _long_rope(config, main), {
            f"rope_factors_{which}.weight": np.asarray(main[f"{which}_factor"], np.float32)
            for which in ("long", "short")
        }
    elif kind != "default":
        refuse(f"positions are scaled by the rule {kind!r}", "rope_parameters", config)
    return values, {}


def _slowed(config: Any) -> Array:
    """[turned / 2]: by what each frequency is divided."""
    theta, width = config.rope_parameters["rope_theta"], head_width(config)
    plain = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return (plain / scaled.double()).float().numpy()


def _long_rope(config: Any, main: Json) -> dict[str, object]:
    before = int(
        main.get("original_max_position_embeddings") or config.original_max_position_embeddings
    )
    longer = main.get("factor") or config.max_position_embeddings / before
    factor = main.get("attention_factor") or (
        1.0 if longer <= 1 else math.sqrt(1 + math.log(longer) / math.log(before))
    )
    return {"rope_scaling_orig_ctx_len": before, "rope_scaling_attn_factors": float(factor)}


def lay_out(name: str, weight: Array, config: Any, family: Family) -> Array:
    """A weight [out, in] (or vector) of transformers as llama.cpp has it."""
    if family.conv_weights and (".attn." in name or ".mlp." in name):
        return np.ascontiguousarray(weight.T)
    if family.norms_add_one and name.endswith("norm.weight"):
        return weight + np.float32(1)
    if heads := _heads_of(name, config) if family.pairs_neighbours else 0:
        halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
    return weight


def taken_back(name: str, weight: Array, config: Any, family: Family) -> Array:
    """What `lay_out` has made, as transformers has it."""
    if heads := _heads_of(name, config) if family.pairs_neighbours else 0:
        pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)
    if family.norms_add_one and name.endswith("norm.weight"):
        return weight - np.float32(1)
    return lay_out(name, weight, config, family)  # its own inverse


def _heads_of(name: str, config: Any) -> int:
    """Heads that a projection is for, 0 where it is of neither queries nor keys."""
    if ".q_proj." in name:
        return int(config.num_attention_heads)
    return (
        int(config.num_key_value_heads or config.num_attention_heads) if ".k_proj." in name else 0
    )
