"""What the hollow GPU has to be for the other tests here to mean anything."""

import os

import pytest

torch = pytest.importorskip("torch")


def test_the_allocator_counts_what_lives():
    before = torch.cuda.memory_allocated()
    kept = torch.empty(3, 2**20, device="cuda")
    assert torch.cuda.memory_allocated() - before == 3 * 2**22
    del kept
    assert torch.cuda.memory_allocated() == before


def test_memory_runs_out_where_the_gpu_ends():
    _, total = torch.cuda.mem_get_info()
    assert total == pytest.approx(float(os.environ["HOLLOW_GIB"]) * 2**30, rel=1e-6)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total, dtype=torch.uint8, device="cuda")


def test_a_tensor_on_the_wrong_device_is_an_error():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="cuda") @ torch.ones(2)


def test_what_was_copied_there_comes_back():
    sent = torch.arange(1000)
    assert torch.equal(sent.cuda().cpu(), sent)
