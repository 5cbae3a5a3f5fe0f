"""The layers of a model compiled one by one with torch.compile, where that saves more than it
takes.

`compile_blocks` leaves modules, names and everything that is saved as they are. Layers of a kind
share their code, so a model takes as many compilations as it has kinds of layers, and one serves
every length. Three things stay outside: attention over documents laid end to end, whose lengths
would each be a new program; the recomputing of checkpointed layers (what is recomputed is
compiled); and evaluation and generation, which are computed as they always were.

What is computed agrees with the plain model to rounding, dropout included, but not to the bit:
torch chooses its kernels by the first lengths it sees, so a resume is exact to rounding too. Run on
CPUs only, never on a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch

from farthing.model import pairs
from farthing.model.attention import NAME as ATTENTION
from farthing.model.attention import attend
from farthing.model.attention_kernels import over_documents
from farthing.model.hardware import find_compiler
from farthing.model.loss import inner_of
from farthing.model.norms import leave_to_compiler
from farthing.model.programs import in_programs

# of a step's seconds. Published: torchtune 21 % (Llama 3.2 3B, A100, README), Axolotl 14 to 19 %
# (8B LoRA, RTX 3090 and 5090), torchtitan 14 % (Llama 3.1 8B, H100), all as of 2026; the least of
# them is expected
CUDA_SAVED_SHARE = 0.14
# forward and backward of one kind of layer with nothing cached, by assumption: tens of seconds
CUDA_S_PER_KIND = 40.0
# measured on one core with g++ 12, 2026-11: 28 to 30 for a layer of Llama, 41 to 55 for two with
# LoRA
CPU_S_PER_KIND = 28.0

# dropout draws what it would draw uncompiled, so that it stays a function of the step
OPTIONS = {"fallback_random": True}


# ---- the rule ----


def predicted_saving(step_s: float, n_steps_left: int, device: str) -> float:
    """Seconds that compiled layers are expected to save in `n_steps_left` steps of `step_s`; on a
    CPU none.
    """
    return CUDA_SAVED_SHARE * step_s * n_steps_left if device == "cuda" else 0.0


def compile_seconds(n_kinds: int, device: str) -> float:
    """Seconds that the first steps take longer, for `n_kinds` kinds of layers and nothing
    cached.
    """
    return n_kinds * (CUDA_S_PER_KIND if device == "cuda" else CPU_S_PER_KIND)


def worth_compiling(
    wanted: bool | Literal["auto"],
    *,
    device: str,
    n_kinds: int,
    step_s: float | None,
    n_steps_left: int,
    full_determinism: bool = False,
) -> bool:
    """Whether to compile: as `wanted`, or with "auto" when what it saves is more than what it
    takes.

    "auto" is no where a step's seconds are not known, and where a resume has to be exact to the
    bit.
    """
    if wanted != "auto":
        return wanted
    if step_s is None or full_determinism:
        return False
    return predicted_saving(step_s, n_steps_left, device) > compile_seconds(n_kinds, device)


def n_kinds(model: Any) -> int:
    """Kinds of layers that have to be compiled apart: by class, by kind of attention, and by what
    they are given.

    The first layer is a kind of its own where the embeddings are frozen, as its input needs no
    gradient, and on both sides of an encoder with a decoder. Padded batches may have one row or
    several, which torch tells apart.
    """
    inner, layers = inner_of(model), _layers(model)
    config = inner.config.get_text_config()
    kinds = len({type(layer) for layer in layers}) * len(
        set(getattr(config, "layer_types", None) or [""])
    )
    embeddings = inner.get_input_embeddings()  # Perceiver's are a weight by themselves
    weights = [embeddings] if torch.is_tensor(embeddings) else embeddings.parameters()
    is_frozen = not any(weight.requires_grad for weight in weights)
    if inner.config.is_encoder_decoder:
        kinds *= 4
    elif is_frozen and len(layers) > 1:
        kinds *= 2
    return kinds if inner.config._attn_implementation == ATTENTION else 2 * kinds


# ---- the compiling ----


def why_not_compiled(model: Any) -> str | None:
    """Why the layers of this model can't be compiled here; None if they can."""
    device = next(model.parameters()).device.type
    if not _layers(model):
        return (
            f"{inner_of(model).config.model_type}: its layers are not known to transformers as such"
        )
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if find_compiler(device) is None:
        return "there is no C compiler" if device == "cuda" else "there is no C++ compiler"
    return None


def compile_blocks(model: Any, backend: str = "inductor") -> int | str:
    """Compile every layer in place and return how many there are, or why none is.

    The compiling itself happens in the first steps (see `n_graphs`), and again after
    `checkpoint_layers` changed what is recomputed. What torch fails to trace is computed as it was.
    """
    if reason := why_not_compiled(model):
        return reason
    _keep_attention_out()
    leave_to_compiler(model)
    how: dict[str, object] = {"backend": backend}
    if backend == "inductor":
        how["options"] = OPTIONS
    layers = _layers(model)
    for layer in layers:
        layer._compiled_call_impl = _in_training(layer, how)
    return len(layers)


def n_graphs() -> int:
    """Programs that torch has compiled in this process so far. A step in which it grows is warm-up,
    and no measure.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def _in_training(layer: Any, how: dict[str, object]) -> Callable[..., Any]:
    """What calling the layer does: the compiled program in training; one that is recomputed has it
    further within.
    """
    compiled = in_programs(layer._call_impl, **how)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not (layer.training and torch.is_grad_enabled()):
            return layer._call_impl(*args, **kwargs)
        if not layer.gradient_checkpointing:
            return compiled(*args, **kwargs)
        if not isinstance(layer._gradient_checkpointing_func, _Recomputed):
            layer._gradient_checkpointing_func = _Recomputed(
                layer._gradient_checkpointing_func, how
            )
        return layer._call_impl(*args, **kwargs)

    return call


class _Recomputed:
    """The checkpointing function of a layer, that hands it a compiled layer.

    The other way round, checkpointing in a program, torch gives up on all of it where attention has
    to stay outside.
    """

    def __init__(self, checkpointing: Callable[..., Any], how: dict[str, object]) -> None:
        self.checkpointing, self._how = checkpointing, how
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, function: functools.partial[Any], *args: Any, **kwargs: Any) -> Any:
        """`function` is what transformers wants recomputed: a partial of the layer's own
        forward.
        """
        body = function.func
        if body not in self._compiled:
            self._compiled[body] = in_programs(body, **self._how)
        compiled = functools.partial(self._compiled[body], *function.args, **function.keywords)
        return self.checkpointing(compiled, *args, **kwargs)


def _keep_attention_out() -> None:
    """Leave programs at attention over documents and come back after it: it is called as it is."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, torch.compiler.disable(attend))
    pairs.over_documents = torch.compiler.disable(over_documents)


def _layers(model: Any) -> list[Any]:
    """The layers that transformers knows as such; of layers within layers the outer ones."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer)
    }
    return [
        module
        for name, module in found.items()
        if not any(name.startswith(f"{other}.") for other in found)
    ]
