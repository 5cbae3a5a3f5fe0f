"""Chat templates compiled as transformers compiles them, in a sandbox that bounds their work.

A template is a program by whoever published the model. Here it can't draw at random, look at the
clock, loop without end or grow a text without bound.
"""

from __future__ import annotations

import functools
import json
import math
import re
import threading
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from farthing.data.rows import START, STOP
from farthing.errors import ModelError

MOST_WORK = 200_000_000
"""Of one chat, in characters that expressions read and write: about a second."""
_WORK_OF_A_CALL, _WORK_OF_A_TURN, _WORK_OF_AN_ITEM = 4000, 100, 400
_LARGEST_ARGUMENT, _LARGEST_INDENT, _MOST_BITS = 1_000_000, 100, 10_000
_OUTSIDE = ("length", "count", "first", "last", "list", "reverse", "items", "default", "d", "attr")
"""Filters that don't look into the items of a list; all others do."""
_UNSAFE = ("translate", "expandtabs", "encode", "to_bytes")
"""Methods that multiply texts or make bytes, and that no template needs."""


class _Left(threading.local):
    work = MOST_WORK


_left = _Left()


def _spend(work: int) -> None:
    _left.work -= work
    if _left.work < 0:
        raise _unbounded()


def _unbounded() -> ModelError:
    return ModelError(
        "it loops or grows without bound",
        where="the chat template",
        to_do="name another template: data.chat_template: FILE.jinja",
    )


def _length(value: Any) -> int:
    if isinstance(value, list | tuple):
        return 8 * len(value)
    return len(value) if isinstance(value, str) else 0


def _spend_all(value: Any) -> None:
    """What writing a value out costs; a list counts as often as it stands in others."""
    if isinstance(value, str):
        return _spend(len(value))
    items = (*value, *value.values()) if isinstance(value, dict) else value
    if isinstance(items, list | tuple):
        _spend(_WORK_OF_AN_ITEM * len(items))
        for each in items:
            _spend_all(each)
    return None


@jinja2.pass_context  # never folded into a constant
def _read(_: Any, value: Any, is_whole: bool) -> Any:
    """A value whose length is spent, or with `is_whole` all that it holds."""
    (_spend_all if is_whole else lambda some: _spend(_length(some)))(value)
    return value


@jinja2.pass_context
def _turns(_: Any, value: Any, n_written: int) -> list[Any]:
    """What a loop goes through; each turn writes so many characters of the template."""
    found = [] if isinstance(value, jinja2.Undefined) else list(value)
    _spend(len(found) * (_WORK_OF_A_TURN + n_written))
    return found


def _bounded(name: str, call: Callable[..., Any], own: Any, given: list[Any]) -> Any:
    """The result of a filter, test, method or macro. `own` is what a method belongs to."""
    _spend(_WORK_OF_A_CALL)
    texts = [each for each in (own, *given) if isinstance(each, str)]
    numbers = [each for each in given if isinstance(each, int)]
    copies_lists = name == "sum" and any(isinstance(each, list) for each in given[1:])
    if copies_lists or any(abs(each) > _LARGEST_ARGUMENT for each in numbers):
        raise _unbounded()
    before = _left.work
    if name not in _OUTSIDE or isinstance(own, list | tuple):
        for each in (own, *given):
            _spend_all(each)
    if name.startswith("format") and texts:
        pattern = texts[0]
        if re.search(r"%[^%a-zA-Z]*\*|\{[^}]*\{", pattern):  # a width that is an argument
            raise _unbounded()
        n_fields = pattern.count("%") + pattern.count("{")
        widths = sum(map(int, re.findall(r"\d{1,18}", pattern)))
        _spend(n_fields * (before - _left.work) + widths)
    if name == "replace" and len(texts) > 2:
        _spend(texts[0].count(texts[1]) * len(texts[2]))
    if name in ("wordwrap", "urlize"):  # a text for each word of another
        _spend(math.prod(map(len, texts)))
    if name in ("join", "indent"):
        each = max([*numbers, min(map(len, texts), default=0)])
        _spend(max(map(_length, (own, *given))) * each)
    found = call()
    _spend(sum(map(len, texts)) + _length(found))
    return found


def _bounded_function(name: str, of: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test."""

    @functools.wraps(of)  # with what jinja2 notes at it
    def bounded(*args: Any, **named: Any) -> Any:
        return _bounded(name, lambda: of(*args, **named), None, [*args, *named.values()])

    return bounded


def _filtered(value: nodes.Node, name: str, *args: object) -> nodes.Filter:
    return nodes.Filter(value, name, list(map(nodes.Const, args)), [], None, None)


class _Counted(NodeTransformer):
    """Has loops, comparisons, slices, keys and `~` spend what they read."""

    def generic_visit(self, node: nodes.Node) -> nodes.Node:
        super().generic_visit(node)
        match node:
            case nodes.For():  # each turn writes what the template has in it
                n_written = sum(len(each.data) for each in node.find_all(nodes.TemplateData))
                node.iter = _filtered(node.iter, "_turns", n_written)
            case nodes.Concat():
                return _filtered(nodes.List(node.nodes), "join")
            case nodes.Operand():  # what something is compared with
                node.expr = _filtered(node.expr, "_read", True)
            case nodes.Compare() if any(each.op in ("in", "notin") for each in node.ops):
                node.expr = _filtered(node.expr, "_read", True)  # for its hash
            case nodes.Pair():
                node.key = _filtered(node.key, "_read", True)
            case nodes.Getitem(arg=nodes.Slice()):
                node.node = _filtered(node.node, "_read", False)
        return node


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: what the model says."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 wants it

    def parse(self, parser: Any) -> Any:
        """The block's content between marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{START}{caller()}{STOP}"


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, *source: Any) -> nodes.Template:
        found: nodes.Template = _Counted().visit(super()._parse(*source))
        found.set_environment(self)
        return found

    def getitem(self, of: Any, key: Any) -> Any:
        """An item, by a key whose hash goes through all of it."""
        _spend_all(key)
        return super().getitem(of, key)

    def call(self, context: Any, of: Any, /, *args: Any, **named: Any) -> Any:
        """Of methods, macros and functions."""
        call = functools.partial(super().call, context, of, *args, **named)
        name = getattr(of, "__name__", "")
        own = getattr(getattr(of, "__wrapped__", of), "__self__", None)  # jinja2 wraps str.format
        return _bounded(name, call, own, [*args, *named.values()])

    def is_safe_callable(self, of: Any) -> bool:
        """Whether a template may call this."""
        return getattr(of, "__name__", "") not in _UNSAFE and super().is_safe_callable(of)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Numbers of thousands of digits are refused; what texts and lists grow by is spent."""
        call = functools.partial(super().call_binop, context, operator, left, right)
        if isinstance(left, str) and operator == "%":
            return _bounded("format", call, left, [right])
        if isinstance(left, int) and isinstance(right, int):
            n, m = left.bit_length(), right.bit_length()
            if (n * abs(right) if operator == "**" else n + m) > _MOST_BITS:
                raise _unbounded()
        elif operator == "+":
            _spend(_length(left) + _length(right))
        elif operator == "*":
            n, m = (each if isinstance(each, int) else _length(each) for each in (left, right))
            _spend(max(0, n * m))
        return call()


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it."""
    if max(indent or 0, *map(len, separators or ("",))) > _LARGEST_INDENT:
        raise _unbounded()
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        finalize=_written,
    )
    filters: dict[str, Any] = {**environment.filters, "tojson": _as_json}
    tests: dict[str, Any] = environment.tests
    environment.filters = {name: _bounded_function(name, of) for name, of in filters.items()}
    environment.filters |= {"_turns": _turns, "_read": _read}
    for name, of in tests.items():
        if of.__module__ == "_operator" or name in ("in", "lower", "upper"):  # they read it all
            tests[name] = _bounded_function(name, of)
    del environment.filters["random"], environment.globals["lipsum"]
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


@jinja2.pass_context
def _written(_: Any, value: Any) -> Any:
    _spend_all(value)
    return value


def render(source: str, values: dict[str, Any]) -> str:
    """What a template makes of these values. Raises `ModelError` for one without bounds."""
    _left.work = MOST_WORK
    return _compiled(source).render(values)
