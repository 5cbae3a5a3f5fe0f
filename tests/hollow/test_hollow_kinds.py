"""Kinds of GPUs: names that torch gives, what is said of them, and one of several.

For another kind: `python bench/hollow_gpu.py --gpu T4 -- python -m pytest
tests/hollow/test_hollow_kinds.py`.
"""

import os

import torch

import farthing.train.run
from farthing.doctor import check_machine
from farthing.events import Decided
from farthing.model.hardware import choose_numerics, peak_flops
from farthing.prices.gpus import gpu_of_device
from workshop import Heard, make_job


def test_this_gpu_is_known_with_its_memory_and_its_peak():
    name, total = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
    gpu = gpu_of_device(name, total)
    assert gpu is not None, name
    assert gpu.compute_capability == os.environ["HOLLOW_CAPABILITY"]
    numerics = choose_numerics("auto", None, None)
    assert numerics.name == ("bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16")
    assert peak_flops(torch.device("cuda"), numerics.name) == gpu.flops[numerics.name]
    assert gpu_of_device(name, total // 3) is not gpu


def test_a_run_says_what_it_computes_on(tmp_path):
    heard = Heard()
    job = make_job(tmp_path, where={"device": "cuda"}, max_steps=2)
    assert farthing.train.run.train(job, heard).state == "finished"
    decided = heard.of(Decided)[0]
    n_others = torch.cuda.device_count() - 1
    assert decided.device == torch.cuda.get_device_name()
    assert (f"; {n_others} other GPU" in decided.price) == (n_others > 0)
    assert ("Ampere" in decided.computed) == (torch.cuda.get_device_capability() < (8, 0))


def test_the_doctor_has_a_line_for_each_gpu(tmp_path):
    lines = [one for one in check_machine(tmp_path) if one.name.startswith("gpu ")]
    assert [one.state for one in lines] == ["ok"] * torch.cuda.device_count()
