"""Python scripts, notebooks and command lines as calls with their values, read from the syntax tree
and never executed.

A value is known where it is written down: literals, names and attributes that were given one,
defaults of `argparse` and of dataclass fields, arithmetic on these. Everything else is `Computed`.
"""

from __future__ import annotations

import ast
import json
import operator
import re
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

from farthing.config.importers.tables import Computed
from farthing.errors import InputError
from farthing.storage.files import Json

MAX_DEPTH, MAX_LINE = 200, 1 << 20
OWN_METHODS = ("compute_loss", "training_step", "create_optimizer", "get_train_dataloader")


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


class Command(NamedTuple):
    """A command line that starts a training."""

    program: str
    """The script or verb: `run_glue.py`, `sft`."""
    values: Json
    launcher: Json


def code_of_notebook(text: str, where: str) -> str:
    """The Python of a notebook's cells, without lines for the shell. Raises `InputError`."""
    try:
        cells = json.loads(text)["cells"]
        codes = ["".join(cell["source"]) for cell in cells if cell.get("cell_type") == "code"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError("not a notebook (JSON with cells)", where=where) from error
    code = "\n\n".join(code for code in codes if not code.lstrip().startswith("%%"))
    return re.sub(r"(?m)^([ \t]*)[%!](?:.*\\\n)*.*", r"\1pass", code)


def tree_of(source: str, where: str) -> ast.Module:
    """The syntax tree. Raises `InputError`."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        what = f"not Python that can be read: {getattr(error, 'msg', error)}"
        raise InputError(what, where=f"{where}:{line}" if line else where) from error


def calls_of(tree: ast.Module) -> list[Call]:
    """Every call in the order of their lines. Methods of a trainer that a script writes itself, and
    weights that it freezes, are calls too.
    """
    known, found = _Values(tree), []
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=owner, body=body):
                own = [each for each in body if getattr(each, "name", "") in OWN_METHODS]
                found += [Call(f"{owner}.{m.name}", m.lineno, [], {}) for m in own]  # type: ignore[attr-defined]
            case ast.Assign([ast.Attribute(attr="requires_grad")], ast.Constant(False)):
                found.append(Call("().requires_grad_", node.lineno, [False], {}))
            case ast.Call(func, args, keywords) if name := _dotted(func):
                given = [arg for arg in args if not isinstance(arg, ast.Starred)]
                named = Json()
                for keyword in keywords:
                    value = known.of(keyword.value, node.lineno)
                    if keyword.arg is None and isinstance(value, dict):
                        named |= value
                    else:
                        named[keyword.arg or f"**{value}"] = value
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
    return f"().{parts[0]}" if parts else ""


_ARITHMETIC: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}


class _Values:
    """What expressions are worth, where that can be seen. Each is worked out once: names grow out
    of one another.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.assigned: dict[str, list[tuple[int, ast.expr]]] = {}
        self.defaults: dict[str, ast.expr] = {}
        """Of command line arguments and dataclass fields, by their name."""
        self._known: dict[tuple[ast.expr, int], Any] = {}
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets, value):
                    self._assign(targets, value, node.lineno)
                case ast.AnnAssign(target, value=ast.expr() as value):
                    self._assign([target], value, node.lineno)
                case ast.Call(func, args) if _dotted(func).endswith("add_argument"):
                    for arg in args:
                        flag = str(arg.value) if isinstance(arg, ast.Constant) else ""
                        if flag.startswith("--"):
                            self._default(flag.lstrip("-").replace("-", "_"), _default_of(node))
                case ast.ClassDef(body=body):
                    for item in body:
                        match item:
                            case ast.AnnAssign(ast.Name(name), value=given):
                                is_field = isinstance(given, ast.Call)
                                self._default(name, _default_of(given) if is_field else given)

    def _assign(self, targets: list[ast.expr], value: ast.expr, line: int) -> None:
        for target in targets:
            if isinstance(target, ast.Name | ast.Attribute):
                self.assigned.setdefault(ast.unparse(target), []).append((line, value))

    def _default(self, name: str, value: ast.expr | None) -> None:
        self.defaults |= {name: value} if value is not None else {}

    def of(self, node: ast.expr, line: int, depth: int = 0) -> Any:
        """The value of an expression on a line, or `Computed`."""
        if depth > MAX_DEPTH:
            return Computed("...")
        if (node, line) not in self._known:
            self._known[node, line] = self._of(node, line, depth + 1)
        return self._known[node, line]

    def _of(self, node: ast.expr, line: int, depth: int) -> Any:
        match node:
            case ast.Constant(value=str() | int() | float() | None):
                return node.value
            case ast.List(items) | ast.Tuple(items) | ast.Set(items):
                values = [self.of(item, line, depth) for item in items]
                return Computed(ast.unparse(node)) if any(map(_is_open, values)) else values
            case ast.Dict(keys, values):
                pairs = ((k, self.of(v, line, depth)) for k, v in zip(keys, values, strict=True))
                return {str(self.of(k, line, depth)): value for k, value in pairs if k}
            case ast.UnaryOp(sign, inner):
                return _arithmetic(node, sign, [self.of(inner, line, depth)])
            case ast.BinOp(left, sign, right):
                return _arithmetic(node, sign, [self.of(x, line, depth) for x in (left, right)])
            case ast.Name() | ast.Attribute():
                return self._named(node, line, depth)
        return Computed(ast.unparse(node))

    def _named(self, node: ast.Name | ast.Attribute, line: int, depth: int) -> Any:
        name = ast.unparse(node)
        before = [(at, value) for at, value in self.assigned.get(name, ()) if at < line]
        if before:
            at, expression = before[-1]
            value = self.of(expression, at, depth)
            return Computed(name) if _is_open(value) else value
        last, is_attribute = name.rpartition(".")[2], isinstance(node, ast.Attribute)
        if is_attribute and last in self.defaults and not _is_constant(name):
            return self.of(self.defaults[last], line, depth)
        return Computed(name)


def _default_of(call: ast.expr | None) -> ast.expr | None:
    keywords = call.keywords if isinstance(call, ast.Call) else []
    return next((keyword.value for keyword in keywords if keyword.arg == "default"), None)


def _arithmetic(node: ast.expr, sign: ast.AST, sides: list[Any]) -> Any:
    """Of numbers, and of texts that stay short: names grow out of one another."""
    is_number = all(type(v) in (int, float) and abs(v) < 1e15 for v in sides)
    is_text = isinstance(sign, ast.Add) and all(type(v) is str and len(v) < 1000 for v in sides)
    is_truth = isinstance(sign, ast.Not) and type(sides[0]) is bool
    how = _ARITHMETIC.get(type(sign))
    if how is None or not (is_number or is_text or is_truth):
        return Computed(ast.unparse(node))
    try:
        return how(*sides)
    except (ArithmeticError, ValueError):
        return Computed(ast.unparse(node))


def _is_open(value: Any) -> bool:
    return isinstance(value, Computed) and not _is_constant(value)


def _is_constant(name: str) -> bool:
    """`torch.bfloat16`, `IntervalStrategy.EPOCH`: names that stand for themselves."""
    return re.fullmatch(r"(torch\.\w+|[A-Z]\w*\.[A-Z_0-9]+)", name) is not None


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

    def known(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] or match[0])

    for line in joined.split("\n"):
        begins = _STARTS.search(line)
        if begins is None or "--" not in line:
            continue
        for _ in range(MAX_NESTED):  # a variable may be made of others
            line = _VARIABLE.sub(known, line) if len(line) < MAX_LINE else line
        try:
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
