"""What a published figure of memory is of: torch's own peak, what its allocator had reserved, or
all that `nvidia-smi` has.
"""

from __future__ import annotations

import re

from plan_stacks import QWEN

GIB = 2**30


def meter_of(words: str) -> tuple[str, float]:
    """(allocated, reserved or nvidia-smi; bytes of the unit), from the first words of the notes."""
    first = words.split(";")[0]
    meter = "allocated"
    if re.search(r"nvidia-smi|nvml|device memory", first) and "max_memory_allocated" not in words:
        meter = "nvidia-smi"
    elif "reserved" in first or "torch reserved" in words:
        meter = "reserved"
    return meter, 1e9 if re.match(r"\s*gb\b", words) else float(GIB)


def meter_of_source(source: str, words: str) -> tuple[str, float]:
    """`meter_of`, where a source's own code or tables tell what its pages don't.

    Qwen's are of nvidia-smi, in 1,000 MiB: in any other unit its 76.8G of full training
    (recipes/finetune/deepspeed) were less than bf16 weights, gradients, moments and the update
    have, or the 162.0G of two A100 more than there is.
    """
    meter, unit = meter_of(words)
    is_said = re.search(
        r"nvidia-smi|nvml|device memory|max_memory|allocated|reserved|active", words.split(";")[0]
    )
    if (
        "swift" in source and not is_said
    ):  # torch.cuda.max_memory_reserved (swift/trainers/trainers.py)
        meter = "reserved"
    if QWEN in source and not is_said:
        meter, unit = "nvidia-smi", 1000.0 * 2**20
    if (
        "universal-llm-trainer" in source
    ):  # torch.cuda.memory_reserved() / 1E9 (src/trainer/trainer.py)
        unit = 1e9
    return meter, unit
