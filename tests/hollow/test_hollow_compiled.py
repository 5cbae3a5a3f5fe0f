"""What is compiled for a GPU, by torch's own Inductor, Triton and ptxas: flex attention, Liger's
kernels and layers.
"""

import pytest
import torch

import farthing.train.run
from farthing.events import Decided
from farthing.model.attention_kernels import KERNELS, AttentionSettings
from farthing.model.compiled import n_graphs
from farthing.model.documents import Documents
from workshop import Heard, make_job

_MORE = {"where": {"device": "cuda"}, "max_steps": 2, "probe": False}


@pytest.fixture(autouse=True)
def from_scratch():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def attended(lengths: list[int], size: int, *, trains: bool):
    """Flex attention with a soft cap and a window over documents, in bf16."""
    documents = Documents.of(lengths, "cuda")
    tensors = [
        torch.zeros(
            sum(lengths), heads, size, device="cuda", dtype=torch.bfloat16, requires_grad=trains
        )
        for heads in (4, 2, 2)
    ]
    with torch.set_grad_enabled(trains):
        out = KERNELS["flex"](
            *tensors,
            documents,
            AttentionSettings(causal=True, scale=0.125, softcap=50.0, window=40),
        )
    if trains:
        out.sum().backward()
        assert all(tensor.grad is not None for tensor in tensors)


def test_flex_attention_with_a_soft_cap_is_compiled_once_for_all_lengths():
    before = n_graphs()
    attended([300, 196], 32, trains=True)
    attended([900, 124], 32, trains=True)
    made = n_graphs() - before
    assert made <= 3  # attention, and the blocks of a batch, of few and of many
    for lengths in ([300, 300], [700, 17, 1]):
        attended(lengths, 32, trains=True)
    assert n_graphs() - before == made


def test_layers_with_ligers_kernels_are_compiled(tmp_path):
    """Their rotation has a place of its own among the globals of the family, and torch.compile has
    to find it.
    """
    pytest.importorskip("liger_kernel")
    heard = Heard()
    job = make_job(tmp_path, torch_compile=True, use_liger_kernel=True, size={"layers": 1}, **_MORE)
    assert farthing.train.run.train(job, heard).state == "finished"
    computed = heard.of(Decided)[0].computed
    assert "1 rotation" in computed
    assert "1 layer compiled" in computed
