"""The `farthing` command: finds the verb, runs it, and turns what it raises into a message and an
exit code.

Torch is imported by the verbs that need it, so that `--help` and a wrong job file answer at once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence

from farthing.cli.console import complain, discard, is_full, print_json, write
from farthing.cli.parser import parse
from farthing.device_memory import in_words, set_allocator
from farthing.errors import (
    EXIT_CRASH,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    DiskFullError,
    FarthingError,
    InputError,
)
from farthing.printable import print_any_character, printable_lines
from farthing.report.last_words import leave_last_words
from farthing.run.guard import guarded

GUARDED = (["train"], ["search"])
"""Verbs that a process of their own watches, which runs the job's `when_done`."""
_last: list[BaseException] = []
"""The error that ends the process, and with it the tensors that its frames hold: where a GPU has
failed, torch ends the process with a signal when it frees them."""


def entry() -> None:
    """The `farthing` command."""
    print_any_character()
    ended_with: list[int] = []
    atexit.register(
        _leave_at_once, ended_with
    )  # the first to be registered is the last to be called
    ended_with.append(guarded(main, leave_last_words) if sys.argv[1:2] in GUARDED else main())
    sys.exit(ended_with[0])


def _leave_at_once(ended_with: list[int]) -> None:
    """End the process without taking its libraries apart: with torch that takes up to seconds,
    which would be paid for.
    """
    if ended_with:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(ended_with[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code. When the reader of stdout has gone (`| head`), the rest
    is not written.
    """
    code = EXIT_FINISHED
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        discard(sys.stdout)
        return EXIT_FINISHED
    except OSError as error:  # of the flush
        if not is_full(error):
            raise
        discard(sys.stdout)
        if code == EXIT_FINISHED:
            complain(_of_system(error))
        return code or EXIT_INTERRUPTED
    except SystemExit:  # of argparse, after its help
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
            raise
        discard(sys.stdout)
        return EXIT_FINISHED


def _of_system(error: BaseException) -> FarthingError | None:
    """A full disk, a file that this user may not read or write, a package that is missing."""
    if isinstance(error, OSError) and is_full(error):
        return DiskFullError(
            error.strerror or "the disk is full",
            where=str(error.filename or ""),
            to_do="make room, and run the same command again",
        )
    if isinstance(error, PermissionError):
        return InputError(
            f"this user may not read or write it ({error.strerror or error})",
            where=str(error.filename or ""),
            to_do="run as its owner, or name a folder of your own",
        )
    package = (getattr(error, "name", None) or "farthing").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package == "farthing":
        return None
    to_do = f"pip install {package}; `farthing doctor` checks the others"
    return InputError(f"{package} is not installed", to_do=to_do)


def _run(words: Sequence[str]) -> int:
    arguments, verb = parse(words)
    set_allocator(os.environ)  # before torch is imported
    as_json: bool = getattr(arguments, "json", False)
    try:
        return int(verb.run(arguments))
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and not getattr(verb, "GOES_ON_UNREAD", False):
            raise  # where a verb continues when nobody reads, a broken pipe is not that of stdout
        _last[:] = [error]
        said = error if isinstance(error, FarthingError) else in_words(error) or _of_system(error)
        if said is not None:
            if as_json:
                with contextlib.suppress(OSError):  # the disk behind stdout may be what is full
                    print_json(said.as_dict())
            if not as_json or not sys.stderr.isatty():
                complain(said)
            return said.exit_code
        write(printable_lines(traceback.format_exc()).rstrip())
        complain(f"crashed: {type(error).__name__}: {error}")
        write(
            "  to do: report the lines above; saved checkpoints are intact, and the same command"
            " resumes"
        )
        return EXIT_CRASH
