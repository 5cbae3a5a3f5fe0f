"""torch imported in less time: its largest library linked by another thread, and what hardly
anybody asks of it left out.

A sixth of `import torch` is linking `libtorch_cpu.so`, for which no Python runs. A quarter is
Python that computes the shapes of tensors without memory where C++ does not: the compiler needs it,
loading models does not. It is imported when somebody does. Nothing that is computed changes. Is for
a process of our own alone; a torch that is not as expected is imported whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

SHAPES = "torch._meta_registrations"
_LIBRARIES = (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch_cpu.so", os.RTLD_LOCAL))
"""As `import torch` opens them, in its order. The first may find nothing to do, and must be there.
"""
_OF_GPUS = "lib*_cuda.so", "lib*_hip.so", "lib*_xpu.so"
_WITH_IT = "torch._", "torch.testing._internal", "torch.utils._content_store"
"""Of these some are imported by it, in an order on which they rely."""
P = ParamSpec("P")
T = TypeVar("T")


def load_libraries() -> threading.Thread:
    """Begin to link torch's libraries, without Python's lock. A build for GPUs, and one of other
    files, is left to torch.

    The thread ends by itself. Who forks waits for it: the linker's lock must be free.
    """
    thread = threading.Thread(target=_load_libraries, name="farthing-libraries", daemon=True)
    thread.start()
    return thread


def _libraries() -> Path | None:
    """Where torch's libraries are; None for a build for GPUs, and where there is no torch or it is
    imported already.
    """
    spec = importlib.util.find_spec("torch") if "torch" not in sys.modules else None
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "lib"
    return None if any(next(folder.glob(pattern), None) for pattern in _OF_GPUS) else folder


def _load_libraries() -> None:
    with contextlib.suppress(Exception):  # torch will say what is wrong with it
        dlopen = ctypes.CDLL(None).dlopen  # called so, it leaves the lock
        dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
        if (folder := _libraries()) is None:
            return
        for name, how in _LIBRARIES:
            if not (folder / name).is_file() or not dlopen(
                os.fsencode(folder / name), os.RTLD_NOW | how
            ):
                return


class _LeftOut(ModuleType):
    """What torch finds in place of `SHAPES` while it is imported; the module itself, where it takes
    a name of it already.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(SHAPES) is self:
            del sys.modules[SHAPES]
        return getattr(importlib.import_module(SHAPES), name)


class _Whole(MetaPathFinder, Loader):
    """Has `SHAPES` imported before what would have come with it: torch relies on that order."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """That of a module which has come along; else none, as others know where it is."""
        if not name.startswith(_WITH_IT) or SHAPES in sys.modules or name == SHAPES:
            return None
        importlib.import_module(SHAPES)
        if (come := sys.modules.get(name)) is None:
            return None
        come.__spec__ = ModuleSpec(
            name, self, loader_state=come.__spec__
        )  # of a module that is there its own is taken
        return come.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module that has come along."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to do but to give it back what it says of itself."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def import_torch() -> None:
    """`import torch` without `SHAPES`, which is imported before any private module of torch is, and
    by `with_shapes`.

    A build for GPUs, with which this was never run, is imported as it is, and so is a torch that
    does not take it as expected.
    """
    if _libraries() is None:
        return
    left_out = sys.modules[SHAPES] = _LeftOut(SHAPES)
    try:
        import torch
    finally:
        if sys.modules.get(SHAPES) is left_out:
            del sys.modules[SHAPES]
    known, name = vars(torch), SHAPES.partition(".")[2]
    if known.get(name) is left_out:
        del known[name]
        if isinstance(by_name := known.get("_lazy_modules"), set):
            by_name |= {name, "_decomp", "_prims", "_refs"}
            sys.meta_path.insert(0, _Whole())
            return
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(SHAPES)


def with_shapes(make: Callable[P, T]) -> Callable[P, T]:
    """`make`, called again once `SHAPES` is there where an operation on tensors without memory was
    not known.
    """

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return make(*args, **kwargs)
        except Exception as error:
            if SHAPES in sys.modules or not _is_for_lack_of_them(error):
                raise
        importlib.import_module(SHAPES)
        return make(*args, **kwargs)

    return made


def _is_for_lack_of_them(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, NotImplementedError):
        error = error.__cause__ or error.__context__
    return error is not None
