"""Machines to lose: each a network namespace and a process namespace with an sshd, an empty folder
and a cable of its own.

Needs root, sshd (`apt-get install openssh-server`), ip and unshare. All traffic stays between
namespaces made here.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

NET = "10.231"
PACE = """\
import farthing.run.mirror as replica
replica.PACE = replica.MirrorTimes(renew_s=0.5, lease_s=3.0, answer_s=5.0, pause_s=0.1, again_s=0.5)
"""
"""A lease of seconds instead of a minute, for farthing on these machines."""


def why_not() -> str:
    """Why there can be no such machines here; empty where there can."""
    lacks = [name for name in ("sshd", "ssh", "ip", "unshare", "pgrep") if not _which(name)]
    if lacks:
        return (
            f"{', '.join(lacks)} not found: apt-get install openssh-server openssh-client iproute2"
            " util-linux procps"
        )
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    tried = subprocess.run(
        ["unshare", "--pid", "--net", "--fork", "true"], capture_output=True, check=False
    )
    return "" if tried.returncode == 0 else "namespaces can't be made here"


def _which(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Machine:
    """One machine, up after `boot`."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet, self.number, self.name = fleet, number, f"m{number}"
        self.space = f"ft{os.getpid() % 10000}m{number}"
        self.cable = f"ft{os.getpid() % 10000}h{number}"
        self.gateway, self.address = fleet.addresses(number)
        self.home = fleet.folder / self.name
        self._process: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        """An empty machine with this name and address."""
        self.home.mkdir(parents=True, exist_ok=True)
        _run("ip", "netns", "add", self.space)
        _run(
            "ip",
            "link",
            "add",
            self.cable,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            self.space,
        )
        _run("ip", "addr", "add", f"{self.gateway}/30", "dev", self.cable)
        _run("ip", "link", "set", self.cable, "up")
        inside = ("ip", "-n", self.space)
        _run(*inside, "addr", "add", f"{self.address}/30", "dev", "eth0")
        for name in ("lo", "eth0"):
            _run(*inside, "link", "set", name, "up")
        _run(*inside, "route", "add", "default", "via", self.gateway)
        # with SHLVL bash reads no ~/.bashrc, which all machines share: a machine that is lost in it
        # could leave a lock behind
        settings = {
            **self.fleet.environment,
            "FARTHING_HOME": str(self.home / "farthing"),
            "SHLVL": "2",
        }
        config = self.fleet.folder / f"sshd_{self.name}"
        config.write_text(
            f"ListenAddress {self.address}:22\nHostKey {self.fleet.folder}/host_key\nPidFile"
            " none\nUsePAM no\nStrictModes no\nAuthorizedKeysFile"
            f" {self.fleet.folder}/key.pub\nPasswordAuthentication no\nMaxStartups 100\nSetEnv "
            + " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
            + "\n"
        )
        words = [
            "ip",
            "netns",
            "exec",
            self.space,
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        self._process = subprocess.Popen(
            [*words, str(_which("sshd")), "-D", "-f", str(config)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._wait_until_it_answers()

    def _wait_until_it_answers(self) -> None:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            done = subprocess.run(
                [*self.fleet.ssh, "-o", "ConnectTimeout=2", self.name, "true"],
                capture_output=True,
                check=False,
            )
            if done.returncode == 0:
                return
            time.sleep(0.2)
        raise RuntimeError(f"{self.name} does not answer")

    def lose(self) -> None:
        """Everything on it is dead and its disk is gone."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
        for words in (("ip", "netns", "del", self.space), ("ip", "link", "del", self.cable)):
            subprocess.run(words, capture_output=True, check=False)
        shutil.rmtree(self.home, ignore_errors=True)

    def cut(self) -> None:
        """Pull its cable: it lives on."""
        _run("ip", "link", "set", self.cable, "down")

    def mend(self) -> None:
        """Put the cable back."""
        _run("ip", "link", "set", self.cable, "up")


class Fleet:
    """Machines m1, m2 ... that `ssh -F CONFIG m1` reaches; all are gone when the block ends."""

    def __init__(self, folder: Path, n: int, environment: dict[str, str] | None = None) -> None:
        self.folder, self.n = folder, n
        site = folder / "site"
        path = os.pathsep.join(
            [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
        )
        modules = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        self.environment = {
            "PATH": path,
            "PYTHONPATH": modules,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **(environment or {}),
        }
        self.config = folder / "ssh_config"
        self.ssh = ["ssh", "-F", str(self.config)]
        self.machines: list[Machine] = []

    def addresses(self, number: int) -> tuple[str, str]:
        """Ours and its own in the network of a machine, of which a fleet has 60: not those of
        another process' fleet.
        """
        net = f"{NET}.{os.getpid() % 250}"
        return f"{net}.{number * 4 + 1}", f"{net}.{number * 4 + 2}"

    def __enter__(self) -> Fleet:
        (self.folder / "site").mkdir(parents=True)
        (self.folder / "site" / "sitecustomize.py").write_text(PACE)
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("host_key", "key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        self.config.write_text(
            "".join(f"Host m{n}\n  HostName {self.addresses(n)[1]}\n" for n in range(1, self.n + 1))
            + f"Host *\n  User root\n  IdentityFile {self.folder}/key\n  IdentitiesOnly yes\n"
            "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        try:
            for number in range(1, self.n + 1):
                self.machines.append(Machine(self, number))
                self.machines[-1].boot()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for machine in self.machines:
            with contextlib.suppress(OSError):
                machine.lose()
