"""Read by Python at its start where this folder is on PYTHONPATH: puts operations in place once
torch is imported.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _After(MetaPathFinder):
    """Does something once a module has been imported."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with a loader that goes on to our work."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            import on_host

            on_host.take_over("aten" if fullname == "torch" else fullname)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path[:0] = [_After("torch"), _After("bitsandbytes")]
