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
from farthing.units import plural

Array = NDArray[np.float32]
SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Of this many layers llama.cpp scales the scores by the width of the model over its heads, else by
the width of a head.
"""


@dataclass(frozen=True)
class GgufFamily:
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
    "llama": GgufFamily("llama", pairs_neighbours=True),
    "mistral": GgufFamily("llama", pairs_neighbours=True),
    "qwen2": GgufFamily("qwen2"),
    "qwen3": GgufFamily("qwen3"),
    "gemma": GgufFamily("gemma", GELU, norms_add_one=True),
    "gemma2": GgufFamily("gemma2", GELU, norms_add_one=True, full_every=2),
    "gemma3_text": GgufFamily("gemma3", GELU, norms_add_one=True, full_every=6),
    "phi3": GgufFamily("phi3"),
    "gpt2": GgufFamily("gpt2", GELU, conv_weights=True),
}
"""By `model_type` of the configuration."""


def family_of(config: Any, task: str) -> GgufFamily:
    """The family of a model for a task. Raises `InputError` where llama.cpp has none, or computes
    another model.
    """
    family = FAMILIES.get(config.model_type)
    if family is None or not objective_of(task).predicts_next:
        known = f"GGUF is written of models that continue a text, of {', '.join(FAMILIES)}"
        raise _refused(known, f"task {task}", config)
    names = ("hidden_activation", "hidden_act", "activation_function")
    activation = next(value for name in names if (value := getattr(config, name, None)))
    layers, every, architecture = _layer_types(config), family.full_every, family.architecture
    in_turn = [
        ("sliding" if every and number % every else "full") + "_attention"
        for number in range(1, len(layers) + 1)
    ]
    wanted, own = getattr(config, "query_pre_attn_scalar", None), head_width(config)
    if config.num_hidden_layers == GEMMA_27B_LAYERS.get(architecture):
        own = config.hidden_size // config.num_attention_heads
    caps = [getattr(config, f"{name}_logit_softcapping", None) for name in ("final", "attn")]
    other_scores = (
        not getattr(config, "scale_attn_weights", True)
        or getattr(config, "scale_attn_by_inverse_layer_idx", False)
        or getattr(config, "add_cross_attention", False)
    )
    for is_other, key, why in (
        (
            activation not in family.activations,
            "activation",
            f"its activation is {activation}, that of llama.cpp {family.activations[0]}",
        ),
        (
            getattr(config, "use_bidirectional_attention", None),
            "use_bidirectional_attention",
            "its attention looks ahead",
        ),
        (
            getattr(config, "attention_bias", False) and architecture != "llama",
            "attention_bias",
            "llama.cpp reads no biases of its attention",
        ),
        (
            architecture == "gpt2" and other_scores,
            "scale_attn_weights",
            "its attention is scaled in another way, or looks at an encoder",
        ),
        (
            every and (list(layers) != in_turn or not config.sliding_window),
            "layer_types",
            f"its layers are not {every - 1} with a window and one without, in turn",
        ),
        (
            wanted is not None and not math.isclose(wanted, own),
            "query_pre_attn_scalar",
            f"its scores are divided by the root of {wanted}, in llama.cpp of {own}",
        ),
        (
            (architecture == "gemma3" and any(caps))
            or (architecture == "gemma2" and not all(caps)),
            "logit_softcapping",
            f"{architecture} caps its logits and scores otherwise",
        ),
    ):
        if is_other:
            raise _refused(why, key, config)
    if architecture != "gpt2":
        _rope(config, family)  # raises
    return family


def _refused(why: str, key: str, config: Any) -> InputError:
    return InputError(
        f"llama.cpp does not compute this model as it was trained: {why}",
        where=f"{key} of {config.model_type}",
        to_do="use --format merged, fp8, w8a16 or w4a16",
    )


def _layer_types(config: Any) -> list[str]:
    return getattr(config, "layer_types", None) or []


def head_width(config: Any) -> int:
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def settings_of(
    config: Any, family: GgufFamily
) -> tuple[dict[str, object], dict[str, Array], list[str]]:
    """(settings by the name of the method of `gguf.GGUFWriter` that writes them, further tensors,
    notes).
    """
    values: dict[str, object] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "head_count": config.num_attention_heads,
    }
    if family.architecture == "gpt2":
        width = config.n_inner or 4 * config.hidden_size
        more = {"feed_forward_length": width, "layer_norm_eps": config.layer_norm_epsilon}
        return values | more, {}, []
    rope, tensors = _rope(config, family)
    values |= {
        "feed_forward_length": config.intermediate_size,
        "head_count_kv": _n_kv_heads(config),
        "key_length": head_width(config),
        "value_length": head_width(config),
        "layer_norm_rms_eps": config.rms_norm_eps,
        **rope,
    }
    window, notes = getattr(config, "sliding_window", None), []
    if family.full_every:
        values["sliding_window"] = window
    elif "sliding_attention" in (_layer_types(config) or ["sliding_attention"]) and (
        window and window < config.max_position_embeddings
    ):
        values["context_length"] = window
        notes.append(
            f"llama.cpp has no sliding window for it: the context is {plural(window, 'token')},"
            " up to which both agree"
        )
    if family.architecture == "gemma2":
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            values[name] = getattr(config, name)
    return values, tensors, notes


def _rope(config: Any, family: GgufFamily) -> tuple[dict[str, object], dict[str, Array]]:
    """Rotary embeddings: settings, and the factors that divide each frequency where they are no
    rule of llama.cpp. Raises `InputError`.
    """
    every, width = config.rope_parameters, head_width(config)
    main, local = every.get("full_attention", every), every.get("sliding_attention")
    turned = int(width * main.get("partial_rotary_factor", 1.0))
    values: dict[str, object] = {
        "rope_freq_base": float(main["rope_theta"]),
        "rope_dimension_count": turned,
    }
    if turned != width and family.architecture != "phi3":
        why = "only a part of each head is turned by position"
        raise _refused(why, "partial_rotary_factor", config)
    if local is not None:
        values["rope_freq_base_swa"] = float(local["rope_theta"])
        if local.get("rope_type", "default") != "default":
            why = "positions of its windowed layers are scaled"
            raise _refused(why, "rope_parameters", config)
    match main.get("rope_type", "default"), family.architecture:
        case "default", _:
            return values, {}
        case "linear", _:
            scaled = {"rope_scaling_type": "linear", "rope_scaling_factor": float(main["factor"])}
            return values | scaled, {}
        case "llama3", "llama":
            exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
            frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
            divided_by = 1.0 / main["rope_theta"] ** exponents / frequencies.double()
            return values, {"rope_freqs.weight": divided_by.float().numpy()}
        case "longrope", "phi3":
            before = main.get("original_max_position_embeddings")
            before = int(before or config.original_max_position_embeddings)
            longer = main.get("factor") or config.max_position_embeddings / before
            factor = main.get("attention_factor") or (
                1.0 if longer <= 1 else math.sqrt(1 + math.log(longer) / math.log(before))
            )
            values |= {"rope_scaling_orig_ctx_len": before}
            values |= {"rope_scaling_attn_factors": float(factor)}
            return values, {
                f"rope_factors_{which}.weight": np.asarray(main[f"{which}_factor"], np.float32)
                for which in ("long", "short")
            }
        case kind, _:
            why = f"positions are scaled by the rule {kind!r}"
            raise _refused(why, "rope_parameters", config)


def is_transposed(name: str, family: GgufFamily) -> bool:
    return family.conv_weights and (".attn." in name or ".mlp." in name)


def lay_out(
    name: str, weight: Array, config: Any, family: GgufFamily, *, is_back: bool = False
) -> Array:
    """A weight [out, in] (or vector) of transformers as llama.cpp has it; with `is_back` one of
    llama.cpp as transformers has it.
    """
    if is_transposed(name, family):
        return np.ascontiguousarray(weight.T)
    if family.norms_add_one and name.endswith("norm.weight"):
        return weight + np.float32(-1 if is_back else 1)
    heads = {".q_proj.": config.num_attention_heads, ".k_proj.": _n_kv_heads(config)}
    for part, n_heads in heads.items() if family.pairs_neighbours else ():
        if part in name:
            half = weight.shape[0] // n_heads // 2
            apart = (half, 2) if is_back else (2, half)
            split = weight.reshape(n_heads, *apart, *weight.shape[1:])
            return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)
    return weight


def _n_kv_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
