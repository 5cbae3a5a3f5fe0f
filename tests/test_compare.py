"""The side-by-side bench: its judge and its verdicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from peers import judge, models, ours, workloads
from peers.assignment import Assignment
from peers.clock import Clock
from peers.race import Piece

ROOT = Path(__file__).parent.parent
SIZE = {"hidden": 32, "layers": 4, "words": 300}
SHAPES = {
    "causal-lm": workloads.Workload("causal-lm", mean=20, spread=0.6, max_length=48),
    "seq2seq": workloads.Workload(
        "seq2seq", mean=16, spread=0.5, max_length=32, max_target_length=16
    ),
    "classification": workloads.Workload("classification", mean=16, spread=0.6, max_length=32),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A workload folder for each task: six steps of four examples."""
    root = tmp_path_factory.mktemp("workloads")
    return {
        task: workloads.prepare(root, shape, 24, 6, size=SIZE) for task, shape in SHAPES.items()
    }


def entry(place: tuple[Path, dict[str, Any]], contestant: str, out: Path) -> Assignment:
    """A run over the folder, in fp32."""
    return Piece(*place, "full", "fp32", batch=4, out=out).entry(contestant, seed=3)


# ---- the judge ----


@pytest.mark.parametrize("task", list(SHAPES))
def test_the_judge_agrees_with_the_library_on_padded_rows(task, places):
    assignment = entry(places[task], "hf", Path("-"))
    examples = assignment.examples("eval")
    model = models.load(assignment).eval()
    rows = [examples.row(index) for index in range(6)]
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    labels = [torch.tensor(row["labels"]) for row in rows]
    is_classes = task == "classification"
    with torch.no_grad():
        padded = model(
            input_ids=pad_sequence(ids, True, model.config.pad_token_id),
            attention_mask=pad_sequence([torch.ones_like(each) for each in ids], True),
            labels=torch.stack(labels) if is_classes else pad_sequence(labels, True, -100),
        ).loss
    alone = judge.loss_of_folder(assignment.model, assignment.model, examples, task)
    assert alone == pytest.approx(float(padded), abs=2e-5)


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


# ---- from end to end ----


def test_other_examples_than_the_order_says_are_no_comparison(places, tmp_path):
    assignment = entry(places["causal-lm"], "farthing", tmp_path)
    with pytest.raises(SystemExit, match="other examples"):
        ours.train(replace(assignment, order=assignment.order[::-1]), Clock())


# ---- the peers ----


def test_peers_have_the_versions_that_farthing_is_tested_with():
    def pins(path):
        return {line.split(" ;")[0] for line in path.read_text().splitlines() if line[:1] != "#"}

    assert pins(ROOT / "bench" / "peers.txt") - pins(ROOT / "constraints.txt") == {"trl==1.16.0"}
