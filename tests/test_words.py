"""A value in a table or a line of words is one cell and one line, whatever is in it."""

from farthing.report.words import lines, table


def test_what_is_in_a_value_begins_no_cell_and_no_line():
    row = {"precision": 0.5, "recall": 0.25, "f1": 1.0, "n": 3}
    found = table("receipt.txt", "classes_table", {"a | b\nc": row})
    assert found.heads == ("class", "#precision", "#recall", "#F1", "#examples")
    assert found.rows == ((r"a | b\nc", "0.500", "0.250", "1.000", "3"),)
    assert lines("plan.txt", "limits", _Limits()) == ["at most $5.00"]


class _Limits:
    max_usd = 5.0
    max_hours = max_gpu_hours = deadline_s = None
