"""Names that are taken from a module which is imported when they are used; optimizers that step
without torch's compiler.

What a whole run imports, and that it ends in the same bits, is in `test_start_up.py`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farthing.model import light_imports
from farthing.model.light_imports import Later

ORIGINAL = """
class Shape:
    def __init__(self, n=0):
        self.n = n

    def __class_getitem__(cls, item):
        return (cls, item)

class Square(Shape):
    pass

def doubled(n):
    return 2 * n

SIDES = 4
"""
USER = """
from farthing_heavy.parts import SIDES, Shape, doubled

class Holder:
    def __init__(self):
        self.shape = Shape(3)

HELD = Holder()
Annotated = int | Shape | None

def is_shape(value):
    return isinstance(value, Shape), isinstance(value, (str, Shape)), isinstance(value, Annotated)

def make(n):
    return Shape(n), doubled(n)

def derived():
    class Own(Shape):
        pass
    return Own
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module that takes names from a heavy one, as transformers would."""
    (tmp_path / "farthing_heavy").mkdir()
    (tmp_path / "farthing_heavy/__init__.py").touch()
    (tmp_path / "farthing_heavy/parts.py").write_text(ORIGINAL)
    (tmp_path / "farthing_library").mkdir()
    (tmp_path / "farthing_library/__init__.py").touch()
    (tmp_path / "farthing_library/user.py").write_text(USER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(light_imports, "HEAVY", ("farthing_heavy",))
    monkeypatch.setattr(light_imports, "_IMPORTERS", ("farthing_library.",))
    monkeypatch.setattr("builtins.__import__", light_imports._import)
    yield importlib.import_module("farthing_library.user")
    for name in [
        name for name in sys.modules if name.startswith(("farthing_heavy", "farthing_library"))
    ]:
        del sys.modules[name]


@pytest.fixture
def light(user: Any) -> Any:
    """The module, where the heavy one is not imported: it was for the constant."""
    for name in ("farthing_heavy.parts", "farthing_heavy"):
        sys.modules.pop(name, None)
    return user


def test_a_constant_is_taken_at_once(user: Any) -> None:
    assert user.SIDES == 4


def test_nothing_is_an_instance_of_a_class_that_is_not_imported(light: Any) -> None:
    assert light.is_shape(torch.nn.Linear(1, 1)) == (False, False, False)
    assert light.is_shape("text") == (False, True, False)
    assert light.is_shape(7) == (False, False, True)
    assert light.is_shape(None) == (False, False, True)
    assert not issubclass(int, light.Shape)
    assert "farthing_heavy.parts" not in sys.modules


def test_a_name_is_what_it_stands_for_once_it_is_used(light: Any) -> None:
    assert "farthing_heavy.parts" not in sys.modules
    shape, twice = light.make(5)
    parts = sys.modules["farthing_heavy.parts"]
    assert type(shape) is parts.Shape
    assert (shape.n, twice) == (5, 10)
    assert light.is_shape(shape) == (True, True, True)
    assert light.is_shape(parts.Square()) == (True, True, True)
    assert light.is_shape(7) == (False, False, True)
    assert issubclass(parts.Square, light.Shape)
    assert issubclass(light.derived(), parts.Shape)
    assert light.Shape[int] == (parts.Shape, int)
    assert light.Shape.__name__ == "Shape"


def test_what_a_module_makes_while_it_is_imported_is_made_when_it_is_used(light: Any) -> None:
    assert isinstance(light.HELD.shape, Later)
    assert "farthing_heavy.parts" not in sys.modules
    assert light.HELD.shape.n == 3


def test_others_import_as_ever(light: Any) -> None:
    from farthing_heavy.parts import Shape  # type: ignore[import-not-found]

    assert isinstance(Shape, type)
    assert light.is_shape(Shape())[0]


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad", "RMSprop"])
def test_an_optimizer_steps_to_the_same_bits_without_the_compiler(name: str) -> None:
    kind = getattr(torch.optim, name)

    def stepped() -> list[torch.Tensor]:
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7))]
        optimizer = kind(
            [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:]}], lr=0.01
        )
        for _ in range(3):
            sum((weight**2).sum() for weight in weights).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return [
            *weights,
            *(
                v
                for state in optimizer.state.values()
                for v in state.values()
                if torch.is_tensor(v)
            ),
        ]

    def bare() -> list[Any]:
        return [
            f
            for f in (torch.optim.Optimizer.add_param_group, torch.optim.Optimizer.zero_grad)
            if hasattr(inspect.unwrap(f), light_imports._MARK)
        ]

    expected = stepped()
    with pytest.MonkeyPatch.context() as patch:
        for method in (torch.optim.Optimizer.add_param_group, torch.optim.Optimizer.zero_grad):
            patch.delattr(inspect.unwrap(method), light_imports._MARK)
        patch.delitem(sys.modules, light_imports.COMPILER)
        patch.setattr(torch, "_dynamo", light_imports._Compiler())
        patch.setattr("builtins.__import__", light_imports._import)
        found = stepped()
        assert light_imports.COMPILER not in sys.modules
        assert len(bare()) == 2
        light_imports.tell_compiler()
        assert not bare()
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_the_compiler_hears_what_it_would_have_heard() -> None:
    heard = []
    compiler = light_imports._Compiler()

    def left_alone() -> None: ...

    def constant() -> None: ...

    assert compiler.allow_in_graph(left_alone) is left_alone
    assert compiler.assume_constant_result(constant)._dynamo_marked_constant is True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "allow_in_graph", heard.append)
        light_imports.tell_compiler()
        light_imports.tell_compiler()
    assert heard == [left_alone]


def test_files_of_models_are_looked_through_when_a_name_of_theirs_is_asked_for_and_give_the_same_names() -> (  # noqa: E501
    None
):
    import transformers

    scan = importlib.import_module("transformers.utils.import_utils")
    names = ("__name__", "__file__", "fetch__all__", "define_import_structure")
    copy = SimpleNamespace(
        **{name: getattr(scan, name) for name in names},
        _LazyModule=type("Lazy", (scan._LazyModule,), {}),
    )
    light_imports._look_later(copy)
    later = copy.define_import_structure
    light_imports._look_later(copy)
    assert copy.define_import_structure is later
    light_imports._look_later(
        object()
    )  # another version of the library, which has no such functions
    models = Path(scan.__file__).parents[1] / "models"

    def module(kind: Any, structure: Any) -> Any:
        structure[frozenset()].update({"activations": {"ACT2FN"}})  # as transformers does
        return kind(
            "transformers",
            transformers.__file__,
            structure,
            extra_objects={"__version__": "of a test"},
        )

    light = module(copy._LazyModule, later(models, prefix="models"))
    plain = module(
        scan._LazyModule, scan.define_import_structure.__wrapped__(models, prefix="models")
    )
    assert light.AutoConfig is transformers.AutoConfig
    assert light.activations is transformers.activations
    assert light.__version__ == "of a test"
    assert not hasattr(light, "__wrapped__")
    assert "LlamaConfig" not in light._class_to_module, "nobody has asked for it"
    assert light.LlamaConfig is transformers.LlamaConfig
    assert set(light.__all__) == set(plain.__all__)
    for kept in ("_class_to_module", "_modules", "_object_missing_backend"):
        assert getattr(light, kept) == getattr(plain, kept)
    assert {k: set(v) for k, v in light._import_structure.items()} == {
        k: set(v) for k, v in plain._import_structure.items()
    }
    with pytest.raises(AttributeError):
        light.NoSuchModel  # noqa: B018
    again = module(copy._LazyModule, later(models, prefix="models"))
    assert set(again.__all__) == set(plain.__all__)


def test_names_of_a_file_are_found_from_their_last_mention_on() -> None:
    scan = importlib.import_module("transformers.utils.import_utils")
    names = ("__name__", "__file__", "fetch__all__", "define_import_structure")
    copy = SimpleNamespace(
        **{name: getattr(scan, name) for name in names},
        _LazyModule=type("Lazy", (scan._LazyModule,), {}),
    )
    light_imports._look_later(copy)
    for text in (
        "x = 1\n",
        "__all__ = ['A', 'B']",
        (
            "import a\n__all__ = ['A']\n\nfor __all__ in []: pass\n__all__ = [\n    'C',\n   "
            " 'D',\n]\n"
        ),
        "# about __all__\ny = 2\n",
    ):
        assert copy.fetch__all__(text) == scan.fetch__all__(text)


def test_beside_a_gpu_everything_is_imported_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    for name in (light_imports._LIBRARY, light_imports.COMPILER):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = builtins.__import__, torch.compiler.disable, torch.optim.AdamW.step
    light_imports.import_lightly()
    assert (builtins.__import__, torch.compiler.disable, torch.optim.AdamW.step) == before


def test_a_plain_model_is_saved_as_it_is_and_others_are_taken_out() -> None:
    import transformers

    class Model(transformers.PreTrainedModel):
        def __init__(self) -> None: ...

    def find() -> Any:
        return lambda model, recursive=False: ("taken out", model)

    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, light_imports.COMPILER, raising=False)
        model = Model()
        assert light_imports._taken_out(find, model, recursive=True) is model
        assert light_imports._taken_out(find, "another", recursive=True) == ("taken out", "another")
        patch.setitem(sys.modules, light_imports.COMPILER, torch)
        assert light_imports._taken_out(find, model) == ("taken out", model)
