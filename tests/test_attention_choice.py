"""Which kernel attends, over the whole table, and how documents are padded."""

import pytest
import torch

from farthing.model import attention_kernels
from farthing.model.attention_choice import AttentionHardware, AttentionTask, choose
from farthing.model.attention_kernels import (
    AttentionSettings,
    choose_kernel,
    here,
    padded_groups,
    use_flash_3,
)

A100, H100, T4, RTX = (8, 0), (9, 0), (7, 5), (8, 9)
FULL = {"has_flash": True, "has_flex": True}


FLASH_3, EXACT = FULL | {"has_flash_3": True}, FULL | {"is_deterministic": True}
FP32, CAPPED, DROPPED = {"dtype": "fp32"}, {"has_softcap": True}, {"has_dropout": True}


@pytest.mark.parametrize(
    ("capability", "here", "asked", "kernel"),
    [
        (H100, FULL, {"dtype": "fp16"}, "flash"),
        (H100, FULL, DROPPED, "flash"),
        (H100, FLASH_3, DROPPED, "padded"),
        (H100, FULL, CAPPED, "flex"),
        (H100, FULL, FP32, "flex"),
        (H100, FULL, {"head_size": 20}, "flex"),
        (H100, FULL, FP32 | DROPPED, "padded"),
        (H100, FULL, FP32 | {"head_size": 128}, "padded"),
        (H100, FULL, {"head_size": 4}, "padded"),
        (H100, FULL, {"head_size": 512}, "padded"),
        (H100, {}, {}, "padded"),
        # before Ampere
        *((T4, FULL, more, "padded") for more in ({}, CAPPED, FP32)),
        # wide heads train where shared memory is large enough
        (RTX, FULL, {"head_size": 256}, "flash"),
        (RTX, FULL, {"head_size": 208}, "padded"),
        (RTX, FULL, {"head_size": 256} | DROPPED, "padded"),
        (A100, FULL, {"head_size": 208}, "flash"),
        (A100, FULL, {"head_size": 256} | DROPPED, "flash"),
        *((each, FULL, {"head_size": 128} | CAPPED, "flex") for each in (RTX, (8, 6), (12, 0))),
        *((each, FULL, {"head_size": 256} | CAPPED, "padded") for each in (RTX, (8, 6), (12, 0))),
        *((each, FULL, {"head_size": 256} | CAPPED, "flex") for each in (A100, H100, (10, 0))),
        # where bits must repeat
        (H100, EXACT, {}, "flash"),
        (H100, EXACT, DROPPED, "flash"),
        (H100, EXACT, CAPPED, "padded"),
        (H100, EXACT, FP32, "padded"),
    ],
)
def test_kernels_are_chosen_by_what_they_can_do(capability, here, asked, kernel):
    """For bf16 heads of 64, unless said otherwise."""
    asked = AttentionTask(**{"dtype": "bf16", "head_size": 64, **asked})
    assert choose(asked, AttentionHardware(capability, **here)) == kernel


def test_what_is_asked_is_read_off_the_tensors_and_the_machine(monkeypatch):
    made = []
    monkeypatch.setattr(
        attention_kernels,
        "choose",
        lambda asked, machine: made.append(asked) or choose(asked, machine),
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: A100)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    here.cache_clear()

    class Query:
        device, dtype, shape = torch.device("cuda"), torch.float16, (7, 8, 96)

    try:
        query = Query()
        assert choose_kernel(query, AttentionSettings(True, 1.0)) == "flash"
        assert choose_kernel(query, AttentionSettings(True, 1.0, 4, 0.1, 2.0)) == "padded"
    finally:
        here.cache_clear()
    assert made == [AttentionTask("fp16", 96), AttentionTask("fp16", 96, True, True)]
    assert choose_kernel(torch.zeros(3, 2, 8), AttentionSettings(True, 1.0, None, 0.1)) == "cpu"


# ---- documents in padded calls ----


@pytest.mark.parametrize(
    ("width", "groups"),
    [
        (64, [[1, 3, 6, 4], [7, 2, 5, 0]]),
        (768, [[1, 3], [6], [4, 7, 2, 5], [0]]),
        (4096, [[1], [3], [6], [4, 7], [2, 5, 0]]),
    ],
)
def test_a_group_ends_where_it_pads_more_than_a_call_costs(width, groups):
    lengths = [16, 1900, 40, 1800, 500, 30, 900, 480]
    assert padded_groups(lengths, lengths, width, 6e9) == groups


@pytest.mark.parametrize(
    ("capability", "is_exact", "asks"), [((9, 0), False, 1), ((9, 0), True, 0), ((8, 0), False, 0)]
)
def test_flash_attention_3_is_for_hopper_where_bits_need_not_repeat(
    capability, is_exact, asks, monkeypatch
):
    asked = []

    def activate(name):
        asked.append(name)
        raise ModuleNotFoundError("flash_attn_interface")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    use_flash_3.cache_clear()
    here.cache_clear()
    assert here(torch.device("cuda"), is_exact).capability == capability
    assert asked == ["FA3"] * asks
    assert not use_flash_3(), "a package that is not there is no error"
    use_flash_3.cache_clear()
    here.cache_clear()
