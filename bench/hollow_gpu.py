"""Run a command on a GPU that is hollow: a CUDA build of torch believes that it is there, and
nothing is computed on it.

    python bench/hollow_gpu.py [--gpu H100] [--count 1] [--gib 79.1] [--copy-mib 1] [--report FILE]
    [--launch-us 3] COMMAND ...

For machines without a GPU. Below torch everything is stood in for (`bench/hollow/`); torch, its
allocator, streams, autograd, Triton's compiler, bitsandbytes' and NCCL's callers are the real ones.
So this finds what fails on a GPU for other reasons than what a kernel computes: devices, dtypes,
arguments, backward passes, streams, growing segments, memory that runs out; and it counts, to the
byte and to the launch, what torch's own allocator gives out, what is launched and where the host
waits. It shows no values (what a kernel would have written is whatever lay there, and the host
reads zeros), no order of streams (waits return at once, copies are synchronous) and no time.

`--copy-mib`: copies larger than this are not made, so that weights of 8B or 70B need no memory.
`--report`: counts of launches by kernel, waits, copies and products' floating-point operations, as
JSON; %%d in the file's name is the process. `--launch-us`: what each launch costs the host.
`HOLLOW_FAIL_AT`, `HOLLOW_BREAK` and their kin make memory run out or break it (`cudart.c`).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from hollow.build import build

# name, compute capability, GiB that CUDA reports, multiprocessors, KiB of shared memory a block may
# ask for (NVIDIA's CUDA C++ programming guide, table of compute capabilities, and its data sheets,
# read 2026-11-22)
GPUS = {
    "V100": ("Tesla V100-SXM2-16GB", "7.0", 15.8, 80, 96),
    "T4": ("Tesla T4", "7.5", 14.6, 40, 64),
    "A100": ("NVIDIA A100-SXM4-80GB", "8.0", 79.2, 108, 163),
    "A10G": ("NVIDIA A10G", "8.6", 22.1, 80, 99),
    "L4": ("NVIDIA L4", "8.9", 22.0, 58, 99),
    "4090": ("NVIDIA GeForce RTX 4090", "8.9", 23.5, 128, 99),
    "H100": ("NVIDIA H100 80GB HBM3", "9.0", 79.1, 132, 227),
    "H200": ("NVIDIA H200", "9.0", 139.8, 132, 227),
    "B200": ("NVIDIA B200", "10.0", 178.4, 148, 227),
    "5090": ("NVIDIA GeForce RTX 5090", "12.0", 31.4, 170, 99),
}

COUNTS = "launches waits copies_up copies_down bytes_up bytes_down waits_for_copies products"


class _Counts(ctypes.Structure):
    """`struct counts` of hollow/cudart.c."""

    _fields_ = [(name, ctypes.c_uint64) for name in (*COUNTS.split(), "allocations")]


def counted() -> dict[str, int]:
    """What the hollow GPU has counted so far in this process. Raises `ValueError` without one."""
    counts = _Counts.in_dll(ctypes.CDLL(None), "hollow_counts")
    return {name: int(getattr(counts, name)) for name, _ in _Counts._fields_}


def environment(
    gpu: str,
    count: int = 1,
    gib: float = 0,
    copy_mib: float = 0,
    report: str = "",
    launch_us: float = 0,
) -> dict[str, str]:
    """The variables with which a process of this Python's torch sees `count` hollow GPUs. Builds
    the libraries where needed.
    """
    name, capability, memory_gib, multiprocessors, shared_kib = GPUS[gpu]
    folder = Path(sys.prefix, "hollow")
    sources = [*Path(__file__).resolve().parent.glob("hollow/*")]
    stamp = folder / "built"
    if not stamp.exists() or stamp.stat().st_mtime < max(
        path.stat().st_mtime for path in sources if path.is_file()
    ):
        stamp.parent.mkdir(exist_ok=True)
        libraries = build(folder)
        stamp.write_text(":".join(map(str, libraries)))
    found = {
        "LD_PRELOAD": stamp.read_text(),
        # its nvidia-smi
        "PATH": f"{Path(__file__).resolve().parent / 'hollow'}{os.pathsep}{os.environ['PATH']}",
        "TRITON_LIBCUDA_PATH": str(folder),
        "HOLLOW_NAME": name,
        "HOLLOW_CAPABILITY": capability,
        "HOLLOW_GIB": str(gib or memory_gib),
        "HOLLOW_SMS": str(multiprocessors),
        "HOLLOW_SHARED_KIB": str(shared_kib),
        "HOLLOW_COUNT": str(count),
    }
    return found | {
        name: str(value)
        for name, value in (
            ("HOLLOW_COPY_MIB", copy_mib),
            ("HOLLOW_REPORT", report),
            ("HOLLOW_US", launch_us),
        )
        if value
    }


def main() -> None:
    """Run the command in place of this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", choices=GPUS, default="H100")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument(
        "--gib", type=float, default=0, help="memory of each, instead of that GPU's"
    )
    parser.add_argument("--copy-mib", type=float, default=0)
    parser.add_argument("--report", default="")
    parser.add_argument("--launch-us", type=float, default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = vars(parser.parse_args())
    command = [word for at, word in enumerate(asked.pop("command")) if at or word != "--"]
    if not command:
        parser.error("no command")
    os.environ.update(environment(**asked))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
