"""The layers of a model compiled one by one with torch.compile.

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

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch

from farthing.model import pairs
from farthing.model.activation_checkpointing import checkpointed_layers
from farthing.model.attention import NAME as ATTENTION
from farthing.model.attention import attend
from farthing.model.attention_kernels import over_documents
from farthing.model.hardware import find_compiler
from farthing.model.loss import inner_of
from farthing.model.norms import leave_to_compiler
from farthing.model.programs import in_programs

# dropout draws what it would draw uncompiled, so that it stays a function of the step
HOW: dict[str, Any] = {"backend": "inductor", "options": {"fallback_random": True}}


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


def compile_blocks(model: Any) -> int | str:
    """Compile every layer in place and return how many there are, or why none is.

    The compiling itself happens in the first steps (see `n_graphs`), and again after
    `checkpoint_layers` changed what is recomputed. What torch fails to trace is computed as it was.
    """
    if reason := why_not_compiled(model):
        return reason
    _keep_attention_out()
    leave_to_compiler(model)
    layers = _layers(model)
    for layer in layers:
        layer._compiled_call_impl = _in_training(layer)
    return len(layers)


def n_graphs() -> int:
    """Programs that torch has compiled in this process so far. A step in which it grows is warm-up,
    and no measure.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def _in_training(layer: Any) -> Callable[..., Any]:
    """What calling the layer does: the compiled program in training; one that is recomputed has it
    further within: checkpointing in a program, torch gives up on all of it where attention has to
    stay outside.
    """
    compiled = in_programs(layer._call_impl, **HOW)
    layer.compiled_forward = in_programs(type(layer).forward.__wrapped__, **HOW)

    def call(*args: Any, **kwargs: Any) -> Any:
        is_trained = layer.training and torch.is_grad_enabled()
        if not is_trained or layer.gradient_checkpointing:
            return layer._call_impl(*args, **kwargs)
        return compiled(*args, **kwargs)

    return call


def _keep_attention_out() -> None:
    """Leave programs at attention over documents and come back after it: it is called as it is."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, torch.compiler.disable(attend))
    pairs.over_documents = torch.compiler.disable(over_documents)


def _layers(model: Any) -> list[Any]:
    """The layers that transformers knows as such; of layers within layers the outer ones."""
    found = checkpointed_layers(model)
    inner = {each for layer in found for each in layer.modules() if each is not layer}
    return [layer for layer in found if layer not in inner]
