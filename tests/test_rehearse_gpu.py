"""The rehearsal of CUDA, as far as a torch without CUDA can follow: what it tries, and how it ends."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

import rehearse_gpu
from farthing.planner.families import DECODERS, ENCODERS


def test_every_family_is_tried_in_every_method_precision_and_layout() -> None:
    tried = {(one.family, one.task, one.method, one.precision, one.layout) for one in rehearse_gpu.all_cases()}
    wanted = itertools.chain(
        itertools.product(DECODERS, ("causal-lm", "classification"), ("full", "lora"), ("bf16", "fp16", "fp32")),
        itertools.product(ENCODERS | {"distilbert"}, ("classification",), ("full", "lora"), ("bf16", "fp16", "fp32")),
        itertools.product(("t5", "mt5"), ("seq2seq",), ("full", "lora"), ("bf16", "fp16", "fp32")),
    )
    for case, layout in itertools.product(wanted, ("packed", "padded")):
        assert (*case, layout) in tried


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA: make rehearse-gpu")
def test_a_torch_without_cuda_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert rehearse_gpu.main([]) == 2
    assert "make rehearse-gpu" in capsys.readouterr().err


def test_a_case_whose_process_dies_fails_and_the_others_are_still_tried() -> None:
    def dies() -> str:
        os._exit(11)

    def skips() -> str:
        raise rehearse_gpu.Skipped("no reason")

    def fails() -> str:
        raise ValueError("two\nlines")

    work = [("a", lambda: "fine"), ("b", dies), ("c", skips), ("d", fails)]
    first, second, third, fourth = rehearse_gpu.in_children(work)
    assert first == ("a", "ok", "fine")
    assert second == ("b", "failed", "its process died")
    assert third == ("c", "skipped", "no reason")
    assert fourth[:2] == ("d", "failed")
    assert fourth[2].startswith("ValueError: two lines (test_rehearse_gpu.py:")
