"""transformers imported without the parts of torch that it names and a run on one device never
calls.

Every model class imports torch's compiler, its tensors over several machines, and accelerate: as
much work as torch itself. After `import_lightly` a name that transformers takes from them is a
`Later`, which imports the module when it is first used and answers `isinstance` as the class would.
Optimizers step without the compiler, by the same code. Nothing that is computed changes. Is for a
process that is ours alone, the command line's; refuses to undo what is loaded already.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from farthing.model.light_torch import import_torch

COMPILER = "torch._dynamo"
HEAVY = (
    COMPILER,
    *(
        f"torch.distributed.{part}"
        for part in ("_composable", "_functional_collectives", "checkpoint", "fsdp", "tensor")
    ),
    "accelerate",
)
_LIBRARY = "transformers"
_IMPORTERS = (f"{_LIBRARY}.", "huggingface_hub.", "peft.")
_TELLERS = ("torch._compile", "torch.optim.optimizer")
"""Modules of torch that import its compiler to tell it something, in optimizers and in random
weights without memory.
"""
_MARK = "__dynamo_disable"
"""Where `torch._disable_dynamo` keeps what it calls."""
_plain_import = builtins.__import__
_allowed: list[Callable[..., Any]] = []
"""Functions that transformers wants the compiler to leave as they are."""
_bare: list[Callable[..., Any]] = []
"""Functions of torch that run as they are, without telling the compiler that they want to."""


class Later:
    """A class or function of a module, or what calling it gives, found when it is first used."""

    def __init__(self, module: str, find: Callable[[], Any]) -> None:
        self._module, self._find = module, functools.cache(find)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._find(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def call() -> Any:
            return self._find()(*args, **kwargs)

        return Later(self._module, call) if _is_importing(sys._getframe(1)) else call()

    def __getitem__(self, item: Any) -> Any:
        return self._find()[item]

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._find(),)

    def __instancecheck__(self, value: Any) -> bool:
        """No: while the module is not imported, there is no instance."""
        return self._module in sys.modules and isinstance(value, self._find())

    def __subclasscheck__(self, kind: Any) -> bool:
        return self._module in sys.modules and issubclass(kind, self._find())

    def __or__(self, other: Any) -> Any:
        return _OneOf(self, other)

    def __ror__(self, other: Any) -> Any:
        return _OneOf(other, self)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether this is done for a constant of a library's module that is being imported."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and str(frame.f_globals.get("__name__")).startswith(
            _IMPORTERS
        ):
            return True
        frame = frame.f_back
    return False


class _OneOf:
    """`Tensor | Later`, in annotations and for `isinstance`."""

    def __init__(self, *kinds: Any) -> None:
        self._kinds = tuple(type(None) if kind is None else kind for kind in kinds)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, self._kinds)

    def __or__(self, other: Any) -> Any:
        return _OneOf(*self._kinds, other)

    __ror__ = __or__


class _Module:
    """A module of which names are taken, and which is not imported for that. Constants and private
    parts of Python are.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        def find() -> Any:
            return getattr(importlib.import_module(self._name), name)

        if name == "extract_model_from_parallel":
            return functools.partial(_taken_out, find)
        return find() if name.startswith("__") or name.isupper() else Later(self._name, find)


def _taken_out(find: Callable[[], Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """The model in what accelerate or torch has put around it, which is asked of every model that
    is saved.
    """
    is_plain = COMPILER not in sys.modules and isinstance(
        model, sys.modules[_LIBRARY].PreTrainedModel
    )
    return model if is_plain else find()(model, *args, **kwargs)


class _Compiler:
    """`torch._dynamo` until somebody compiles: it notes what it is told by transformers and torch,
    and does nothing.
    """

    def graph_break(self) -> None:
        """Means nothing where nothing is compiled."""

    def disable(self, function: Any, recursive: bool = True, **how: Any) -> Any:
        """The function itself, which torch will call from now on; `tell_compiler` has it forget
        that.
        """
        _bare.append(function)
        return function

    def assume_constant_result(self, function: Any) -> Any:
        """As the compiler's own: a mark."""
        function._dynamo_marked_constant = True
        return function

    def allow_in_graph(self, function: Any) -> Any:
        """Told to the compiler by `tell_compiler`."""
        _allowed.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(COMPILER), name)


def import_lightly() -> None:
    """From here on transformers is imported without what it may never use.

    Does nothing where it is imported already, and on a machine with a GPU of torch, where this was
    never run.
    """
    import_torch()
    import torch

    if _LIBRARY in sys.modules or COMPILER in sys.modules or torch.cuda.is_available():
        return
    disable, allow, compiler = torch.compiler.disable, torch.compiler.allow_in_graph, _Compiler()

    @functools.wraps(disable)
    def disable_later(fn: Any = None, recursive: bool = True, **how: Any) -> Any:
        if COMPILER in sys.modules or not (fn is None or inspect.isfunction(fn)):
            return disable(fn, recursive, **how)
        return torch._disable_dynamo(fn, recursive)

    @functools.wraps(allow)
    def allow_later(fn: Any) -> Any:
        return allow(fn) if COMPILER in sys.modules else compiler.allow_in_graph(fn)

    torch.compiler.disable, torch.compiler.allow_in_graph = disable_later, allow_later
    vars(torch)["_dynamo"] = compiler  # the import of the real one puts itself there
    for name in HEAVY:
        parent, _, part = name.rpartition(".")
        if parent and name not in sys.modules and not hasattr(sys.modules[parent], part):
            setattr(
                sys.modules[parent], part, _Module(name)
            )  # read by who relies on others to import it
    builtins.__import__ = _import


def tell_compiler() -> None:
    """Before something is compiled: the compiler hears what it would have heard."""
    import torch

    while _bare:
        vars(_bare.pop()).pop(_MARK, None)
    while _allowed:
        torch.compiler.allow_in_graph(_allowed.pop())


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """Python's own `__import__`, but for `from HEAVY import NAME` and `import accelerate` in those
    libraries.
    """
    by = str(globals.get("__name__")) if globals and name.startswith(HEAVY) else ""
    if name == COMPILER and not fromlist and by in _TELLERS and name not in sys.modules:
        return sys.modules["torch"]
    if (
        level == 0
        and by.startswith(_IMPORTERS)
        and name not in sys.modules
        and (fromlist or "." not in name)
    ):
        return _Module(name)
    found = _plain_import(name, globals, locals, fromlist, level)
    if (
        name == "utils.import_utils"
        and (scan := sys.modules.get(f"{_LIBRARY}.utils.import_utils")) is not None
    ):
        _look_later(scan)
    return found


class _Part(dict[Any, Any]):
    """What is known of the names in a folder of transformers: those of its `auto`; `whole` finds
    all.
    """

    whole: Callable[[], dict[Any, Any]]


def _look_later(scan: Any) -> None:
    """transformers looks for `__all__` in its 2,200 files of models: here only in those of
    `models/auto` until another name is asked for, and from the last mention on."""
    needs = "__file__", "fetch__all__", "define_import_structure", "_LazyModule"
    if (
        not all(hasattr(scan, name) for name in needs)
        or scan.fetch__all__.__module__ != scan.__name__
    ):
        return  # another version, or it is done
    names_in, plain, lazy = scan.fetch__all__, scan.define_import_structure, scan._LazyModule
    scan.fetch__all__ = lambda text: names_in(text[text.rfind("\n__all__") + 1 :])
    begin, find, lock, models = (
        lazy.__init__,
        lazy.__getattr__,
        threading.Lock(),
        Path(scan.__file__).parents[1] / "models",
    )
    maps = "_class_to_module", "_modules", "_objects", "_object_missing_backend"
    if not (models / "auto").is_dir() or not {*maps, "__all__", "__path__"} <= {
        *begin.__code__.co_names
    }:
        return

    def define(module_path: Any, prefix: str | None = None) -> Any:
        if Path(module_path) not in (models, models / "__init__.py"):
            return plain(module_path, prefix)
        known = plain(models / "auto", f"{prefix}.auto" if prefix else "auto")
        part = _Part(
            {frozenset(): {}} | {backends: dict(names) for backends, names in known.items()}
        )
        part.whole = functools.partial(plain, module_path, prefix)
        return part

    def begin_with_part(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        for part in (*args, *kwargs.values()):
            if isinstance(part, _Part):
                del self.__all__
                vars(self)["_part"] = part

    def complete(self: Any) -> None:
        with lock:
            if (part := vars(self).get("_part")) is not None:
                structure = part.whole()
                structure[frozenset()].update(
                    part[frozenset()]
                )  # to which transformers has added its own
                whole = vars(
                    lazy(self.__name__, self.__file__, structure, self.__spec__, self._objects)
                )
                vars(self).update(
                    {
                        key: whole[key]
                        for key in whole
                        if key == "__all__" or not key.startswith("__")
                    }
                )
                del self._part

    def find_in_all(self: Any, name: str) -> Any:
        of_python = name.startswith("__") and name != "__all__"
        if (
            "_part" not in vars(self)
            or of_python
            or any(name in vars(self)[known] for known in maps)
        ):
            return find(self, name)
        file = Path(self.__path__[0]) / name
        if file.is_dir() or file.with_suffix(".py").is_file():
            return importlib.import_module(f"{self.__name__}.{name}")
        complete(self)
        return getattr(self, name)

    lazy.__init__, lazy.__getattr__, scan.define_import_structure = (
        begin_with_part,
        find_in_all,
        define,
    )
