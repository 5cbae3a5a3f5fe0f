"""Weights spread over several processes: what one process computes, checkpoints of rows, and
refusals in words.
"""

import contextlib
import copy
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers.modeling_layers import GradientCheckpointingLayer

import farthing.train.resolve
import farthing.train.run
from farthing.config.job import Job
from farthing.dist.fsdp import ShardedModel, ShardingSettings
from farthing.dist.ranks import Ranks
from farthing.errors import InputError, ModelError
from farthing.local import machine
from farthing.model.forward import Forward
from farthing.model.hardware import Numerics
from farthing.run.checkpoint import Checkpoints, commit_together, fill_along
from farthing.run.folder import kept
from farthing.run.group import seat_in
from farthing.run.parts import Shared, files_of, read_part
from farthing.storage.files import DamagedFileError, verify_folder
from farthing.train.build import build_model
from farthing.train.estimate import estimated
from farthing.train.memory import dearest_step
from farthing.train.rank_setup import joined
from farthing.train.resolve import open_examples
from farthing.train.strategy import read_where_it_differs, resident_bytes, shard_weights
from ranks_at_work import SMALL, finish_on, train_on
from together import on_ranks
from workshop import Heard, losses_of, make_job, opened, resolved, rows_of, with_gpu, with_where

# ---- whole runs ----


IN_FP16 = Numerics(torch.device("cpu"), torch.float16, needs_scaler=True)


def spread_job(folder: Path, family: str = "llama", **keys) -> Job:
    where = {"gpus": 2, "patience_s": 20, "strategy": "fsdp", **keys.pop("where", {})}
    settings = {
        "n_rows": 23,
        "max_steps": 7,
        "global_batch_size": 7,
        "save_steps": 1,
        "eval_rows": rows_of(family, 5, 5),
        "learning_rate": 0.001,
        "size": {"hidden": 32, "layers": 2},
        "predict_with_generate": False,
    }
    return make_job(folder, family, where=where, **(SMALL | settings | keys))


def trained_alone(folder: Path, family: str = "llama", **keys) -> Job:
    """The job on one process."""
    job = spread_job(folder / "alone", family, where={"strategy": "ddp", "gpus": None}, **keys)
    farthing.train.run.train(job, Heard())
    return job


def saves_of(job: Job):
    folder = Path(job.output_dir) / "checkpoints"
    return {
        int(path.name.split("-")[1]): path
        for path in sorted(folder.glob("step-*"))
        if "." not in path.name
    }


def refuse_difference(job: Job, other: Job):
    """Losses, checkpoints and exported weights of two runs are equal to rounding."""
    assert losses_of(job) == pytest.approx(losses_of(other), rel=1e-5)
    step, found = max(saves_of(other)), []
    for each in (job, other):
        exported = load_file(Path(each.output_dir) / "model" / "model.safetensors")
        save = saves_of(each)[step]
        found.append((read_part(save, "model"), read_part(save, "optimizer"), exported))
    assert_close(*found, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "keys", "where", "ranks"),
    [
        ("t5", {"optim": "adamw_torch"}, {}, [(1, 2), (2, 5), (4, None)]),
        (
            "bert",
            {"gradient_checkpointing": True, "optim": "adamw_torch_offload"},
            {"reshard_after_forward": False},
            [(3, 4), (2, None)],
        ),
        (
            "llama",
            {"global_batch_size": 2, "optim": "sgd"},
            {"strategy": "hsdp", "offload_weights": True},
            [(4, 3), (2, 4), (4, None)],
        ),
        (  # several micro-batches a rank: copies of rows are summed in the last one
            "llama",
            {"global_batch_size": 12, "micro_batch_tokens": 40},
            {"strategy": "hsdp"},
            [(4, None)],
        ),
        ("llama", {"train_ddp": 1}, {}, [(2, 3), (1, None)]),
    ],
)
def test_other_numbers_of_ranks_and_other_ways_give_the_same(family, keys, where, ranks, tmp_path):
    begins_with_ddp = keys.pop("train_ddp", 0)
    alone = trained_alone(tmp_path, family, **keys)
    spread = spread_job(tmp_path / "spread", family, where=where, **keys)
    n_local = 2 if where.get("strategy") == "hsdp" else 0
    for number, (n, step) in enumerate(ranks):
        if step is None:
            found = finish_on(n, tmp_path, spread, None, n_local)
            held, whole = [each["held"][0] for each in found], found[0]["held"][1]
            n_copies = n // n_local if n_local else 1
            assert sum(held) == whole * n_copies, "each rank has its rows and no more"
        else:
            first = begins_with_ddp and not number
            job = with_where(spread, strategy="ddp") if first else spread
            assert (
                train_on(n, tmp_path, job, [n - 1, step, signal.SIGKILL], n_local)[-1]
                == -signal.SIGKILL
            )
    refuse_difference(spread, alone)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "full"), [("fsdp", "loss"), ("ddp", "clip")])
def test_a_rank_without_memory_ends_all_and_leaves_less_to_the_next_attempt(
    strategy, full, tmp_path
):
    where = {"strategy": strategy}
    alone, spread = trained_alone(tmp_path), spread_job(tmp_path / "spread", where=where)
    first, second = train_on(2, tmp_path, spread, [1, 4, full, 99])
    assert [first, second["code"]] == [76, 76]
    assert "with smaller micro-batches" in second["why"]
    settings = kept(Path(spread.output_dir) / "settings.json") or {}
    assert settings["micro_batch_tokens"] < 90
    finish_on(2, tmp_path, spread)
    refuse_difference(spread, alone)


@pytest.mark.slow
def test_rows_travel_through_a_store_to_another_number_of_ranks(tmp_path):
    alone = trained_alone(tmp_path)
    spread = spread_job(tmp_path / "spread", output_store=str(tmp_path / "store"))
    assert train_on(2, tmp_path, spread, [1, 5, signal.SIGKILL]) == [76, -signal.SIGKILL]
    shutil.rmtree(spread.output_dir)
    assert "was brought back" in str(finish_on(3, tmp_path, spread)[0]["said"])
    refuse_difference(spread, alone)


@pytest.mark.parametrize(("budget", "least"), [(16_384, 1), (200, 1), (200, 4)])
def test_the_largest_micro_batch_is_rehearsed_and_lowered_until_it_has_room(
    budget, least, tmp_path, monkeypatch
):
    """With a second pass that adds up gradients, where a step will."""
    size = {"hidden": 32, "layers": 1}
    job = make_job(tmp_path, n_rows=40, max_steps=5, micro_batch_tokens=budget, size=size)
    loss, most, n_passes = Forward.loss, budget // least, []

    def limited(forward, batch, *more):
        n_passes.append(1)
        if batch["input_ids"].numel() > most:
            raise torch.OutOfMemoryError("made up")
        return loss(forward, batch, *more)

    monkeypatch.setattr(Forward, "loss", limited)
    with opened(job) as attempt:
        steps, step = attempt.steps, dearest_step(attempt)
        largest = [steps.feed.largest_of(each)[1] for each in range(5)]
        assert attempt.memory.n_tokens == largest[step] == max(largest)
        assert attempt.memory.accumulates == steps.feed.first_steps()[1] == (budget == 200)
        before = [weight.clone() for weight in steps.step.trained]
        n_examples, n_tokens = steps.rehearse(step)
        assert n_tokens <= most
        assert (n_examples, n_tokens) == steps.feed.largest_of(step)
        assert (steps.feed.settings.micro_batch_tokens < budget) == (least > 1)
        assert least > 1 or len(n_passes) == (2 if budget == 200 else 1)
        for weight, other in zip(steps.step.trained, before, strict=True):
            assert weight.grad is None
            assert torch.equal(weight, other)
        attempt.progress.step = 5
        assert dearest_step(attempt) is None, "nothing is left to take"


def told(rank: int):
    """Another rank has its model from the first, or reads it where its configuration makes another."""  # noqa: E501
    ranks, found = Ranks(seat_in(os.environ), patience_s=20.0), []
    for width in (2, 3):
        torch.manual_seed(rank)
        model = torch.nn.Linear(2, 2 if ranks.is_first else width).to(
            torch.bfloat16 if ranks.is_first else torch.float32
        )
        model.register_buffer("kept", torch.full((2,), float(rank)))
        model = read_where_it_differs(
            ranks, model, lambda: torch.nn.ParameterDict({"read": torch.nn.Parameter()})
        )
        found.append(type(model).__name__)
        if width == 2:
            ranks.bring((*model.parameters(), *model.buffers()))
            found += [
                str(model.weight.dtype),
                *(each.tolist() for each in model.state_dict().values()),
            ]
    ranks.close()
    return found


@pytest.mark.slow
def test_ranks_have_the_model_that_the_first_one_has_read(tmp_path):
    first, second = on_ranks(2, tmp_path, told)
    assert first[:-1] == second[:-1]
    assert (first[1], first[4]) == ("torch.bfloat16", [0.0, 0.0])
    assert (first[-1], second[-1]) == ("Linear", "ParameterDict")


# ---- what is spread ----


class Layer(GradientCheckpointingLayer):  # type: ignore[misc]
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, states):
        return self.linear(states)


class Shares(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])


LAYER, HEAD = 10_304, 13_120  # weights; the head is tied to the embeddings
ROOT = HEAD + 32  # with the last norm


@pytest.mark.parametrize(
    ("method", "reshards", "dtype", "expected"),
    [
        (
            "full",
            True,
            torch.bfloat16,
            (2 * (ROOT + LAYER + HEAD), 2 * (ROOT + 5 * LAYER + HEAD), 8 * ROOT + 4 * LAYER),
        ),
        (
            "full",
            False,
            torch.bfloat16,
            (2 * (ROOT + 3 * LAYER + HEAD), 2 * (ROOT + 6 * LAYER + HEAD), 8 * ROOT + 10 * LAYER),
        ),
        (
            "full",
            True,
            None,
            (4 * (ROOT + LAYER + HEAD), 4 * (ROOT + 4 * LAYER + HEAD), 4 * (3 * ROOT + LAYER)),
        ),
        (
            "lora",
            True,
            torch.bfloat16,
            (4 * (ROOT + LAYER), 4 * (ROOT + 2 * LAYER), 4 * (ROOT + LAYER)),
        ),
    ],
)
def test_what_is_gathered_is_counted_at_the_moment_when_it_is_there(
    method, reshards, dtype, expected, tmp_path
):
    """Bytes as torch's allocator has them on a GPU: the root and one layer in the loss, two in the
    backward pass.
    """
    job = make_job(tmp_path, method=method, size={"hidden": 32, "layers": 3})
    model = build_model(resolved(job, Numerics(torch.device("cpu"), None)), ())
    with contextlib.closing(Ranks()) as ranks:
        ranks.apply_fsdp(model, ShardingSettings(reshards, gathers_in=dtype))
        assert ranks.fsdp.gathered == expected


def test_the_residual_stream_and_norms_are_as_precise_as_on_one_gpu(tmp_path):
    job = make_job(tmp_path, bf16=True, size={"hidden": 32, "layers": 2})
    numerics = Numerics(torch.device("cpu"), torch.bfloat16)
    spec = resolved(job, numerics)
    found = []
    for sharding in (None, ShardingSettings(gathers_in=torch.bfloat16)):
        model, seen = build_model(spec, ()), []
        with contextlib.closing(Ranks()) as ranks:
            if sharding:
                ranks.apply_fsdp(model, sharding)
            for module in model.modules():
                is_layer = isinstance(module, GradientCheckpointingLayer)
                if is_layer or "Norm" in type(module).__name__:
                    module.register_forward_hook(
                        lambda _, given, out, seen=seen: seen.extend((given[0].dtype, out.dtype))
                    )
            ids = torch.arange(12)[None]
            with numerics.autocasting():
                loss = ranks.within(lambda model=model, ids=ids: model(ids, labels=ids).loss)
            loss.backward()
            if ranks.fsdp is not None:
                ranks.fsdp.take_gradients()
            gradients = [weight.grad for weight in ranks.trained_of(model).values()]
            assert {each.dtype for each in gradients} == {torch.float32}  # type: ignore[union-attr]
        found.append((seen, float(loss.detach())))
    (own, loss_of_one), (spread, loss_of_spread) = found
    assert own == spread == [torch.float32] * 14, "two layers and their four norms, and the last"
    assert loss_of_one == pytest.approx(loss_of_spread, rel=2e-3)


def test_gradients_added_up_whole_are_those_added_up_by_rows():
    found = []
    for is_whole in (False, True):
        torch.manual_seed(0)
        model = Shares()
        with contextlib.closing(Ranks()) as ranks:
            ranks.apply_fsdp(model, ShardingSettings(gathers_in=torch.bfloat16))
            spreads = ranks.fsdp
            assert spreads.whole_gradients_bytes == 4 * 2 * (2 * 2 + 2)
            spreads.accumulates_whole = is_whole
            for _ in range(2):
                spreads.begin_step(3)
                for passed in range(3):
                    seen = torch.full((1, 2), float(passed), dtype=torch.bfloat16)
                    ranks.within(
                        lambda model=model, seen=seen: model.layers[1](model.layers[0](seen)).sum()
                    ).backward()
                    is_sent = all(weight.grad is not None for weight in model.parameters())
                    assert is_sent == (not is_whole or passed == 2)
                spreads.take_gradients()
                found.append([weight.grad for weight in ranks.trained_of(model).values()])
    for others in found[1:]:
        assert_close(others, found[0], rtol=1e-2, atol=1e-8)


def test_weights_that_fsdp_would_compute_wrongly_are_refused():
    shared, single = Shares(), Shares()
    shared.layers[1].linear.weight = shared.layers[0].linear.weight
    single.scale = torch.nn.Parameter(torch.ones(()))
    for model, why in (
        (shared, "is shared by several layers"),
        (single, "`scale` is a single number"),
    ):
        with pytest.raises(ModelError, match=why):
            ShardedModel(model, torch.device("cpu"), 0, 1, ShardingSettings())


def test_experts_that_nobody_asks_have_no_gradient_as_on_one_process():
    """FSDP2 sends zeros for them, so that ranks that ask others send as much; an optimizer must not
    see those.
    """
    model = Shares()
    model.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(3)])
    alone = copy.deepcopy(model)

    def loss_of(model):
        return model.layers[0](model.experts[1](torch.ones(1, 2))).square().sum()

    def gradients(weights):
        return {name: weight.grad for name, weight in weights if weight.grad is not None}

    loss_of(alone).backward()
    with contextlib.closing(Ranks()) as ranks:
        ranks.apply_fsdp(model, ShardingSettings())
        ranks.within(lambda: loss_of(model)).backward()
        ranks.fsdp.take_gradients()
        found = gradients(ranks.trained_of(model).items())
    assert set(found) == {"layers.0.linear.weight", "layers.0.linear.bias", "experts.1.weight"}
    assert_close(found, gradients(alone.named_parameters()))


@pytest.mark.parametrize(
    ("method", "family", "keys", "why"),
    [
        ("qlora", "llama", {}, "4-bit weights lose their quantization"),
        ("lora", "llama", {"model": {"new_tokens": ["<a>"]}}, "are written whole"),
        ("full", "llama", {"optim": "adamw_8bit"}, "is not by rows"),
        ("full", "llama", {"torch_compile": True}, "are not compiled"),
        ("full", "llama", {"where": {"same_bits": True}}, "equal to rounding"),
        ("lora", "t5", {"predict_with_generate": True}, "texts of different lengths"),
        ("full", "llama", {"where": {"offload_weights": True}}, "fp16"),
    ],
)
def test_weights_that_cannot_be_spread_are_refused_in_words(method, family, keys, why, tmp_path):
    where = {"gpus": 2, "strategy": "fsdp", **keys.pop("where", {})}
    job = make_job(tmp_path, family, method=method, where=where, **keys)
    with pytest.raises(InputError, match=f"can't be spread: .*{why}") as refused:
        shard_weights(resolved(job, IN_FP16), Ranks(), torch.nn.Linear(1, 1), Heard())
    assert refused.value.to_do


def test_a_run_that_is_measured_has_all_its_weights_on_the_device(tmp_path):
    where = {"gpus": 2, "strategy": "fsdp", "offload_weights": True}
    job, heard = make_job(tmp_path, where=where), Heard()
    with opened(job, heard) as run:
        assert not run.context.ranks.is_fsdp
    assert "where.gpus" not in heard.warnings, "nobody can start a probe on two"


@pytest.mark.parametrize(("asked", "found"), [("auto", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")])
def test_a_process_alone_spreads_weights_over_the_device_that_computes(
    asked, found, tmp_path, monkeypatch
):
    with_gpu(monkeypatch, is_available=True)
    with joined(make_job(tmp_path, where={"device": asked, "strategy": "fsdp"})) as (ranks, _):
        assert (ranks.n, ranks.device.type) == (1, found)


def test_a_run_is_planned_for_all_gpus_that_share_it(tmp_path, monkeypatch):
    """Each process sees its own GPU alone."""
    name, size = "NVIDIA H100 80GB HBM3", 80 << 30
    monkeypatch.setattr(machine, "_gpus", lambda: [machine.LocalGpu(name, size)])
    with_gpu(monkeypatch, get_device_name=name, mem_get_info=(size, size))
    found = {}
    for n_ranks, strategy in ((1, "ddp"), (2, "ddp"), (4, "fsdp")):
        where = {"device": "auto", "gpus": n_ranks, "strategy": strategy}
        job = make_job(
            tmp_path / f"{n_ranks}",
            size={"hidden": 64},
            n_rows=64,
            global_batch_size=64,
            where=where,
        )
        spec = resolved(job, Numerics(torch.device("cuda"), torch.bfloat16))
        examples, _ = open_examples(spec, Heard())
        folder = Path(job.output_dir)
        folder.mkdir()
        found[n_ranks] = estimated(spec, folder, examples, None, Heard(), n_ranks)
    one, two, four = (estimate.memory for estimate in found.values())
    assert two["cache"] - one.get("cache", 0) >= 2**29
    assert two["weights"] == one["weights"] == pytest.approx(4 * four["weights"], rel=1e-3)


def test_auto_spreads_what_leaves_no_room_on_one_gpu(tmp_path, monkeypatch):
    model, spread = torch.nn.Linear(1000, 250, bias=False), []
    assert resident_bytes(model, "adamw_torch_fused") == 16 * 250_000
    assert resident_bytes(model, "adamw_torch_offload") == 8 * 250_000
    ranks = Ranks()
    ranks.n, ranks.device = 2, torch.device("cuda")
    monkeypatch.setattr(ranks, "least", lambda number: number)
    monkeypatch.setattr(ranks, "tell_all", lambda value: value)
    monkeypatch.setattr(ranks, "apply_fsdp", lambda model, how: spread.append(how))
    monkeypatch.setattr(ranks, "bring", lambda tensors: None)
    for total_bytes, n_spread in ((6_000_000, 0), (4_500_000, 1)):
        memory = type("Properties", (), {"total_memory": total_bytes})()
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device, memory=memory: memory
        )
        heard = Heard()
        numerics = Numerics(torch.device("cpu"), torch.bfloat16)
        shard_weights(resolved(make_job(tmp_path), numerics), ranks, model, heard)
        assert len(spread) == n_spread
        assert ("leave no room" in str(heard)) == bool(n_spread)
    assert spread == [ShardingSettings(True, 2, torch.bfloat16)]


# ---- files of rows ----


SHAPES = {"wide": (7, 3), "short": (1, 4), "flat": (2,), "buffer": (3,), "wide|step": ()}


def rows_of_rank(n: int, index: int, name: str):
    """Where the rows of a rank begin and end; None of a tensor that each has."""
    key = name.partition("|")[0]
    if key == "buffer":
        return None
    n_rows = SHAPES[key][0]
    size = -(-n_rows // n)
    return min(n_rows, index * size), min(n_rows, (index + 1) * size)


class Saved:
    """A part whose tensors a rank has rows of."""

    def __init__(self, n, index):
        self.whole = {
            name: torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
            for name, shape in SHAPES.items()
        }
        self.own = dict(self.whole)
        for name, tensor in self.whole.items():
            if tensor.ndim and (rows := rows_of_rank(n, index, name)):
                self.own[name] = tensor[slice(*rows)].clone()

    def state(self):
        return self.own, {}

    def restore(self, tensors, values):
        assert tensors.keys() == self.own.keys()
        self.own = tensors


class Meeting:
    """Ranks that are threads."""

    def __init__(self, n):
        self.n, self.values, self.barrier = n, {}, threading.Barrier(n, timeout=120)

    def gather(self, index, value):
        self.values[index] = value
        self.barrier.wait()
        found = [self.values[each] for each in range(self.n)]
        self.barrier.wait()
        return found


def shared_of(meeting: Meeting, index: int) -> Shared:
    n, gather = meeting.n, partial(meeting.gather, index)
    return Shared(index == 0, index, n, False, partial(rows_of_rank, n, index), gather)


def checkpoints_of(folder: Path, n: int) -> list[Checkpoints]:
    meeting, others = Meeting(n), [folder.parent / f"of-{index}" for index in range(1, n)]
    return [
        Checkpoints(own, "run-1", 3, warn=lambda text: None, shared=shared_of(meeting, index))
        for index, own in enumerate([folder, *others])
    ]


def errors_of_saving(ranks: list[Checkpoints], step: int):
    for index, each in enumerate(ranks):
        each.save(step, {"model": Saved(len(ranks), index)}, None)
    return [each.wait().error for each in ranks]  # type: ignore[union-attr]


def test_what_ranks_have_saved_is_read_by_any_number_of_them(tmp_path):
    for n in (1, 2, 4):
        ranks = checkpoints_of(tmp_path / f"on-{n}", n)
        assert errors_of_saving(ranks, 5) == [None] * n
        assert ranks[0].newest_valid() == 5
        folder = ranks[0].folder_of(5)
        whole = read_part(folder, "model")
        assert_close(whole, Saved(1, 0).whole, rtol=0, atol=0)
        for n_others in (1, 2, 3, 4, 5):
            for index, each in enumerate(
                checkpoints_of(tmp_path / f"on-{n}-then-{n_others}", n_others)
            ):
                part = Saved(n_others, index)
                expected = dict(part.own)
                each.restore(folder, {"model": part})
                assert_close(part.own, expected, rtol=0, atol=0)


def test_a_save_that_fails_on_one_rank_has_failed_on_all(tmp_path, monkeypatch):
    ranks = checkpoints_of(tmp_path / "run", 3)
    plain = farthing.run.checkpoint.save_file

    def full_on_the_third(tensors, path):
        if "00003-of" in path.name:
            raise OSError(28, "No space left on device")
        plain(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(farthing.run.checkpoint, "save_file", full_on_the_third)
        errors = errors_of_saving(ranks, 5)
    assert all("No space left" in str(error) for error in errors)
    assert list((tmp_path / "run").iterdir()) == [], "nothing is left of it"
    assert errors_of_saving(ranks, 6) == [None] * 3
    assert ranks[0].steps() == [6]


def test_ranks_that_wait_for_a_draft_hear_that_there_is_none(tmp_path):
    """The first one fails before any file is written: its folder can't be made."""
    meeting = Meeting(2)
    with ThreadPoolExecutor() as pool:
        along = pool.submit(fill_along, shared_of(meeting, 1), lambda draft: [])
        with pytest.raises(FileExistsError):
            commit_together(shared_of(meeting, 0), tmp_path, lambda draft: [], {})
        with pytest.raises(OSError, match="exists"):
            along.result(120)


def test_a_part_without_one_of_its_files_is_damaged(tmp_path):
    ranks = checkpoints_of(tmp_path / "run", 3)
    errors_of_saving(ranks, 5)
    folder = ranks[0].folder_of(5)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(DamagedFileError, match="missing"):
        verify_folder(folder)
    with pytest.raises(DamagedFileError, match="there are 2 of 3"):
        files_of(folder, "model")
    save_file({"x": torch.ones(1)}, folder / "model-00002-of-00004.safetensors")
    with pytest.raises(DamagedFileError):
        files_of(folder, "model")
