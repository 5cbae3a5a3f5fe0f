"""A model without its weights, for a process that gets them from another one."""

from __future__ import annotations

from typing import Any

import torch


def skeleton(auto: Any, config: Any, *, trust_remote_code: bool = False) -> Any:
    """The layers of a model and their shapes, without memory."""
    with torch.device("meta"):
        return auto.from_config(config, trust_remote_code=trust_remote_code)


def without_weights(auto: Any, config: Any, dtype: torch.dtype, **how: Any) -> Any:
    """The model as it is read, but for its weights, one number in memory each: who has none gets
    them from another process.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = auto.from_config(config, dtype=dtype, **how)
    model.tie_weights()
    found: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                one = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
                module._parameters[name] = found.setdefault(
                    weight, torch.nn.Parameter(one, weight.requires_grad)
                )
    return model
