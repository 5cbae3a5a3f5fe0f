"""The notebook of the documentation: its cells are Python and commands that farthing takes, and run
from first to last.
"""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from farthing.cli.parser import build_parser

NOTEBOOK = Path(__file__).parent.parent / "docs/notebooks/farthing.ipynb"


def cells() -> list[list[str]]:
    """The lines of each cell of code."""
    content: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [
        "".join(cell["source"]).splitlines()
        for cell in content["cells"]
        if cell["cell_type"] == "code"
    ]


def test_cells_are_python_and_commands_that_are_taken() -> None:
    commands = [line[1:] for lines in cells() for line in lines if line.startswith("!")]
    assert commands
    for command in commands:
        _, verb, *words = shlex.split(command)
        build_parser([verb]).parse_args([verb, *words])
    for lines in cells():
        ast.parse("\n".join(line for line in lines if not line.startswith("!")))


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip(
        "nbclient", reason="needs nbclient and ipykernel: pip install nbclient ipykernel"
    )
    pytest.importorskip("ipykernel", reason="needs ipykernel: pip install ipykernel")
    nbformat = pytest.importorskip("nbformat")
    import sys

    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    shown = [
        text
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        for text in (output.get("text", ""), output.get("data", {}).get("text/plain", ""))
    ]
    assert any("finished" in text for text in shown)
