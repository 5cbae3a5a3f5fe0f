"""The command line: words in, text and exit codes out. Nothing outside this folder imports it."""

from farthing.cli.command import entry, main

__all__ = ["entry", "main"]
