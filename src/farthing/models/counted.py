"""The sizes of a model of a family that has no table, counted on the model that transformers makes
of its config.json: without memory, because its weights are on the meta device.

Imports torch and transformers when it is called.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from farthing.errors import InputError
from farthing.models.families import POSITIONS_AFTER_PADDING
from farthing.models.shapes import Shape
from farthing.models.weights import Weight
from farthing.objectives.registry import objective_of

QUERY_AND_VALUE = (
    ("query", "value"),
    ("q_proj", "v_proj"),
    ("q_lin", "v_lin"),
    ("q", "v"),
    ("query_proj", "value_proj"),
    *(("qkv_proj",), ("query_key_value",), ("c_attn",), ("Wqkv",), ("in_proj",)),
)
"""Names that families give to the layers of queries and values (Hu et al. 2021, section 4.2), the
last ones where these are one layer with the keys."""
_PAIR_LAYERS = ("encoder_layers", "num_hidden_layers"), ("decoder_layers", "num_decoder_layers")
_FFN = (
    "intermediate_size",
    "ffn_dim",
    "encoder_ffn_dim",
    "d_ff",
    "n_inner",
    "ffn_hidden_size",
    "hidden_dim",
)
_N_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_N_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k")


class _Kind(NamedTuple):
    """What copies of a weight have in common."""

    name: str
    kind: str
    n_in: int
    n_out: int
    has_bias: bool
    is_tied: bool
    n_experts: int


def count_shape(config: Mapping[str, Any], task: str, n_labels: int = 0) -> Shape:
    """The sizes of the model that `config` (what config.json holds) describes, with the head of
    `task`. Raises `InputError` where transformers can't make it.
    """
    model, settings = _made(config, task, n_labels)
    text = settings.get_text_config()
    objective = objective_of(task)
    is_pair = bool(getattr(settings, "is_encoder_decoder", False))
    n_layers, n_decoder_layers = (
        _first(text, _PAIR_LAYERS[0] if is_pair else ("num_hidden_layers",)),
        0,
    )
    if is_pair:
        n_decoder_layers = _first(text, _PAIR_LAYERS[1]) or n_layers
    n_heads = _first(text, ("num_attention_heads", "encoder_attention_heads")) or 1
    n_experts = _first(text, _N_EXPERTS)
    n_active = (_first(text, _N_ACTIVE) or 1) if n_experts > 1 else 0
    ffn = _first(text, ("moe_intermediate_size", *_FFN) if n_active else _FFN)
    hidden, vocab = _first(text, ("hidden_size",)), _first(text, ("vocab_size",))
    if not hidden or not vocab:
        what = f"a `{settings.model_type}` has no {'vocab_size' if hidden else 'hidden_size'}"
        raise InputError(what, where="config.json", to_do="choose a model of another family")
    is_causal = _reads_back(settings, objective.predicts_next)
    weights = _weights(
        model,
        objective.scores_tokens,
        is_pair,
        is_causal,
        n_active / n_experts if n_active else 1.0,
    )
    names = {weight.name.rpartition(".")[2] for weight in weights if weight.kind == "linear"}
    positions = _first(text, ("max_position_embeddings",)) or None
    if positions and settings.model_type in POSITIONS_AFTER_PADDING:
        positions -= (settings.pad_token_id or 0) + 1
    return Shape(
        model_type=settings.model_type,
        task=task,
        attention="encoder-decoder" if is_pair else "causal" if is_causal else "bidirectional",
        hidden=hidden,
        n_layers=n_layers,
        n_decoder_layers=n_decoder_layers,
        n_heads=n_heads,
        n_kv_heads=_first(text, ("num_key_value_heads",)) or n_heads,
        head_dim=_first(text, ("head_dim",)) or max(1, hidden // n_heads),
        ffn=(ffn or 4 * hidden) * max(1, n_active)
        + _first(text, ("shared_expert_intermediate_size",)),
        vocab=vocab,
        max_positions=positions,
        is_tied=any(weight.is_tied and weight.part == "head" for weight in weights)
        if objective.scores_tokens
        else bool(getattr(settings, "tie_word_embeddings", False)),
        windows=_windows(text, n_decoder_layers or n_layers),
        weights=weights,
        query_and_value=next((each for each in QUERY_AND_VALUE if set(each) <= names), ()),
        n_active=n_active,
    )


def _made(config: Mapping[str, Any], task: str, n_labels: int) -> tuple[Any, Any]:
    """The model without memory, and its configuration."""
    import torch
    import transformers

    kind = config.get("model_type")
    says = {name: value for name, value in config.items() if name not in ("model_type", "auto_map")}
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            settings = transformers.AutoConfig.for_model(kind, **says)
            if n_labels:
                settings.num_labels = n_labels
            auto = getattr(transformers, objective_of(task).auto_class)
            return auto.from_config(settings), settings
    except Exception as error:  # whatever the code of a family raises
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise InputError(
            f"transformers can't make a `{kind}` for {task}: {reason}",
            where="config.json: model_type",
            to_do="check the model's config.json, or choose another model",
        ) from None


def _first(text: Any, names: Iterable[str]) -> int:
    """The first of these keys that says a number; 0 where none does. Of one that differs from layer
    to layer, the first layer's.
    """
    for name in names:
        value = None
        with contextlib.suppress(Exception):  # what a family's own configuration raises
            value = getattr(text, name, None)
        if value is None:
            with contextlib.suppress(Exception):
                value = getattr(text.per_layer_config[0], name)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def _reads_back(settings: Any, predicts_next: bool) -> bool:
    """Whether a token sees those before it alone: not in what transformers knows as an encoder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

    is_encoder = settings.model_type in ENCODERS and not getattr(settings, "is_decoder", False)
    return predicts_next or not is_encoder


def _windows(text: Any, n_layers: int) -> tuple[int | None, ...]:
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    if not isinstance(window, int) or getattr(text, "use_sliding_window", True) is False:
        return (None,) * n_layers
    slides = [kind == "sliding_attention" for kind in kinds or ["sliding_attention"] * n_layers]
    return tuple(window if here else None for here in slides)


def _weights(
    model: Any, scores_tokens: bool, is_pair: bool, is_causal: bool, share: float
) -> tuple[Weight, ...]:
    """All weights, those of different layers as copies; a tied one counts where it is first."""
    prefix = f"{model.base_model_prefix}."
    in_body = (
        prefix if hasattr(model, model.base_model_prefix) else ("encoder.", "decoder.", "shared")
    )
    found: dict[_Kind, int] = {}
    heads: set[str] = set()
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for kind in _of_module(module_name, module, seen):
            is_head = not kind.name.startswith(in_body)
            kind = kind._replace(name=kind.name.removeprefix(prefix) if is_pair else kind.name)
            heads |= {kind.name} if is_head else set()
            found[kind] = found.get(kind, 0) + 1
    weights = []
    for kind, copies in found.items():
        part = "head" if kind.name in heads else _part(kind)
        tokens = "all"
        if part == "pooler" or (
            part == "head" and not scores_tokens and (is_pair or not is_causal)
        ):
            tokens = "sequence"
        elif is_pair and part != "head":
            reads_source = re.search(
                r"(encoder_attn|cross_attn|EncDecAttention)\.\w*(k|v|key|value)", kind.name
            )
            is_target = kind.name.startswith("decoder.") and not reads_source
            tokens = "target" if is_target else "source"
        is_expert = "expert" in kind.name and "shared" not in kind.name and kind.kind != "norm"
        is_shared = not (is_expert and (kind.kind == "experts" or kind.name.count("*") > 1))
        weights.append(
            Weight(
                name=kind.name,
                part=part,
                kind=kind.kind,
                n_in=kind.n_in,
                n_out=kind.n_out,
                has_bias=kind.has_bias,
                copies=copies,
                is_tied=kind.is_tied,
                tokens=tokens,
                share=1.0 if is_shared else share,
                n_experts=kind.n_experts,
            )
        )
    return tuple(weights)


def _of_module(module_name: str, module: Any, seen: set[int]) -> list[_Kind]:
    """The weights that a module has by itself."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    own = {name: each for name, each in module._parameters.items() if each is not None}
    name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module_name)
    weight, bias = own.get("weight"), own.get("bias")
    kind = "linear" if isinstance(module, nn.Linear | Conv1D) else "norm"
    kind = "embedding" if isinstance(module, nn.Embedding) else kind
    is_whole = weight is not None and len(own) == 1 + (bias is not None)
    has_bias = bias is not None and id(bias) not in seen
    seen.add(id(bias))
    if is_whole and weight is not None and weight.dim() == (1 if kind == "norm" else 2):
        is_tied = id(weight) in seen
        seen.add(id(weight))
        n_out, n_in = (weight.numel(), 1) if kind == "norm" else tuple(weight.shape)
        if kind == "embedding" or isinstance(module, Conv1D):
            n_in, n_out = n_out, n_in
        return [_Kind(name, kind, n_in, n_out, has_bias, is_tied, 1)]
    found = []
    for own_name, each in own.items():
        is_tied = id(each) in seen and own_name != "bias"
        seen.add(id(each))
        full = f"{name}.{own_name}" if name else own_name
        if each.dim() == 3 and "expert" in full:
            found.append(
                _Kind(full, "experts", each.shape[1], each.shape[2], False, is_tied, each.shape[0])
            )
        elif each.dim() == 2 and re.search(r"\.(gate|router)\.weight$", full):
            found.append(_Kind(name, "router", each.shape[1], each.shape[0], False, is_tied, 1))
        else:
            found.append(_Kind(full, "raw", 1, each.numel(), False, is_tied, 1))
    return found


def _part(kind: _Kind) -> str:
    if kind.kind == "embedding":
        return "positions" if "position" in kind.name else "embeddings"
    if "pooler" in kind.name:
        return "pooler"
    if kind.kind in ("norm", "raw") and "norm" in kind.name.lower():
        return "norms"
    return "attention" if "attn" in kind.name or "attention" in kind.name.lower() else "mlp"
