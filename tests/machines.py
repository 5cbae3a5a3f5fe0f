"""Whole runs of one job on machines with empty disks, with a store between them."""

from pathlib import Path

import pytest

from farthing.run import mirror as mirror_module
from mirrored import (
    QUICK,
)
from workshop import make_job


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(mirror_module, "PACE", QUICK)


def machine(folder: Path, name: str, store: str | Path | None, **keys):
    """The job as a machine with an empty disk would run it: its own output_dir, the same data and
    model.
    """
    settings = {
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "max_steps": 8,
        "lr_scheduler_type": "linear",
    }
    places = {"output_dir": f"./{name}", "output_store": store and str(store)}
    return make_job(folder, data={"eval_fraction": 0.2}, **(settings | keys | places))


def same_result(left: Path, right: Path) -> list[str]:
    import survive

    found = survive.differences(survive.result_of(left), survive.result_of(right))
    return [name for name in found if name != "model/README.md"]  # it names the data by its address
