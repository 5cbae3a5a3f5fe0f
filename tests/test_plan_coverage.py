"""How many measurements a range holds, each source counting the same."""

from __future__ import annotations

from typing import Any

import pytest

from plan_accuracy import print_coverage
from plan_coverage import held_by, left_out, width_of


def test_a_width_holds_its_share_of_new_rows_and_each_group_counts_the_same() -> None:
    small = [0.01 * k for k in range(1, 101)]
    assert width_of({"a": small}) == pytest.approx(0.81), "80 of 100, and one more for the sample"
    assert width_of({"a": small, "b": [5.0] * 1000}) == 5.0
    assert width_of({"a": small * 10, "b": [0.1] * 50}) < width_of({"a": small * 10})
    assert width_of({"a": [0.1, 0.2]}) == 0.2


def test_a_source_has_no_say_in_its_own_range() -> None:
    rows = [
        {"source": source, "e": error}
        for source, error in (("a", 0.1), ("a", -0.1), ("b", 0.3), ("c", None))
    ]
    whole, a, b = left_out(rows, "e")
    assert (a["width"], a["n_held"], b["width"], b["n_held"]) == (0.3, 2, 0.1, 0)
    assert (whole["n"], whole["n_held"], whole["share"]) == (3, 2, pytest.approx(2 / 3))
    assert whole["share_of_groups"] == 0.5, "each source alike: all of one, nothing of the other"
    assert left_out(rows[:2], "e") == []
    assert held_by(rows, "e", lambda row: 0.2)["share"] == pytest.approx(2 / 3)


def test_the_share_with_each_source_alike_is_printed_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows: list[dict[str, Any]] = [
        {"source": name, "e": e} for name, e in (("a", 0.1), ("a", -0.1), ("b", 0.3))
    ]
    none = {"n": 0, "n_held": 0, "share": 0.0}
    ways = {"family left out": [], "by facts/estimate_errors.csv": none, "as plans say it": none}
    print_coverage({"memory": ways | {"source left out": left_out(rows, "e")}})
    assert (
        capsys.readouterr().out.splitlines()[1]
        == "80 % ranges of memory: 50.0%, each source alike (66.7% of rows)"
    )
    print_coverage({"memory": ways | {"source left out": []}})
    assert capsys.readouterr().out.splitlines()[1] == "80 % ranges of memory"
