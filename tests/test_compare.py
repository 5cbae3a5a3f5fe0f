"""The side-by-side bench: its judge and its verdicts."""

from pathlib import Path

import pytest

from peers import judge

ROOT = Path(__file__).parent.parent


def test_a_row_counts_when_it_differs_by_less_than_seeds_do():
    reference = {0: 4.00, 1: 4.02, 2: 4.01}
    assert judge.verdict(reference, {0: 4.01, 1: 4.03, 2: 4.02}).word == "equal"
    worse = judge.verdict(reference, {0: 4.03, 1: 4.05, 2: 4.04})
    assert (worse.word, worse.is_void) == ("higher", True)
    assert worse.difference == pytest.approx(0.03)
    assert worse.spread == pytest.approx(0.02)
    better = judge.verdict(reference, {0: 3.9, 1: 3.9, 2: 3.9})  # not the same training either
    assert (better.word, better.is_void) == ("lower", True)
    packer = judge.verdict(reference, {0: 3.9, 1: 3.9, 2: 3.9}, is_in_order=False)
    assert (packer.word, packer.is_void) == ("lower, in its own order", False)
    assert judge.verdict(reference, {0: 4.2}, is_in_order=False).is_void
    assert judge.verdict(reference, {0: float("nan")}).is_void
    few = judge.verdict({0: 4.0, 1: 4.1}, {0: 9.0})
    assert few.word.startswith("not judged")
    assert not few.is_void


# ---- the peers ----


def test_peers_have_the_versions_that_farthing_is_tested_with():
    def pins(path):
        return {line.split(" ;")[0] for line in path.read_text().splitlines() if line[:1] != "#"}

    assert pins(ROOT / "bench" / "peers.txt") - pins(ROOT / "constraints.txt") == {"trl==1.16.0"}
