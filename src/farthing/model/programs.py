"""What torch.compile is told, wherever farthing compiles something: layers (`compiled.py`) and flex
attention.

torch keeps its settings by thread, and autograd has threads of its own on CUDA: every call looks
whether its thread was told.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental._config

# of one code: torch gives up at 8, which T5's layers need already. Flex attention is compiled for
# each window, with gradients and without, for up to 128 tokens and for more, and with and without a
# shared beginning
MOST_PROGRAMS = 32

_TOLD = threading.local()


def in_programs(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """`function` compiled for any lengths, with our settings in whatever thread it is called; `how`
    goes to `torch.compile`.

    What torch fails to compile is computed as it was, unless `how` has `fullgraph`: then it is an
    error.
    """
    compiled = torch.compile(function, dynamic=True, **how)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not hasattr(_TOLD, "is_done"):
            torch._dynamo.config.suppress_errors = True
            torch._dynamo.config.recompile_limit = max(
                MOST_PROGRAMS, torch._dynamo.config.recompile_limit
            )
            # with dynamic=True torch takes a float for something that changes, which flex
            # attention's backward pass can't read, and sizes that are equal once for one size: as
            # many blocks as heads, and the next batch is a new program
            torch._dynamo.config.specialize_float = True
            torch.fx.experimental._config.use_duck_shape = False
            _TOLD.is_done = True
        return compiled(*args, **kwargs)

    return call
