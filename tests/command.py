"""farthing run as a command, and what it tells its caller."""

from __future__ import annotations

import json
from typing import Any

import pytest

from farthing.cli import main


class Cli:
    """Runs a verb, whose exit code must be `code`."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *argv: object, code: int = 0) -> tuple[str, str]:
        """(stdout, stderr)."""
        self.capsys.readouterr()
        ended = main([str(word) for word in argv])
        out, err = self.capsys.readouterr()
        assert ended == code, out + err
        return out, err

    def out(self, *argv: object, code: int = 0) -> str:
        """What it prints on stdout."""
        return self(*argv, code=code)[0]

    def err(self, *argv: object, code: int = 2) -> str:
        """What it prints on stderr: of a mistake, where nothing else is said."""
        return self(*argv, code=code)[1]

    def json(self, *argv: object, code: int = 0) -> Any:
        """The one JSON document that it prints with `--json`."""
        return json.loads(self.out(*argv, "--json", code=code))


@pytest.fixture
def cli(capsys):
    return Cli(capsys)
