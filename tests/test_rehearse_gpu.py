"""The rehearsal on a hollow GPU, as far as a torch without CUDA can follow: what it tries, and how
it ends.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import yaml

import rehearse_gpu
from every_family import MAPPINGS
from farthing.config.job import KEYS
from farthing.models.families import DECODERS, ENCODERS, PACKED
from farthing.objectives.registry import objective_of
from rehearse_gpu import Case


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


def test_settings_are_keys_of_a_job():
    besides = [
        yaml.safe_load(case.besides)
        for case in rehearse_gpu.all_cases()
        if case.besides.startswith("{")
    ]
    assert besides
    for keys in besides:
        assert keys.keys() <= KEYS.keys()
        assert all(inner.keys() <= set(KEYS[section]) for section, inner in keys.items())


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="this torch is built for CUDA: make rehearse-gpu"
)
def test_a_torch_without_cuda_is_refused_in_words(capsys):
    assert rehearse_gpu.main([]) == 2
    assert "make rehearse-gpu" in capsys.readouterr().err


def test_a_fault_is_told_by_its_place_and_a_refusal_by_its_words(tmp_path, monkeypatch):
    def fails(case: Case, folder: Path) -> str:
        if case.method == "full":
            raise rehearse_gpu.RefusedError("no reason")
        raise ValueError("two\nlines")

    monkeypatch.setattr(rehearse_gpu, "rehearse", fails)
    cases = [
        Case("llama", "causal-lm", method, "bf16", "packed", "H100") for method in ("full", "lora")
    ]
    refused, failed = (rehearse_gpu.ended(case, tmp_path) for case in cases)
    assert refused == ("refused", "no reason")
    assert failed[0] == "failed"
    assert failed[1].startswith("ValueError: two lines (test_rehearse_gpu.py:")
