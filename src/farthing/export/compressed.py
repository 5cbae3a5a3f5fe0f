"""A merged model in compressed-tensors form, with fewer bits to a weight, as vLLM, SGLang and
transformers load it.

Without calibration: each weight is rounded to the nearest step between the smallest and the largest
of its group (of its row for fp8, whose activations are scaled as they come). Weights go through one
at a time, from file to file; what is no matrix of a layer, the output layer, heads and the choice
between experts stay in bf16. Refuses, before a byte is written, models of which nothing would be
compressed and those that transformers does not load in this form.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from farthing.errors import InputError
from farthing.model.load import auto_class
from farthing.model.meta_init import skeleton
from farthing.storage.files import read_json, write_json

METHODS = {
    "fp8": (
        "FP8_DYNAMIC: weights by row and activations by token in 8-bit floats, rounded to nearest"
    ),
    "w8a16": (
        "W8A16: weights in 8-bit integers by groups of {group}, rounded to nearest (no calibration)"
    ),
    "w4a16": (
        "W4A16: weights in 4-bit integers by groups of {group}, rounded to nearest (no calibration)"
    ),
}
GROUPS = (128, 64, 32)
WHOLE = frozenset(
    {"score", "classifier", "lm_head", "qa_outputs", "gate", "router", "shared_expert_gate"}
)
"""Parts of the names of layers that keep all their bits: heads, and what chooses between experts.
"""
CONFIG, INDEX = "config.json", "model.safetensors.index.json"


@dataclass(frozen=True)
class Compression:
    """What will be compressed of a model."""

    method: str
    """In words."""
    group: int
    """Weights that share a scale; 0: a row."""
    layers: frozenset[str]
    """Names of the layers that lose bits, besides the experts."""
    settings: Any
    """The `QuantizationConfig`."""


def plan_compressed(
    config: Any, task: str, form: str, *, trust_remote_code: bool = False
) -> Compression:
    """What is compressed of a model by its configuration. Raises `InputError` for what can't be."""
    model = skeleton(auto_class(task), config, trust_remote_code=trust_remote_code)
    output, heads, body = model.get_output_embeddings(), set[str](), dict[str, int]()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            if module is output or WHOLE & set(name.split(".")):
                heads.add(name)
            else:
                body[name] = module.in_features
    where, gguf = f"--format {form}", "gguf where llama.cpp has the family"
    if not body:
        raise InputError(
            f"none of the layers of a {config.model_type} can be compressed",
            where=where,
            to_do=f"use --format merged, or {gguf}",
        )
    usual, group = Counter(body.values()).most_common(1)[0][0], 0
    if form != "fp8":
        group = next((size for size in GROUPS if usual % size == 0), 0)
        if not group:
            raise InputError(
                f"the model's width {usual} is no multiple of {GROUPS[-1]}, the smallest group of"
                " weights",
                where=where,
                to_do=f"use --format fp8, or {gguf}",
            )
    odd = {name for name, width in body.items() if group and width % group}
    method = METHODS[form].format(group=group)
    if odd:
        method += f"; {len(odd)} layers whose width is no multiple of {group} stay whole"
    settings = _settings(form, group, sorted(heads | odd))
    try:
        _load_without_weights(model, settings)
    except Exception as error:  # of a library, within a family that it does not know in this form
        raise InputError(
            f"transformers does not load a {config.model_type} in this form ({error})",
            where=where,
            to_do=f"use --format merged{'' if form == 'fp8' else ' or fp8'}",
        ) from error
    return Compression(method, group, frozenset(body) - odd, settings)


def _load_without_weights(model: Any, settings: Any) -> None:
    """What transformers does when it loads the folder."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import apply_quantization_config

    compressor = BaseCompressor.get_value_from_registry(settings.format)
    apply_quantization_config(model, settings, show_progress=False)
    for module in list(model.modules()):
        module._is_hf_initialized = False
        if hasattr(module, "quantization_scheme"):
            compressor.compress_module(module)
    for name in model.all_tied_weights_keys:
        model.get_parameter(name)
    model.initialize_weights()


def _settings(form: str, group: int, whole: list[str]) -> Any:
    """Raises `InputError` that says how to get the package."""
    try:
        from compressed_tensors.logger import logger
        from compressed_tensors.quantization import (
            QuantizationArgs,
            QuantizationConfig,
            QuantizationScheme,
        )
        from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    except ImportError as error:
        raise InputError(
            "such folders are written with compressed-tensors, which is not installed"
            f" ({error.name})",
            where="--format",
            to_do="pip install 'farthing[export]'",
        ) from error
    logger.disable("compressed_tensors")
    if form == "fp8":
        scheme, kind = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"]), "float-quantized"
    else:
        weights = QuantizationArgs(
            num_bits=8 if form == "w8a16" else 4,
            type="int",
            symmetric=True,
            strategy="group",
            group_size=group,
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
        kind = "pack-quantized"
    scheme.format = kind
    return QuantizationConfig(
        config_groups={"group_0": scheme},
        format=kind,
        ignore=whole,
        quantization_status="compressed",
    )


def write_compressed(plan: Compression, source: Path, folder: Path) -> None:
    """Compress the merged model in `source` into `folder`. Raises `OSError`."""
    from compressed_tensors.compressors import ModelCompressor

    places, n_bytes = dict[str, str](), 0
    for path in sorted(source.glob("*.safetensors")):
        kept: dict[str, torch.Tensor] = {}
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                kept |= compressed_weight(name, file.get_tensor(name), plan)
        save_file(kept, folder / path.name, metadata={"format": "pt"})
        places |= dict.fromkeys(kept, path.name)
        n_bytes += sum(tensor.nbytes for tensor in kept.values())
    if (source / INDEX).exists():
        sizes = {"total_size": n_bytes}
        index = {"metadata": sizes, "weight_map": dict(sorted(places.items()))}
        write_json(folder / INDEX, index)
    for path in source.glob("*config.json"):
        if not path.name.startswith("tokenizer"):
            shutil.copy(path, folder / path.name)
    write_json(folder / CONFIG, read_json(folder / CONFIG) | {"dtype": "bfloat16"})
    ModelCompressor(quantization_config=plan.settings).update_config(folder)


def compressed_weight(
    name: str, tensor: torch.Tensor, plan: Compression
) -> dict[str, torch.Tensor]:
    """What becomes of one weight, by name: [out, in] in few bits with its scales; or itself, in
    bf16.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    layer, _, kind = name.rpartition(".")
    is_matrix = kind == "weight" and tensor.ndim == 2
    has_groups = is_matrix and not (plan.group and tensor.shape[1] % plan.group)
    if not ((is_matrix and layer in plan.layers) or (has_groups and ".experts." in layer)):
        return {name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor}
    scheme = plan.settings.config_groups["group_0"]
    weight = tensor.to(torch.bfloat16)
    groups = weight.unflatten(1, (-1, plan.group or weight.shape[1]))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(plan.settings.format)
    written = compressor.compress(state, scheme)
    return {f"{layer}.{part}": value.contiguous() for part, value in written.items()}
