"""The words of the command line: its verbs, their arguments, and suggestions for unknown words.

A verb is a file of this folder, named after it, and a line in `VERBS`. The file has `ARGUMENTS`,
`run(arguments) -> exit code`, and maybe `RARE`, options that only `--help-all` shows. It imports
nothing heavy at its top, and is imported when its verb is called.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from types import ModuleType
from typing import Any

import farthing
from farthing.errors import EXIT_MISTAKE, InputError
from farthing.printable import printable

VERBS = {
    "init": "write a commented starter job, a demo, or the JSON Schema of job files",
    "plan": "show where a job fits, how long it takes and what it costs on every GPU",
    "train": "start a job, or resume it",
    "search": "find the best settings of a job under one cap",
    "launch": "run a job on a cloud or remote machine (dry run unless --yes)",
    "probe": "time real steps and find the cheapest settings for this machine",
    "profile": "profile a few real steps, with a trace",
    "report": "print the receipt of a run, compare two, or write a page",
    "watch": "follow a run from another terminal or machine",
    "runs": "list runs with their state, dollars and best metric",
    "eval": "evaluate the base and the tuned model on held-out examples",
    "chat": "chat with the model of a run",
    "predict": "label or answer the rows of a file with the model of a run",
    "export": "write the model: adapter, merged, GGUF or quantized",
    "prices": "show GPU prices, or update them from public feeds",
    "doctor": "check this machine, and a job before it starts",
    "import": "convert a configuration of another tool to a job",
    "completion": "print a completion script for your shell",
}
"""What each verb does, in the order of the help."""

DESCRIPTION = (
    "Fine-tune a language model for the fewest dollars: resumable to the bit, with its bill."
)
EPILOG = "exit codes: 0 done, 1 crash, 2 mistake, 3 limit, 75 interrupted (run again)"


Arguments = Mapping[str, str]
"""Arguments by how they are written, with their help:

    --yes                 a switch
    --limit N             a whole number; --every SECONDS:float a number; anything else a text
    --seed N:=0           with its default
    --kind {spot,owned}   one of these words
    --compare A B         two values
    --gpu GPU...          may be repeated
    --serve [TRAFFIC]     may stand alone, which gives "", or with [N:=3] the value behind :=
    --output FILE!        required
    job, [path], [data]...    a position: required, optional, any number
"""
SET: Arguments = {
    "--set KEY=VALUE...": "override a key: train.learning_rate=1e-4",
}
JOB: Arguments = {"job": "job file (YAML)", **SET}
RUN: Arguments = {
    "folder": "run folder (output_dir)",
    "--trust-remote-code": "run the code that comes with the base model, as the job does",
}
MAX_TOKENS: Arguments = {"--max-tokens N:=256": "maximum tokens of an answer"}
_VALUE = re.compile(
    r"(?P<open>\[)?(?P<name>.*?)(?P<choices>\{.*\})?(?P<float>:float)?(:=(?P<default>.*?))?"
    r"(?(open)\])(?P<more>\.\.\.)?(?P<needed>!)?"
)


class Parser(argparse.ArgumentParser):
    """An argparse parser that suggests the nearest word, and prints what was typed without letting
    it steer a terminal.
    """

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message("\n".join(map(printable, message.split("\n"))), file)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = ", ".join(map(str, action.choices))
            message = f"{value!r} is not one of {known}{did_you_mean(value, action.choices)}"
            raise argparse.ArgumentError(action, message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, after `refuse_unknown_options` where the words belong to one verb."""
        if self._subparsers is None:
            self.refuse_unknown_options(args)
        return super().parse_known_args(args, namespace)

    def refuse_unknown_options(self, words: Sequence[str]) -> None:
        """Exit with a suggestion when a word looks like an option and is none, before any other
        complaint.
        """
        known = [name for action in self._actions for name in action.option_strings]
        for word in words[: words.index("--")] if "--" in words else words:
            name = word.split("=")[0]
            is_known = any(each.startswith(name) for each in known)
            if word.startswith("--") and " " not in word and not is_known:
                self.error(f"no such option: {name}{did_you_mean(name, known)}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` with the nearest known word, empty where none is near."""
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, ModuleType]:
    """The arguments of a command line and the module of its verb. Exits after `--help`, and with 2
    when it is wrong.
    """
    verb = next((word for word in words if not word.startswith("-")), "")
    parser = build_parser([verb] if verb in VERBS else [], shows_rare="--help-all" in words)
    if verb not in VERBS and not {"-h", "--help", "--version"} & set(words):
        if not verb:
            parser.refuse_unknown_options(words)
        parser.print_help(sys.stderr)
        what = "which verb? `farthing init --demo` writes an example to start from"
        if verb:
            what = f"there is no verb {verb!r}{did_you_mean(verb, VERBS)}"
        parser.exit(EXIT_MISTAKE, f"\nfarthing: {what}\n")
    return parser.parse_args(words), verb_module(verb)


def verb_module(verb: str) -> ModuleType:
    """The file of a verb; a verb that is a word of Python has an underscore behind its name."""
    return import_module(f"farthing.cli.{verb}{'_' * iskeyword(verb)}")


def build_parser(verbs: Iterable[str], *, shows_rare: bool = True) -> Parser:
    """The parser that knows all verbs, and the arguments of the `verbs` named."""
    parser = Parser(prog="farthing", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"farthing {farthing.__version__}")
    added = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb, summary in VERBS.items():
        sub = added.add_parser(verb, help=summary, description=summary, epilog=EPILOG)
        if verb in verbs:
            module = verb_module(verb)
            if hasattr(module, "add_arguments"):  # what a form can't say
                module.add_arguments(sub)
            _add_arguments(sub, module.ARGUMENTS)
            rare: Arguments = getattr(module, "RARE", {})
            _add_arguments(sub, rare, is_hidden=not shows_rare)
            if rare:
                words = f"show all options; {len(rare)} more"
                sub.add_argument("--help-all", action="help", help=words)
            if rare and not shows_rare:
                positions = (form for form in module.ARGUMENTS if not form.startswith("-"))
                sub.usage = sub.usage or f"farthing {verb} [options] {' '.join(positions)}"
    return parser


def _add_arguments(parser: Parser, arguments: Arguments, *, is_hidden: bool = False) -> None:
    for form, words in arguments.items():
        flags = [word for word in form.split(" ") if word.startswith("-")]
        values = form.split(" ")[len(flags) :]
        keys: dict[str, Any] = {"action": "store_true"}
        if len(values) == 2:
            keys = {"nargs": 2, "metavar": tuple(values)}
        elif values:
            keys = _taking(values[0], is_position=not flags)
            words += "" if "default" in words else keys.pop("said", "")
        names = flags or [keys.pop("metavar")]
        if iskeyword(names[-1].lstrip("-")):
            keys["dest"] = f"{names[-1].lstrip('-')}_"
        keys.pop("said", None)
        parser.add_argument(*names, help=argparse.SUPPRESS if is_hidden else words, **keys)


def _taking(form: str, *, is_position: bool) -> dict[str, Any]:
    """What argparse is told of a value."""
    found = _VALUE.fullmatch(form)
    assert found is not None
    name, default = found["name"], found["default"]
    is_float = found["float"] or re.fullmatch(r"\d+\.\d+", default or "")
    kind = float if is_float else int if name == "N" else str
    keys: dict[str, Any] = {"metavar": name or None, "type": kind}
    if found["choices"]:
        keys["choices"] = found["choices"][1:-1].split(",")
    value = None if default is None else kind(default)
    if is_position and found["more"]:
        return keys | {"nargs": "*", "default": [] if value is None else [value]}
    if is_position:
        return keys | {"nargs": "?" if found["open"] else None, "default": value}
    if found["more"]:
        return keys | {"action": "append", "default": [], "said": " (repeatable)"}
    if found["open"]:
        said = "" if default is None else f" (default: {default})"
        return keys | {"nargs": "?", "const": "" if value is None else value, "said": said}
    if default is not None:
        said = f" (default: {default.removesuffix('.0')})" if default else ""
        return keys | {"default": value, "said": said}
    return keys | {"required": bool(found["needed"])}


def run_folder(arguments: argparse.Namespace) -> Path:
    """The run folder that was named. Raises `InputError` where there is none, or a search."""
    folder = Path(arguments.folder)
    if not folder.is_dir():
        to_do = "name the output_dir of a job"
        raise InputError("no such run folder", where=str(folder), to_do=to_do)
    from farthing.run.folder import SEARCH_LOG

    if (folder / SEARCH_LOG).exists():
        from farthing.search.receipt import is_search, winner_of

        best = winner_of(folder) if is_search(folder) else None
        to_do = f"name the run of a trial; the best is {best or 'not known yet'}"
        raise InputError("this folder holds a search, not a run", where=str(folder), to_do=to_do)
    return folder


def in_range(name: str, value: float | None, least: float, most: float = math.inf) -> None:
    """Raises `InputError` for an option's number outside its bounds; none was given where it is
    None.
    """
    if value is not None and not least <= value <= most:
        bounds = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
        what = f"{value:g} is too {'large' if value > most else 'small'}"
        raise InputError(what, where=name, to_do=f"give {bounds}")


def existing_file(name: str, where: str = "") -> Path:
    """Raises `InputError` where there is no such file."""
    if not Path(name).is_file():
        raise InputError("no such file", where=name, to_do=f"check {where or 'its name'}")
    return Path(name)


def new_file(name: str) -> Path:
    """Where a file may be written: nothing is there yet, and its folder is. Raises `InputError`."""
    path = Path(name)
    if path.exists():
        raise InputError("this file exists already", where=str(path), to_do="name a new one")
    if not path.parent.is_dir():
        raise InputError("no such folder", where=str(path.parent), to_do="make it first")
    return path
