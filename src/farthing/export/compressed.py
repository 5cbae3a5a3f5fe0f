"""A merged model in compressed-tensors form, with fewer bits to a weight, as vLLM, SGLang and
transformers load it.

Without calibration: each weight is rounded to the nearest step between the smallest and the largest
of its group (of its row for fp8, whose activations are scaled as they come). Weights go through one
at a time, from file to file; what is no matrix of a layer, the output layer, heads and the choice
between experts stay in bf16. Refuses, before a byte is written, models of which nothing would be
compressed and those that transformers does not load in this form.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from farthing.errors import InputError
from farthing.model.load import auto_class
from farthing.model.meta_init import skeleton
from farthing.storage.files import read_json

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

    form: str
    group: int
    layers: frozenset[str]
    """Names of the layers that lose bits, besides the experts."""
    whole: tuple[str, ...]
    """Names of the layers that keep them."""
    n_odd: int
    """How many of `whole` do so for their width."""

    def in_words(self) -> str:
        odd = (
            f"; {self.n_odd} layers whose width is no multiple of {self.group} stay whole"
            if self.n_odd
            else ""
        )
        return METHODS[self.form].format(group=self.group) + odd


def plan_compressed(
    config: Any, task: str, form: str, *, trust_remote_code: bool = False
) -> Compression:
    """What is compressed of a model by its configuration. Raises `InputError` for what can't be."""
    model = skeleton(auto_class(task), config, trust_remote_code=trust_remote_code)
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    output = model.get_output_embeddings()
    heads = {
        name for name, module in linear.items() if module is output or WHOLE & set(name.split("."))
    }
    body = {name: module.in_features for name, module in linear.items() if name not in heads}
    if not body:
        raise InputError(
            f"none of the layers of a {config.model_type} can be compressed",
            where=f"--format {form}",
            to_do="use --format merged, or gguf where llama.cpp has the family",
        )
    group = 0
    if form != "fp8":
        widest = max(body.values(), key=list(body.values()).count)
        group = next((size for size in GROUPS if widest % size == 0), 0)
        if not group:
            raise InputError(
                f"the model's width {widest} is no multiple of {GROUPS[-1]}, the smallest group of"
                " weights",
                where=f"--format {form}",
                to_do="use --format fp8, or gguf where llama.cpp has the family",
            )
    odd = {name for name, width in body.items() if group and width % group}
    found = Compression(form, group, frozenset(body) - odd, tuple(sorted(heads | odd)), len(odd))
    _rehearse(model, found)
    return found


def _rehearse(model: Any, plan: Compression) -> None:
    """Do with a model without weights what transformers does when it loads the folder. Raises
    `InputError`.
    """
    settings = _settings(plan)
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import apply_quantization_config

    compressor = BaseCompressor.get_value_from_registry(settings.format)
    try:
        apply_quantization_config(model, settings, show_progress=False)
        for module in list(model.modules()):
            module._is_hf_initialized = False
            if hasattr(module, "quantization_scheme"):
                compressor.compress_module(module)
        for name in model.all_tied_weights_keys:
            model.get_parameter(name)
        model.initialize_weights()
    except (
        Exception
    ) as error:  # of a library, in the middle of a family that it does not know in this form
        raise InputError(
            f"transformers does not load a {model.config.model_type} in this form ({error})",
            where=f"--format {plan.form}",
            to_do="use --format merged or fp8" if plan.form != "fp8" else "use --format merged",
        ) from error


def _settings(plan: Compression) -> Any:
    """The `QuantizationConfig` of a plan. Raises `InputError` that says how to get the package."""
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
    if plan.form == "fp8":
        scheme = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])
    else:
        bits = 8 if plan.form == "w8a16" else 4
        weights = QuantizationArgs(
            num_bits=bits, type="int", symmetric=True, strategy="group", group_size=plan.group
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    scheme.format = "float-quantized" if plan.form == "fp8" else "pack-quantized"
    return QuantizationConfig(
        config_groups={"group_0": scheme},
        format=scheme.format,
        ignore=list(plan.whole),
        quantization_status="compressed",
    )


def write_compressed(plan: Compression, source: Path, folder: Path) -> None:
    """Compress the merged model in `source` into `folder`. Raises `OSError`."""
    from compressed_tensors.compressors import ModelCompressor

    settings = _settings(plan)
    places: dict[str, str] = {}
    n_bytes = 0
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            kept: dict[str, torch.Tensor] = {}
            for name in file.keys():  # noqa: SIM118
                kept |= compressed_weight(name, file.get_tensor(name), plan, settings)
        save_file(kept, folder / path.name, metadata={"format": "pt"})
        places |= dict.fromkeys(kept, path.name)
        n_bytes += sum(tensor.nbytes for tensor in kept.values())
    if (source / INDEX).exists():
        index = {"metadata": {"total_size": n_bytes}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for path in source.glob("*config.json"):
        if not path.name.startswith("tokenizer"):
            shutil.copy(path, folder / path.name)
    values = read_json(folder / CONFIG)
    (folder / CONFIG).write_text(
        json.dumps(values | {"dtype": "bfloat16"}, indent=2) + "\n", encoding="utf-8"
    )
    ModelCompressor(quantization_config=settings).update_config(folder)


def compressed_weight(
    name: str, tensor: torch.Tensor, plan: Compression, settings: Any
) -> dict[str, torch.Tensor]:
    """What becomes of one weight, by name: [out, in] in few bits with its scales; or itself, in
    bf16.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    layer, _, kind = name.rpartition(".")
    is_expert = ".experts." in layer and not (
        plan.group and tensor.ndim == 2 and tensor.shape[1] % plan.group
    )
    if kind != "weight" or tensor.ndim != 2 or not (layer in plan.layers or is_expert):
        return {name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor}
    scheme = settings.config_groups["group_0"]
    weight = tensor.to(torch.bfloat16)
    groups = weight.unflatten(1, (-1, plan.group or weight.shape[1]))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    written = BaseCompressor.get_value_from_registry(settings.format).compress(state, scheme)
    return {f"{layer}.{part}": value.contiguous() for part, value in written.items()}
