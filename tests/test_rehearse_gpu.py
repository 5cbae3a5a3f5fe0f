"""The rehearsal on a hollow GPU, on a torch without CUDA: how it ends."""

import pytest
import torch

import rehearse_gpu


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="this torch is built for CUDA: make rehearse-gpu"
)
def test_a_torch_without_cuda_is_refused_in_words(capsys):
    assert rehearse_gpu.main([]) == 2
    assert "make rehearse-gpu" in capsys.readouterr().err
