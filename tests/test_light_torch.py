"""torch without what it computes of tensors without memory, until somebody asks; its libraries
linked before it is imported.

That a run does without, and ends in the same bits, is in `test_start_up.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from farthing.model import light_torch

PLAIN = {
    "__init__": (
        "from torch import _meta_registrations, cuda\n_lazy_modules = set()\n"
        "def __getattr__(name):\n"
        "    if name in _lazy_modules:\n"
        "        import importlib\n"
        "        return importlib.import_module('torch.' + name)\n"
        "    raise AttributeError(name)\n"
    ),
    "cuda": "def is_available(): return False\n",
    "_meta_registrations": "device_hint = 1\nfrom torch import _decomp\n",
    "_decomp": "import torch._prims\n",
    "_prims": (
        "assert 'torch._meta_registrations' in __import__('sys').modules\nimport torch._refs\n"
    ),
    "_refs": "made = 1\n",
}
"""A torch whose private modules can only be imported in one order, that which begins with
`_meta_registrations`.
"""
WHOLE = "_meta_registrations _decomp _prims _refs "


def imported(folder: Path, files: dict[str, str], then: str = "") -> str:
    """What `import_torch` of a torch of these files and `then` import, in their order; the last
    line of an error.
    """
    (folder / "torch/lib").mkdir(parents=True)
    for name, text in files.items():
        is_library = name.startswith("lib/")
        (folder / "torch" / (name if is_library else f"{name}.py")).write_text(
            f"print({name!r}, end=' ')\n{text}"
        )
    code = (
        "import importlib, sys\nfrom farthing.model import light_torch\n"
        f"sys.path.insert(0, {str(folder)!r})\nlight_torch.import_torch()\n{then}\n"
        "assert light_torch.SHAPES not in sys.modules or sys.modules[light_torch.SHAPES].__file__\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else done.stderr.splitlines()[-1]


def test_shapes_are_not_imported_with_torch(tmp_path: Path) -> None:
    assert imported(tmp_path, PLAIN, "assert 'torch' in sys.modules") == "__init__ cuda "


@pytest.mark.parametrize(
    "asked",
    [
        "import torch._prims",
        "importlib.import_module('torch._refs')",
        "from torch import _decomp",
        "import torch; torch._refs.made",
        "import torch; torch._meta_registrations.device_hint",
    ],
)
def test_who_asks_for_a_private_part_of_torch_finds_all_of_it_in_its_order_and_once(
    tmp_path: Path, asked: str
) -> None:
    then = (
        f"{asked}\nassert all(sys.modules[f'torch.{{name}}'].__spec__.origin for name in"
        f" {WHOLE.split()})"
    )
    assert imported(tmp_path, PLAIN, then) == "__init__ cuda " + WHOLE


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lib/libtorch_cuda.so", ""),
        ("__init__", "from torch import _meta_registrations, cuda\n"),
        (
            "__init__",
            (
                "from torch._meta_registrations import device_hint\nfrom torch import"
                " cuda\n_lazy_modules = set()\n"
            ),
        ),
        (
            "__init__",
            "import torch._meta_registrations\nfrom torch import cuda\n_lazy_modules = set()\n",
        ),
    ],
    ids=["a build for GPUs", "without names that come later", "a name is taken", "another way"],
)
def test_where_torch_is_not_as_expected_it_is_imported_whole(
    tmp_path: Path, name: str, text: str
) -> None:
    found = imported(
        tmp_path,
        {**PLAIN, name: text},
        "import torch; assert torch._meta_registrations.device_hint",
    )
    assert sorted(found.split()) == sorted(f"__init__ cuda {WHOLE}".split())


def test_a_torch_without_shapes_and_one_that_can_not_be_imported_are_as_ever(
    tmp_path: Path,
) -> None:
    (tmp_path / "a").mkdir()
    assert imported(tmp_path / "a", {"__init__": "", "cuda": PLAIN["cuda"]}) == "__init__ "
    (tmp_path / "b").mkdir()
    assert (
        imported(tmp_path / "b", {"__init__": "import nowhere"})
        == "ModuleNotFoundError: No module named 'nowhere'"
    )


def test_what_needs_shapes_is_done_again_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    @light_torch.with_shapes
    def make(error: Exception, cause: Exception | None) -> str:
        tried.append("tried")
        if light_torch.SHAPES in sys.modules:
            return "made"
        raise error from cause

    def left_out() -> None:
        tried.clear()
        monkeypatch.delitem(sys.modules, light_torch.SHAPES, raising=False)

    for error, cause in (
        (NotImplementedError("aten::x"), None),
        (RuntimeError("model"), NotImplementedError("aten::x")),
    ):
        left_out()
        monkeypatch.setattr(
            light_torch.importlib, "import_module", lambda name: sys.modules.setdefault(name, sys)
        )
        assert make(error, cause) == "made"
        assert len(tried) == 2
    left_out()
    with pytest.raises(ValueError, match="another"):
        make(ValueError("another"), None)
    assert len(tried) == 1


def test_torch_with_its_libraries_linked_before_computes_what_needs_shapes_too() -> None:
    code = (
        "import os, sys\nfrom farthing.model import"
        " light_torch\nlight_torch.load_libraries().join()\nassert 'torch' not in"
        " sys.modules\nlinked = 'libtorch_cpu.so' in"
        " open('/proc/self/maps').read()\nlight_torch.import_torch()\nimport torch\nassert"
        " light_torch.SHAPES not in sys.modules\nif (child := os.fork()) == 0:\n    import"
        " torch.utils._content_store\n    os._exit(light_torch.SHAPES not in sys.modules)\nassert"
        " os.waitpid(child, 0)[1] == 0, 'it can only be imported after the others'\ndef made():\n  "
        "  x = torch.empty(2, 3, 8, 8, device='meta')\n    return"
        " tuple(torch.nn.functional.conv2d(x, torch.empty(5, 3, 3, 3,"
        " device='meta')).shape)\nassert light_torch.with_shapes(made)() == (2, 5, 6, 6)\nassert"
        " light_torch.SHAPES in sys.modules\nassert torch.ones(3, 3).mm(torch.ones(3, 3)).sum() =="
        " 27\nprint(linked, torch.version.cuda)\nsys.stdout.flush()\nos._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    linked, cuda = done.stdout.split()
    assert linked == str(cuda == "None")


@pytest.mark.parametrize("extra", [None, "libc10_cuda.so", "libtorch_hip.so"])
def test_libraries_that_are_not_what_they_should_be_are_left_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str | None
) -> None:
    (tmp_path / "torch/lib").mkdir(parents=True)
    (tmp_path / "torch/__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    light_torch._load_libraries()  # none is there
    (tmp_path / "torch/lib/libtorch_global_deps.so").write_bytes(b"not a library")
    light_torch._load_libraries()
    if extra is not None:
        (tmp_path / "torch/lib" / extra).touch()
        monkeypatch.setattr(
            light_torch.os, "fsencode", lambda path: pytest.fail(f"{path} would be linked")
        )
        light_torch._load_libraries()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert "torch" not in sys.modules
