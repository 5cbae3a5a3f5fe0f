"""The rules of the house: who may import whom, what may stand where."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import farthing

SOURCE = Path(farthing.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def imports(path: Path, *, top_only: bool = False) -> set[str]:
    """Names of the modules a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def room(name: str) -> list[Path]:
    """A file, or the files of a folder."""
    folder = SOURCE / name
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [SOURCE / f"{name}.py"]


def test_nobody_imports_the_front_door() -> None:
    for path in FILES:
        if path.name != "__main__.py":
            assert "farthing.cli" not in imports(path), path


def test_only_the_front_door_and_the_drawings_print_and_only_it_exits() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if path.name not in ("cli.py", "terminal.py"):
            assert not re.search(r"^\s*print\(", text, re.MULTILINE), path
        if path.name != "cli.py":
            assert "sys.exit(" not in text, path


def test_one_place_goes_backward() -> None:
    calls = [path.name for path in FILES for _ in re.findall(r"\.backward\(", path.read_text(encoding="utf-8"))]
    assert calls == ["step.py"]


@pytest.mark.parametrize(
    "name",
    [
        *("errors", "units", "job", "files", "meter", "run_folder", "limits", "metrics", "starter", "data", "report"),
        *("families", "shapes"),
        *("notice", "cloud_notice", "retry", "fit"),
        *("spells", "spot"),
        *("catalog", "price_feeds", "money"),
        *("lengths", "machine", "model_config", "measurements"),
        *("store", "lease", "commits", "mirror"),
        *("plan", "study", "recipe", "memory", "speed", "calibrate", "reuse"),
    ],
)
def test_rooms_without_torch(name: str) -> None:
    for path in room(name):
        heavy = {module.split(".")[0] for module in imports(path, top_only=True)} & {"torch", "transformers", "peft"}
        assert not heavy, path


@pytest.mark.parametrize(
    "name",
    [
        *("cloud_notice", "retry", "fit"),
        *("checkpoint", "meter", "notice", "model", "data", "files", "optim", "evaluate", "parts"),
        *("store", "lease", "commits", "mirror"),
        *("machine", "model_config", "measurements"),
    ],
)
def test_rooms_that_take_plain_values(name: str) -> None:
    for path in room(name):
        assert not imports(path) & {"farthing.job", "farthing.train", "farthing.prepare"}, path


def test_reports_and_exports_never_import_the_loop() -> None:
    for path in [*room("report"), *room("export"), *room("doctor")]:
        assert "farthing.train" not in imports(path), path


@pytest.mark.parametrize(
    "name",
    [
        *("catalog", "money", "shapes", "plan", "recipe", "memory", "speed", "study", "reuse"),
        *("report/plan_view", "report/plan_table", "report/plan_page"),
    ],
)
def test_rooms_that_look_at_no_clock_and_no_network(name: str) -> None:
    for path in room(name):
        assert not imports(path) & {"time", "socket", "http", "urllib.request", "requests", "farthing.price_feeds"}, (
            path
        )
        assert not re.search(r"\b(today|now)\(\)", path.read_text(encoding="utf-8")), path


def test_nothing_is_unpickled_or_evaluated() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert not imports(path) & {"pickle", "shelve", "marshal", "joblib", "dill"}, path
        assert not re.search(
            r"torch\.load\(|[^.\w]eval\(|[^.\w]exec\(|yaml\.(unsafe_|full_)?load\(|allow_pickle=True", text
        ), path


def test_help_and_job_files_need_no_torch() -> None:
    code = (
        "import sys, farthing.cli, farthing.report.receipt, farthing.report.plan_view, farthing.study\n"
        "from farthing.starter import starter\n"
        "heavy = {'torch', 'transformers', 'datasets', 'peft', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "farthing.cli.main(['--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for verb in ("init", "plan", "probe", "train", "report", "export", "prices", "doctor"):
        assert verb in done.stdout
    assert not re.search(r"^\s+launch\b", done.stdout, re.MULTILINE), "what is not built is not shown"


def test_every_public_function_says_what_it_is() -> None:
    kinds = (ast.FunctionDef, ast.ClassDef)
    missing = []
    for path in FILES:
        top = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, kinds)]
        inner = [
            node for outer in top if isinstance(outer, ast.ClassDef) for node in outer.body if isinstance(node, kinds)
        ]
        for node in [*top, *inner]:
            if not node.name.startswith("_") and not ast.get_docstring(node):
                missing.append(f"{path.name}:{node.lineno} {node.name}")
    assert missing == []
