"""Python scripts, notebooks and command lines as calls with their values, read from the syntax tree
and never executed.

A value is known where it is written down: literals, names and attributes that were given one,
defaults of `argparse` and of dataclass fields, arithmetic on these. Everything else is `Computed`.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import operator
import platform
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from farthing.config.importers.tables import Computed, is_open
from farthing.errors import InputError
from farthing.storage.files import Json

MAX_LINE, MAX_VALUES = 1 << 20, 10_000
"""Of a command line in which variables are written out, and of a list with the lists in it."""


class Call(NamedTuple):
    """A call: what is called (`FastModel.from_pretrained`), its line, its values by position and by
    name.
    """

    name: str
    line: int
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
    known, found = _Values(tree), []
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=owner, body=body):
                own = (each for each in body if isinstance(each, ast.FunctionDef))
                found += [Call(f"{owner}.{method.name}", method.lineno, [], {}) for method in own]
            case ast.Assign([ast.Attribute(attr="requires_grad")], ast.Constant(False)):
                found.append(Call("parameters.requires_grad_", node.lineno, [False], {}))
            case ast.Assign([ast.Attribute(ast.Name(owner), attr)], value):
                made = known.made(owner, node.lineno)  # `args.max_steps = 5` is a call's key
                made = "get_chat_template" if attr == "chat_template" else made
                found.append(Call(made, node.lineno, [], {attr: known.of(value, node.lineno)}))
            case ast.Call(func, args, keywords) if name := _dotted(func):
                named = Json()
                for keyword in keywords:
                    value = known.of(keyword.value, node.lineno)
                    is_spread = keyword.arg is None and isinstance(value, dict)
                    named |= value if is_spread else {keyword.arg or f"**{value}": value}
                given = [arg for arg in args if not isinstance(arg, ast.Starred)]
                positional = [known.of(arg, node.lineno) for arg in given]
                found.append(Call(name, node.lineno, positional, named))
    return sorted(found, key=lambda call: call.line)


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        return ".".join([node.id, *reversed(parts)])
    return ".".join(["()", *reversed(parts)]) if parts else ""


_ARITHMETIC: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class _Values:
    """What expressions are worth, where that can be seen."""

    def __init__(self, tree: ast.Module) -> None:
        self.assigned: dict[str, list[tuple[int, ast.expr]]] = {}
        self.defaults: dict[str, ast.expr] = {}
        """Of command line arguments and dataclass fields, by their name."""
        self.of = functools.cache(self._of)  # names grow out of one another
        self.sizes: dict[int, int] = {}  # values in a list or mapping with those in it, by its id
        for node in ast.walk(tree):
            match node:
                case ast.Constant(value=int(number)) if number.bit_length() > 63:
                    node.value = math.inf  # Python makes no text of a long number
                case ast.Assign(targets, value):
                    self._assign(targets, value)
                case ast.AnnAssign(target, value=ast.expr() as value):
                    self._assign([target], value)
                    self.defaults[_dotted(target)] = _default_of(value) or value
                case ast.Call(func, flags) if _dotted(func).endswith("add_argument"):
                    for flag in flags:
                        if isinstance(flag, ast.Constant) and (default := _default_of(node)):
                            name = str(flag.value).lstrip("-").replace("-", "_")
                            self.defaults[name] = default

    def _assign(self, targets: list[ast.expr], value: ast.expr) -> None:
        for target in targets:
            name = _dotted(target)
            if name and not name.startswith("()"):
                self.assigned.setdefault(name, []).append((target.lineno, value))

    def _of(self, node: ast.expr, line: int) -> Any:
        """The value of an expression on a line, or `Computed`."""
        try:
            return self._seen(node, line)
        except (RecursionError, ArithmeticError):
            return Computed("...")

    def _seen(self, node: ast.expr, line: int) -> Any:
        match node:
            case ast.Constant(value=str() | int() | float() | None):
                return node.value
            case ast.List(items) | ast.Tuple(items) | ast.Set(items):
                values = [self.of(item, line) for item in items]
                if any(map(is_open, values)):
                    return Computed(ast.unparse(node))
                return self._counted(values, values)
            case ast.Dict(keys, values):
                pairs = zip(keys, values, strict=True)
                found = {
                    str(self.of(key, line)): self.of(value, line) for key, value in pairs if key
                }
                return self._counted(found, found.values())
            case ast.UnaryOp(ast.USub(), inner):
                return self._arithmetic(node, operator.neg, inner, line=line)
            case ast.BinOp(left, sign, right):
                return self._arithmetic(node, _ARITHMETIC.get(type(sign)), left, right, line=line)
            case ast.Name() | ast.Attribute():
                return self._named(node, line)
        return Computed(ast.unparse(node))

    def _counted(self, value: Any, parts: Iterable[Any]) -> Any:
        n = sum(self.sizes.get(id(part), 1) for part in parts)
        if n > MAX_VALUES:
            raise OverflowError
        self.sizes[id(value)] = n
        return value

    def made(self, name: str, line: int) -> str:
        """The name of the call that a variable was made by; empty for others."""
        before = [value for at, value in self.assigned.get(name, ()) if at < line]
        return _dotted(before[-1].func) if before and isinstance(before[-1], ast.Call) else ""

    def _arithmetic(self, node: ast.expr, how: Any, *sides: ast.expr, line: int) -> Any:
        values = [self.of(side, line) for side in sides]
        is_number = all(type(value) in (int, float) and abs(value) < 1e15 for value in values)
        return how(*values) if how and is_number else Computed(ast.unparse(node))

    def _named(self, node: ast.Name | ast.Attribute, line: int) -> Any:
        name = _dotted(node)
        before = [(at, value) for at, value in self.assigned.get(name, ()) if at < line]
        owner, _, last = name.rpartition(".")
        if before:
            value = self.of(before[-1][1], before[-1][0])
        elif owner and last in self.defaults and not Computed(name).is_constant:
            value = self.of(self.defaults[last], line)
        else:
            return Computed(name)
        return Computed(name) if is_open(value) else value


def _default_of(node: ast.expr) -> ast.expr | None:
    keywords = node.keywords if isinstance(node, ast.Call) else []
    return next((keyword.value for keyword in keywords if keyword.arg == "default"), None)


# ---- command lines ----

_STARTS = re.compile(
    r"(accelerate launch|torchrun|deepspeed|python3?|trl (?:sft|dpo|kto|grpo|rloo|reward|env)"
    r"|llamafactory-cli train|uv run)\b"
)
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
        begins = _STARTS.search(line)
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
