"""What this machine is without torch, against torch and against machines that are not here."""

import os

import psutil
import pytest
import torch

from command import in_python
from farthing.cli.leaving import n_processes_of
from farthing.local import machine
from farthing.local.machine import (
    Cpu,
    free_memory_bytes,
    local_machine,
    read_cpuinfo,
)
from farthing.model.hardware import Numerics
from farthing.run.folder import kept
from farthing.train.estimate import estimated
from farthing.train.resolve import open_examples, resolve
from workshop import Heard, make_job, resolved, with_gpu, with_where

XEON = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R)  Platinum 8481C CPU @ 2.70GHz
cpu MHz\t\t: 2699.998
physical id\t: 0
core id\t\t: {0}
flags\t\t: fpu avx2 fma avx512f avx512_bf16 amx_bf16 amx_tile
power management:
"""
ARM = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes bf16 i8mm
CPU implementer\t: 0x41
CPU part\t: 0xd40

processor\t: 1
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes bf16 i8mm
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


def on_its_own(code: str, **environment: str) -> str:
    """What a fresh Python says."""
    own = {
        name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")
    } | environment
    return in_python(code, check=True, env=own).stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OMP_NUM_THREADS": "1"},
        {"OMP_NUM_THREADS": "2,1"},
        {"MKL_NUM_THREADS": "1"},
    ],
)
def test_the_trainer_and_the_planner_name_the_hardware_alike(environment):
    planner = on_its_own(
        "import sys\nfrom farthing.local.machine import local_machine\n"
        "print(local_machine().hardware)\nassert 'torch' not in sys.modules",
        **environment,
    )
    trainer = on_its_own(
        "import torch,"
        " farthing.model.hardware\nprint(farthing.model.hardware.hardware_key(torch.device('cpu')))",  # noqa: E501
        **environment,
    )
    assert planner == trainer
    assert " thread" in planner


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="Linux only: a process kept to one core"
)
def test_a_process_kept_to_one_core_computes_with_one_thread():
    code = (
        "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from farthing.local.machine import local_machine\nimport torch\n"
        "print(local_machine().n_threads, torch.get_num_threads())"
    )
    assert on_its_own(code) == "1 1"


def test_processors():
    text = "\n".join(
        XEON.format(i // 2).replace("processor\t: 0", f"processor\t: {i}") for i in range(8)
    )
    xeon = read_cpuinfo(text)
    assert xeon.name == "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz (family 6, model 143)"
    assert (xeon.n_cores, xeon.has_bf16) == (4, True), "two threads a core"
    assert read_cpuinfo(text, frozenset({0, 1, 2})).n_cores == 2
    assert xeon.peak_flops("fp32", 8) == pytest.approx(4 * 2.7e9 * 64, rel=0.01)
    assert xeon.peak_flops("bf16", 1) == pytest.approx(2.7e9 * 1024, rel=0.01)
    arm = read_cpuinfo(ARM)
    assert "part 0xd40" in arm.name
    assert (arm.n_cores, arm.flags) == (2, {"asimd", "bf16"})
    nothing = read_cpuinfo("")
    assert nothing.n_cores >= 1
    assert nothing.peak_flops("bf16", 1) > 0
    old = Cpu("Intel old", 2, 2.0, frozenset())
    assert old.peak_flops("fp32", 2) == 2 * 2e9 * 8
    assert not old.has_bf16


def test_the_memory_of_a_container(tmp_path):
    before = psutil.virtual_memory().available
    free = free_memory_bytes(tmp_path, tmp_path / "none")
    after = psutil.virtual_memory().available  # others may take or give back a lot at the same time
    assert 0.8 * min(before, after) < free < 1.2 * max(before, after)
    inside = tmp_path / "pod" / "box"
    inside.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("0::/pod/box\n")
    for folder, limit in ((inside, "max"), (tmp_path / "pod", str(64 << 20))):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(str(24 << 20))
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {4 << 20}\n")
    assert free_memory_bytes(tmp_path, tmp_path / "cgroup") == (64 - 24 + 4) << 20
    (tmp_path / "memory" / "box").mkdir(parents=True)
    (tmp_path / "cgroup1").write_text("5:cpu:/\n4:memory:/box\n")
    (tmp_path / "memory" / "box" / "memory.limit_in_bytes").write_text(str(32 << 20))
    (tmp_path / "memory" / "box" / "memory.usage_in_bytes").write_text(str(40 << 20))
    (tmp_path / "memory" / "box" / "memory.stat").write_text("total_inactive_file 0\n")
    assert free_memory_bytes(tmp_path, tmp_path / "cgroup1") == 0


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """An nvidia-smi that says what its file `says` holds, after `wait` seconds."""
    (tmp_path / "says").write_text(
        "0, GPU-bb, [N/A], Tesla T4, 15360\n1, GPU-aa, Disabled, NVIDIA A10G, 23028, 20000\n"
    )
    command = tmp_path / "nvidia-smi"
    lines = [
        f"[ -f {tmp_path}/wait ] && exec sleep 30",
        f"[ -f {tmp_path}/fail ] && exit 9",
        f"exec cat {tmp_path}/says",
    ]
    command.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine.importlib.metadata, "version", lambda name: "2.13.0")
    return tmp_path


def test_gpus_by_nvidia_smi(smi, monkeypatch):
    here = local_machine()
    assert (here.kind, here.device_name, here.n_gpus) == ("cuda", "NVIDIA A10G", 2)
    assert here.memory_bytes == 23028 << 20
    assert here.hardware == "NVIDIA A10G"
    both = here.on_first(2)
    assert (both.hardware, both.memory_bytes, both.taken_bytes) == (
        "Tesla T4",
        15360 << 20,
        12332 << 20,
    )
    for visible, name, n in (
        ("1", "Tesla T4", 1),
        ("1,0", "Tesla T4", 2),
        ("GPU-bb", "Tesla T4", 1),
        ("1,9,0", "Tesla T4", 1),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert (local_machine().device_name, local_machine().n_gpus) == (name, n)
    for visible in ("", "-1", "9", "MIG-aa"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert local_machine().kind == "cpu"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert local_machine().device_name == "Tesla T4"
    (smi / "says").write_text("0, GPU-aa, Enabled, NVIDIA A100-SXM4-40GB, [N/A]\n")
    for visible in ("0", "MIG-aa"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        here = local_machine()
        assert here.device_name == "NVIDIA A100-SXM4-40GB MIG", "a slice is no A100"
        assert here.memory_bytes == psutil.virtual_memory().total, "as of a GB10"


def test_no_gpu_after_all(smi, monkeypatch):
    (smi / "fail").touch()
    assert local_machine().kind == "cpu"
    (smi / "wait").touch()
    with monkeypatch.context() as patch:
        patch.setattr(machine, "_SMI_TIMEOUT_S", 0.3)
        assert local_machine().kind == "cpu"
        patch.setattr(machine.Path, "glob", lambda folder, pattern: iter("01"))
        assert (local_machine().kind, local_machine().n_gpus) == ("cuda", 2), "it hangs"
    for name in ("fail", "wait"):
        (smi / name).unlink()
    assert local_machine().kind == "cuda"
    monkeypatch.setattr(machine.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert local_machine().kind == "cpu", "this torch can't use it"
    (smi / "says").write_text("nothing that we know\n")
    assert local_machine().kind == "cpu"


def test_gpus_are_counted_where_there_is_no_nvidia_smi(smi, monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    monkeypatch.setattr(machine.Path, "glob", lambda folder, pattern: iter("01"))
    assert n_processes_of(make_job(smi, where={"gpus": "all", "device": "auto"}), on_cpu=False) == 2


def test_a_spot_gpu_in_a_container_without_nvidia_smi_is_planned(tmp_path, monkeypatch):
    job = make_job(tmp_path, where={"spot": True, "gpus": "all"})
    examples, _ = open_examples(resolve(job), Heard())
    size = 15 << 30
    with_gpu(monkeypatch, mem_get_info=(size, size), get_device_name="Tesla T4", device_count=2)
    monkeypatch.setattr(machine, "_gpus", list)
    heard = Heard()
    spec = resolved(with_where(job, device="cuda"), Numerics(torch.device("cuda"), torch.float16))
    estimated(spec, tmp_path, examples, None, heard)
    assert kept(tmp_path / "plan.json")
    assert "no plan" not in str(heard)
    monkeypatch.setattr(machine, "_gpus", lambda: [machine.LocalGpu("Tesla T4", 1)])
    (cpu := tmp_path / "cpu").mkdir()
    estimated(resolve(job), cpu, examples, None, heard)
    assert kept(cpu / "plan.json"), "by the main memory"
