"""Python scripts, notebooks and command lines as calls with their values, read from the syntax tree
and never executed.

A value is known where it is written down: literals, names and attributes that were given one,
defaults of `argparse` and of dataclass fields, arithmetic on these. Everything else is `Computed`.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import platform
import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

from farthing.config.importers.tables import Computed, fact, is_open
from farthing.errors import InputError
from farthing.storage.files import Json

MAX_LINE, MAX_VALUES = 1 << 20, 10_000
"""Of a command line in which variables are written out, and of a list with the lists in it."""


class Call(NamedTuple):
    """A call: what is called (`FastModel.from_pretrained`), its values by position and by name."""

    name: str
    positional: list[Any]
    named: Json

    @property
    def last(self) -> str:
        """The name without what it belongs to."""
        return self.name.rpartition(".")[2]

    @property
    def owner(self) -> str:
        """What the name belongs to."""
        return self.name.rpartition(".")[0].rpartition(".")[2]


class Command(NamedTuple):
    """A command line that starts a training: the script or verb, its flags and its launcher's."""

    program: str
    values: Json
    launcher: Json


_OTHER_LANGUAGE = re.compile(r"\s*%%(?!(time|timeit|capture|prun)\b)")
_OF_NOTEBOOKS = re.compile(
    r"^([ \t]*)(?:(?:[\w., ]+=\s*)?[%!?](?:.*\\\n)*.*|[\w.]+\?+[ \t]*$)", re.MULTILINE
)
"""A line for the shell, a magic or a question, and the same in an assignment."""


def code_of_notebook(text: str, where: str) -> str:
    """The Python of a notebook's cells, without lines for the shell. Raises `InputError`."""
    try:
        cells = json.loads(text)["cells"]
        codes = ["".join(cell["source"]) for cell in cells if cell.get("cell_type") == "code"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError("not a notebook (JSON with cells)", where=where) from error
    code = "\n\n".join(code for code in codes if not _OTHER_LANGUAGE.match(code))
    return _OF_NOTEBOOKS.sub(r"\1pass", code)


def calls_of(source: str, where: str) -> list[Call]:
    """Every call in the order of their lines. Methods that a script writes itself, and weights that
    it freezes, are calls too. Raises `InputError`.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        what = f"not Python that can be read: {getattr(error, 'msg', error)}"
        to_do = f"for a later Python than {platform.python_version()}, run farthing under that one"
        raise InputError(what, where=f"{where}:{line}" if line else where, to_do=to_do) from error
    return list(_Script(tree).calls())


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        return ".".join([node.id, *reversed(parts)])
    return ".".join(["()", *reversed(parts)]) if parts else ""


_line = operator.attrgetter("lineno")
_ARITHMETIC: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class _Given(NamedTuple):
    """What a name was given, and the call that made it."""

    value: Any
    maker: str


class _Script:
    """The values in a script, as far as they can be seen."""

    def __init__(self, tree: ast.Module) -> None:
        self.known: dict[str, _Given] = {}
        self.defaults: dict[str, ast.expr] = {}
        """Of command line arguments and dataclass fields, by their name."""
        self.sizes: dict[int, int] = {}  # values in a list or mapping with those in it, by its id
        self.nodes = sorted((each for each in ast.walk(tree) if hasattr(each, "lineno")), key=_line)
        for node in self.nodes:
            match node:
                case ast.Constant(value=int(number)) if number.bit_length() > 63:
                    node.value = math.inf  # Python makes no text of a long number
                case ast.AnnAssign(target, value=ast.expr() as value):
                    self.defaults[_dotted(target)] = _default_of(value) or value
                case ast.Call(func, flags) if _dotted(func).endswith("add_argument"):
                    for flag in flags:
                        if isinstance(flag, ast.Constant) and (default := _default_of(node)):
                            name = str(flag.value).lstrip("-").replace("-", "_")
                            self.defaults[name] = default

    def calls(self) -> Iterator[Call]:
        """In the order of their lines. What a line assigns is known from the next one on."""
        for _, nodes in groupby(self.nodes, _line):
            given: dict[str, _Given] = {}
            for node in nodes:
                match node:
                    case ast.ClassDef(name=owner, body=body):
                        own = (each for each in body if isinstance(each, ast.FunctionDef))
                        yield from (Call(f"{owner}.{method.name}", [], {}) for method in own)
                    case ast.Assign([ast.Attribute(attr="requires_grad")], ast.Constant(False)):
                        yield Call("parameters.requires_grad_", [False], {})
                    case ast.Assign(targets, value):
                        made = self._given(value)
                        given |= dict.fromkeys(map(_dotted, targets), made)
                        match targets:  # `args.max_steps = 5` is a call's key
                            case [ast.Attribute(attr="chat_template" as attr)]:
                                yield Call("get_chat_template", [], {attr: made.value})
                            case [ast.Attribute(ast.Name(owner), attr)] if owner in self.known:
                                yield Call(self.known[owner].maker, [], {attr: made.value})
                    case ast.AnnAssign(target, value=ast.expr() as value):
                        given[_dotted(target)] = self._given(value)
                    case ast.Call(func, args, keywords) if name := _dotted(func):
                        named = Json()
                        for keyword in keywords:
                            value = self.of(keyword.value)
                            is_spread = keyword.arg is None and isinstance(value, dict)
                            named |= value if is_spread else {keyword.arg or f"**{value}": value}
                        positional = (arg for arg in args if not isinstance(arg, ast.Starred))
                        yield Call(name, list(map(self.of, positional)), named)
            for name, each in given.items():
                if each.value is not None or name not in self.known:  # it may be the other branch's
                    self.known[name] = each

    def _given(self, node: ast.expr) -> _Given:
        return _Given(self.of(node), _dotted(node.func) if isinstance(node, ast.Call) else "")

    def of(self, node: ast.expr) -> Any:
        """The value of an expression, or `Computed`."""
        try:
            return self._seen(node)
        except (RecursionError, ArithmeticError):
            return Computed("...")

    def _seen(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=str() | int() | float() | None):
                return node.value
            case ast.List(items) | ast.Tuple(items) | ast.Set(items):
                values = list(map(self.of, items))
                if not any(map(is_open, values)):
                    return self._counted(values, values)
            case ast.Dict(keys, values):
                pairs = zip(keys, values, strict=True)
                found = {str(self.of(key)): self.of(value) for key, value in pairs if key}
                return self._counted(found, found.values())
            case ast.UnaryOp(ast.USub(), inner):
                return self._arithmetic(node, operator.neg, inner)
            case ast.BinOp(left, sign, right):
                return self._arithmetic(node, _ARITHMETIC.get(type(sign)), left, right)
            case ast.Name() | ast.Attribute():
                return self._named(_dotted(node))
        return Computed(ast.unparse(node))

    def _counted(self, value: Any, parts: Iterable[Any]) -> Any:
        n = sum(self.sizes[id(part)] if isinstance(part, list | dict) else 1 for part in parts)
        if n > MAX_VALUES:
            raise OverflowError
        self.sizes[id(value)] = n
        return value

    def _arithmetic(self, node: ast.expr, how: Any, *sides: ast.expr) -> Any:
        values = list(map(self.of, sides))
        is_number = all(type(value) in (int, float) and abs(value) < 1e15 for value in values)
        return how(*values) if how and is_number else Computed(ast.unparse(node))

    def _named(self, name: str) -> Any:
        owner, _, last = name.rpartition(".")
        value: Any = Computed(name)
        if name in self.known and not owner.startswith("()"):
            value = self.known[name].value
        elif owner and last in self.defaults and not value.is_constant:
            value = self.of(self.defaults[last])
        if is_open(value):  # of a data set, its split tells more than the name
            value = Computed((re.match(r"\w+\['\w+'\]", value) or [name])[0])
        return value


def _default_of(node: ast.expr) -> ast.expr | None:
    keywords = node.keywords if isinstance(node, ast.Call) else []
    return next((keyword.value for keyword in keywords if keyword.arg == "default"), None)


# ---- command lines ----

_ASSIGNED = (
    r"^[ \t]*(?:(?:export|local|readonly|declare)[ \t]+)?(\w+)="
    r"(\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s;&|\"']*)"
)
"""A shell variable; what is quoted may go over several lines."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_ENDS = ("&&", "||", "|", ";", "&", ">", ">>", "2>&1")
MAX_NESTED = 5


def commands_of(text: str) -> Iterator[Command]:
    """Command lines in a shell script or a docstring that start a training with `--key value`
    arguments.
    """
    joined = re.sub(r"\\\s*(\n\s*|$)", " ", text)
    variables = {
        name: " ".join(value.strip("\"'").split())
        for name, value in re.findall(_ASSIGNED, joined, re.MULTILINE)
    }

    left = MAX_LINE

    def known(match: re.Match[str]) -> str:
        nonlocal left
        text = variables.get(match[1] or match[3], match[2] or match[0])
        left -= len(text)
        if left < 0:
            raise ValueError("variables that expand too far")
        return text

    for line in joined.split("\n"):
        begins = re.search(fact("command-starts"), line)
        if begins is None or "--" not in line or len(line) > MAX_LINE:
            continue
        try:
            for _ in range(MAX_NESTED):  # a variable may be made of others
                line = _VARIABLE.sub(known, line)
            line = re.sub(r"\s-m\s+trl(?:\s+|\.scripts\.)(\w+)", r" \1.py", line)
            words = shlex.split(line[begins.start() :].strip(" `$>"), comments=True)
        except ValueError:
            continue
        found = _command(words)
        if found.program and found.values:
            yield found


def _command(words: list[str]) -> Command:
    program, key = "", ""
    values, launcher = dict[str, list[str]](), dict[str, list[str]]()
    if words[:1] == ["trl"] or words[:2] == ["llamafactory-cli", "train"]:
        program, words = words[words[0] == "trl"], words[2:]
    for word in words:
        into = values if program else launcher
        if word in _ENDS:
            break
        if word.startswith("--"):
            key, sign, value = word.lstrip("-").partition("=")
            key = key.replace("-", "_")
            into[key] = [value] if sign else []
            key = "" if sign else key
        elif not program and word.endswith(".py"):
            program, key = word.rpartition("/")[2], ""
        elif key:
            into[key].append(word)
    kept = ({key: _word(found) for key, found in each.items()} for each in (values, launcher))
    return Command(program, *kept)


def _word(found: list[str]) -> Any:
    if len(found) != 1:
        return found or True
    text = found[0]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.search(r"\$[\w({]", text):
        return Computed(text)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
