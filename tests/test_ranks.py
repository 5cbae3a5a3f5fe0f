"""Several processes share a run: the same bits on any number of them, one word for all, and an end
when one is lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import farthing.dist.reduce
import farthing.train.run
from farthing.cli.command import main
from farthing.config.job import Job
from farthing.data.packing import split_by_tokens
from farthing.data.row_table import of_slots
from farthing.data.row_table import rows_of as table_of
from farthing.dist import reduce
from farthing.dist.ranks import Ranks
from farthing.dist.reduce import AllReduce, FixedOrder, n_slots_for, reduce_bytes, slots_of
from farthing.errors import InputError, RunInterruptedError
from farthing.local.measurements import append_measurement, read_measurements
from farthing.run.folder import kept
from farthing.run.group import Elastic, Seat, device_of, not_followed, seat_in
from farthing.run.signals import Notice
from farthing.train.rank_setup import slots_of_run
from farthing.train.strategy import resident_bytes
from patience import until
from ranks_at_work import child, finish_on, lora_job, train_on
from together import on_ranks
from workshop import Heard, job_file, log_of, losses_of, make_job, opened, steps_of, with_where

# ---- the table of a step: no process needed ----


def must_hold_all(cells, examples, lengths, n_slots: int, most: int):
    """Every example stands in one cell of a slot, and no cell has more than `most` tokens."""
    assert sorted(i for cell in cells for i in cell.examples.tolist()) == sorted(examples.tolist())
    assert [cell.number for cell in cells] == sorted({cell.number for cell in cells})
    assert all(cell.slot == cell.number % n_slots for cell in cells)
    assert max(int(lengths[cell.examples].sum()) for cell in cells) <= most


@pytest.mark.parametrize("n", [1, 3, 8, 64])
@pytest.mark.parametrize("n_slots", [2, 5, 8])
def test_lanes_that_are_dealt_examples_cost_alike_and_so_do_pairs_of_them(n, n_slots):
    """With eight long and short chats a step, the slower of two processes took 14 % more than the
    mean, when the step was cut before it was dealt."""
    drawn = np.random.default_rng(n)
    lengths = np.clip(drawn.lognormal(5.1, 0.8, 600).astype(int), 8, 683)

    def costs(some):
        return lengths[some] * (3072 + lengths[some])

    def pieces(some, most):
        return split_by_tokens(some, lengths, most)

    worst = []
    for _ in range(12):
        examples = drawn.permutation(600)[:n]
        table = table_of(examples, lengths, 900, n_slots, costs=costs, split=pieces)
        must_hold_all(table, examples, lengths, n_slots, 900)
        columns = [of_slots(table, range(slot, slot + 1)) for slot in range(n_slots)]
        of_columns = [[int(costs(cell.examples).sum()) for cell in column] for column in columns]
        for of_rows in of_columns:
            assert of_rows == sorted(of_rows, reverse=True), "the dearest row comes first"
        sums = [sum(of_rows) for of_rows in of_columns]
        halves = sum(sums[: n_slots // 2]), sum(sums[n_slots // 2 :])
        worst.append(max(halves) / sum(halves) * 2)
    if n_slots in (2, 8) and n >= 8:
        assert sum(worst) / len(worst) < 1.01, "the slower process is what a step takes"
    if n == 64:
        assert len({len(column) for column in columns}) == 1


def test_going_backward_attention_counts_more_where_the_weights_are_frozen(tmp_path):
    """A document of 683 tokens kept one of two processes 4 % longer than the other: frozen products
    need no gradients.
    """
    for method, products in (("lora", 4), ("full", 6)):
        job = make_job(tmp_path / method, method=method, max_steps=1)
        with opened(job) as attempt:
            forward, tokens = attempt.forward, attempt.feed.tokens
            examples, lengths = np.arange(len(tokens)), tokens.lengths.astype(np.int64)
            of_products = forward.costs(tokens, examples) - 7 * lengths**2
        assert (of_products % products == 0).all()
        assert (of_products > products * lengths * forward.squares_at).all(), (
            "labelled tokens go through the head"
        )


# ---- the order of sums: no process needed ----


def gradients_of(slot: int) -> list[torch.Tensor | None]:
    made = torch.Generator().manual_seed(slot)
    drawn = [torch.randn(4, 3, generator=made) * 10.0 ** (slot - 2) for _ in range(5)]
    return [None if (slot + at) % 3 == 0 or at == 4 else each for at, each in enumerate(drawn)]


class Seated:
    """A rank of `n` that sends nothing: each sum is noted, and stays what it was."""

    together = staticmethod(contextlib.nullcontext)

    def __init__(self, index=0, n=2, device="cpu"):
        self.index, self.n, self.device = index, n, torch.device(device)


def summed_on(
    n_ranks: int, n_slots: int, monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor | None]:
    """The gradients of all slots, which each rank hands on to the next."""
    sent = {rank: [] for rank in range(n_ranks)}
    monkeypatch.setattr(reduce.dist, "send", lambda flat, rank: sent[rank].append(flat.clone()))
    monkeypatch.setattr(reduce.dist, "broadcast", lambda flat, rank: None)
    has, reducers = [0] * 5, []
    for rank in range(n_ranks):
        weights = [torch.zeros(4, 3) for _ in has]
        reducer = FixedOrder(Seated(rank, n_ranks), weights, n_slots)  # type: ignore[arg-type]
        for slot in slots_of(rank, n_ranks, n_slots):
            reducer.slot(slot)
            for weight, gradient in zip(weights, gradients_of(slot), strict=True):
                weight.grad = gradient
        has = [max(a, b) for a, b in zip(has, reducer.end(has_failed=False), strict=True)]
        reducers.append(reducer)
    for rank, reducer in enumerate(reducers):

        def receive(flat, _, rank=rank):
            flat.copy_(sent[rank].pop(0))

        monkeypatch.setattr(reduce.dist, "recv", receive)
        reducer.finish(has)
    return [weight.grad for weight in weights]


def test_sums_are_the_same_bits_on_any_number_of_ranks(monkeypatch):
    monkeypatch.setattr(reduce, "BUCKET", 30)
    for n_slots in (2, 5, 8):
        alone = summed_on(1, n_slots, monkeypatch)
        assert alone[-1] is None, "nobody has a gradient of the last"
        for n_ranks in range(2, n_slots + 1):
            for mine, other in zip(alone, summed_on(n_ranks, n_slots, monkeypatch), strict=True):
                assert (mine is None) == (other is None)
                assert mine is None or mine.numpy().tobytes() == other.numpy().tobytes()  # type: ignore[union-attr]


CASES = ("whole", "unused", "fails under way", "fails before", "nothing to do")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_buckets_leave_in_one_order_whatever_happens_to_a_rank(device, monkeypatch):
    """Others wait for each of them: one that has failed, has no micro-batch or no use for a weight
    must send as many. On a GPU they leave while the backward pass is at work.
    """
    monkeypatch.setattr(reduce, "BUCKET", 9)
    sent = {}
    for case in CASES:
        of_case = sent.setdefault(case, [])

        def all_reduce(flat, async_op, of_case=of_case):
            assert async_op
            of_case.append(flat)
            return SimpleNamespace(wait=lambda: None)

        monkeypatch.setattr(reduce.dist, "all_reduce", all_reduce)
        layers = [torch.nn.Linear(3, 3) for _ in range(3)]
        weights = [weight for layer in layers for weight in (layer.weight, layer.bias)]
        reducer = AllReduce(Seated(device=device), weights)  # type: ignore[arg-type]
        x = torch.ones(1, 3)
        if case in ("whole", "unused", "fails under way"):
            for layer in [layers[0], layers[2]] if case == "unused" else layers:
                x = layer(x)
                if case == "fails under way" and layer is layers[1]:
                    x.register_hook(lambda gradient: 1 / 0)
            reducer.last_backward_begins()
            with contextlib.suppress(ZeroDivisionError):
                x.sum().backward()
        assert len(of_case) == (
            {"whole": 6, "unused": 2, "fails under way": 2}.get(case, 0) if device == "cuda" else 0
        )
        own = [None if weight.grad is None else weight.grad.clone() for weight in weights]
        has = reducer.end(has_failed=case.startswith("fails"))
        if case in ("whole", "unused"):
            unused = (2, 3) if case == "unused" else ()
            assert has == [int(at not in unused) for at in range(6)]
        reducer.finish(has)
        for weight, used, gradient in zip(weights, has, own, strict=True):
            assert (weight.grad is not None) == bool(used)
            assert gradient is None or weight.grad is None or torch.equal(weight.grad, gradient)
    assert len(sent["whole"]) == 6
    sizes = [[len(flat) for flat in sent[case]] for case in CASES]
    assert all(each == sizes[0] for each in sizes)
    assert all(not flat.any() for flat in sent["fails before"])


def test_gradients_of_passes_that_do_not_count_are_forgotten():
    weight = torch.nn.Parameter(torch.zeros(3))
    for reducer in (AllReduce(Seated(), [weight]), FixedOrder(Seated(n=1), [weight], 2)):  # type: ignore[arg-type]
        weight.grad = torch.ones(3)
        with reducer.aside():
            weight.grad = torch.full((3,), 7.0)
        if isinstance(reducer, FixedOrder):
            reducer.finish(reducer.end(has_failed=False))
        assert weight.grad.tolist() == [1.0, 1.0, 1.0]


def test_state_comes_to_a_rank_in_its_place(monkeypatch):
    """A copy of all of it would not fit where ddp just fits."""
    own, sent = torch.zeros(3), []
    monkeypatch.setattr(reduce.dist, "broadcast", lambda whole, _: sent.append(whole.data_ptr()))
    rank = Seated(index=1)
    rank.is_first = rank.trains_rows = False  # type: ignore[attr-defined]
    rank.tell_all = lambda value: value  # type: ignore[attr-defined]
    part = SimpleNamespace(
        state=lambda: ({"a": own}, {}), restore=lambda told, _: sent.append(told)
    )
    Ranks.bring_together(rank, {"model": part})  # type: ignore[arg-type]
    assert sent == [own.data_ptr(), {"a": own}]


def test_sums_and_copies_of_weights_take_their_bytes():
    weights = [torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.zeros(7))]
    two, spread, alone = (
        SimpleNamespace(n=n, trains_rows=rows) for n, rows in ((2, False), (2, True), (1, False))
    )
    assert [reduce_bytes(each, weights) for each in (two, spread, alone)] == [144, 0, 0]  # type: ignore[arg-type]
    model = torch.nn.ParameterList(weights)
    assert resident_bytes(model, "adamw_torch_fused") == 12 * 16
    weights[0].requires_grad_(False)
    assert resident_bytes(model, "sgd") == 5 * 4 + 7 * 8


def test_slots_are_as_many_as_share_bits():
    assert [n_slots_for(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [4, 4, 4, 4, 8, 8, 9]


# ---- words between processes ----


def leaves(rank: int, was_asked: bool):
    ranks = Ranks(seat_in(os.environ), patience_s=60.0)
    if rank == 1:
        ranks.notice = Notice()
        ranks.notice.reason = "SIGTERM" if was_asked else None
        ranks.fail(75)
        ranks.close()
    else:
        ranks.gather(None)


@pytest.mark.parametrize("was_asked", [pytest.param(True, marks=pytest.mark.slow), False])
def test_nothing_is_begun_again_where_a_rank_was_asked_to_leave_before_the_first_step(
    was_asked, tmp_path
):
    assert on_ranks(2, tmp_path, leaves, was_asked) == [75 if was_asked else 76, None]


def said_to(rank: int) -> list[Any]:
    """What a rank of two knows of both, and how blocks end in which the second fails."""
    ranks = Ranks(seat_in(os.environ), patience_s=60.0)
    found: list[Any] = [ranks.agree(rank, [rank, 5 - rank]), ranks.least(7 - rank)]
    found += [ranks.tell_all(["a", rank]), ranks.gather("x" * 9 * rank)]
    found += [ranks.sum_up(torch.tensor([1.0, rank])).tolist()]
    found += [1e6 < ranks.link_bytes_per_s() < 1e12]
    for error in (None, RunInterruptedError("asked"), torch.OutOfMemoryError("full")):
        try:
            with ranks.all_or_none():
                if error is not None and rank == 1:
                    raise error
        except Exception as each:
            found.append(type(each).__name__)
    ranks.close()
    return found


def test_what_one_rank_says_all_know(tmp_path):
    one, other = on_ranks(2, tmp_path, said_to)
    assert one == other
    assert one[:5] == [[1, [1, 5]], 6, ["a", 0], ["", "x" * 9], [2.0, 1.0]]
    assert one[5:] == [True, "RunInterruptedError", "OutOfMemoryError"]


# ---- whole runs ----


def sha256_at(job: Job, step: int) -> str:
    """Of weights, moments and progress as they were saved at a step."""
    folders = sorted((Path(job.output_dir) / "checkpoints").glob(f"step-{step:08d}-*"))
    files = [
        path
        for path in sorted(folders[-1].iterdir())
        if path.suffix == ".safetensors" or path.name == "state.json"
    ]
    assert len(files) == 3
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def test_the_same_bits_on_one_and_on_two_of_which_one_is_killed_then_three_that_spread_weights(
    tmp_path,
):
    alone, others = (lora_job(tmp_path / name, max_steps=10) for name in ("alone", "others"))
    finish_on(1, tmp_path, alone)
    killed = train_on(2, tmp_path, others, [1, 4, signal.SIGKILL])
    assert killed == [76, -signal.SIGKILL], "the other one ends, and says why"
    others = with_where(others, strategy="fsdp")
    (measured,) = read_measurements(Path(alone.cache_dir or "") / "measurements.jsonl")
    measurements = Path(others.cache_dir or "") / "measurements.jsonl"
    append_measurement(measurements, replace(measured, n_devices=3, link_bytes_per_s=5e9))
    found = finish_on(3, tmp_path, others)
    assert "ranks" in json.dumps(found[0]["receipt"]), "waiting for others is on the bill"
    known = [each.link_bytes_per_s for each in read_measurements(measurements)]
    assert known == [5e9, 5e9], "it is not measured at each start"
    held, whole = [each["held"][0] for each in found], found[0]["held"][1]
    assert sum(held) == whole, "each rank holds its rows of the layers' frozen weights"
    assert max(held) < 0.5 * whole
    assert kept(Path(alone.output_dir) / "settings.json")["slots"] == 4
    for step in (2, 10):
        assert sha256_at(alone, step) == sha256_at(others, step)
    assert log_of(alone) == log_of(others)


@pytest.mark.parametrize(("strategy", "n"), [("ddp", 2), ("fsdp", 3)])
def test_full_training_on_several_is_that_of_one_to_rounding_with_fewer_examples_than_ranks(
    strategy, n, tmp_path
):
    keys = {
        "n_rows": 7,
        "max_steps": 3,  # of 3, 3 and 1 examples
        "global_batch_size": 3,
        "size": {"hidden": 32, "layers": 1},
        "pretrained": True,
        "optim": "sgd",
        "max_grad_norm": 0.5,
    }
    one, several = (
        make_job(tmp_path / name, micro_batch_tokens=60, **keys) for name in ("one", "several")
    )
    farthing.train.run.train(one, Heard())
    finish_on(n, tmp_path, with_where(several, strategy=strategy))
    assert losses_of(several) == pytest.approx(losses_of(one), rel=1e-5)
    norms, expected = ([row["grad_norm"] for row in steps_of(job)] for job in (several, one))
    assert norms == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_what_one_rank_meets_is_met_by_all(tmp_path):
    """Memory that runs out on the second makes both halve."""
    job = lora_job(tmp_path / "a", save_steps=100, where={"same_bits": False})
    found = finish_on(2, tmp_path, job, [1, 1, "loss", 2])
    assert "out of memory" in found[0]["warnings"]


@pytest.mark.slow
def test_mismatched_answers_are_scored_alike_by_all_ranks(tmp_path):
    rows = [{"prompt": f"{n}", "completion": f" {7 * n}", "label": n % 2 == 0} for n in range(16)]
    job = make_job(tmp_path, task="kto", rows=rows, max_steps=2)
    finish_on(2, tmp_path, job, [1, 1, "mismatched_ratio", 2])
    keys = {"method": {"name": "lora", "lora_dropout": 0.3}, "where": {"same_bits": True}}
    keys |= {"task": "kto", "rows": rows, "max_steps": 4, "learning_rate": 0.1}
    one, two = (make_job(tmp_path / name, **keys) for name in ("one", "two"))
    finish_on(1, tmp_path, one)
    finish_on(2, tmp_path, two)
    assert losses_of(one) == losses_of(two), "dropout is that of the cell"


@pytest.mark.slow
def test_a_damaged_model_is_written_again_without_references(tmp_path):
    row = {"prompt": "a", "chosen": " b", "rejected": " c"}
    job = make_job(tmp_path, task="dpo", rows=[row] * 8, max_steps=1)
    for _ in range(2):
        finish_on(2, tmp_path, job)
        (Path(job.output_dir) / "model/config.json").write_text("{}")


def test_a_run_of_one_slot_goes_on_with_more_to_rounding_and_says_so(tmp_path):
    job, heard, two = lora_job(tmp_path), Heard(), Ranks()
    two.n = 2

    def slots(job, ranks, before):
        return slots_of_run(job.where, ranks, before, heard)

    assert slots(job, Ranks(), 1) == 1
    assert not heard
    assert slots(job, two, 1) == 4
    assert "equal to rounding" in heard.warnings
    assert "no GPU" not in heard.warnings
    slots(with_where(job, device="auto"), two, 0)
    assert "no GPU is here: 2 processes share the processor" in heard.warnings
    assert slots(job, Ranks(), 4) == 4, "on fewer it stays as it was cut"
    plain = make_job(tmp_path / "plain")
    assert slots(plain, Ranks(), 0) == slots(plain, two, 0) == 0


# ---- who sits where, and how processes end together ----


def test_seats_are_those_that_launchers_give():
    torchrun = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    assert seat_in(torchrun) == Seat(3, 4, 1, 2, "a launcher")
    assert seat_in({"MASTER_ADDR": "a", "MASTER_PORT": "1"}) == Seat(), (
        "an address alone means nothing"
    )
    batch_script = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
    assert seat_in(batch_script) == Seat(), "a batch script is no task of a step"
    for wrong in (
        {**torchrun, "RANK": "4"},
        {**torchrun, "WORLD_SIZE": "two"},
        {**torchrun, "LOCAL_RANK": "2"},
    ):
        with pytest.raises(InputError):
            seat_in(wrong)
    assert device_of(1, {"CUDA_VISIBLE_DEVICES": "5, 7"}) == "7"
    assert device_of(1, {}) == "1"
    assert not_followed({"FSDP_VERSION": "2", "ACCELERATE_MIXED_PRECISION": "fp8", "PATH": ""}) == [
        "ACCELERATE_MIXED_PRECISION",
        "FSDP_VERSION",
    ]


KILLED, HANGS = "os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 19)\ntime.sleep(600)"
ENDS: list[tuple[list[list[str]], int, int]] = [
    ([["sys.exit(75)", "sys.exit(75)"]], 75, 0),
    ([["sys.exit(2)", "sys.exit(76)"]], 2, 0),
    ([["sys.exit(76)", KILLED, "sys.exit(76)"], ["sys.exit(0)", "sys.exit(0)"]], 0, 1),
    ([[KILLED, "sys.exit(76)"], ["sys.exit(0)"]], 0, 1),
    ([["sys.exit(76)", "sys.exit(1)"], ["sys.exit(0)"]], 0, 1),
    ([["sys.exit(76)", HANGS], ["sys.exit(3)"]], 3, 1),
    ([["sys.exit(1)", "sys.exit(1)"]], 1, 0),
    ([[KILLED, KILLED]], -9, 0),
    ([["sys.exit(76)", "sys.exit(76)"]] * 3, 75, 2),
    (
        [["sys.exit(0)", HANGS], ["sys.exit(0)"]],
        0,
        1,
    ),  # the first ends last: who is there yet does not answer
]


def test_attempts_end_with_the_right_code_and_go_on_with_those_that_are_left(
    monkeypatch,
):
    for attempts, code, n_said in ENDS:
        hangs = any(
            HANGS in each for each in attempts
        )  # where none does, one may begin long after another has ended
        monkeypatch.setattr("farthing.run.group.GRACE_S", 0.5 if hangs else 120.0)
        said = []
        started = []

        def start(seat, slot, number, attempts=attempts, started=started):
            started.append((number, slot))
            return child(attempts[number - 1][seat.index])

        attempt = Elastic(len(attempts[0]), start, said.append)
        assert attempt.wait() == code, attempts
        assert (len(said), len(started)) == (n_said, sum(len(each) for each in attempts)), (
            attempts,
            said,
        )
        assert all(each.poll() is not None for each in attempt.children), "no process is left"


def test_a_start_from_zero_is_not_asked_for_again_once_a_rank_was_lost(tmp_path, monkeypatch):
    codes, began = iter(["sys.exit(76)", KILLED, "sys.exit(0)"]), []

    def begin(words, **_):
        began.append("--allow-restart" in words)
        return child(next(codes))

    monkeypatch.setattr("farthing.run.supervisor.begin", begin)
    job = job_file(tmp_path, where={"gpus": 2, "device": "cpu"})
    assert main(["train", str(job), "--allow-restart"]) == 0
    assert began == [True, True, False]


def test_a_killed_rank_that_waits_in_the_kernel_is_gone_for_the_others(
    monkeypatch,
):
    for name in ("GRACE_S", "STUCK_S"):
        monkeypatch.setattr(f"farthing.run.group.{name}", 0.2)
    stuck, said = child(HANGS), []
    codes = {(1, 0): "sys.exit(76)", (2, 0): "sys.exit(0)"}
    kill = stuck.kill
    monkeypatch.setattr(stuck, "kill", lambda: None)  # no signal ends it

    def start(seat, slot, number):
        return stuck if (number, slot) == (1, 1) else child(codes[number, slot])

    try:
        assert Elastic(2, start, said.append).wait() == 0
        assert stuck.poll() is None
        assert "rank 1 of 2 (it did not answer) was lost" in said[0]
    finally:
        kill()
        stuck.wait()


@pytest.mark.parametrize(
    ("index", "took_s", "code"), [(1, 20.0, 76), (1, 0.0, None), (0, 20.0, None)]
)
def test_who_is_done_and_waits_for_a_first_rank_that_hangs_says_so(
    index, took_s, code, monkeypatch
):
    """Stopped in its export, the first rank was killed a minute after the others had given it up,
    and not at once. One that is gone at the same moment is no loss."""
    ranks = Ranks()
    ranks.index, ranks.n, ranks.is_first, ranks.patience_s = index, 2, index == 0, 20.0
    ranks.seat, ranks.word, ranks.of_beats = (
        replace(ranks.seat, index=index, n=2, by="farthing"),
        1000,
        None,
    )
    now = [time.monotonic()]

    def all_reduce(*_, **__):
        now[0] += took_s
        raise RuntimeError("no answer")

    def leave(code):
        raise KeyError(code)

    monkeypatch.setattr("farthing.dist.ranks.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("farthing.dist.ranks.dist.all_reduce", all_reduce)
    monkeypatch.setattr("farthing.dist.ranks.os._exit", leave)
    with pytest.raises(SystemExit if code is None else KeyError) as ended:
        ranks.beat()
    assert code is None or ended.value.args == (code,)


def test_a_wish_to_leave_reaches_all_and_nothing_is_begun_again(tmp_path):
    polite = "signal.signal(15, lambda *_: sys.exit(75))\nopen({!r}, 'w')\ntime.sleep(600)"
    listening = [tmp_path / "first", tmp_path / "second"]
    attempt = Elastic(
        2, lambda seat, slot, n: child(polite.format(str(listening[seat.index]))), lambda text: None
    )
    until(lambda: all(path.exists() for path in listening))
    attempt.send_signal(signal.SIGTERM)
    assert attempt.wait() == 75
    assert attempt.n_begun == 1


def test_a_wish_to_leave_reaches_ranks_that_are_being_started():
    def start(seat, slot, n):
        if n == 2:
            attempt.send_signal(signal.SIGTERM)
        return child("time.sleep(600)" if n == 2 else (KILLED, "sys.exit(76)")[slot])

    attempt = Elastic(2, start, lambda text: None)
    assert attempt.wait() == 75
