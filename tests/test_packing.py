"""Pieces of a token budget: whole, balanced and within the budget."""

import numpy as np
import pytest
from numpy.typing import NDArray

from drawn_sets import token_set
from farthing.data.batches import collate, permutation, rows_of
from farthing.data.packing import (
    MicroBatchCost,
    collate_packed,
    padded_tokens,
    split_by_tokens,
    split_padded,
)
from farthing.data.units import Sequences, collate_units


def some_lengths(seed: int) -> NDArray[np.int64]:
    """Lengths as chats have them, as instructions have them, all equal, or two sorts; now and then
    one giant.
    """
    draw = np.random.default_rng(seed)
    n = int(draw.integers(1, 200))
    kinds = [
        lambda: draw.lognormal(5.5, 1.0, n),
        lambda: draw.integers(1, 60, n),
        lambda: np.full(n, 37),
        lambda: draw.choice([3, 800], n),
    ]
    return np.clip(kinds[seed % 4](), 1, 2048).astype(np.int64)


# ---- flat cuts ----


@pytest.mark.parametrize("seed", range(24))
def test_flat_pieces_hold_every_example_once_within_the_budget(seed):
    lengths = some_lengths(seed)
    examples = permutation(len(lengths), seed, 0)
    budget = int(np.random.default_rng(seed).integers(64, 4096))
    pieces = split_by_tokens(examples, lengths, budget)
    assert sorted(np.concatenate(pieces).tolist()) == list(range(len(lengths)))
    loads = [int(lengths[piece].sum()) for piece in pieces]
    assert all(load <= budget or len(piece) == 1 for load, piece in zip(loads, pieces, strict=True))
    assert loads == sorted(loads, reverse=True)
    for piece in pieces:
        assert (np.diff(lengths[piece]) <= 0).all()
    shared = [load for load, piece in zip(loads, pieces, strict=True) if load < budget]
    if len(shared) > 1:  # nearly equal: by less than the longest of them
        longest = max(
            int(lengths[piece].max()) for piece in pieces if lengths[piece].sum() < budget
        )
        assert max(shared) - min(shared) <= longest
    rest = [load for load in loads if load < budget]
    assert len(rest) <= 2 * -(-sum(rest) // budget) + 1


def test_flat_cuts_are_few_balanced_and_the_same_everywhere():
    lengths = np.array([900, 30, 30, 500, 400, 30, 100, 700, 5000, 300])
    pieces = split_by_tokens(np.arange(10), lengths, 1600)
    assert [piece.tolist() for piece in pieces] == [[8], [7, 3, 9], [0, 4, 6, 1, 2, 5]]
    assert [int(lengths[piece].sum()) for piece in pieces] == [5000, 1500, 1490]


@pytest.mark.parametrize(
    ("lengths", "budget", "n_pieces"),
    [([3, 4, 5, 6], 18, 1), ([3, 4, 5, 6], 17, 2), ([9], 4, 1), ([], 4, 0)],
)
def test_a_step_that_fits_is_one_piece(lengths, budget, n_pieces):
    pieces = split_by_tokens(np.arange(len(lengths)), np.array(lengths, np.int64), budget)
    assert len(pieces) == n_pieces


# ---- padded cuts ----


def costs(more_tokens: int) -> dict[str, MicroBatchCost]:
    return {"cost": MicroBatchCost(0, more_tokens)}


@pytest.mark.parametrize("two_sides", [False, True])
@pytest.mark.parametrize("seed", range(16))
def test_padded_pieces_hold_every_example_once_within_budget_and_share(seed, two_sides):
    lengths = some_lengths(seed)
    targets = np.random.default_rng(seed).integers(1, 50, len(lengths)) if two_sides else None
    examples = permutation(len(lengths), seed, 0)
    pieces = split_padded(examples, lengths, 2048, target_lengths=targets, **costs(0))
    assert sorted(np.concatenate(pieces).tolist()) == list(range(len(lengths)))
    sizes = lengths[:, None] if targets is None else np.stack([lengths, targets], 1)
    computed = [padded_tokens(sizes[piece]) for piece in pieces]
    assert all(n <= 2048 or len(piece) == 1 for n, piece in zip(computed, pieces, strict=True))
    assert computed == sorted(computed, reverse=True)
    assert sizes.sum() >= 0.97 * sum(computed)
    again = split_padded(examples, lengths, 2048, target_lengths=targets, **costs(0))
    assert [piece.tolist() for piece in again] == [piece.tolist() for piece in pieces]


def test_equal_lengths_are_not_split_further_than_the_budget_asks():
    pieces = split_padded(np.arange(64), np.full(64, 32), 1024)
    assert [len(piece) for piece in pieces] == [32, 32]


@pytest.mark.parametrize(
    ("cost", "sizes"), [({}, [2, 2, 2]), (costs(100), [4, 2]), (costs(300), [6])]
)
def test_no_piece_is_split_for_less_than_a_micro_batch_costs(cost, sizes):
    lengths = np.array([100, 100, 60, 60, 20, 19])
    pieces = split_padded(np.arange(6), lengths, 1000, **cost)
    assert [len(piece) for piece in pieces] == sizes
    assert sorted(np.concatenate(pieces).tolist()) == list(range(6))


def test_padded_tokens_are_those_of_the_collation():
    tokens = token_set(np.array([9, 3, 6]))
    batch = collate(tokens, [0, 1, 2], "seq2seq", 0)
    targets = tokens.target_lengths[np.arange(3)]
    sizes = np.stack([tokens.lengths - targets, targets], 1)
    assert padded_tokens(sizes) == batch["input_ids"].size + batch["labels"].size


# ---- flat collation ----


def test_a_flat_batch_is_its_examples_end_to_end():
    tokens = token_set(np.array([5, 1, 3, 4]))
    tokens.targets[tokens.offsets[:-1]] = 1  # a first token is never predicted all the same
    batch = collate_packed(tokens, [2, 0, 1], "causal-lm", first_position=2)
    rows = [tokens.example(index) for index in (2, 0, 1)]
    assert batch["lengths"].tolist() == [3, 5, 1]
    assert batch["input_ids"].tolist() == [[int(i) for ids, _ in rows for i in ids]]
    assert batch["position_ids"].tolist() == [[2, 3, 4, 2, 3, 4, 5, 6, 2]]
    of_units = Sequences(*rows_of(tokens, [2, 0, 1])[:3], np.zeros(3, np.int64), 1)
    units = collate_units(of_units, first_position=2)
    assert units["position_ids"].tolist() == batch["position_ids"].tolist()
    expected = [
        int(i) if target and place else -100
        for ids, is_target in rows
        for place, (i, target) in enumerate(zip(ids, is_target, strict=True))
    ]
    assert batch["labels"].tolist() == [expected]
    assert all(array.dtype == np.int64 for array in batch.values())


def test_what_can_not_be_laid_flat_is_refused():
    tokens = token_set(np.array([4, 4]))
    with pytest.raises(ValueError, match="pad it"):
        collate_packed(tokens, [0], "seq2seq")
    with pytest.raises(ValueError, match="at least one token"):
        collate_packed(tokens, [], "causal-lm")


@pytest.mark.parametrize("seed", range(6))
def test_splitting_with_a_floor_of_costs_is_never_more_expensive(seed):
    """On a GPU a small piece takes as long as its launches: neither one batch nor a processor's cut
    is cheaper.
    """
    lengths = some_lengths(seed)
    on_gpu = MicroBatchCost(2048, 256)

    def cost(**how):
        pieces = split_padded(np.arange(len(lengths)), lengths, 16_384, **how)
        return sum(int(on_gpu.of(padded_tokens(lengths[piece][:, None]))) for piece in pieces)

    assert cost(cost=on_gpu) <= cost()
    whole = MicroBatchCost(10**6, 0)
    assert cost(cost=on_gpu) <= cost(cost=whole)
    few, many = (
        split_padded(np.arange(len(lengths)), lengths, 16_384, cost=each)
        for each in (whole, on_gpu)
    )
    assert len(few) <= len(many), "nothing to gain"
