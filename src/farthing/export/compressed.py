"""A merged model in compressed-tensors form, with fewer bits to a weight, as vLLM, SGLang and transformers load it.

Through `llmcompressor`, without calibration: each weight is rounded to the nearest step between the smallest and the largest
of its group (of its row for fp8, whose activations are scaled as they come). The output layer and heads stay in bf16.
Refuses models of which nothing would be compressed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from farthing.errors import UserMistake

METHODS = {
    "fp8": "FP8_DYNAMIC: weights by row and activations by token in 8-bit floats, rounded to nearest",
    "w8a16": "W8A16: weights in 8-bit integers by groups of {group}, rounded to nearest (no calibration)",
    "w4a16": "W4A16: weights in 4-bit integers by groups of {group}, rounded to nearest (no calibration)",
}
GROUPS = (128, 64, 32)


def need_compressor() -> Any:
    """The `llmcompressor` package, silenced. Raises `UserMistake` that says how to get it."""
    parallelism = os.environ.get("TOKENIZERS_PARALLELISM")
    try:
        import llmcompressor
        from loguru import logger
    except ImportError as error:
        raise UserMistake(
            f"compressed-tensors folders are written with llmcompressor, which is not installed ({error.name})",
            where="--format",
            to_do="pip install 'farthing[export]'",
        ) from error
    logger.remove()
    if parallelism is None:  # importing it has switched it off
        os.environ.pop("TOKENIZERS_PARALLELISM", None)
    return llmcompressor


def plan_compressed(config: Any, form: str) -> int:
    """The weights of a group. Raises `UserMistake` where the model's width is no whole number of groups."""
    need_compressor()
    text = config.get_text_config()
    width: int = getattr(text, "hidden_size", None) or text.d_model
    group = next((size for size in GROUPS if width % size == 0), 0)
    if not group and form != "fp8":
        raise UserMistake(
            f"the model's width {width} is no multiple of {GROUPS[-1]}, the smallest group of weights",
            where=f"--format {form}",
            to_do="use --format fp8, or gguf where llama.cpp has the family",
        )
    return group


def write_compressed(model: Any, folder: Path, form: str, group: int) -> str:
    """Compress `model`, which was loaded from a folder and is changed, into `folder`; returns how in words."""
    compressor = need_compressor()
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.quantization import QuantizationModifier

    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    heads = {"score", "classifier", "lm_head", "qa_outputs"}
    ignored = [
        name
        for name, module in linear.items()
        if module is output or heads & set(name.split(".")) or (form != "fp8" and module.in_features % group)
    ]
    if len(ignored) == len(linear):
        raise UserMistake(
            "none of its layers can be compressed", where=f"--format {form}", to_do="use --format merged or gguf"
        )
    if form == "fp8":
        recipe = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=ignored)
    else:
        bits = 8 if form == "w8a16" else 4
        weights = QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy="group", group_size=group)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
        recipe = QuantizationModifier(config_groups={"group_0": scheme}, ignore=ignored)
    compressor.oneshot(model=model, recipe=recipe)
    model.save_pretrained(folder, save_compressed=True)
    whole = [name for name in ignored if not heads & set(name.split("."))]
    left = f"; {len(whole)} layers whose width is no multiple of {group} stay whole" if whole and form != "fp8" else ""
    return METHODS[form].format(group=group) + left
