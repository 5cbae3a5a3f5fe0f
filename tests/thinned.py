"""Long lists of cases of which the default suite runs some, and `make test-all` all."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], every: int) -> list[Any]:
    """All `cases`, in their order; the first and each `every`-th after it stay in the default
    suite, the others are slow.
    """
    found = []
    for number, case in enumerate(cases):
        if number % every == 0 or hasattr(case, "marks"):
            found.append(case)
        else:
            values = case if type(case) is tuple else (case,)  # a named tuple is one value
            found.append(pytest.param(*values, marks=pytest.mark.slow))
    return found
