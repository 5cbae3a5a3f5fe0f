"""Which GPUs the software can use: the builds of torch and what else a job needs, by compute
capability; and fp16's risk.

Facts are rows of `facts/gpu_software.csv` and `facts/trained_dtypes.csv`, each with its source and
date. A build of torch has code for some compute capabilities only: V100 and P100 are in none that
PyPI has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from farthing.errors import InputError
from farthing.prices.gpus import Gpu, gpus
from farthing.tables import facts, typed

OLDEST_TORCH = "2.13"
_INDEX = "https://download.pytorch.org/whl"
_ARM_HOSTS = ("GH200", "GB200", "GB300")
_BUILD = r"cu\d+|rocm[\d.]+|cpu"
_WITHOUT = {  # of a package: its name, and what leaves it out
    "flash_attention_2": ("flash-attn", "leave out model.attn_implementation", "attention"),
    "bitsandbytes": ("bitsandbytes", "method: lora with train.optim: adamw_torch_fused", "method"),
}


class Torch(NamedTuple):
    """`2.13.0` and the build `cu126`; without a build the one that PyPI has."""

    version: str
    build: str = ""

    @property
    def in_words(self) -> str:
        """`torch 2.13.0+cu126`, `torch 2.13.0 from PyPI (cu130)`."""
        if self.build:
            return f"torch {self.version}+{self.build}"
        return f"torch {self.version} from PyPI ({build_of(self).build})"


class Build(NamedTuple):
    package: str
    since: str
    build: str
    is_default: bool
    capabilities: tuple[str, ...]

    def runs_on(self, gpu: Gpu) -> bool:
        """Code of a capability runs on later ones with the same first number."""
        if self.build.startswith("rocm") != (gpu.vendor == "amd"):
            return False
        major, minor = _numbers(gpu.compute_capability)
        return any(m == major and n <= minor for m, n in map(_numbers, self.capabilities))


@cache
def builds() -> tuple[Build, ...]:
    found = typed("gpu_software", Build)
    return tuple(sorted(found, key=lambda one: (one.package, _numbers(one.since))))


def parse_torch(text: str) -> Torch:
    """`2.13.0`, `2.13+cu126`. Raises `InputError`."""
    found = re.fullmatch(rf"(\d+\.\d+(?:\.\d+)?)(?:\+({_BUILD}))?", text.strip())
    if found is None or found[2] == "cpu":
        what, to_do = f"no torch for GPUs is called `{text}`", "e.g. --torch 2.13.0+cu126"
        raise InputError(what, where="--torch", to_do=to_do)
    version, build = found[1], found[2] or ""
    if _numbers(version) < _numbers(OLDEST_TORCH):
        what, to_do = f"torch {version} is too old", f"give {OLDEST_TORCH} or later"
        raise InputError(what, where="--torch", to_do=to_do)
    known = [one.build for one in _of_version(version)]
    if build and build not in known:
        what = f"no build {build} of torch {version} is known"
        to_do = f"torch {version} has {', '.join(known)}"
        raise InputError(what, where="--torch", to_do=to_do)
    return Torch(version, build)


def torch_of(version: str, build: str) -> Torch | None:
    """The torch of this machine; None where it is no release of the builds that are known (made
    from source, NVIDIA's containers), of which its own list of GPUs tells when training starts.
    """
    if not re.fullmatch(r"\d+(\.\d+)+", version) or (build and not re.fullmatch(_BUILD, build)):
        return None
    return Torch(version, build)


def asked_precision(bf16: bool | None, fp16: bool | None) -> str | None:
    """What `train.bf16` and `train.fp16` ask for; None: nothing. To refuse one asks for fp32."""
    if bf16 or fp16:
        return "bf16" if bf16 else "fp16"
    return "fp32" if False in (bf16, fp16) else None


def choose_precision(asked: str | None, has_bf16: bool, has_fp16: bool, risk: str = "") -> str:
    """What a GPU computes in, for plan and trainer: as asked, else bf16 where it has it natively,
    else fp16 where the model can bear that (no `risk`), else fp32.
    """
    if asked is not None:
        return asked
    return "bf16" if has_bf16 else "fp16" if has_fp16 and not risk else "fp32"


def build_of(torch: Torch) -> Build:
    """What is in the wheels of a torch; an unknown build is taken for the one that PyPI has."""
    known = _of_version(torch.version)
    named = [one for one in known if one.build == torch.build]
    return named[0] if named else next(one for one in known if one.is_default)


def why_no_code(
    gpu: Gpu, torch: Torch, *, needs_bitsandbytes: bool = False, attention: str = ""
) -> tuple[str, str, str] | None:
    """(why software can't use a GPU, what would let it, its kind); None where it can."""
    name = f"{gpu.architecture} ({gpu.compute_capability})"
    if not build_of(torch).runs_on(gpu):
        line = pip_line(gpu, torch)
        if line is None:
            return f"no build of torch {OLDEST_TORCH} or later has code for {name}", "", ""
        return f"{torch.in_words} has no code for {name}", line, "torch"
    for one in builds() if gpu.vendor == "nvidia" else ():
        is_needed = one.package == attention or (
            one.package == "bitsandbytes" and needs_bitsandbytes
        )
        if is_needed and not one.runs_on(gpu):
            plain, change, kind = _WITHOUT[one.package]
            return f"{plain} has no code for {name}", change, kind
    return None


def pip_line(gpu: Gpu, torch: Torch) -> str | None:
    """How to install a torch that runs on a GPU: the same version, else the newest that can."""
    same = [one for one in _of_version(torch.version) if one.runs_on(gpu)]
    older = [one for one in builds() if one.package == "torch" and one.runs_on(gpu)]
    if not (same or older):
        return None
    build, version = (same or older)[-1].build, torch.version
    wanted = f"torch=={version}"
    if not same:
        version = max(older[-1].since, OLDEST_TORCH, key=_numbers)
        wanted = f"'torch=={version}.*'"
    line = f"pip install {wanted} --index-url {_INDEX}/{build}"
    return f"{line}, and plan with --torch {version}+{build}"


def host_note(gpu: Gpu, torch: Torch) -> str:
    """What to install before a machine of this GPU can train with `torch`; empty where nothing
    is.

    PyPI's wheel for ARM processors has no CUDA (github.com/pytorch/pytorch/issues/168065,
    2025-11-18).
    """
    if gpu.name not in _ARM_HOSTS or torch.build:
        return ""
    line = f"pip install torch=={torch.version} --index-url {_INDEX}/{build_of(torch).build}"
    return f"its processor is an ARM, for which PyPI's torch has no CUDA: {line}"


def runs_in_words(torch: Torch) -> str:
    """`torch 2.13.0 from PyPI (cu130): Turing, Ampere, ...`, for the notes of a plan."""
    build = build_of(torch)
    names = dict.fromkeys(gpu.architecture for gpu in gpus().values() if build.runs_on(gpu))
    return f"{torch.in_words} has code for {', '.join(names)}"


@cache
def _of_version(version: str) -> list[Build]:
    """Of the newest row that is not newer than a version; of the oldest for older ones."""
    of_torch = [one for one in builds() if one.package == "torch"]
    until = [one.since for one in of_torch if _numbers(one.since) <= _numbers(version)]
    since = until[-1] if until else of_torch[0].since
    return [one for one in of_torch if one.since == since]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version)[0]))


# ---- fp16 ----


def fp16_risk(config: Mapping[str, Any]) -> str:
    """Why a model should not be computed in fp16; empty where nothing speaks against it. `config`
    is its config.json.

    Activations of models trained in bf16 may pass 65504, the largest number of fp16: the loss
    becomes inf or nan.
    """
    kind, size = config.get("model_type"), str(config.get("vocab_size", ""))
    for row in facts("trained_dtypes"):
        if row["model_type"] == kind and row["vocab_size"] in ("", size):
            if row["in_fp16"] == "nan":
                return f"{kind} is known to give inf and nan in fp16"
            return "it was trained in bf16, and fp16 may overflow (65504 is its largest number)"
    inner = config.get("text_config")
    both = [one for one in (config, inner) if isinstance(one, Mapping)]
    dtypes = [one.get(key) for one in both for key in ("dtype", "torch_dtype")]
    if any(str(dtype).removeprefix("torch.") == "bfloat16" for dtype in dtypes):
        return "it was trained in bf16, and fp16 may overflow (65504 is its largest number)"
    return ""
