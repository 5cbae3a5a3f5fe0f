"""`farthing chat`: try the model of a run in the terminal; with `--prompt`, or text on stdin, one
answer for scripts.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from farthing.cli.console import print_json, write
from farthing.cli.parser import MAX_TOKENS, add_options, add_run_argument, in_range, run_folder
from farthing.errors import EXIT_FINISHED, InputError
from farthing.printable import printable_lines

if TYPE_CHECKING:
    from farthing.after.chat import Asked, Speaker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    options = {
        "--prompt TEXT": "answer this text and exit",
        "--base": "also answer with the base model",
        **MAX_TOKENS,
        "--temperature T=0.0": "0 (default) always picks the likeliest token",
        "--seed N=0": "random seed for a temperature above 0",
        "--json": "print one answer as JSON; needs --prompt",
    }
    add_options(parser, options)


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
    from farthing.after.chat import Asked, Speaker
    from farthing.model.load import quiet_libraries

    quiet_libraries()
    trust = arguments.trust_remote_code
    speakers = {"tuned": Speaker(folder, trust_remote_code=trust)}
    if arguments.base:
        speakers = {"base": Speaker(folder, is_base=True, trust_remote_code=trust), **speakers}
    asked = Asked(arguments.max_tokens, arguments.temperature, arguments.seed)
    if prompt is None:
        _converse(speakers, asked)
    else:
        _answer_once(speakers, prompt, asked, as_json=arguments.json)
    return EXIT_FINISHED


def _answer_once(speakers: dict[str, Speaker], prompt: str, asked: Asked, *, as_json: bool) -> None:
    messages = [{"role": "user", "content": prompt}]
    answers: dict[str, object] = {"prompt": prompt}
    for name, speaker in speakers.items():
        if not as_json:
            _say(name if len(speakers) > 1 else "", speaker, messages, asked)
        elif speaker.classes:
            answers[name] = speaker.classify(prompt)
        else:
            answers[name] = {"text": "".join(speaker.stream(messages, asked))}
    if as_json:
        print_json(answers)


def _say(name: str, speaker: Speaker, messages: list[dict[str, str]], asked: Asked) -> str:
    """Print an answer as it comes; returns it."""
    if name:
        print(f"{name}:", end=" ", flush=True)
    if speaker.classes:
        found = speaker.classify(messages[-1]["content"])
        shares = found.get("probabilities", {})
        text = (
            ", ".join(f"{label} {share:.1%}" for label, share in list(shares.items())[:5])
            or f"{found['score']:.4g}"
        )
        print(printable_lines(text), flush=True)
        return text
    said = ""
    for piece in speaker.stream(messages, asked):
        print(printable_lines(piece), end="", flush=True)
        said += piece
    print(flush=True)
    return said


def _converse(speakers: dict[str, Speaker], asked: Asked) -> None:
    write("an empty line begins a new chat, Ctrl-D ends")
    chats: dict[str, list[dict[str, str]]] = {name: [] for name in speakers}
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            write("")
            return
        if not line.strip():
            chats = {name: [] for name in speakers}
            continue
        for name, speaker in speakers.items():
            messages = [*chats[name], {"role": "user", "content": line}]
            said = _say(name if len(speakers) > 1 else "", speaker, messages, asked)
            chats[name] = [*messages, {"role": "assistant", "content": said}]
