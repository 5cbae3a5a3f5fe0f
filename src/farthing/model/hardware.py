"""What this machine is and which numbers it computes in. The only place that asks torch about
devices.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import shutil
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from farthing.device_memory import (
    ALLOCATOR_SETTING,
    ALLOCATOR_VARIABLES,
    PLAIN_SEGMENTS,
    is_out_of_memory,
    set_allocator,
)
from farthing.errors import HardwareError, ModelError
from farthing.local.machine import free_memory_bytes, local_cpu
from farthing.local.machine import hardware_key as hardware_name
from farthing.planner.software import asked_precision, choose_precision
from farthing.prices.gpus import gpu_of_device
from farthing.units import plural


@dataclass(frozen=True)
class Numerics:
    """Where and in which precision a run computes.

    `autocast` is the dtype of the forward pass (None: fp32 throughout); `needs_scaler` is for fp16,
    whose gradients would vanish without one.
    """

    device: torch.device
    autocast: torch.dtype | None
    needs_scaler: bool = False

    @property
    def name(self) -> str:
        """bf16, fp16 or fp32."""
        return {torch.bfloat16: "bf16", torch.float16: "fp16", None: "fp32"}[self.autocast]

    @property
    def base_dtype(self) -> torch.dtype:
        """What frozen weights are kept in; trained weights are fp32 always."""
        return self.autocast or torch.float32

    def autocasting(self) -> Any:
        """The context of a forward pass."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


def choose_numerics(
    device: str,
    bf16: bool | None,
    fp16: bool | None,
    tf32: bool = True,
    full_determinism: bool = False,
    fp16_risk: str = "",
) -> Numerics:
    """The device and precision of a run: bf16 on GPUs that have it natively, fp16 on older ones,
    fp32 on a CPU.

    With an `fp16_risk` (why the model should not be computed in fp16) older GPUs compute in fp32
    unless fp16 is asked for.

    Raises `HardwareError` when the job asks for what is not here.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise HardwareError(
            "no CUDA GPU can be used here",
            where="where.device",
            to_do="set where.device: auto, or check the driver",
        )
    where = torch.device("cuda" if has_cuda and device != "cpu" else "cpu")
    if where.type == "cpu":
        if fp16:
            raise HardwareError(
                "fp16 on a CPU is hundreds of times slower than fp32",
                where="train.fp16",
                to_do="leave it out to use fp32, or set train.bf16: true",
            )
        return Numerics(where, torch.bfloat16 if bf16 else None)
    _tell_allocator()  # whoever asks for the GPU's name starts it
    must_be_built_for_gpu()
    _try_allocator(where)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    # cuDNN builds a graph for each new shape, and micro-batches seldom have the same:
    # pytorch/pytorch#187770, #191576
    torch.backends.cuda.enable_cudnn_sdp(False)
    if full_determinism:
        be_deterministic()
    native = torch.cuda.get_device_capability()[0] >= 8
    if bf16 and not native:
        raise HardwareError(
            f"{torch.cuda.get_device_name()} has no native bf16 (Ampere and later do)",
            where="train.bf16",
            to_do="leave it out: fp16 with a gradient scaler is used",
        )
    asked = asked_precision(bf16, fp16)
    chosen = choose_precision(asked, native, True, fp16_risk)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[chosen]
    return Numerics(where, dtype, needs_scaler=chosen == "fp16")


def find_compiler(device: str) -> str | None:
    """The compiler that torch.compile would call for this kind of device: C++ on a CPU, C for
    Triton on CUDA.
    """
    variable, *names = ("CC", "gcc", "clang") if device == "cuda" else ("CXX", "g++", "clang++")
    wanted = [os.environ.get(variable), *names]
    return next((found for name in wanted if name and (found := shutil.which(name))), None)


# CUDA 13 has dropped everything before sm_75; torch 2.14 is the last with wheels of CUDA 12.6
# (pytorch/pytorch#190385)
CUDA_12_WHEELS = "https://download.pytorch.org/whl/cu126"


def must_be_built_for_gpu(number: int | None = None) -> None:
    """`must_be_built_for` of a GPU of this machine, without a number the current one.

    torch's own warning, eight lines for each such GPU, is left out.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found GPU")
        name, capability = (
            torch.cuda.get_device_name(number),
            torch.cuda.get_device_capability(number),
        )
    must_be_built_for(name, capability, torch.cuda.get_arch_list())


def must_be_built_for(name: str, capability: tuple[int, int], built_for: list[str]) -> None:
    """Refuse a GPU that this build of torch has no kernels for: the first of them would fail.
    Raises `HardwareError`.

    `built_for` is like ["sm_80", "sm_90", "compute_90"]. A cubin runs on its generation's later
    GPUs, PTX on all later ones (CUDA C++ Programming Guide, 5.2 and 5.3); letters behind a number
    bind it to that one GPU.
    """

    def runs(one: str) -> bool:
        kind, _, number = one.partition("_")
        if not number.isdigit():  # sm_90a
            return number.rstrip("af") == "{}{}".format(*capability)
        theirs = divmod(int(number), 10)
        return theirs <= capability and (kind == "compute" or theirs[0] == capability[0])

    if not built_for or any(map(runs, built_for)):
        return
    to_do = "pip install --upgrade torch, or use another GPU"
    if capability < (7, 5):
        to_do = (
            f"pip install 'torch<2.15' --index-url {CUDA_12_WHEELS} (the last for sm_50 to sm_70),"
            " or use another GPU"
        )
    raise HardwareError(
        f"torch {torch.__version__} has no kernels for {name} (sm_{capability[0]}{capability[1]}):"
        f" it is built for {', '.join(built_for)}",
        where="where.device",
        to_do=to_do,
    )


CUBLAS_WORKSPACES = (
    ":4096:8",
    ":16:8",
)  # with which cuBLAS is deterministic (its documentation, "Results Reproducibility")


def be_deterministic() -> None:
    """From now on only kernels that give the same bits each time; an operation that has none
    raises. For this process.

    With `warn_only` flash attention's and the memory-efficient backward pass would keep adding in
    any order. cuDNN attention looks at none of it, and is off. transformers' own calls of
    flash-attn go by a variable. Raises `HardwareError` where the environment asks cuBLAS for the
    contrary.
    """
    workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACES[0])
    if workspace not in CUBLAS_WORKSPACES:
        raise HardwareError(
            f"cuBLAS is not deterministic with CUBLAS_WORKSPACE_CONFIG={workspace}",
            where="train.full_determinism",
            to_do=f"unset the variable, or set it to {' or '.join(CUBLAS_WORKSPACES)}",
        )
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    torch.use_deterministic_algorithms(True, warn_only=False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cuda.enable_cudnn_sdp(False)


def why_not_deterministic(attn_implementation: str | None, torch_compile: bool) -> str | None:
    """What of a job can't give the same bits each time on CUDA; None if all can."""
    if torch_compile:
        return (
            "train.torch_compile: programs are made for the first lengths that are seen, and others"
            " after a resume"
        )
    known = {None, "eager", "sdpa", "flash_attention_2"}
    if attn_implementation not in known:
        return f"model.attn_implementation: {attn_implementation} is not known to be deterministic"
    return None


def not_deterministic(error: BaseException) -> HardwareError | None:
    """An operation that refused to run deterministically, as an error of farthing; None for other
    errors.
    """
    found = re.match(r"(\S+) does not have a deterministic implementation", str(error))
    if found is None:
        return None
    return HardwareError(
        f"this model needs {found[1]}, which is not deterministic on CUDA",
        where="train.full_determinism",
        to_do="leave it out, or train this model on a CPU",
    )


def of_models_code(error: Exception) -> ModelError | None:
    """An error out of the code of a model, which may want pictures or a longer text; None
    for other errors.
    """
    if "does not require grad" in str(error):  # as Reformer's, whose layers compute without one
        return ModelError(
            "the loss has no gradient for the weights that are trained: the model's own code passes"
            " none on",
            where="method",
            to_do="train other layers (method.target_modules), or all of them (method: full)",
        )
    ours = str(Path(__file__).parents[1])
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code
        if code.co_filename.startswith(ours):  # what it calls is no fault of a model
            return None
        if re.search(r"transformers(_modules|[/\\]models)[/\\]", code.co_filename):
            return ModelError(
                f"the model's own code can't compute this: {type(error).__name__}:"
                f" {' '.join(str(error).split())[:200]}",
                where=f"{Path(code.co_filename).name}, {code.co_name}",
                to_do="try it with transformers alone; it may want more than text, other settings"
                " in its config.json, or longer texts",
            )
    return None


def _tell_allocator() -> None:
    """Set torch's allocator where the command line has not done so before torch was imported, e.g.
    in a notebook.
    """
    had_been_set = any(os.environ.get(name) for name in ALLOCATOR_VARIABLES)
    set_allocator(os.environ)
    if not had_been_set and not torch.cuda.is_initialized():
        _set_allocator(ALLOCATOR_SETTING)


def _try_allocator(device: torch.device) -> None:
    """Take the setting of the allocator back where the driver refuses segments that grow, as those
    of vGPUs, of Jetson and some of WSL do (xgboost#12217, pytorch#192330).
    """
    if os.environ.get(ALLOCATOR_VARIABLES[0]) != ALLOCATOR_SETTING:
        return
    try:
        for n_bytes in (1, 1 << 21):  # of the pools for small blocks and for large ones
            torch.empty(n_bytes, dtype=torch.uint8, device=device)
    except Exception as error:  # any other is for who computes first
        if "CUDA driver error" in str(error):
            os.environ[ALLOCATOR_VARIABLES[0]] = PLAIN_SEGMENTS
            _set_allocator(PLAIN_SEGMENTS)


def _set_allocator(setting: str) -> None:
    with contextlib.suppress(
        AttributeError, RuntimeError
    ):  # the variable alone is read where this is not there
        torch._C._accelerator_setAllocatorSettings(setting)


def device_name(device: torch.device) -> str:
    """The marketing name of the GPU, or of the CPU with its core count."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"CPU, {plural(torch.get_num_threads(), 'thread')}"


def n_devices(device: torch.device) -> int:
    """Devices of this kind that the process sees."""
    return torch.cuda.device_count() if device.type == "cuda" else 1


def hardware_key(device: torch.device) -> str:
    """The name that measurements on this device are kept under."""
    name = str(torch.cuda.get_device_name(device)) if device.type == "cuda" else local_cpu().name
    return hardware_name(device.type, name, torch.get_num_threads())


def free_cached(device: torch.device) -> None:
    """Give back what nothing needs any more: cycles of references, and blocks that the allocator of
    a GPU keeps.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in memory that a GPU reads by itself; as it is where the machine has none left to
    pin: copies are waited for.
    """
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return tensor


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken, of a GPU with what torch's allocator keeps for later."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + kept)
    return free_memory_bytes()


def peak_bytes(device: torch.device) -> int:
    """Most memory taken so far: by torch on a GPU, by the whole process on a CPU."""
    own = window_peak_bytes(device)
    if own or device.type == "cuda":
        return own
    # Linux keeps the parent's peak in ru_maxrss when a process begins another
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_bytes(device: torch.device) -> None:
    """Begin a window for `window_peak_bytes`. On Linux the kernel forgets the process's own peak,
    where it allows that.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def window_peak_bytes(device: torch.device) -> int:
    """Most memory taken since `reset_peak_bytes`; 0 where nobody can say."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def wait_for(device: torch.device) -> None:
    """Until a GPU has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def taken_bytes(device: torch.device) -> int:
    """Memory taken now."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Dense peak of the GPU in FLOP/s from `facts/gpus.csv`; None where it is not known."""
    if device.type != "cuda":
        return None
    gpu = gpu_of_device(torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1])
    return gpu.flops.get(precision) if gpu else None


class Utilisation:
    """How busy the device is, in percent: the GPU by NVML (needs `nvidia-ml-py`), else this process
    on its CPUs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()
        self._process.cpu_percent()

    def percent(self) -> float | None:
        """Since the last call (CPU), or now (GPU); None where it can't be read."""
        if self._device.type == "cuda":
            try:
                return float(torch.cuda.utilization(self._device))
            except Exception:  # no NVML bindings, no driver library, no permission
                return None
        return min(100.0, self._process.cpu_percent() / max(1, torch.get_num_threads()))
