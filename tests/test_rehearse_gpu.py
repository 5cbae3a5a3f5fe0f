"""The rehearsal on a hollow GPU, as far as a torch without CUDA can follow: what it tries, and how
it ends.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import rehearse_gpu
from every_family import MAPPINGS
from farthing.models.families import DECODERS, ENCODERS, PACKED
from farthing.objectives.registry import objective_of


def test_every_family_is_tried_in_every_method_and_precision_packed_and_padded():
    tried = {(one.family, one.task, one.method, one.precision) for one in rehearse_gpu.all_cases()}
    layouts = {(one.family, one.task, one.layout) for one in rehearse_gpu.all_cases()}
    pairs = PACKED[objective_of("seq2seq").head]
    families = [
        *itertools.product(DECODERS, ("causal-lm", "classification")),
        *itertools.product(ENCODERS, ("classification",)),
        *itertools.product(pairs, ("seq2seq",)),
    ]
    for of_family in families:
        if of_family[0] not in MAPPINGS[of_family[1]]:
            continue  # ERNIE 4.5 has no class for it
        assert {(*of_family, layout) for layout in ("packed", "shared", "padded")} <= layouts
        for case in itertools.product(("full", "lora"), ("bf16", "fp16", "fp32")):
            assert (*of_family, *case) in tried


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="this torch is built for CUDA: make rehearse-gpu"
)
def test_a_torch_without_cuda_is_refused_in_words(capsys):
    assert rehearse_gpu.main([]) == 2
    assert "make rehearse-gpu" in capsys.readouterr().err
