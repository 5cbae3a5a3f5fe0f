"""farthing: fine-tune a language model for the fewest dollars.

From Python: `dir(farthing)` lists what there is; see `farthing.api`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farthing.api import (
        FarthingError,
        Job,
        Plan,
        Receipt,
        evaluate,
        export_model,
        fine_tune,
        generate,
        history,
        load_job,
        plan,
    )

__version__ = "0.1.0"
__all__ = [
    "FarthingError",
    "Job",
    "Plan",
    "Receipt",
    "__version__",
    "evaluate",
    "export_model",
    "fine_tune",
    "generate",
    "history",
    "load_job",
    "plan",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'farthing' has no attribute {name!r}")
    from farthing import api

    return getattr(api, name)
