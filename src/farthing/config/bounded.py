"""YAML that others may have written, read so that a small file can't fill the memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

MAX_DEPTH, MAX_VALUES = 50, 100_000
MAX_DIGITS = 80  # of 64 bits, in any notation of YAML


class _Loader(yaml.SafeLoader):
    """Plain values, of which numbers are no longer than a job can hold."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise _refused(f"a value that can't be read: {error}", node.start_mark) from error

    def number(self, node: yaml.ScalarNode) -> int:
        if re.search(r":|^[-+]?0\d", node.value):
            raise ValueError(f"YAML reads {node.value} as {self.construct_yaml_int(node)}")
        return whole_number(node.value, lambda text: int(self.construct_yaml_int(node)))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.number)


def whole_number(text: str, read: Callable[[str], int] = int) -> int:
    """Raises `ValueError` for one of more than 64 bits."""
    number = 1 << 64 if len(text) > MAX_DIGITS else read(text)
    if abs(number) >= 1 << 63:
        raise ValueError("a whole number of more than 64 bits")
    return number


def _refused(what: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=what, problem_mark=mark)


def read_yaml(text: str) -> Any:
    """The values of a document, as `parse_yaml`."""
    return parse_yaml(text)[0]


def parse_yaml(text: str) -> tuple[Any, yaml.Node | None]:
    """A document's values, and its nodes, which know their lines. Values are counted with aliases
    written out. Raises `yaml.YAMLError`.
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
            raise _refused(what, event.start_mark)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    finally:
        loader.dispose()
