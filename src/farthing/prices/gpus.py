"""What GPUs are: facts from `facts/gpus.csv`, in which every row has its unit, source and date; and
finding one by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import date
from functools import cache
from typing import NamedTuple

from farthing.errors import InputError
from farthing.tables import numbers, typed

_DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp8")
_MEMORY_TOLERANCE = 0.12  # marketing says 24 GB where the driver shows 22.5 GiB


class Gpu(NamedTuple):
    """What one GPU can do, by its maker's data sheet. Peaks are dense."""

    name: str
    aliases: tuple[str, ...]  # as providers, `nvidia-smi` and torch write it
    vendor: str
    architecture: str
    compute_capability: str
    memory_mib: int  # what the driver shows
    bandwidth_gb_per_s: float
    bf16_tflops: float
    fp16_tflops: float
    tf32_tflops: float
    fp32_tflops: float
    fp8_tflops: float
    link: str  # to other GPUs of its machine: nvlink, pcie or infinity-fabric
    link_gb_per_s: float  # of one GPU in one direction
    power_watts: float
    source: str
    date: date

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib << 20

    @property
    def memory_gib(self) -> float:
        return self.memory_mib / 1024

    @property
    def bandwidth_bytes_per_s(self) -> float:
        return self.bandwidth_gb_per_s * 1e9

    @property
    def link_bytes_per_s(self) -> float:
        return self.link_gb_per_s * 1e9

    @property
    def flops(self) -> dict[str, float]:
        peaks = {name: getattr(self, f"{name}_tflops") for name in _DTYPES}
        return {name: tflops * 1e12 for name, tflops in peaks.items() if tflops}

    @property
    def has_bf16(self) -> bool:
        """Whether it computes in bf16 natively (Ampere and later)."""
        return bool(self.bf16_tflops)

    @property
    def usable_bytes(self) -> int:
        """Without what the driver keeps: as it was seen, else the share of those that were."""
        seen = _usable_gib().get(self.name)
        return int(seen * 2**30 if seen is not None else self.memory_bytes * _usable_share())


@cache
def gpus() -> dict[str, Gpu]:
    return {gpu.name: gpu for gpu in typed("gpus", Gpu)}


def _usable_gib() -> dict[str, float]:
    return numbers("gpu_usable_memory", "gpu", "usable_gib")


@cache
def _usable_share() -> float:
    """The median over the GPUs of which it is known."""
    shares = sorted(gib * 2**30 / gpus()[name].memory_bytes for name, gib in _usable_gib().items())
    return shares[len(shares) // 2]


def find_gpu(text: str, memory_gib: float | None = None) -> Gpu:
    """The GPU that `text` names, whatever its case, spaces and hyphens: "rtx4090", "NVIDIA
    A100-SXM4-80GB", "h100".

    Where a name goes with several sizes (an A100 has 40 or 80 GB), `memory_gib` says which; without
    it a plain "A100" or "V100" is the smaller one. Raises `InputError`.
    """
    gpu = gpu_named(text, memory_gib)
    if gpu is not None:
        return gpu
    what = f"no GPU `{text}` is known"
    what += f" with {memory_gib:g} GiB" if memory_gib is not None else ""
    if plain := gpu_named(_without_memory(text)[0]):
        hint = f"{plain.name} has {plain.memory_gib:.0f} GiB; "
    else:
        hint = did_you_mean(text, [n for one in gpus().values() for n in (one.name, *one.aliases)])
    raise InputError(what, where="gpu", to_do=f"{hint}known: {', '.join(gpus())}")


def gpu_of_device(name: str, memory_bytes: int | None = None) -> Gpu | None:
    """The GPU behind the name that torch or `nvidia-smi` gives a device; None for laptops, slices,
    and names not known.

    Cards of several sizes share a name (RTX 4060 Ti): the driver's `memory_bytes` says which, and
    that none in the table is it.
    """
    return gpu_named(name, None if memory_bytes is None else memory_bytes / 2**30)


@cache
def gpu_named(text: str, memory_gib: float | None = None) -> Gpu | None:
    """None where it is not known. A name may end in its memory ("L4-24GB") if that is true."""
    plain, said_gb = _without_memory(text)
    sized = [f"{text} {size}GB" for size in _sizes(memory_gib)] if memory_gib is not None else []
    for name in (*sized, text, plain):
        gpu = _by_key().get(name_key(name))
        if gpu is None or (memory_gib is not None and not _is_about(gpu, memory_gib)):
            continue
        if name != plain or said_gb is None or _is_about(gpu, said_gb):
            return gpu
    return None


def _without_memory(text: str) -> tuple[str, float | None]:
    """ "L4-24GB" -> ("L4", 24); the text itself and None where it does not end so."""
    ends = re.fullmatch(r"(.+?)[\s_(-]+(\d+)\s*(?:g|gb|gib)?\)?", text.strip(), re.IGNORECASE)
    return (ends[1], float(ends[2])) if ends else (text, None)


@cache
def _by_key() -> dict[str, Gpu]:
    return {name_key(name): gpu for gpu in gpus().values() for name in (*gpu.aliases, gpu.name)}


def name_key(text: str) -> str:
    """A name without case, punctuation, and the words that every card of a maker has."""
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla|amd|instinct", "", text.lower())


def _sizes(memory_gib: float) -> list[int]:
    """The sizes in GB that a maker may have written on a card with this memory."""
    sizes = (10, 12, 16, 24, 32, 40, 80, 94)
    return [gb for gb in sizes if abs(gb - memory_gib) <= _MEMORY_TOLERANCE * gb]


def _is_about(gpu: Gpu, memory_gib: float) -> bool:
    return abs(gpu.memory_gib - memory_gib) <= _MEMORY_TOLERANCE * max(gpu.memory_gib, memory_gib)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The question with the known name that is nearest to a word; nothing where none is near."""
    import difflib

    by_key = {name_key(name): name for name in known}
    near = difflib.get_close_matches(name_key(word), by_key, n=1, cutoff=0.5)
    return f"did you mean `{by_key[near[0]]}`? " if near else ""
