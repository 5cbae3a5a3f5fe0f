"""This machine, and machines that ssh reaches: one script, run in a session of its own."""

from __future__ import annotations

from farthing.launch.request import SCRIPT, LaunchRequest, script_of
from farthing.launch.target import Files, Target


def render(ask: LaunchRequest) -> Files:
    """The script; it goes there by the standard input of a shell, with the values of the secrets
    before it.
    """
    return {SCRIPT: script_of(ask)}


LOCAL = Target(
    "local",
    "this machine",
    render,
    ends="`timeout` around the run, a separate process",
    takes_values=True,
)
SSH = Target(
    "ssh",
    "machines by ssh",
    render,
    ends=(
        "`timeout` around the run ends the run; a rented host is yours to end: its provider"
        " counts on"
    ),
    at="HOST[,HOST...], each as ssh knows it",
    program="ssh",
    install="apt-get install openssh-client",
    keeps_billing=("a rented host", "its provider, when you end the host there"),
    takes_values=True,
)
