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
    kept = [code for code in codes if not code.lstrip().startswith("%%")]
    lines = "\n\n".join(kept).split("\n")
    return "\n".join("pass" if re.match(r"\s*[%!]", line) else line for line in lines)


def tree_of(source: str, where: str) -> ast.Module:
    """The syntax tree. Code that only newer Pythons parse (quotes within f-strings) is read
    statement by statement. Raises `InputError`.
    """
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        parts = _parts_that_parse(source)
        if parts is None:
            line = getattr(error, "lineno", None)
            what = f"not Python that can be read: {getattr(error, 'msg', error)}"
            raise InputError(what, where=f"{where}:{line}" if line else where) from error
        return parts


def _parts_that_parse(source: str) -> ast.Module | None:
    """The statements at the margin that parse by themselves, in their places; None for none."""
    lines, body = source.split("\n"), []
    starts = [
        i
        for i, line in enumerate(lines)
        if line[:1].strip()
        and line[0] not in "#)]}"
        and not line.startswith(("else", "elif", "except", "finally"))
    ]
    for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        try:
            part = ast.parse("\n".join(lines[start:stop]))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        ast.increment_lineno(part, start)
        body += part.body
    return ast.Module(body, []) if body else None


OWN_METHODS = ("compute_loss", "training_step", "create_optimizer", "get_train_dataloader")


def calls_of(tree: ast.Module) -> list[Call]:
    """Every call, in the order of their lines."""
    known, found = _Values(tree), []
    for node in ast.walk(tree):
        found += _own_code(node)
        name = _dotted(node.func) if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or not name:
            continue
        given = [arg for arg in node.args if not isinstance(arg, ast.Starred)]
        positional, named = [known.of(arg, node.lineno) for arg in given], Json()
        for keyword in node.keywords:
            value = known.of(keyword.value, node.lineno)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, dict):
                named |= {str(key): each for key, each in value.items()}
            else:
                source = ast.unparse(keyword.value)
                named[f"**{source}"] = Computed(source)
        found.append(Call(name, node.lineno, positional, named))
    return sorted(found, key=lambda call: call.line)


def _own_code(node: ast.AST) -> list[Call]:
    """Methods of a trainer that a script writes itself, and weights that it freezes, as calls."""
    if isinstance(node, ast.ClassDef):
        methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
        return [
            Call(f"{node.name}.{each.name}", each.lineno, [], {})
            for each in methods
            if each.name in OWN_METHODS
        ]
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
        targets = (each for each in node.targets if isinstance(each, ast.Attribute))
        if node.value.value is False and any(each.attr == "requires_grad" for each in targets):
            return [Call("().requires_grad_", node.lineno, [False], {})]
    return []


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
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name | ast.Attribute):
                        places = self.assigned.setdefault(ast.unparse(target), [])
                        places.append((node.lineno, node.value))
            elif isinstance(node, ast.Call) and _dotted(node.func).endswith("add_argument"):
                self._argument(node)
            elif isinstance(node, ast.ClassDef):
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        self._field(item.target.id, item.value)

    def _argument(self, node: ast.Call) -> None:
        default = next((k.value for k in node.keywords if k.arg == "default"), None)
        for arg in node.args:
            flag = arg.value if isinstance(arg, ast.Constant) else None
            if isinstance(flag, str) and flag.startswith("--") and default is not None:
                self.defaults[flag.lstrip("-").replace("-", "_")] = default

    def _field(self, name: str, value: ast.expr | None) -> None:
        if isinstance(value, ast.Call):
            value = next((k.value for k in value.keywords if k.arg == "default"), None)
        if value is not None:
            self.defaults[name] = value

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
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                values = [self.of(item, line, depth) for item in items]
                return Computed(ast.unparse(node)) if any(map(_is_open, values)) else values
            case ast.Dict():
                pairs = zip(node.keys, node.values, strict=True)
                return {
                    str(self.of(k, line, depth)): self.of(v, line, depth) for k, v in pairs if k
                }
            case ast.UnaryOp(op=sign, operand=inner):
                return _arithmetic(node, sign, [self.of(inner, line, depth)])
            case ast.BinOp(op=sign, left=left, right=right):
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
    for line in joined.split("\n"):
        begins = _STARTS.search(line)
        if begins is None or "--" not in line:
            continue
        for _ in range(MAX_NESTED):  # a variable may be made of others
            before, line = (
                line,
                _VARIABLE.sub(
                    lambda match: variables.get(match[1] or match[3], match[2] or match[0]), line
                ),
            )
            if line == before or len(line) > MAX_LINE:
                break
        try:
            words = shlex.split(line[begins.start() :].strip(" `$>"), comments=True)
        except ValueError:
            continue
        found = _command(words)
        if found is not None and found.values:
            yield found


def _command(words: list[str]) -> Command | None:
    values, launcher = Json(), Json()
    program, into = "", launcher
    if words[:1] == ["trl"] or words[:2] == ["llamafactory-cli", "train"]:
        program, into = (words[1] if words[0] == "trl" else words[0]), values
        words = words[2:]
    at = 0
    while at < len(words) and words[at] not in _ENDS:
        word = words[at]
        at += 1
        if not word.startswith("--"):
            if not program and word.endswith(".py"):
                program, into = word.rpartition("/")[2], values
            continue
        key, sign, value = word.lstrip("-").partition("=")
        found = [value] if sign else []
        while not sign and at < len(words) and not words[at].startswith("--"):
            is_script = into is launcher and words[at].endswith(".py")
            if is_script or words[at] in _ENDS:
                break
            found.append(words[at])
            at += 1
        into[key.replace("-", "_")] = _word(found)
    return Command(program, values, launcher) if program else None


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
