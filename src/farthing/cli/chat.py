"""`farthing chat`: try the model of a run in the terminal; with `--prompt`, or text on stdin, one
answer for scripts.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from farthing.cli.console import print_json, write
from farthing.cli.parser import MAX_TOKENS, RUN, in_range, run_folder
from farthing.errors import EXIT_FINISHED, InputError
from farthing.printable import printable_lines

if TYPE_CHECKING:
    from farthing.after.predict import Message, Predictor


ARGUMENTS = {
    **RUN,
    "--prompt TEXT": "answer this text and exit",
    "--base": "also answer with the base model",
    **MAX_TOKENS,
    "--temperature T:=0.0": "0 (default) always picks the likeliest token",
    "--seed N:=0": "random seed for a temperature above 0",
    "--json": "print one answer as JSON; needs --prompt",
}


def run(arguments: argparse.Namespace) -> int:
    folder = run_folder(arguments)
    in_range("--max-tokens", arguments.max_tokens, 1)
    in_range("--temperature", arguments.temperature, 0)
    prompt = arguments.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().removesuffix("\n")
    if prompt is None and arguments.json:
        raise InputError(
            "which prompt?", where="--json", to_do="give --prompt TEXT, or a text on stdin"
        )
    if prompt is not None and not prompt.strip():
        raise InputError("the prompt is empty", where="--prompt", to_do="write a text")
    from farthing.after.predict import Predictor
    from farthing.model.load import quiet_libraries

    quiet_libraries()
    models = {
        name: Predictor(
            folder,
            is_base=name == "base",
            max_new_tokens=arguments.max_tokens,
            trust_remote_code=arguments.trust_remote_code,
        )
        for name in (("base", "tuned") if arguments.base else ("tuned",))
    }
    if prompt is None:
        _converse(models, arguments)
        return EXIT_FINISHED
    messages, answers = [{"role": "user", "content": prompt}], dict[str, object](prompt=prompt)
    for name, model in models.items():
        if not arguments.json:
            _say(name if arguments.base else "", model, messages, arguments)
        elif model.classifies:
            answers[name] = model.classify(prompt)
        else:
            pieces = model.stream(messages, arguments.temperature, arguments.seed)
            answers[name] = {"text": "".join(pieces)}
    if arguments.json:
        print_json(answers)
    return EXIT_FINISHED


def _say(
    name: str, model: Predictor, messages: list[Message], arguments: argparse.Namespace
) -> str:
    """Print an answer as it comes; returns it."""
    if name:
        print(f"{name}:", end=" ", flush=True)
    if model.classifies:
        found = model.classify(messages[-1]["content"])
        shares = found.get("probabilities", {})
        likeliest = [f"{label} {share:.1%}" for label, share in list(shares.items())[:5]]
        pieces = iter([", ".join(likeliest) or f"{found['score']:.4g}"])
    else:
        pieces = model.stream(messages, arguments.temperature, arguments.seed)
    said = ""
    for piece in pieces:
        print(printable_lines(piece), end="", flush=True)
        said += piece
    print(flush=True)
    return said


def _converse(models: dict[str, Predictor], arguments: argparse.Namespace) -> None:
    write("an empty line begins a new chat, Ctrl-D ends")
    chats: dict[str, list[Message]] = {name: [] for name in models}
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            write("")
            return
        for name, model in models.items():
            if not line.strip():
                chats[name] = []
                continue
            messages = [*chats[name], {"role": "user", "content": line}]
            said = _say(name if arguments.base else "", model, messages, arguments)
            chats[name] = [*messages, {"role": "assistant", "content": said}]
