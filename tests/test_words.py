"""Every call for words names a macro of its template, with as many values as the macro takes; a
value is one cell and one line, whatever is in it.
"""

from __future__ import annotations

import ast
from pathlib import Path

from jinja2 import Environment, nodes

import farthing
from farthing.report.words import lines, table

SOURCE = Path(farthing.__file__).parent
CALLS = {"say", "lines", "pairs", "cards", "table", "report"}


def test_each_call_for_words_names_a_macro_with_as_many_values():
    macros = {
        (path.name, macro.name): len(macro.args)
        for path in (SOURCE / "report/templates").iterdir()
        for macro in Environment().parse(path.read_text()).find_all(nodes.Macro)
    }
    n_checked = 0
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        for call in ast.walk(ast.parse(text if "report.words" in text else "")):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                continue
            file, macro, *values = [*call.args, None, None]
            if call.func.id not in CALLS or not isinstance(macro, ast.Constant):
                continue
            assert isinstance(file, ast.Constant)
            takes = macros[file.value, macro.value]
            if not any(isinstance(value, ast.Starred) for value in values):
                assert len(values) - 2 == takes, (path, macro.value)
            n_checked += 1
    assert n_checked > 40


def test_what_is_in_a_value_begins_no_cell_and_no_line():
    row = {"precision": 0.5, "recall": 0.25, "f1": 1.0, "n": 3}
    found = table("receipt.txt", "classes_table", {"a | b\nc": row})
    assert found.heads == ("class", "#precision", "#recall", "#F1", "#examples")
    assert found.rows == ((r"a | b\nc", "0.500", "0.250", "1.000", "3"),)
    assert lines("plan.txt", "limits", _Limits()) == ["at most $5.00"]


class _Limits:
    max_usd = 5.0
    max_hours = max_gpu_hours = deadline_s = None
