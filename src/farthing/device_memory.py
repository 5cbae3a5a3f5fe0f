"""Memory that runs out, and GPUs that fail, recognised in any library's words; how torch's
allocator for CUDA is set.
"""

from __future__ import annotations

import contextlib
import errno
import re
import traceback
from collections.abc import Iterator, MutableMapping

from farthing.errors import DeviceError, FarthingError, HardwareError, OutOfMemoryError

# torch 2.9 has renamed the variable, and reads the old one too
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ALLOCATOR_SETTING, PLAIN_SEGMENTS = "expandable_segments:True", "expandable_segments:False"
"""Segments that grow: micro-batches of many sizes leave no holes between blocks (torch's notes on
CUDA semantics).
"""

_WORDS = re.compile(
    r"DefaultCPUAllocator"
    r"|(CUDA|HIP) out of memory"
    # torch asks NVML about its words for memory that ran out, which knows no slices of a GPU
    r"|NVML_SUCCESS == .*CUDACachingAllocator"
    r"|(CUDA|HIP)( driver| runtime)? error: out of memory|Triton Error \[(CUDA|HIP)\]: out of"
    r" memory"
    r"|CU(BLAS|SOLVER|SPARSE)_STATUS_(ALLOC_FAILED|INSUFFICIENT_RESOURCES)"
    r"|CUDNN_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED)"
)
# after these every call of the process fails (CUDA's driver_types.h: "the process must be
# terminated and relaunched"), or no GPU was there
_FAILED = re.compile(
    r"illegal memory access|unspecified launch failure|uncorrectable (ECC|NVLink) error|illegal"
    r" instruction|misaligned address"
    r"|invalid program counter|hardware stack error|global/shared address space|launch timed"
    r" out|CUDA error: unknown error"
    r"|CUDA-capable device\S* (is|are|is/are) (busy|detected)|hardware"
    r" error|CU(BLAS|DNN)_STATUS_\w*EXECUTION_FAILED"
)
_FAILED_TO_DO = (
    "run the same command again: a run resumes from its last checkpoint; if it fails again, look"
    " for Xid in `dmesg` and for ECC errors in `nvidia-smi -q`, and use another GPU"
)
_OUT_OF_RANGE = "device-side assert triggered"
_OUT_OF_RANGE_TO_DO = (
    "a token, label or position may be out of the model's range; CUDA_LAUNCH_BLOCKING=1 shows the"
    " operation"
)
_FULL_TO_DO = (
    "lower data.max_length, use method: lora or qlora, or a larger GPU; close other programs"
    " on this one"
)
_NO_KERNELS_TO_DO = "set the first two to false and the third to sdpa"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, had no room for something.

    torch has an error of its own for its own allocator. What CUDA and its libraries ask of the
    driver fails as a
    `RuntimeError` or `torch.AcceleratorError`, a CPU's allocator as a `RuntimeError`, and a mapped
    file as an `OSError`. A Triton kernel that wants more registers or shared memory than a GPU has
    (`is_out_of_resources`) is none of these.
    """
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    of_torch = any(
        kind.__name__ == "OutOfMemoryError" and kind.__module__.split(".")[0] == "torch"
        for kind in type(error).__mro__
    )
    return of_torch or (isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None)


def first_line(error: BaseException) -> str:
    """What an error of a library says first, 200 characters at most."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def is_out_of_resources(error: BaseException) -> bool:
    """Whether a Triton kernel needs more of a GPU's processor than it has: no smaller micro-batch
    helps.
    """
    return type(error).__name__ == "OutOfResources" or "out of resource:" in str(error)


def in_words(error: BaseException, where: str = "") -> FarthingError | None:
    """What a device refuses, or how it has failed; None for errors of another kind."""
    kind: type[FarthingError] = DeviceError
    if is_out_of_resources(error):
        kind, what, to_do = HardwareError, "a kernel does not fit on this GPU", _NO_KERNELS_TO_DO
        where = "train.use_liger_kernel, train.torch_compile, model.attn_implementation"
    elif is_out_of_memory(error):
        kind, what, to_do = OutOfMemoryError, "the device has no memory left", _FULL_TO_DO
    elif isinstance(error, RuntimeError) and _OUT_OF_RANGE in str(error):
        what, to_do = "a kernel was given a number out of its range", _OUT_OF_RANGE_TO_DO
    elif isinstance(error, RuntimeError) and _FAILED.search(str(error)):
        what, to_do = "the GPU has failed", _FAILED_TO_DO
    else:
        return None
    return kind(f"{what}: {first_line(error)}", where=where, to_do=to_do)


@contextlib.contextmanager
def out_of_memory_said(
    where: str, to_do: str, what: str = "the device has no memory left"
) -> Iterator[None]:
    """Raise `OutOfMemoryError` where memory runs out within, with the key of the job that helps."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"{what}: {first_line(error)}", where=where, to_do=to_do) from error


def reported(error: BaseException) -> BaseException:
    """What a device has refused while transformers converted weights, which keeps the words in a
    report and raises another error; else the error itself."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        report = getattr(frame.f_locals.get("loading_info"), "conversion_errors", None) or {}
        for line in "\n".join(report.values()).splitlines():
            if in_words(found := RuntimeError(line.partition("Error: ")[2] or line)):
                return found
    return error


def set_allocator(environment: MutableMapping[str, str]) -> str:
    """Ask for segments that grow, for this process before it imports torch, and for its children.

    Whoever has set the allocator already is left alone. Returns the setting, with the variable that
    it was found in.
    """
    for name in ALLOCATOR_VARIABLES:
        if environment.get(name):
            return f"{environment[name]} ({name})"
    environment[ALLOCATOR_VARIABLES[0]] = ALLOCATOR_SETTING
    return f"{ALLOCATOR_SETTING} ({ALLOCATOR_VARIABLES[0]})"
