"""`python -m farthing` is the same door as the `farthing` command."""

from farthing.cli import entry

entry()
