"""The table of docs/gpu.md: which kernel attends on which GPU. `PYTHONPATH=src python
tests/attention_table.py` prints it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from farthing.model.attention_choice import FLASH_ATTN, VARLEN, Asked, Machine, choose

_GPUS = {
    **{"T4 (7.5)": (7, 5), "A100 (8.0)": (8, 0), "RTX 4090 (8.9)": (8, 9), "H100 (9.0)": (9, 0)},
    **{"B200 (10.0)": (10, 0), "RTX 5090 (12.0)": (12, 0)},
}
_BESIDES = {
    "nothing": (frozenset[str](), False),
    "Triton and a C compiler": (frozenset[str](), True),
    "flash-attn": (FLASH_ATTN, False),
    "all of them": (FLASH_ATTN, True),
}
_NUMBERS = {
    f"{dtype}, {size}": (dtype, size)
    for dtype, size in [*itertools.product(("half",), (64, 208, 256)), ("fp32", 64), ("fp32", 128)]
}
_ASKED: dict[str, dict[str, bool]] = {
    "plain": {},
    "window": {"has_window": True},
    "soft cap": {"has_softcap": True},
    "dropout": {"has_dropout": True},
}
_COLUMNS: dict[str, dict[str, Any]] = {
    "GPU (capability)": _GPUS,
    "torch": {f"{major}.{minor}": (major, minor) for major, minor in VARLEN},
    "installed besides": _BESIDES,
    "`full_determinism`": {"no": False, "yes": True},
    "numbers, width of a head": _NUMBERS,
}


def varlen_of(version: tuple[int, int]) -> frozenset[str]:
    """What `varlen_attn` of a torch of this version takes, as far as it matters here."""
    known = [parameters for since, parameters in VARLEN.items() if version >= since]
    return known[-1] if known else frozenset()


def rows_of_the_table() -> Iterator[str]:
    """Lines of a table in Markdown: the kernel for what is asked, by GPU, torch, packages,
    determinism and numbers.

    A version of torch stands for itself and those up to the next in the table, the last for all
    later ones.
    """
    lines: list[tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]] = []
    for case in itertools.product(*_COLUMNS.values()):
        capability, version, (flash, has_flex), is_exact, (dtype, size) = (
            values[name] for values, name in zip(_COLUMNS.values(), case, strict=True)
        )
        numbers = dtype if dtype == "fp32" else "bf16" if capability >= (8, 0) else "fp16"
        machine = Machine("cuda", capability, varlen_of(version), flash, has_flex, is_exact)
        kernels = tuple(
            choose(Asked(numbers, size, **asked), machine).kernel for asked in _ASKED.values()
        )
        lines.append((tuple((name,) for name in case), kernels))
    for column in reversed(range(len(_COLUMNS))):
        lines = _merged(lines, column)
    yield "| " + " | ".join([*_COLUMNS, *_ASKED]) + " |"
    yield "|---" * (len(_COLUMNS) + len(_ASKED)) + "|"
    for names, kernels in lines:
        said = (
            "any" if len(of) == len(all_of) else "; ".join(of)
            for of, all_of in zip(names, _COLUMNS.values(), strict=True)
        )
        yield "| " + " | ".join([*said, *kernels]) + " |"


def _merged(
    lines: list[tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]], column: int
) -> list[tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]]:
    """Lines that differ in one column alone as one line."""
    found: dict[Any, list[str]] = {}
    for names, kernels in lines:
        found.setdefault((names[:column], names[column + 1 :], kernels), []).extend(names[column])
    return [
        ((*left, tuple(names), *right), kernels) for (left, right, kernels), names in found.items()
    ]


if __name__ == "__main__":
    print("\n".join(rows_of_the_table()))
