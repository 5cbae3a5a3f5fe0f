"""farthing run as a command, and what it tells its caller."""

import json
import subprocess
import sys

import pytest

from farthing.cli import main


def sets(*keys: str) -> list[str]:
    """Options that set keys of a job."""
    return [word for key in keys for word in ("--set", key)]


def in_python(code: str, *words: str, check: bool = False, **more):
    """A program in a process of its own, how it ended and what it printed."""
    argv = [sys.executable, "-c", code, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=check, **more)


class Cli:
    """Runs a verb, whose exit code must be `code`."""

    def __init__(self, capsys):
        self.capsys = capsys

    def __call__(self, *argv, code: int = 0):
        """(stdout, stderr)."""
        self.capsys.readouterr()
        ended = main([str(word) for word in argv])
        out, err = self.capsys.readouterr()
        assert ended == code, out + err
        return out, err

    def out(self, *argv, code: int = 0) -> str:
        """What it prints on stdout."""
        return self(*argv, code=code)[0]

    def err(self, *argv, code: int = 2) -> str:
        """What it prints on stderr: of a mistake, where nothing else is said."""
        return self(*argv, code=code)[1]

    def json(self, *argv, code: int = 0):
        """The one JSON document that it prints with `--json`."""
        return json.loads(self.out(*argv, "--json", code=code))


@pytest.fixture
def cli(capsys):
    return Cli(capsys)
