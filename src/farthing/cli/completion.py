"""`farthing completion`: a script for tab completion, made by `shtab` from the parsers of all
verbs.
"""

from __future__ import annotations

import argparse

from farthing.cli.parser import VERBS, build_parser
from farthing.errors import EXIT_FINISHED, InputError

ARGUMENTS = {"shell{bash,zsh,tcsh}": "bash, zsh or tcsh"}


def run(arguments: argparse.Namespace) -> int:
    """Print the script; `source <(farthing completion bash)` switches it on."""
    try:
        import shtab
    except ImportError as error:
        raise InputError(
            "shtab is not installed", to_do="pip install 'farthing[completion]'"
        ) from error
    print(shtab.complete(build_parser(VERBS), arguments.shell))
    return EXIT_FINISHED
