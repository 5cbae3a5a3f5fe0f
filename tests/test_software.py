"""GPUs that the installed software can't use are turned away with the line that would let them in;
fp16's risk is said.
"""

from dataclasses import replace

import pytest

import planned
from farthing.data.lengths import from_mean
from farthing.errors import HardwareError, InputError
from farthing.model.hardware import choose_numerics
from farthing.models.model_config import known_config
from farthing.planner.decide import decide
from farthing.planner.machines import machine_of
from farthing.planner.search import Refusal
from farthing.planner.software import (
    Torch,
    builds,
    fp16_risk,
    parse_torch,
    pip_line,
    runs_in_words,
    why_no_code,
)
from farthing.planner.types import JobSpec, Machine
from farthing.prices.gpus import find_gpu, gpus
from offers import offer_of
from workshop import with_gpu


def on(gpu: str, wanted: JobSpec) -> Machine:
    found = machine_of(find_gpu(gpu), 1, wanted)
    assert isinstance(found, Machine)
    return found


def wanted_of(model: str, **changes) -> JobSpec:
    usual = {
        "lengths": from_mean(2000, 200, 1024),
        "target_modules": ("all-linear",),
    }
    risk = fp16_risk(known_config(model) or {})
    return planned.wanted_of(model, global_batch=16, fp16_risk=risk, **(usual | changes))


def test_every_version_of_torch_has_one_build_on_pypi():
    found = [(one.since, one.is_default) for one in builds() if one.package == "torch"]
    for version, _ in found:
        assert found.count((version, True)) == 1


@pytest.mark.parametrize(
    ("version", "can", "cannot"),
    [
        (
            "2.13.0",
            ["T4", "A100-80GB", "L40S", "B300", "RTX 5090"],
            ["V100-16GB", "P100", "K80", "MI300X"],
        ),
        (
            "2.13.0+cu126",
            ["P100", "V100-32GB", "T4", "RTX 4090", "H100"],
            ["K80", "B200", "RTX 5090"],
        ),
        ("2.13.0+rocm7.2", ["MI300X"], ["H100"]),
        ("2.16", ["T4"], ["V100-16GB"]),
    ],
)
def test_which_gpus_a_torch_has_code_for(version, can, cannot):
    found = parse_torch(version)
    assert [name for name in can if why_no_code(find_gpu(name), found)] == []
    assert [name for name in cannot if not why_no_code(find_gpu(name), found)] == []


def test_the_pip_line_names_a_wheel_that_has_code_for_the_gpu():
    for gpu in gpus().values():
        for version in ("2.13.0", "2.14", "2.15.0"):
            line = pip_line(gpu, Torch(version))
            if line is None:
                assert gpu.name == "K80"
                continue
            again = parse_torch(line.rpartition(" ")[2])
            assert why_no_code(gpu, again) is None, (gpu.name, line)
            assert f"/whl/{again.build}," in line
    assert (
        pip_line(find_gpu("V100-16GB"), Torch("2.13.0"))
        == "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126, and plan"
        " with --torch 2.13.0+cu126"
    )
    assert "'torch==2.14.*'" in (pip_line(find_gpu("V100-16GB"), Torch("2.15.0")) or "")


def test_no_plan_is_on_a_gpu_that_the_torch_cannot_run():
    wanted, volta = wanted_of("Qwen/Qwen2.5-0.5B"), find_gpu("V100-16GB")
    refused = machine_of(volta, 1, wanted, torch=parse_torch("2.13.0"))
    assert isinstance(refused, Refusal)
    assert refused.change == pip_line(volta, Torch("2.13.0"))
    assert isinstance(machine_of(volta, 1, wanted, torch=parse_torch("2.13.0+cu126")), Machine)


def test_what_else_a_job_needs_has_code_too():
    turing, volta = find_gpu("T4"), find_gpu("V100-16GB")
    assert (
        "flash-attn"
        in (why_no_code(turing, Torch("2.13.0"), attention="flash_attention_2") or ("",))[0]
    )
    assert why_no_code(find_gpu("L4"), Torch("2.13.0"), attention="flash_attention_2") is None
    assert why_no_code(volta, parse_torch("2.13.0+cu126"), needs_bitsandbytes=True) is None


@pytest.mark.parametrize("text", ["2.13+cpu", "latest", "2.12", "2.13+cu128", "2.15+cu126"])
def test_a_torch_that_is_not_known_is_refused_by_name(text):
    with pytest.raises(InputError, match=text.partition("+")[2] or text):
        parse_torch(text)


def test_the_notes_say_what_can_be_used():
    assert runs_in_words(Torch("2.13.0")).startswith(
        "torch 2.13.0 from PyPI (cu130) has code for Turing, Ampere"
    )


# ---- fp16 ----


@pytest.mark.parametrize(
    ("config", "is_risky"),
    [
        ({"model_type": "t5", "torch_dtype": "float32"}, True),
        ({"model_type": "gemma2", "torch_dtype": "float32"}, True),
        ({"model_type": "llama", "vocab_size": 128256}, True),
        ({"model_type": "llama", "vocab_size": 32000, "torch_dtype": "float16"}, False),
        ({"model_type": "llama", "vocab_size": 32000, "dtype": "bfloat16"}, True),
        ({"model_type": "new", "text_config": {"torch_dtype": "torch.bfloat16"}}, True),
        ({"model_type": "gpt2"}, False),
        ({"model_type": "xlm-roberta", "vocab_size": 250002}, False),
    ],
)
def test_models_trained_in_bf16_are_known(config, is_risky):
    assert bool(fp16_risk(config)) == is_risky


@pytest.mark.parametrize("model", ["google/flan-t5-base", "Qwen/Qwen2.5-0.5B", "google/gemma-2-2b"])
def test_a_gpu_without_bf16_computes_such_a_model_in_fp32_unless_fp16_is_asked_for(model):
    wanted = wanted_of(model)
    machine = on("T4", wanted)
    assert machine.precision == "fp32"
    assert "fp16" in machine.precision_note
    asked = replace(wanted, precision="fp16")
    risky, calm = on("T4", asked), on("T4", replace(asked, fp16_risk=""))
    assert risky.precision == "fp16"
    risk, usual = (decide(asked, [(one, [offer_of("T4", 0.3)])]).plans[0] for one in (risky, calm))
    assert risk.total_usd == usual.total_usd
    assert risk.usd_range.high > 1.5 * usual.usd_range.high - 0.5 * usual.total_usd
    assert on("L4", wanted).precision == "bf16"


def test_where_fp32_does_not_fit_fp16_is_offered_with_its_risk():
    wanted = wanted_of("Qwen/Qwen2.5-7B")
    offer = offer_of("Quadro RTX 6000", 0.3)
    (rejected,) = decide(wanted, [(on(offer.gpu, wanted), [offer])]).rejected
    assert rejected.change.startswith("method: qlora, or train.fp16: true at a risk")
    asked = replace(wanted, precision="fp16")
    assert decide(asked, [(on(offer.gpu, asked), [offer])]).plans, "what is offered can be done"


@pytest.mark.parametrize(
    ("risk", "asked", "name"),
    [("overflow", None, "fp32"), ("", None, "fp16"), ("overflow", True, "fp16")],
)
def test_the_trainer_does_as_the_plan_says(risk, asked, name, monkeypatch):
    v100 = {"get_device_capability": (7, 0), "get_arch_list": ["sm_70"]}
    with_gpu(monkeypatch, is_available=True, get_device_name="Tesla V100", **v100)
    assert choose_numerics("auto", None, asked, fp16_risk=risk).name == name
    with pytest.raises(HardwareError):
        choose_numerics("auto", True, None, fp16_risk=risk)
