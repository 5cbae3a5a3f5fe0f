"""Python scripts, notebooks and command lines as calls with their values, read from the syntax tree
and never executed.

A value is known where it is written down: literals, names and attributes that were given one,
defaults of `argparse` and of dataclass fields, arithmetic on these. Everything else is `Computed`
and keeps its source text.
"""

from __future__ import annotations

import ast
import json
import operator
import re
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

from farthing.errors import InputError
from farthing.storage.files import Json

MAX_SCRIPT_BYTES = 16 << 20
MAX_DEPTH = 200


class Computed(str):
    """The source text of a value that only running the script would tell."""


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
    return "\n\n".join(
        "\n".join("pass" if re.match(r"\s*[%!]", line) else line for line in code.split("\n"))
        for code in kept
    )


def tree_of(source: str, where: str) -> ast.Module:
    """The syntax tree. Code that only newer Pythons parse (quotes within f-strings) is read
    statement by statement.

    Raises `InputError`.
    """
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        parts = _parts_that_parse(source)
        if parts is None:
            line = getattr(error, "lineno", None)
            raise InputError(
                f"not Python that can be read: {getattr(error, 'msg', error)}",
                where=f"{where}:{line}" if line else where,
            ) from error
        return parts


def _parts_that_parse(source: str) -> ast.Module | None:
    """The statements at the margin that parse by themselves, in their places; None where there are
    none.
    """
    lines, body = source.split("\n"), []
    inner = ("else", "elif", "except", "finally")
    starts = [
        i
        for i, line in enumerate(lines)
        if line[:1].strip() and line[0] not in "#)]}" and not line.startswith(inner)
    ]
    for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        try:
            part = ast.parse("\n".join(lines[start:stop]))
        except (SyntaxError, ValueError):
            continue
        ast.increment_lineno(part, start)
        body += part.body
    return ast.Module(body, []) if body else None


def calls_of(tree: ast.Module) -> list[Call]:
    """Every call, in the order of their lines."""
    defaults = _defaults(tree)
    assigned: dict[str, list[tuple[int, ast.expr]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and node.value is not None:
            for target in node.targets:
                if isinstance(target, ast.Name | ast.Attribute):
                    assigned.setdefault(ast.unparse(target), []).append((node.lineno, node.value))
        elif (
            isinstance(node, ast.AnnAssign)
            and node.value is not None
            and isinstance(node.target, ast.Name)
        ):
            assigned.setdefault(node.target.id, []).append((node.lineno, node.value))
    known = _Values(assigned, defaults)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
            if name:
                positional = [
                    known.of(arg, node.lineno)
                    for arg in node.args
                    if not isinstance(arg, ast.Starred)
                ]
                named: Json = {}
                for keyword in node.keywords:
                    value = known.of(keyword.value, node.lineno)
                    if keyword.arg is not None:
                        named[keyword.arg] = value
                    elif isinstance(value, dict):
                        named |= {str(key): each for key, each in value.items()}
                    else:
                        named[f"**{ast.unparse(keyword.value)}"] = Computed(
                            ast.unparse(keyword.value)
                        )
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


def _defaults(tree: ast.Module) -> dict[str, ast.expr]:
    """Defaults of command line arguments and dataclass fields, by their name."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _dotted(node.func).endswith("add_argument"):
            flags = [
                a.value
                for a in node.args
                if isinstance(a, ast.Constant) and isinstance(a.value, str)
            ]
            default = next((k.value for k in node.keywords if k.arg == "default"), None)
            for flag in flags:
                if flag.startswith("--") and default is not None:
                    found[flag.lstrip("-").replace("-", "_")] = default
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if (
                    isinstance(item, ast.AnnAssign)
                    and isinstance(item.target, ast.Name)
                    and item.value is not None
                ):
                    value: ast.expr | None = item.value
                    if isinstance(value, ast.Call):
                        value = next((k.value for k in value.keywords if k.arg == "default"), None)
                    if value is not None:
                        found[item.target.id] = value
    return found


_ARITHMETIC: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class _Values:
    """What expressions are worth, where that can be seen."""

    def __init__(
        self, assigned: dict[str, list[tuple[int, ast.expr]]], defaults: dict[str, ast.expr]
    ) -> None:
        self.assigned, self.defaults = assigned, defaults
        self._known: dict[tuple[ast.expr, int], Any] = {}

    def of(self, node: ast.expr, line: int, depth: int = 0) -> Any:
        """The value of an expression on a line, or `Computed`. Each is worked out once: names grow
        out of one another.
        """
        if depth > MAX_DEPTH:
            return Computed("...")
        if (node, line) not in self._known:
            self._known[node, line] = self._of(node, line, depth)
        return self._known[node, line]

    def _of(self, node: ast.expr, line: int, depth: int) -> Any:
        if isinstance(node, ast.Constant):
            return (
                node.value
                if not isinstance(node.value, bytes | complex) and node.value is not ...
                else Computed(ast.unparse(node))
            )
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            values = [self.of(item, line, depth + 1) for item in node.elts]
            return (
                Computed(ast.unparse(node))
                if any(isinstance(v, Computed) and not _is_constant_name(v) for v in values)
                else values
            )
        if isinstance(node, ast.Dict):
            return {
                str(self.of(k, line, depth + 1)): self.of(v, line, depth + 1)
                for k, v in zip(node.keys, node.values, strict=True)
                if k
            }
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            value = self.of(node.operand, line, depth + 1)
            if isinstance(node.op, ast.USub) and isinstance(value, int | float):
                return -value
            return (not value) if isinstance(value, bool) else Computed(ast.unparse(node))
        if isinstance(node, ast.BinOp):
            return self._arithmetic(node, line, depth)
        if isinstance(node, ast.Name | ast.Attribute):
            return self._named(node, line, depth)
        return Computed(ast.unparse(node))

    def _named(self, node: ast.Name | ast.Attribute, line: int, depth: int) -> Any:
        name = ast.unparse(node)
        before = [(at, value) for at, value in self.assigned.get(name, ()) if at < line]
        if before:
            value = self.of(before[-1][1], before[-1][0], depth + 1)
            return (
                value
                if not isinstance(value, Computed)
                else Computed(value if _is_constant_name(value) else name)
            )
        last = name.rpartition(".")[2]
        if (
            isinstance(node, ast.Attribute)
            and last in self.defaults
            and not _is_constant_name(name)
        ):
            return self.of(self.defaults[last], line, depth + 1)
        return Computed(name)

    def _arithmetic(self, node: ast.BinOp, line: int, depth: int) -> Any:
        left, right = self.of(node.left, line, depth + 1), self.of(node.right, line, depth + 1)
        how = _ARITHMETIC.get(type(node.op))
        numbers = all(
            isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e15
            for v in (left, right)
        )
        texts = isinstance(node.op, ast.Add) and all(
            isinstance(v, str) and not isinstance(v, Computed) for v in (left, right)
        )
        if how is None or not (numbers or texts):
            return Computed(ast.unparse(node))
        try:
            return how(left, right)
        except (ArithmeticError, ValueError):
            return Computed(ast.unparse(node))


def _is_constant_name(name: str) -> bool:
    """`torch.bfloat16`, `IntervalStrategy.EPOCH`: names that stand for themselves."""
    return re.fullmatch(r"(torch\.\w+|[A-Z]\w*\.[A-Z_0-9]+)", name) is not None


# ---- command lines ----

_STARTS = re.compile(
    r"(accelerate launch|torchrun|deepspeed|python3?|trl"
    r" (?:sft|dpo|kto|grpo|rloo|reward|env)|llamafactory-cli train|uv run)\b"
)


_ASSIGNED = (
    r"^[ \t]*(?:(?:export|local|readonly|declare)[ \t]+)?(\w+)="
    r"(\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s;&|\"']*)"
)
"""A shell variable; what is quoted may go over several lines."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
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
            before = line
            line = _VARIABLE.sub(
                lambda match: variables.get(match[1] or match[3], match[2] or match[0]), line
            )
            if line == before or len(line) > MAX_SCRIPT_BYTES:
                break
        try:
            words = shlex.split(line[begins.start() :].strip(" `$>"), comments=True)
        except ValueError:
            continue
        found = _command(words)
        if found is not None and found.values:
            yield found


def _command(words: list[str]) -> Command | None:
    values: Json = {}
    launcher: Json = {}
    program, at, into = "", 0, launcher
    if words[:1] == ["trl"] and len(words) > 1:
        program, at, into = words[1], 2, values
    elif words[:2] == ["llamafactory-cli", "train"]:
        program, at, into = "llamafactory-cli", 2, values
    while at < len(words):
        word = words[at]
        at += 1
        if word in ("&&", "||", "|", ";", "&", ">", ">>", "2>&1"):
            break
        if not word.startswith("--"):
            if not program and word.endswith(".py"):
                program, into = word.rpartition("/")[2], values
            continue
        key, sign, value = word.lstrip("-").partition("=")
        found = [value] if sign else []
        while (
            not sign
            and at < len(words)
            and not words[at].startswith("--")
            and words[at] not in ("&&", "|", ";", ">")
        ):
            if into is launcher and words[at].endswith(".py"):
                break
            found.append(words[at])
            at += 1
        into[key.replace("-", "_")] = _word(found)
    return Command(program, values, launcher) if program else None


def _word(found: list[str]) -> Any:
    if not found:
        return True
    if len(found) > 1:
        return found
    text = found[0]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
