"""A merged model as one GGUF file, for llama.cpp, Ollama and LM Studio; and its weights read back
from there.

Names of tensors are those of the `gguf` package. Weights go through one at a time, so a model of
any size needs the memory of its largest. Refuses, before a byte is written, what llama.cpp does not
compute (`gguf_families`) or has no tokenizer for.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from farthing.errors import InputError, ModelError
from farthing.export.gguf_families import (
    Array,
    GgufFamily,
    family_of,
    is_transposed,
    lay_out,
    settings_of,
)
from farthing.export.gguf_tokens import tokenizer_settings
from farthing.model.load import auto_class
from farthing.model.meta_init import skeleton

BITS = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
"""What is written here, by llama.cpp's names."""
K_BITS = ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")
"""What `llama-quantize` of llama.cpp writes."""
QUANTIZER = "llama-quantize"


@dataclass(frozen=True)
class GgufPlan:
    """All that a GGUF file is made of but the weights."""

    config: Any
    family: GgufFamily
    settings: dict[str, object]
    tensors: dict[str, Array]
    notes: tuple[str, ...]


def need_gguf() -> Any:
    """The `gguf` package. Raises `InputError` that says how to get it."""
    try:
        import gguf
    except ImportError as error:
        raise InputError(
            "GGUF files are written with the package gguf, which is not installed",
            where="--format gguf",
            to_do="pip install 'farthing[gguf]'",
        ) from error
    return gguf


def plan_gguf(
    config: Any, tokenizer: Any, task: str, bits: str, name: str, *, is_chat: bool
) -> GgufPlan:
    """What will be written of a model by its configuration and tokenizer. Raises `InputError` for
    what can't be.
    """
    gguf = need_gguf()
    if bits in K_BITS and shutil.which(QUANTIZER) is None:
        raise InputError(
            f"{bits} is made by {QUANTIZER} of llama.cpp, which is not on PATH",
            where=f"--bits {bits}",
            to_do=f"install llama.cpp, or choose one of {', '.join(BITS)}",
        )
    family = family_of(config, task)
    places = _places(gguf, config, family)
    model = skeleton(auto_class(task), config)
    own = dict(model.named_parameters())  # each once: what another weight is too is not written
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)} - own.keys()
    for weight in model.state_dict().keys() - shared:
        _placed(weight, places)  # raises
    values, tensors, notes = settings_of(config, family)
    tokens, more = tokenizer_settings(tokenizer, config.vocab_size, is_chat=is_chat)
    kind = BITS.get(bits, "F32")
    file_type = gguf.LlamaFileType[f"{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}"]
    values |= {
        "vocab_size": config.vocab_size,
        "name": _name(name, tokenizer, family),
        "quantization_version": gguf.GGML_QUANT_VERSION,
        "file_type": int(file_type),
        **tokens,
    }
    if "rope_scaling_type" in values:
        values["rope_scaling_type"] = gguf.RopeScalingType(values["rope_scaling_type"])
    return GgufPlan(config, family, values, tensors, (*notes, *more))


def _places(gguf: Any, config: Any, family: GgufFamily) -> Any:
    """llama.cpp's names of the weights of a model."""
    architecture = gguf.MODEL_ARCH[family.architecture.upper()]
    return gguf.get_tensor_name_map(architecture, config.num_hidden_layers)


def _placed(name: str, places: Any) -> str:
    """llama.cpp's name of a weight. Raises `ModelError`."""
    place = places.get_name(name, try_suffixes=(".weight", ".bias"))
    if place is None:
        raise ModelError(
            "llama.cpp has no place for one of the weights",
            where=name,
            to_do="use --format merged for this model",
        )
    return str(place)


def _name(name: str, tokenizer: Any, family: GgufFamily) -> str:
    """llama.cpp strips what follows the special tokens of models called phi-3, and of no
    others.
    """
    tokens = tokenizer.added_tokens_decoder.values()
    if not any(token.rstrip and token.special for token in tokens):
        return name.lower().replace("phi-3", "phi 3").replace("phi3", "phi 3")
    return f"{name} (phi-3)" if family.architecture == "phi3" else name


def write_gguf(plan: GgufPlan, source: Path, path: Path, bits: str) -> None:
    """Write the merged model in `source` to `path`. Raises `ModelError` for weights that have no
    place, `OSError`.
    """
    gguf = need_gguf()
    whole = path.with_suffix(".whole.gguf") if bits in K_BITS else path
    writer = gguf.GGUFWriter(whole, plan.family.architecture)
    for name, value in plan.settings.items():
        getattr(writer, f"add_{name}")(value)

    def announce(place: str, shape: tuple[int, ...], kind: Any) -> None:
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        n_bytes = int(np.prod(shape)) // block * block_bytes
        writer.add_tensor_info(place, shape, np.dtype(np.float32), n_bytes, kind)

    names, weights = _places(gguf, plan.config, plan.family), Weights(source)
    kinds = {}
    for name in weights.names:
        shape, place = weights.shape(name), _placed(name, names)
        shape = shape[::-1] if is_transposed(name, plan.family) else shape
        kinds[name] = _kind(gguf, place, shape, bits)
        announce(place, shape, kinds[name])
    for name, values in plan.tensors.items():
        announce(name, values.shape, gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, kind in kinds.items():
        weight = lay_out(name, weights.read(name), plan.config, plan.family)
        writer.write_tensor_data(gguf.quants.quantize(weight, kind))
    for values in plan.tensors.values():
        writer.write_tensor_data(np.ascontiguousarray(values))
    writer.close()
    if whole != path:
        _make_k_quants(whole, path, bits)


def _kind(gguf: Any, place: str, shape: tuple[int, ...], bits: str) -> Any:
    """Vectors and positions stay F32. What has no whole blocks stays F16; embeddings and the output
    layer have 8 bits at least, as they are hurt most."""
    kinds = gguf.GGMLQuantizationType
    if len(shape) < 2 or place.startswith("position_embd"):
        return kinds.F32
    kind = kinds[BITS.get(bits, "F32")]
    if kind == kinds.Q4_0 and place in ("token_embd.weight", "output.weight"):
        kind = kinds.Q8_0
    return kinds.F16 if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] else kind


def _make_k_quants(whole: Path, path: Path, bits: str) -> None:
    words = [QUANTIZER, str(whole), str(path), bits.upper()]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    whole.unlink(missing_ok=True)
    if done.returncode or not path.exists():
        said = (done.stderr or done.stdout).strip()[-200:]
        raise ModelError(
            f"{QUANTIZER} ended with {done.returncode}: {said}",
            where=f"--bits {bits}",
            to_do="choose --bits q8_0 or q4_0, or install another version of llama.cpp",
        )


class Weights:
    """The weights in a folder of safetensors files, read one at a time."""

    def __init__(self, folder: Path) -> None:
        files = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
        self._of = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        self.names = sorted(self._of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._of[name].get_slice(name).get_shape())

    def read(self, name: str) -> Array:
        """One weight in fp32."""
        return self._of[name].get_tensor(name).float().numpy()


def read_back(plan: GgufPlan, path: Path, source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of a GGUF file by its name in transformers, in fp32: what llama.cpp will compute
    with.
    """
    gguf = need_gguf()
    names = _places(gguf, plan.config, plan.family)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name in Weights(source).names:
        tensor = stored[_placed(name, names)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weight = lay_out(name, values, plan.config, plan.family, is_back=True)
        yield name, torch.from_numpy(weight.copy())
