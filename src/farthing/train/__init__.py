"""One attempt at a job, from the examples to the receipt. `farthing.train(job)` calls
`farthing.api.train`.

The package is called as a function, because both are what the word means: the function for who uses
farthing, the modules for who reads it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, job: Any, **options: Any) -> Any:
        from farthing import api

        return api.train(job, **options)


sys.modules[__name__].__class__ = _Callable
