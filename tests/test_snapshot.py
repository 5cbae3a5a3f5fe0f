"""Checkpoints of a GPU: copied behind the next step, never of two steps at once. A lane without a
GPU stands in.
"""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import farthing.run.checkpoint
import farthing.run.snapshot
import survive
from farthing.run.checkpoint import Checkpoints
from farthing.run.snapshot import Later
from farthing.train.saver import Saver
from workshop import Heard, are_same, losses_of, make_job, train


class Event:
    """Copies when somebody waits for it, as late as a device may."""

    def __init__(self, lane, source, into):
        self._lane, self._source, self._into = lane, source, into

    def synchronize(self):
        """The copy is made now, and not before the trainer has come to its next update."""
        self._lane.comes_late()
        self._into.copy_(self._source)


class SlowLane:
    """Two buffers and no stream."""

    def __init__(self, device=None, at=None):
        self._buffers = [
            torch.empty(farthing.run.snapshot.PIECE_BYTES, dtype=torch.uint8) for _ in range(2)
        ]
        self._at = at
        self.order = []

    def comes_late(self):
        """Wait, once, until the trainer is there."""
        if self._at is not None:
            assert self._at.wait(120)
            self._at = None

    def fetch(self, piece, number):
        """Nothing is copied yet."""
        into = self._buffers[number][: len(piece)]
        self.order.append(("fetch", number))
        return into, Event(self, piece, into)


def tensors_of_all_kinds() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        "weight": torch.randn(37, 11, generator=draw),
        "half": torch.randn(5, 3, generator=draw).bfloat16(),
        "bytes": torch.randint(0, 255, (77,), generator=draw).to(torch.uint8),
        "count": torch.tensor(3.0),
        "flags": torch.tensor([True, False, True]),
        "whole": torch.arange(5),
        "none": torch.empty(0, 4),
    }


@pytest.mark.parametrize("piece_bytes", [16, 64, 1 << 20])
@pytest.mark.parametrize("keeps_in_memory", [True, False])
def test_what_is_fetched_in_pieces_is_what_was_there(
    keeps_in_memory, piece_bytes, tmp_path, monkeypatch
):
    monkeypatch.setattr(farthing.run.snapshot, "PIECE_BYTES", piece_bytes)
    tensors, at_once = tensors_of_all_kinds(), {"small": torch.tensor([1.5, 2.5])}
    later = Later({"part": dict(tensors)}, SlowLane())
    later.keeps_in_memory = keeps_in_memory
    later.fetch()
    assert later.is_copied == keeps_in_memory
    if keeps_in_memory:
        copies = later.copies("part")
        assert all(
            copies[name].data_ptr() != tensors[name].data_ptr()
            for name in tensors
            if tensors[name].numel()
        )
    later.write("part", at_once, tmp_path / "part.safetensors")
    found = load_file(tmp_path / "part.safetensors")
    assert found.keys() == tensors.keys() | at_once.keys()
    for name, expected in (tensors | at_once).items():
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected)


def test_memory_of_the_host_is_taken_only_where_half_of_it_is_left(monkeypatch):
    class Memory:
        available = 4000

    monkeypatch.setattr(farthing.run.snapshot.psutil, "virtual_memory", Memory)
    assert Later({"part": {"a": torch.zeros(500)}}, SlowLane()).keeps_in_memory
    assert not Later({"part": {"a": torch.zeros(501)}}, SlowLane()).keeps_in_memory


KEYS = {"max_steps": 6, "save_steps": 2, "n_rows": 40, "save_total_limit": 5}


def as_on_a_gpu(patch: pytest.MonkeyPatch, share: float = 0.5):
    """Every tensor is fetched later: when the trainer waits for it, before its next update, its
    next save or its end.
    """
    at_update = threading.Event()
    for honest in (Checkpoints.wait_until_copied, Checkpoints.wait):

        def wait(checkpoints, honest=honest):
            at_update.set()
            try:
                return honest(checkpoints)
            finally:
                at_update.clear()

        patch.setattr(Checkpoints, honest.__name__, wait)
    patch.setattr(farthing.run.checkpoint, "can_wait", lambda tensor: tensor.nbytes > 0)
    patch.setattr(farthing.run.checkpoint, "CudaLane", lambda device: SlowLane(device, at_update))
    patch.setattr(farthing.run.snapshot, "HOST_SHARE", share)


def checkpoints_of(folder: Path) -> dict[str, Any]:
    """Every tensor of every checkpoint."""
    return {
        f"{path.parent.name}/{path.name}/{name}": tensor
        for path in sorted((folder / "run/checkpoints").glob("step-*/*.safetensors"))
        for name, tensor in load_file(path).items()
    }


@pytest.fixture(scope="module")
def at_once(tmp_path_factory):
    """Checkpoints, losses and result of a run on a CPU."""
    folder = tmp_path_factory.mktemp("at-once")
    job = make_job(folder, **KEYS)
    train(job)
    return checkpoints_of(folder), losses_of(job), survive.result_of(Path(job.output_dir))


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_a_checkpoint_that_is_copied_behind_the_next_step_is_of_one_step(
    share, at_once, tmp_path, monkeypatch
):
    as_on_a_gpu(monkeypatch, share)
    waited = []
    honest = Saver.wait_for_copies

    def wait(saver):
        waited.append(saver.checkpoints.is_copying)
        honest(saver)
        assert not saver.checkpoints.is_copying

    monkeypatch.setattr(Saver, "wait_for_copies", wait)
    job = make_job(tmp_path, **KEYS)
    outcome = train(job)
    checkpoints, losses, result = at_once
    found = checkpoints_of(tmp_path)
    assert are_same(found, checkpoints)
    assert losses_of(job) == losses
    assert survive.differences(result, survive.result_of(Path(job.output_dir))) == []
    assert True in waited  # the copy was under way when the update was due
    assert outcome.receipt.checkpoints.n == 3


@pytest.mark.slow
def test_a_copy_that_fails_lets_training_go_on(tmp_path, monkeypatch):
    as_on_a_gpu(monkeypatch)

    def failing(*_):
        raise torch.AcceleratorError("CUDA error: out of memory")

    calls = []
    honest = SlowLane.fetch

    def once(lane, piece, number):
        calls.append(1)
        return failing() if len(calls) == 1 else honest(lane, piece, number)

    monkeypatch.setattr(SlowLane, "fetch", once)
    heard = Heard()
    assert train(make_job(tmp_path, **KEYS), heard).state == "finished"
    assert (
        "the checkpoint of step 2 could not be written (CUDA error: out of memory)"
        in heard.warnings
    )
