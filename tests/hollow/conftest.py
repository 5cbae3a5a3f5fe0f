"""Tests for a hollow GPU (`bench/hollow_gpu.py`): `make rehearse-gpu` runs them; anywhere else they
are skipped.
"""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]):
    """Skip what is in this folder where no hollow GPU is there."""
    if "HOLLOW_NAME" not in os.environ:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(
                    pytest.mark.skip(
                        reason="needs a CUDA build of torch and a hollow GPU: make rehearse-gpu"
                    )
                )
