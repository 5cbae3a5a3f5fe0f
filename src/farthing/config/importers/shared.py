"""What is the same in every tool, and the table of keys that have no counterpart:
facts/foreign_keys.yaml.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml

from farthing.config.importers.record import Imported, Why


@functools.lru_cache(maxsize=1)
def _table() -> dict[str, list[Why]]:
    file = resources.files("farthing").joinpath("facts/foreign_keys.yaml")
    table = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {
        of: [Why(each["effect"], each["why"], each["keys"]) for each in rows]
        for of, rows in table.items()
    }


def reasons(*of: str) -> list[Why]:
    """Why keys have no counterpart: the parts of the table by these names, in the order in which
    they are asked.
    """
    return [why for name in of for why in _table()[name]]


def uploaded(values: Mapping[str, Any], out: Imported, service: str) -> None:
    """Files of a service by their names there, as files beside the job."""
    for key, to in (("training_file", "data.train"), ("validation_file", "data.eval")):
        if values.get(key):
            file = str(values[key])
            out.put(key, file, to, [{"path": file if "." in file else f"{file}.jsonl"}])
            if "." not in file:
                out.notes.append(
                    f"{file} is a file at {service}: fetch it to {file}.jsonl beside the job"
                )


NO_COUNT_OF_GPUS = (
    "written for one GPU: where the original ran on N of them its global batch was N times "
    "per_device_train_batch_size x gradient_accumulation_steps"
)
