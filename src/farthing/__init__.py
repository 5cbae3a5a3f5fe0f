"""farthing: fine-tune a language model for the fewest dollars.

From Python: `farthing.plan(job)`, `farthing.fine_tune(job)` and `farthing.load_job(job)`; see
`farthing.api`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farthing.api import FarthingError, Job, Plan, Receipt, fine_tune, load_job, plan

__version__ = "0.1.0"
__all__ = [
    "FarthingError",
    "Job",
    "Plan",
    "Receipt",
    "__version__",
    "fine_tune",
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
