"""This machine, and machines that ssh reaches: a script goes to a shell there and runs in a session
of its own.

What it prints, its process and its exit code are files in its folder, so that any later process of
ours finds it. The values of secrets go by the standard input of the shell: they stand in no file
and no list of processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from farthing.launch.commands import ended
from farthing.launch.driver import (
    Created,
    Driver,
    InstanceStatus,
    RefusedError,
    UnclearError,
    job_status,
)
from farthing.launch.machines import RentedMachine
from farthing.launch.request import SCRIPT, LaunchRequest, home_of, script_of
from farthing.launch.target import Target

HERE = "local"
PATIENT_S, KILL_AFTER_S = 60.0, 60
SSH_OPTIONS = [
    f"-o{setting}"
    for setting in (
        "BatchMode=yes",
        "ConnectTimeout=10",
        "ServerAliveInterval=5",
        "ServerAliveCountMax=2",
    )
]
_NEVER_THERE = re.compile(
    r"[^\n]*(Could not resolve hostname|Connection refused|No route to host|Permission denied|Host"
    r" key verification failed"
    r"|connect to host .* timed out)[^\n]*"
)
"""What ssh says where it has not come as far as the other side's shell."""
_BEGIN, _END = "FARTHING_BEGINS", "END_OF_FARTHING_SCRIPT"
"""The first is printed after what a login prints (~/.bashrc)."""
LOOK = """
boot=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)
ours() {
  began=$(cut -d ' ' -f 22 "/proc/$(cat "$1/pid")/stat" 2>/dev/null)
  [ "$(cat "$1/boot")" = "$boot" ] || return 1
  [ -z "$began" ] || [ ! -e "$1/began" ] || [ "$(cat "$1/began")" = "$began" ]
}
lives() {
  for p in $(pgrep -s "$1" 2>/dev/null); do
    grep -q '^State:.[ZX]' "/proc/$p/status" 2>/dev/null || return 0
  done; false
}
one() {
  if [ -e "$1/code" ]; then echo "over $(cat "$1/code")"
  elif [ -e "$1/pid" ] && ours "$1" && lives "$(cat "$1/pid")"; then echo alive
  else echo "over $(cat "$1/code" 2>/dev/null)"; fi  # it may have ended since the first line
}
"""
"""Numbers of processes are given again: ours began when ours did. Its session may outlive it,
zombies are no life.
"""
_RUN = f"""
cut -d " " -f 22 /proc/$$/stat > "$0/began"; echo $$ > "$0/pid.new"; mv "$0/pid.new" "$0/pid"
sh "$0/{SCRIPT}" > "$0/log.txt" 2>&1 < /dev/null
echo $? > "$0/code.new"; mv "$0/code.new" "$0/code"
"""
"""The session itself says which it is: whoever began it may be cut off before."""


class UnreachableError(UnclearError):
    """Nothing came as far as the host: no new machine was made."""


class HostDriver(Driver):
    """Hosts by name; `local` is this one. `shared` is the run folder without a store."""

    may_overlap, late_s = True, 0.0

    def __init__(self, hosts: Sequence[str], shared: str = "") -> None:
        self._hosts, self._home = list(hosts), home_of(shared)

    def tell(self, host: str, script: str) -> str:
        """What a shell there prints. Raises `UnclearError`."""
        program = shlex.split(os.environ.get("FARTHING_SSH", "ssh"))
        words = ["sh", "-s"] if host == HERE else [*program, *SSH_OPTIONS, "--", host, "sh -s"]
        done = ended(words, f"echo {_BEGIN}\n{script}", PATIENT_S, host)
        if done.returncode == 255 and (found := _NEVER_THERE.search(done.stderr)):
            raise UnreachableError(f"{host}: {found[0].strip()}")
        if done.returncode:
            raise UnclearError(
                f"{host}: {' '.join(done.stderr.split())[-200:] or f'exit code {done.returncode}'}"
            )
        _, began, printed = done.stdout.partition(f"{_BEGIN}\n")
        if not began:  # or what runs there would be taken for gone
            raise UnclearError(f"{host}: the shell there did not run what it was sent")
        return printed

    def create(self, ask: LaunchRequest, asked_at: float) -> Created:
        """A script of that name which runs already is left to run: the same request again."""
        exports = ask.exports(asked_at)
        if (
            ask.offer.instance == HERE
        ):  # this very farthing, also where no environment was activated
            exports += f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"\n'
        script = f"""
umask 077
d={self._home}/{ask.name}
mkdir -p "$d" || exit 1
{LOOK}
[ -e "$d/pid" ] && [ "$(one "$d")" = alive ] && {{ cat "$d/pid"; exit 0; }}
rm -f "$d/code" "$d/asked" "$d/pid"
cat > "$d/{SCRIPT}" <<'{_END}'
{script_of(ask)}{_END}
{exports}
echo "$boot" > "$d/boot"
setsid sh -c '{_RUN}' "$d" > /dev/null 2>&1 < /dev/null &
n=0; until [ -e "$d/pid" ] || [ $n -ge 50 ]; do sleep 0.1; n=$((n + 1)); done
cat "$d/pid"
"""
        try:
            said = self.tell(ask.offer.instance, script)
        except UnreachableError as error:
            raise RefusedError(str(error)) from error
        return Created(said.split()[-1] if said.split() else ask.name)

    def look(self, machine: RentedMachine) -> InstanceStatus | None:
        script = (
            f'{LOOK}\nd={self._home}/{machine.name}\n[ -e "$d/pid" ] && echo "$(cat "$d/pid") $(one'
            ' "$d")"; true'
        )
        words = self.tell(machine.instance, script).split()
        if not words:
            return None
        code = int(words[2]) if len(words) > 2 and words[2].isdigit() else None
        return job_status(machine.name, words[0], words[1] != "alive", waits=False, code=code)

    def names(self, prefix: str) -> dict[str, str]:
        """A host that does not answer is asked again at the next look."""
        found: dict[str, str] = {}
        script = f"""{LOOK}
for d in {self._home}/{prefix}-*; do
  [ -e "$d/pid" ] && [ "$(one "$d")" = alive ] && echo "$(basename "$d") $(cat "$d/pid")"
done; true"""
        for host in self._hosts:
            with contextlib.suppress(UnclearError):
                found |= {
                    name: f"{host} {n}"
                    for name, n in re.findall(r"(\S+) (\d+)", self.tell(host, script))
                }
        return found

    def destroy(self, machine: RentedMachine) -> None:
        """A polite signal, which saves; after a minute the session is killed."""
        self.tell(
            machine.instance,
            f"""
{LOOK}
d={self._home}/{machine.name}
[ -e "$d/pid" ] && ours "$d" || exit 0
p=$(cat "$d/pid"); now=$(date +%s)
[ -e "$d/asked" ] || echo "$now" > "$d/asked"
if [ $((now - $(cat "$d/asked"))) -ge {KILL_AFTER_S} ]; then pkill -KILL -s "$p"
else pkill -TERM -P "$p"; fi
true
""",
        )

    def log(self, machine: RentedMachine) -> str:
        return self.tell(
            machine.instance, f"tail -n 200 {self._home}/{machine.name}/log.txt 2>/dev/null; true"
        )


LOCAL = Target(
    "local",
    "this machine",
    ends="`timeout` around the run, a separate process",
    takes_values=True,
)
SSH = Target(
    "ssh",
    "machines by ssh",
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
