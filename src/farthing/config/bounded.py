"""YAML that others may have written, read so that a small file can't fill the memory."""

from __future__ import annotations

from typing import Any

import yaml

MAX_DEPTH, MAX_VALUES = 50, 100_000


def read_yaml(text: str) -> Any:
    """The document, whose values are counted with aliases written out. Raises `yaml.YAMLError`, and
    `ValueError` for a number or a date that can't be read.
    """
    sizes: dict[str | None, int] = {}  # of what an alias stands for, once that is closed
    opened: list[tuple[str | None, int]] = []
    n_values = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            n_values += sizes.get(event.anchor, MAX_VALUES)
        elif isinstance(event, yaml.NodeEvent):
            n_values += 1
            opened.append((event.anchor, n_values))
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            sizes[anchor] = n_values - before + 1
        if len(opened) > MAX_DEPTH or n_values > MAX_VALUES:
            what = "nested too deep" if len(opened) > MAX_DEPTH else "aliases that expand too far"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=event.start_mark)  # type: ignore[arg-type]
    return yaml.safe_load(text)
