"""What this machine is, asked without torch: GPUs by `nvidia-smi`, the processor and its memory by
what Linux says.

`hardware_key` is the one name under which measurements are kept; the trainer makes it from what
torch says, the planner from what is found here.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import psutil

from farthing.prices.gpus import gpu_of_device
from farthing.units import plural

_SMI_TIMEOUT_S = 10.0
"""It takes over a second for each GPU whose driver no other program keeps loaded."""
_KNOWN_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "bf16",
)


@dataclass(frozen=True)
class Cpu:
    """A processor."""

    name: str
    """As the machine calls it, with the model's numbers: clouds leave the rest of the name out."""
    n_cores: int
    """Physical ones that this process may use."""
    ghz: float
    flags: frozenset[str]
    """Of the vector extensions that matter to matrix products, those it has."""

    @property
    def has_bf16(self) -> bool:
        """Whether it multiplies bf16 by itself."""
        return bool(self.flags & {"avx512_bf16", "amx_bf16", "bf16"})

    def peak_flops(self, precision: str, n_threads: int) -> float:
        """FLOP/s of matrix products, a rough guess: cores x clock x FLOPs of a cycle. A clock that
        rises under load is more, small matrices are far less.

        Two 512-bit multiply-adds a cycle for Intel's servers, one (or two of 256 bits) for AMD
        until Zen 4; bf16 is twice as fast where it is native, AMX does 1024 a cycle (Intel and AMD
        optimisation manuals).
        """
        is_amd = self.name.startswith("AMD")
        if "avx512f" in self.flags:
            of_cycle = 32.0 if is_amd else 64.0
        elif "fma" in self.flags:
            of_cycle = 32.0
        else:
            of_cycle = 16.0 if "asimd" in self.flags else 8.0
        if precision == "bf16" and self.has_bf16:
            of_cycle = 1024.0 if "amx_bf16" in self.flags else 2 * of_cycle
        return min(n_threads, self.n_cores) * self.ghz * 1e9 * of_cycle


class LocalGpu(NamedTuple):
    """A GPU as `nvidia-smi` tells it."""

    name: str
    memory_bytes: int
    taken_bytes: int = 0
    number: str = ""
    uuid: str = ""

    def speed(self) -> float:
        """By which CUDA numbers GPUs of several kinds, the fastest first, where it is not told
        otherwise; `nvidia-smi` numbers them by their places on the bus.
        """
        known = gpu_of_device(self.name, self.memory_bytes)
        return known.fp32_tflops if known else 0.0


@dataclass(frozen=True)
class LocalMachine:
    """What a run here would run on."""

    kind: str
    """cuda or cpu."""
    device_name: str
    """Of the GPU or the processor."""
    n_gpus: int
    memory_bytes: int
    """Of one GPU; without one, what this process may still take of the main memory."""
    n_threads: int
    """That torch computes with."""
    cpu: Cpu
    taken_bytes: int = 0
    """Of the memory of one GPU, by other processes."""
    gpus: tuple[LocalGpu, ...] = ()

    def on_first(self, n: int) -> LocalMachine:
        """With its first `n` GPUs: they share each step, so the slowest and the fullest tell."""
        if not self.gpus[:n]:
            return self
        slowest = min(self.gpus[:n], key=LocalGpu.speed)
        free_bytes = min(gpu.memory_bytes - gpu.taken_bytes for gpu in self.gpus[:n])
        return replace(
            self,
            device_name=slowest.name,
            memory_bytes=slowest.memory_bytes,
            taken_bytes=max(0, slowest.memory_bytes - free_bytes),
        )

    @property
    def hardware(self) -> str:
        """The name that measurements are kept under."""
        return hardware_key(self.kind, self.device_name, self.n_threads)


def hardware_key(kind: str, name: str, n_threads: int) -> str:
    """The name of a device for measurements: the GPU's, or the processor's with the threads that
    compute.
    """
    name = " ".join(name.split())
    return name if kind == "cuda" else f"{name}, {plural(n_threads, 'thread')}"


def local_machine() -> LocalMachine:
    """This machine. Takes no time without an NVIDIA driver."""
    cpu, n_threads = local_cpu(), n_torch_threads()
    gpus = _gpus()
    if gpus:
        of_first = gpus[0].name, len(gpus), gpus[0].memory_bytes, n_threads, cpu
        return LocalMachine("cuda", *of_first, gpus[0].taken_bytes, tuple(gpus))
    return LocalMachine("cpu", cpu.name, 0, free_memory_bytes(), n_threads, cpu)


# ---- the processor ----


@functools.cache
def local_cpu() -> Cpu:
    """The processor, from /proc/cpuinfo where there is one."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return read_cpuinfo(text, _usable_cpus())


def read_cpuinfo(text: str, usable: frozenset[int] | None = None) -> Cpu:
    """The processor that the text of /proc/cpuinfo describes; `usable` are the numbers of the
    logical cores to count.
    """
    blocks = [
        dict(re.findall(r"^([^\t:\n]+?)\s*:[ \t]*(.*)$", block, re.MULTILINE))
        for block in text.split("\n\n")
    ]
    blocks = [block for block in blocks if "processor" in block]
    first = blocks[0] if blocks else {}
    name = (
        first.get("model name")
        or first.get("CPU part")
        or platform.processor()
        or platform.machine()
    )
    if "cpu family" in first and "model" in first:
        name = f"{name} (family {first['cpu family']}, model {first['model']})"
    elif "CPU part" in first:
        name = (
            f"{platform.machine()} (implementer {first.get('CPU implementer', '?')}, part"
            f" {first['CPU part']})"
        )
    cores = {
        (block.get("physical id", "0"), block.get("core id", block["processor"]))
        for block in blocks
        if usable is None or int(block["processor"]) in usable
    }
    mhz = [
        float(block["cpu MHz"])
        for block in blocks
        if re.fullmatch(r"[\d.]+", block.get("cpu MHz", ""))
    ]
    words = set((first.get("flags") or first.get("Features") or "").split())
    return Cpu(
        name=" ".join(name.split()),
        n_cores=len(cores) or psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        ghz=max(mhz, default=2500.0) / 1000,
        flags=frozenset(words & set(_KNOWN_FLAGS)),
    )


def n_torch_threads() -> int:
    """Threads that torch computes with here: MKL_NUM_THREADS or OMP_NUM_THREADS, and no more than
    there are cores.

    torch with MKL (x86) takes physical cores, elsewhere logical ones, both of those that the
    process may use.
    """
    n_cores = local_cpu().n_cores
    if platform.machine() not in ("x86_64", "AMD64"):
        n_cores = len(_usable_cpus()) or n_cores
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        first = os.environ.get(name, "").split(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return min(int(first), n_cores)
    return n_cores


def _usable_cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def free_memory_bytes(
    cgroups: Path = Path("/sys/fs/cgroup"), of_process: Path = Path("/proc/self/cgroup")
) -> int:
    """Main memory that this process may still take: what is free, or what is left of a container's
    limit.
    """
    left = [int(psutil.virtual_memory().available)]
    try:
        lines = of_process.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, limit, used = (
            (cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else (cgroups, "memory.max", "memory.current")
        )
        folder = root / place.lstrip("/")
        for holder in (
            folder,
            *(parent for parent in folder.parents if parent.is_relative_to(root)),
        ):
            try:
                most = int((holder / limit).read_text())  # `max` where there is none
                cached = re.search(
                    r"^(?:total_)?inactive_file (\d+)$",
                    (holder / "memory.stat").read_text(),
                    re.MULTILINE,
                )
                taken = int((holder / used).read_text()) - (int(cached[1]) if cached else 0)
                left.append(most - taken)
            except (OSError, ValueError):
                continue
    return max(0, min(left))


# ---- GPUs ----


def _gpus() -> list[LocalGpu]:
    """Those that a run would see; none where torch was built without CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = shutil.which("nvidia-smi")
    is_for_cpus = installed_torch()[1] == "cpu"
    if (visible is not None and visible.strip() in ("", "-1")) or is_for_cpus:
        return []
    if command is None:  # as in containers that may compute alone
        return _unknown_gpus(visible)
    wanted = "--query-gpu=index,uuid,mig.mode.current,name,memory.total,memory.used"
    query = [command, wanted, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True
        )
    except subprocess.TimeoutExpired:
        return _unknown_gpus(visible)
    except (OSError, subprocess.SubprocessError):
        return []
    found: list[LocalGpu] = []
    for line in done.stdout.splitlines():
        index, uuid, mig, name, mib, used, *_ = [each.strip() for each in f"{line},,,,,".split(",")]
        if mig == "Enabled":  # a process has a slice of it
            name += " MIG"
        if mib.isdecimal():
            taken_bytes = int(used) << 20 if used.isdecimal() else 0
            found.append(LocalGpu(name, int(mib) << 20, taken_bytes, index, uuid))
        elif mib == "[N/A]":  # GB10 and the like share the main memory
            found.append(LocalGpu(name, psutil.virtual_memory().total, 0, index, uuid))
    if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({gpu.name for gpu in found}) > 1:
        found.sort(key=LocalGpu.speed, reverse=True)
        found = [gpu._replace(number=str(at)) for at, gpu in enumerate(found)]
    if visible is None:
        return found
    slices = [gpu for gpu in found if gpu.name.endswith(" MIG")][:1]
    seen: list[LocalGpu] = []
    for word in map(str.strip, visible.split(",")):
        is_slice = word.startswith("MIG-")
        named = [gpu for gpu in found if word == gpu.number or (word and gpu.uuid.startswith(word))]
        if not (several := slices if is_slice else named):
            break  # CUDA sees none behind a name that it does not know
        seen += several
    return seen


def _unknown_gpus(visible: str | None) -> list[LocalGpu]:
    n = len(list(Path("/dev").glob("nvidia[0-9]*")))
    n = n if visible is None else min(n, len(visible.split(",")))
    return [LocalGpu("a GPU without nvidia-smi", 0)] * n


def installed_torch() -> tuple[str, str]:
    """Version and build of the torch that is installed here (`2.13.0`, `cu126`); empty where there
    is none.

    The build is empty where PyPI's own was taken.
    """
    try:
        version, _, build = importlib.metadata.version("torch").partition("+")
    except importlib.metadata.PackageNotFoundError:
        return "", ""
    return version, build
