"""Models that are refused by their config.json, so that a plan refuses what a run would: families
that are not trained, and losses that a model class of transformers adds and farthing does not
compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farthing.errors import ModelError
from farthing.models.families import ENCODERS, FAMILIES, NOT_TRAINED
from farthing.objectives.registry import objective_of

_ROUTER_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef", "router_z_loss_coef", "moe_loss_weight")

_WORDS = {
    "output_router_logits": ("the balance of the experts", "false"),
    "z_loss_coefficient": ("a penalty on large logits", "0"),
    "disable_ngram_loss": ("the prediction of tokens after the next", "true"),
}


def left_out_loss(config: Mapping[str, Any], task: str) -> str:
    """The key of a configuration by which a loss is added that farthing leaves out; or "".

    The balance of the experts (`output_router_logits`, Fedus et al. 2021, section 2.2) is a product
    of two means over all tokens of a step, which does not come apart into micro-batches.
    Classification heads add none of these.
    """
    if not objective_of(task).scores_tokens:
        return ""
    for part in (config, config.get("text_config") or {}):
        if part.get("output_router_logits"):
            weights = [
                of.get(name)
                for of in (part, part.get("ffn_config") or {})
                for name in _ROUTER_WEIGHTS
            ]
            known = [weight for weight in weights if weight is not None]
            if any(known) or not known:
                return "output_router_logits"
        if part.get("z_loss_coefficient"):
            return "z_loss_coefficient"
        if (
            part.get("model_type") == "prophetnet"
            and part.get("ngram", 2) > 1
            and not part.get("disable_ngram_loss")
        ):
            return "disable_ngram_loss"
    return ""


def refuse_model(config: Mapping[str, Any], task: str, name: str, method: str = "") -> None:
    """Refuse a configuration that can't be trained as it is. Raises `ModelError`."""
    kind = str(config.get("model_type"))
    how = (config.get("quantization_config") or {}).get("quant_method")
    # transformers unfolds mxfp4 where it has no kernels for it
    if how not in (None, "mxfp4") and (how, method) != ("bitsandbytes", "qlora"):
        raise ModelError(
            f"its weights are quantized already ({how}), and can't be trained so",
            where=name,
            to_do="name the model with weights of 16 bits; method: qlora quantizes it",
        )
    if kind in NOT_TRAINED:
        raise ModelError(
            f"a {kind} is not trained: {NOT_TRAINED[kind]}",
            where=name,
            to_do="choose a model of another family: docs/reference/models.md lists them",
        )
    looks_back = config.get("is_decoder") or config.get("causal")
    family = FAMILIES.get(kind)
    is_encoder = kind in ENCODERS or (family is not None and family.attention == "bidirectional")
    if is_encoder and objective_of(task).predicts_next and not looks_back:
        raise ModelError(
            f"a {kind} with this config.json looks ahead: it sees the tokens that it is to predict",
            where=name,
            to_do="use a decoder (Llama, Qwen ...), or a copy of this one with `is_decoder: true`"
            " in its config.json",
        )
    key = left_out_loss(config, task)
    if key:
        what, instead = _WORDS[key]
        raise ModelError(
            f"`{key}` in the model's config.json adds {what} to the loss, which farthing does not"
            " compute",
            where=name,
            to_do=(
                f"train without it: use a copy of the model folder whose config.json has `{key}:"
                f" {instead}`"
            ),
        )
