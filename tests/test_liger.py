"""Liger's kernels go into one model and no other, and compute what the plain model does.

Whether they do is tried with the real package where it is installed: its kernels, made for GPUs,
run in Triton's interpreter (`interpreted.py`). Both are apart from the rest, as Triton takes 1 GB:
`pip install --no-deps --target liger liger-kernel triton`, then `PYTHONPATH=liger python -m pytest
tests/test_liger.py`.
"""

import copy
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from farthing.model import liger
from farthing.model.adapters import Adapter, add_adapter
from farthing.model.liger import patch, use_liger, why_not_liger
from heads import assert_same, gradients_of, make_model

IDS = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))


def gradients(model) -> dict[str, torch.Tensor]:
    return gradients_of(model, model(input_ids=IDS, labels=IDS).loss)


# ---- where it is refused ----


def test_reasons_are_given_in_words(monkeypatch):
    model = make_model("llama")
    assert use_liger(model) == (False, "no Liger kernels: they are for GPUs")
    on_gpu = [SimpleNamespace(device=torch.device("cuda"))]
    monkeypatch.setattr(torch.nn.Module, "parameters", lambda self: iter(on_gpu))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert why_not_liger(model) == "they are for GPUs from Ampere on"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'farthing[gpu]'" in str(why_not_liger(model))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert why_not_liger(model) is None
    model.config.model_type = "mixtral"
    assert "not among the families" in str(why_not_liger(model))


def test_another_activation_is_refused_before_anything_is_changed(kernels):
    model = make_model("llama", hidden_act="relu")
    with pytest.raises(ValueError, match="another activation"):
        patch(model)
    assert not any("forward" in vars(module) for module in model.modules())


# ---- what becomes of the model, with a package that patches as Liger does ----


@pytest.fixture
def kernels(monkeypatch):
    """In place of Liger: norms in other operations, the family's class and rotation replaced;
    counts rotations.
    """
    rotated = []
    plain_rotation = modeling_llama.apply_rotary_pos_emb

    def rotate(*args):
        rotated.append(1)
        return plain_rotation(*args)

    def norm(self, hidden):
        return torch.nn.functional.rms_norm(
            hidden, hidden.shape[-1:], self.weight, self.variance_epsilon
        )

    def apply(
        rope=True,
        cross_entropy=False,
        fused_linear_cross_entropy=True,
        rms_norm=True,
        swiglu=True,
        model=None,
    ):
        assert (rope, rms_norm, swiglu) == (True, True, True)
        assert (cross_entropy, fused_linear_cross_entropy) == (False, False)
        modeling_llama.apply_rotary_pos_emb = rotate
        modeling_llama.LlamaRMSNorm = type("Other", (), {})
        for module in model.modules():
            if "RMSNorm" in type(module).__name__:
                module.__dict__["forward"] = norm.__get__(module)

    for name in (
        "liger_kernel",
        "liger_kernel.transformers",
        "liger_kernel.transformers.monkey_patch",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(
        sys.modules["liger_kernel.transformers.monkey_patch"],
        "MODEL_TYPE_TO_APPLY_LIGER_FN",
        {"llama": apply},
        raising=False,
    )
    return rotated


def test_one_model_is_patched_and_the_family_stays_as_it_was(kernels):
    plain = make_model("llama")
    model = copy.deepcopy(plain)
    before, names = dict(vars(modeling_llama)), list(model.state_dict())
    assert patch(model) == {"norms": 5, "feed-forwards": 0, "rotations": 2}
    assert all(vars(modeling_llama)[name] is value for name, value in before.items())
    assert list(model.state_dict()) == names
    expected = gradients(plain)
    assert kernels == []
    assert_same(gradients(model), expected, 2e-5)
    assert len(kernels) == 2


def test_a_model_with_an_adapter_is_patched_within(kernels):
    model = add_adapter(make_model("llama"), Adapter(r=4), "causal-lm", 0)
    assert patch(model)["rotations"] == 2
    gradients(model)
    assert len(kernels) == 2


class Norm(torch.nn.Module):
    """In place of Liger's: what Triton would do at its first kernel, forward or backward."""

    fails: type[Exception] | None = None
    width = 0

    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        Norm.width = width

    def forward(self, rows):
        if self.fails is not None:
            raise self.fails(
                "Failed to find C compiler.\nPlease specify via CC environment variable."
            )
        return rows * self.weight


@pytest.mark.parametrize("error", [RuntimeError, OSError, AssertionError, None])
def test_a_model_is_left_as_it_is_where_the_first_kernel_fails(error, kernels, monkeypatch):
    monkeypatch.setattr(liger, "why_not_liger", lambda model: None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.8.5")
    monkeypatch.setattr(
        sys.modules["liger_kernel.transformers"], "LigerRMSNorm", Norm, raising=False
    )
    monkeypatch.setattr(Norm, "fails", error)
    model = make_model("llama")
    is_used, said = use_liger(model)
    assert is_used == (error is None)
    assert Norm.width == 32
    if error is None:
        assert said == "liger-kernel 0.8.5: 5 norms, 2 rotations"
        return
    assert said == f"no Liger kernels: {error.__name__}: Failed to find C compiler."
    assert not any("forward" in vars(module) for module in model.modules())
    gradients(model)


# ---- the real kernels ----


def interpreted(*kinds: str) -> dict[str, Any]:
    """What `interpreted.py` found of these families."""
    if any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")):
        pytest.skip("liger-kernel and triton are not installed")
    command = [sys.executable, str(Path(__file__).with_name("interpreted.py")), *kinds]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert set(found) == set(kinds)
    return found


def test_the_real_kernels_agree_with_the_plain_model_also_under_adapters():
    for kind, facts in interpreted("llama", "gemma2+lora").items():
        assert facts["replaced"] == {
            "norms": 5 if kind == "llama" else 9,
            "feed-forwards": 2,
            "rotations": 2,
        }
        assert (facts["loss"] < 1e-5, facts["gradient"] < 2e-5) == (True, True), (kind, facts)
