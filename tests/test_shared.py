"""What examples begin with in common, computed once: the same losses and gradients, pieces that
fit, nothing that leaks.
"""

import itertools
import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from farthing.data import prefix_sharing as shared
from farthing.data.batches import Batches, collate, permutation
from farthing.data.prefix_sharing import (
    collate_shared,
    in_common,
    saved_by_sharing,
    split_shared,
)
from farthing.data.token_set import TokenSet
from farthing.model import attention_kernels
from farthing.model.attention import DECODERS, can_share, go_packed, packed_logits
from farthing.model.documents import Documents, packed_batch
from heads import assert_same, gradients_of, language_model_loss, make_model, summed_loss
from packed_models import CLOSE, MAIN, assert_close, model_of
from thinned import thinned
from token_sets import token_set


def some_tree(seed: int, n: int = 8, longest: int = 9) -> TokenSet:
    """Texts that go on from one another anywhere, some the same, some beginning another; targets
    from anywhere on.
    """
    draw = np.random.default_rng(seed)
    texts = [draw.integers(3, 99, longest).tolist()]
    while len(texts) < n:
        before = texts[draw.integers(len(texts))]
        kept = int(draw.integers(len(before) // 2, len(before) + 1)) if draw.random() < 0.8 else 0
        texts.append(
            (before[:kept] + draw.integers(3, 99, draw.integers(kept == 0, longest)).tolist())[:40]
        )
    return token_set(
        texts, [int(draw.integers(1 + len(text) // 3, len(text) + 1)) for text in texts]
    )


@pytest.fixture
def _takes_little(monkeypatch):
    """Two tokens are enough to be taken over."""
    monkeypatch.setattr(shared, "LEAST_TOKENS", 2)


# ---- what is in common ----


@pytest.mark.usefixtures("_takes_little")
@pytest.mark.parametrize("seed", range(5))
def test_each_takes_over_the_most_it_may_from_those_before_it(seed):
    tokens = some_tree(seed, n=12)
    examples = permutation(len(tokens), seed, 0)[:10]
    order, taken = in_common(tokens, examples)
    assert sorted(order.tolist()) == list(range(10))
    texts = [tokens.example(index)[0].tolist() for index in examples[order]]
    for at, text in enumerate(texts):
        is_target = tokens.example(int(examples[order[at]]))[1]
        may = int(is_target.argmax()) - 1 if is_target.any() else len(text) - 1
        most = max(
            (n for n in range(len(text) + 1) for other in texts[:at] if other[:n] == text[:n]),
            default=0,
        )
        assert taken[at] == (min(may, most) if min(may, most) >= 2 else 0)


@pytest.mark.parametrize(
    ("n_inputs", "taken"),
    [(60, [0, *[59] * 2]), (33, [0, 32, 32]), (32, [0, 0, 0])],
)
def test_at_least_32_tokens_that_score_nothing_are_taken_over(n_inputs, taken):
    tokens = token_set([[5] * 80 + [index] for index in range(3)], [n_inputs] * 3)
    assert in_common(tokens, np.arange(3))[1].tolist() == taken


# ---- pieces ----


def cost_of(tokens: TokenSet, piece: NDArray[np.int64]) -> int:
    """What a piece computes, and its copies."""
    taken = in_common(tokens, piece)[1]
    return int(tokens.lengths[piece].sum() - taken.sum() + np.ceil(taken * 0.0625).sum())


@pytest.mark.usefixtures("_takes_little")
@pytest.mark.parametrize("seed", range(5))
def test_pieces_hold_every_example_once_within_the_budget(seed):
    tokens, draw = some_tree(seed, n=60, longest=20), np.random.default_rng(seed)
    examples, budget = permutation(60, seed, 0)[:50], int(draw.integers(20, 200))
    pieces = split_shared(tokens, examples, budget)
    assert sorted(np.concatenate(pieces).tolist()) == sorted(examples.tolist())
    costs = [cost_of(tokens, piece) for piece in pieces]
    assert all(cost <= budget or len(piece) == 1 for cost, piece in zip(costs, pieces, strict=True))
    assert costs == sorted(costs, reverse=True)
    assert [piece.tolist() for piece in split_shared(tokens, examples, budget)] == [
        piece.tolist() for piece in pieces
    ]


@pytest.mark.usefixtures("_takes_little")
@pytest.mark.parametrize("seed", range(3))
def test_pieces_are_as_few_as_can_be_and_the_largest_as_small(seed):
    tokens, budget = some_tree(seed, n=8, longest=20), 60
    order = np.arange(8)[in_common(tokens, np.arange(8))[0]]
    best = (99, 0)
    for cuts in range(2**7):
        ends = [0, *(at + 1 for at in range(7) if cuts >> at & 1), 8]
        stretches = [order[start:stop] for start, stop in itertools.pairwise(ends)]
        costs = [cost_of(tokens, stretch) for stretch in stretches]
        if all(
            cost <= budget or len(stretch) == 1
            for cost, stretch in zip(costs, stretches, strict=True)
        ):
            best = min(best, (len(costs), max(costs)))
    pieces = split_shared(tokens, np.arange(8), budget)
    assert (len(pieces), max(cost_of(tokens, piece) for piece in pieces)) == best


def test_what_begins_alike_is_kept_together():
    systems = [[group] * 100 for group in range(4)]
    texts = [[*systems[index % 4], index, 1, 2, 3] for index in range(40)]
    tokens = token_set(texts, [102] * 40)
    pieces = split_shared(tokens, permutation(40, 0, 0), 450)
    assert [sorted({int(index) % 4 for index in piece}) for piece in pieces] == [[0, 1], [2, 3]]
    assert all(
        collate_shared(tokens, piece, "causal-lm")["input_ids"].size == 2 * 100 + 20 * 4
        for piece in pieces
    )
    assert split_shared(tokens, np.arange(0), 450) == []


# ---- whether it is worth it ----


def test_what_is_saved_is_what_the_steps_leave_out():
    draw = np.random.default_rng(0)
    system = draw.integers(3, 99, 1000).tolist()
    texts = [system + draw.integers(3, 99, n).tolist() for n in draw.integers(20, 400, 200)]
    tokens = token_set(texts, [1010] * 200)
    batches = Batches(np.arange(200), 20, seed=0)
    pieces = [
        piece
        for step in range(10)
        for piece in split_shared(tokens, batches.examples_of(step), 4096)
    ]
    computed = sum(collate_shared(tokens, piece, "causal-lm")["input_ids"].size for piece in pieces)
    saved = saved_by_sharing(tokens, batches, 4096)
    assert saved == pytest.approx(1 - computed / tokens.lengths.sum())
    assert 0.5 < saved < 1000 / 1210
    assert saved_by_sharing(tokens, Batches(np.arange(200), 20, seed=0), 4096) == saved
    assert saved_by_sharing(tokens, batches, 1500) < saved  # two or three in a piece
    assert saved_by_sharing(tokens, Batches(np.arange(200), 1, seed=0), 4096) == 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
def test_what_was_sampled_of_a_file_is_not_held(tmp_path):
    tokens = token_set([[5] * 8192 for _ in range(64)], [1] * 64)
    tokens.ids.tofile(tmp_path / "ids.bin")
    with open(tmp_path / "ids.bin", "rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.int32)

    def held_kib():
        maps = Path("/proc/self/smaps").read_text().partition(f"{tmp_path}/ids.bin\n")[2]
        return int(maps.partition("Rss:")[2].split()[0])

    assert mapped.sum() == 5 * 64 * 8192
    assert held_kib() == 2048
    saved_by_sharing(replace(tokens, ids=mapped), Batches(np.arange(64), 16, seed=0), 65_536)
    assert held_kib() == 0


def test_nothing_is_saved_where_little_is_shared():
    draw = np.random.default_rng(0)
    alone = token_set(
        [draw.integers(3, 99, n).tolist() for n in draw.integers(50, 400, 100)], [40] * 100
    )
    assert saved_by_sharing(alone, Batches(np.arange(100), 50, seed=0), 8192) == 0
    learned = token_set([[5] * 300 + [index] for index in range(100)], [1] * 100)  # train_on_prompt
    assert saved_by_sharing(learned, Batches(np.arange(100), 50, seed=0), 8192) == 0


# ---- the same losses and gradients ----


def padded_loss(model, tokens: TokenSet) -> Tensor:
    """The same from a padded batch, by way of transformers' attention."""
    arrays = collate(tokens, np.arange(len(tokens)), "causal-lm", 1)
    return summed_loss(
        model, {name: torch.from_numpy(array) for name, array in arrays.items()}, "causal-lm"
    )[0]


def n_left_out(tokens: TokenSet) -> int:
    return int(in_common(tokens, np.arange(len(tokens)))[1].sum())


@pytest.mark.usefixtures("_takes_little")
@pytest.mark.parametrize(
    ("family", "seed"),
    thinned(
        [(family, 0) for family in MAIN] + [(family, 0) for family in sorted(DECODERS - set(MAIN))],
        4,
    ),
)
def test_losses_and_gradients_are_those_of_whole_padded_examples(family, seed):
    model, tokens = model_of(family, seed=seed), some_tree(seed)
    assert can_share(model, "causal-lm") is None
    assert n_left_out(tokens) > 10
    padded = padded_loss(model, tokens)
    theirs = gradients_of(model, padded)
    go_packed(model)
    shared_batch = packed_batch(collate_shared(tokens, np.arange(len(tokens)), "causal-lm"))
    ours = language_model_loss(model, shared_batch, "causal-lm")
    assert float(ours.detach()) == pytest.approx(float(padded.detach()), rel=CLOSE)
    assert_same(gradients_of(model, ours), theirs, 3 * CLOSE)


class Adds(TorchDispatchMode):
    """Remembers the dtypes in which rows are added up."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run it, and look at what it adds to."""
        if "index_add" in str(func):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_gradients_of_many_copies_are_added_up_in_fp32():
    n = 600  # on a GPU a sum in bf16 would stop at 256
    lengths, rows = (
        [1] * n,
        np.concatenate([[0], np.stack([np.zeros(n - 1), np.arange(1, n)], 1).flatten()]),
    )
    documents = Documents.of(lengths, "cpu", [1] + [2] * (n - 1), rows.astype(np.int64))
    keys = torch.zeros(n, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    with Adds() as adds:
        (found,) = torch.autograd.grad(attention_kernels.keys_as_seen(keys, documents).sum(), keys)
    assert found.dtype == torch.bfloat16
    assert found.flatten().tolist() == [n, *[1] * (n - 1)]
    assert adds.dtypes == [torch.float32]


@pytest.mark.usefixtures("_takes_little")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_classification_reads_the_last_token_of_the_whole_text(family):
    model = model_of(family, "classification")
    texts = [[5, 6, 7, 8, index] for index in (9, 10, 11, 9)]
    texts += [[5, 6, 7, 8, 9, 12], [5, 6, 1], [20], [5, 6, 7, 8]]
    texts += [[5, 6, 7, 8, 1, 1]]  # padding: nothing of its own is read
    tokens = token_set(texts, [len(text) for text in texts], labels=[0, 1, 2, 0, 1, 2, 0, 1, 2])
    assert can_share(model, "classification") is None
    assert n_left_out(tokens) == 2 + 5 * 4 + 5
    alone = torch.cat([model(input_ids=torch.tensor([text])).logits for text in texts])
    labels = torch.tensor(tokens.labels, dtype=torch.int64)
    theirs = gradients_of(model, F.cross_entropy(alone, labels, reduction="sum"))
    go_packed(model)
    batch = packed_batch(collate_shared(tokens, np.arange(9), "classification"))
    assert batch["input_ids"][0, -2:].tolist() == [1, 1]
    ours = packed_logits(model, batch)
    assert_close(ours, alone)
    assert batch["labels"].tolist() == labels.tolist()
    assert_same(
        gradients_of(model, F.cross_entropy(ours, batch["labels"], reduction="sum")), theirs
    )


# ---- refusals ----


@pytest.mark.parametrize(
    ("model", "task", "why"),
    [
        (lambda: model_of("bert", "classification"), "classification", "what follows"),
        (lambda: make_model("t5"), "seq2seq", "both directions"),
    ],
)
def test_models_that_look_ahead_or_have_two_stacks_do_not_share(model, task, why):
    assert why in str(can_share(model(), task))


def test_a_task_with_two_sides_is_refused():
    tokens = token_set([[5] * 40, [5] * 40], [39, 39])
    with pytest.raises(ValueError, match="pad it"):
        collate_shared(tokens, np.arange(2), "seq2seq")
