"""Liger's kernels for norms, rotations and gated feed-forwards, in one model of a family that Liger
knows.

The `liger-kernel` package (BSD-2, from 0.8) patches an instance, but also the family's module, for
every model of the process to come. `use_liger` lets it, puts the module back as it was, and gives
the rotation to the attention of this model alone. Its cross-entropies are not used: `model/head.py`
makes no logits either, and is quicker. Weights, names and what is saved stay as they are.

`FUSED_BY_LIGER` has the families whose loss and gradients agreed with the plain model when Liger's
own kernels ran in Triton's interpreter on a CPU (tests/test_liger.py). On an H100 a small Llama's
loss and gradients agreed too, in full and with LoRA (2026-11-28).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from farthing.device_memory import in_words
from farthing.errors import DeviceError, OutOfMemoryError
from farthing.model.loss import inner_of
from farthing.models.families import FUSED_BY_LIGER

WANTED = {"rope": True, "rms_norm": True, "swiglu": True, "geglu": True}
NOT_WANTED = {"cross_entropy": False, "fused_linear_cross_entropy": False}
ROTATION = "apply_rotary_pos_emb"


def why_not_liger(model: Any) -> str | None:
    """Why this model can't use Liger's kernels here; None if it can."""
    inner = inner_of(model)
    kind, device = inner.config.model_type, next(inner.parameters()).device
    if device.type != "cuda":
        return "they are for GPUs"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "they are for GPUs from Ampere on"
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed: pip install 'farthing[gpu]'"
    if kind not in FUSED_BY_LIGER or not type(inner).__module__.startswith("transformers."):
        return f"{kind}: not among the families that are tested"
    return None


def use_liger(model: Any) -> tuple[bool, str]:
    """Replace what can be replaced in `model`: (whether anything was; what, or why nothing)."""
    reason = why_not_liger(model)
    # it warns of each kind of hardware, of those that it has kernels for, that this machine has
    # not; what matters is an error
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)
    if reason is None:
        try:
            try_one_kernel(model)
            counts = patch(model)
        except Exception as error:
            if isinstance(
                in_words(error), DeviceError | OutOfMemoryError
            ):  # without Liger nothing would be better
                raise
            # a Triton without a compiler, a GPU it does not know, a version that is not ours
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    if reason is not None:
        return False, f"no Liger kernels: {reason}"
    words = ", ".join(f"{n} {what}" for what, n in counts.items() if n)
    return True, f"liger-kernel {importlib.metadata.version('liger-kernel')}: {words}"


def try_one_kernel(model: Any) -> None:
    """A norm of the model's width, forward and backward, waited for: Triton fails here, if it does,
    and not in the first step.

    Raises what Triton, the driver or Liger raise.
    """
    from liger_kernel.transformers import LigerRMSNorm

    inner = inner_of(model)
    weight = next(inner.parameters())
    norm = LigerRMSNorm(inner.config.get_text_config().hidden_size).to(weight.device)
    rows = torch.ones(
        2, norm.weight.numel(), dtype=torch.float32, device=weight.device, requires_grad=True
    )
    found = torch.autograd.grad(norm(rows).sum(), [rows, norm.weight])
    if not all(bool(gradient.isfinite().all()) for gradient in found):
        raise ArithmeticError("its norm gives no finite gradients")


def patch(model: Any) -> dict[str, int]:
    """Give the norms, feed-forwards and attentions of `model` Liger's kernels, and no other model;
    how many of each.

    Raises `ValueError` before anything is changed where an activation is none that Liger has.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    inner = inner_of(model)
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[inner.config.model_type]
    known = inspect.signature(apply).parameters
    must_have_activation(inner, F.silu if "swiglu" in known else _gelu_tanh)
    family = sys.modules[type(inner).__module__]
    before, already = dict(vars(family)), _own_forwards(inner)
    apply(
        model=inner,
        **{name: value for name, value in (WANTED | NOT_WANTED).items() if name in known},
    )
    changed = {
        name: vars(family)[name]
        for name, value in before.items()
        if vars(family)[name] is not value
    }
    for name in changed:
        setattr(family, name, before[name])
    patched = _own_forwards(inner) - already
    n_norms = sum("RMSNorm" in type(module).__name__ for module in patched)
    n_rotations = (
        _rotate_with(inner, family.__name__, changed[ROTATION]) if ROTATION in changed else 0
    )
    return {"norms": n_norms, "feed-forwards": len(patched) - n_norms, "rotations": n_rotations}


def must_have_activation(inner: Any, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise `ValueError` unless every gated feed-forward computes `activation`: Liger's do,
    whatever the configuration.
    """
    probe = torch.linspace(-3, 3, 13)
    for module in inner.modules():
        own = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
        if own is not None and not torch.allclose(own(probe), activation(probe), atol=1e-5):
            raise ValueError(f"its feed-forward has another activation ({type(own).__name__})")


def _own_forwards(inner: Any) -> set[torch.nn.Module]:
    """Modules whose forward pass is not that of their class."""
    return {module for module in inner.modules() if "forward" in vars(module)}


def _rotate_with(inner: Any, family: str, rotate: Callable[..., Any]) -> int:
    """Let the attention of this model find `rotate` where its module has the family's rotation; how
    many did.
    """
    own: set[Any] = {type(each) for each in inner.modules() if type(each).__module__ == family}
    plain = {kind: inspect.unwrap(kind.forward) for kind in own}  # without what renames arguments
    twin = _module_with(family, ROTATION, rotate)
    forwards = {
        kind: _of_module(forward, twin)
        for kind, forward in plain.items()
        if ROTATION in forward.__code__.co_names
    }
    rotating = [module for module in inner.modules() if type(module) in forwards]
    for module in rotating:
        module.forward = MethodType(forwards[type(module)], module)
    return len(rotating)


def _module_with(family: str, name: str, value: Any) -> ModuleType:
    """A copy of a module in which `name` is `value`, known by a name of its own: torch.compile
    looks for globals by it.
    """
    twin = ModuleType(f"{family}_with_liger")
    vars(twin).update(
        {key: of for key, of in vars(sys.modules[family]).items() if key != "__name__"}
        | {name: value}
    )
    sys.modules[twin.__name__] = twin
    return twin


def _of_module(function: FunctionType, module: ModuleType) -> FunctionType:
    """A copy of `function` that finds its globals in `module`."""
    twin = FunctionType(
        function.__code__,
        vars(module),
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _gelu_tanh(values: torch.Tensor) -> torch.Tensor:
    return F.gelu(values, approximate="tanh")
