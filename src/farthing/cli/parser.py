"""The words of the command line: its verbs, their options, and what to say of a word that is not
known.

A verb is a file of this folder, named after it, and a line in `VERBS`. The file has
`add_arguments(parser)`, `run(arguments) -> exit code`, and maybe `RARE`, options that only
`--help-all` shows. It imports nothing heavy at its top, and is imported when its verb is called.
"""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

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
EPILOG = (
    "exit codes: 0 finished, 1 crash, 2 mistake in the input, 3 stopped by a limit, 75 interrupted"
    " (run it again)"
)


class Parser(argparse.ArgumentParser):
    """An argparse parser that suggests the nearest word, and prints what was typed without letting
    it steer a terminal. `--help` leaves out the options in `rare`, `--help-all` shows them.
    """

    rare: tuple[str, ...] = ()

    def format_help(self) -> str:
        """The help without rare options."""
        hidden = [each for each in self._actions if set(each.option_strings) & set(self.rare)]
        helps = [each.help for each in hidden]
        for each in hidden:
            each.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for each, words in zip(hidden, helps, strict=True):
                each.help = words

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message("\n".join(map(printable, message.split("\n"))), file)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            message = (
                f"{value!r} is not one of"
                f" {', '.join(map(str, action.choices))}{did_you_mean(value, action.choices)}"
            )
            raise argparse.ArgumentError(action, message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, after `refuse_unknown_options` where the words belong to one verb."""
        if self._subparsers is None:
            self.refuse_unknown_options(args)
        return super().parse_known_args(args, namespace)

    def refuse_unknown_options(self, words: Sequence[str]) -> None:
        """Exit with a suggestion when a word looks like an option and is none, before anything else
        is complained of.
        """
        known = [name for action in self._actions for name in action.option_strings]
        for word in words[: words.index("--")] if "--" in words else words:
            name = word.split("=")[0]
            if (
                word.startswith("--")
                and " " not in word
                and not any(each.startswith(name) for each in known)
            ):
                self.error(f"no such option: {name}{did_you_mean(name, known)}")


class HelpAll(argparse.Action):
    """`--help-all`: every option, also the rare ones."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        parser.rare = ()
        parser.print_help()
        parser.exit()


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` with the nearest known word, empty where none is near."""
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, ModuleType]:
    """The arguments of a command line and the module of its verb. Exits after `--help`, and with 2
    when it is wrong.
    """
    verb = next((word for word in words if not word.startswith("-")), "")
    parser = build_parser([verb] if verb in VERBS else [])
    if verb not in VERBS and not {"-h", "--help", "--version"} & set(words):
        _refuse_verb(parser, verb, words)
    return parser.parse_args(words), verb_module(verb)


def _refuse_verb(parser: Parser, verb: str, words: Sequence[str]) -> NoReturn:
    if not verb:
        parser.refuse_unknown_options(words)
    parser.print_help(sys.stderr)
    if verb:
        parser.exit(
            EXIT_MISTAKE, f"\nfarthing: there is no verb {verb!r}{did_you_mean(verb, VERBS)}\n"
        )
    parser.exit(
        EXIT_MISTAKE,
        "\nfarthing: which verb? `farthing init --demo` writes an example to start from\n",
    )


def verb_module(verb: str) -> ModuleType:
    """The file of a verb; a verb that is a word of Python has an underscore behind its name."""
    return import_module(f"farthing.cli.{verb}{'_' * iskeyword(verb)}")


def build_parser(verbs: Iterable[str]) -> Parser:
    """The parser that knows all verbs, and the options of the `verbs` named."""
    parser = Parser(prog="farthing", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"farthing {farthing.__version__}")
    added = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb, summary in VERBS.items():
        sub = added.add_parser(verb, help=summary, description=summary, epilog=EPILOG)
        if verb in verbs:
            module = verb_module(verb)
            module.add_arguments(sub)
            sub.rare = getattr(module, "RARE", ())
            if sub.rare:
                words = f"show all options; {len(sub.rare)} more"
                sub.add_argument("--help-all", action=HelpAll, nargs=0, help=words)
    return parser


def add_options(parser: Any, options: Mapping[str, str]) -> None:
    """Arguments by how they are written, with their help: `--yes` is a switch, `--limit N` takes a
    whole number and `--every SECONDS:float` a number, `--seed N=0` has a default,
    `--kind {spot,on-demand}` takes one of these words, `--gpu GPU...` can be repeated,
    `--serve [TRAFFIC]` may stand alone, `--output FILE!` is required.
    """
    for form, words in options.items():
        *flags, last = form.split(" ")
        if last.startswith("--"):
            parser.add_argument(*flags, last, action="store_true", help=words)
            continue
        keys: dict[str, Any] = {"required": True} if last.endswith("!") else {}
        if last.endswith("..."):
            keys |= {"action": "append", "default": []}
            words += " (repeatable)"
        if last.startswith("["):
            keys |= {"nargs": "?", "const": ""}
        name, _, default = last.strip("[]!.").partition("=")
        if name.endswith(":float") or "." in default:
            keys["type"] = float
        elif name == "N":
            keys["type"] = int
        if default:
            keys["default"] = keys.get("type", str)(default)
            words += "" if "default" in words else f" (default: {default.removesuffix('.0')})"
        name = name.removesuffix(":float")
        keys |= {"choices": name[1:-1].split(",")} if name[0] == "{" else {"metavar": name}
        parser.add_argument(*flags, help=words, **keys)


MAX_TOKENS = {"--max-tokens N=256": "maximum tokens of an answer"}
TRUST = {
    "--trust-remote-code": "run the code that comes with the base model, as the job does",
}


def as_json(what: str, *, progress: bool = False) -> dict[str, str]:
    """The switch `--json`, which prints `what`; `progress` then goes to stderr."""
    return {"--json": f"print {what} as JSON" + "; progress goes to stderr" * progress}


def add_job_arguments(parser: argparse.ArgumentParser, options: Mapping[str, str] = {}) -> None:
    """The job file and `--set`, as every verb takes them that needs a job, and its `options`."""
    parser.add_argument("job", help="job file (YAML)")
    add_set_argument(parser)
    add_options(parser, options)


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """A run folder, as every verb takes it that loads the model of one; `run_folder` looks
    for it.
    """
    parser.add_argument("folder", help="run folder (output_dir)")
    add_options(parser, TRUST)


def run_folder(arguments: argparse.Namespace) -> Path:
    """The run folder that was named. Raises `InputError` where there is none."""
    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise InputError(
            "no such run folder", where=str(folder), to_do="name the output_dir of a job"
        )
    return folder


def add_set_argument(parser: argparse.ArgumentParser) -> None:
    """`--set KEY=VALUE`, repeatable."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key, e.g. --set train.learning_rate=1e-4 (repeatable)",
    )


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
