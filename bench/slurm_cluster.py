"""A Slurm cluster on one machine: a controller, nodes with GPUs that are plain files, and
everything that happens to jobs.

Needs root and Debian's packages: apt-get install slurmctld slurmd slurm-client munge. All state is
in one folder, no service of the system is touched. As a target of `farthing launch` it is a real
one: sbatch, squeue and scancel talk to it.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")


def why_not() -> str:
    """Why there can be no cluster here; empty where there can."""
    lacks = [
        name for name in PROGRAMS if not shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
    ]
    if lacks:
        return f"{', '.join(lacks)} not found: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "slurmctld wants to be root here"


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """A controller and pairs of nodes, up within the block: n1 and n2 in the partitions low1 and
    high1, n3 and n4 in low2 and high2. `environment` is what its jobs have beside their own."""

    def __init__(
        self, folder: Path, environment: dict[str, str] | None = None, n_pairs: int = 1
    ) -> None:
        self.folder, self.environment, self.n_pairs = folder, environment or {}, n_pairs
        self.nodes = [f"n{n}" for n in range(1, 2 * n_pairs + 1)]
        self.config = folder / "slurm.conf"
        self._munged: subprocess.Popen[bytes] | None = None
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._controller: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Cluster:
        folder = self.folder
        folder.mkdir(parents=True)
        folder.chmod(0o755)
        for name in ("state", "munge", *(f"spool-{node}" for node in self.nodes)):
            (folder / name).mkdir()
        (folder / "munge" / "key").write_bytes(os.urandom(1024))
        (folder / "munge" / "key").chmod(0o400)
        for node in self.nodes:
            (folder / f"gpu-{node}").write_text("")
        host = socket.gethostname().split(".")[0]
        (folder / "gres.conf").write_text(
            "".join(f"NodeName={n} Name=gpu File={folder}/gpu-{n}\n" for n in self.nodes)
        )
        nodes = "".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={_port()} CPUs=1"
            " RealMemory=1000 Gres=gpu:1 State=UNKNOWN\n"
            for node in self.nodes
        )
        partitions = "".join(
            f"PartitionName=low{n} Nodes=n{2 * n - 1},n{2 * n} PriorityTier=1 GraceTime=5 State=UP"
            f" MaxTime=INFINITE\nPartitionName=high{n} Nodes=n{2 * n - 1},n{2 * n} PriorityTier=10"
            " PreemptMode=OFF State=UP MaxTime=INFINITE\n"
            for n in range(1, self.n_pairs + 1)
        )
        self.config.write_text(f"""\
ClusterName=farthing
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={_port()}
SlurmctldParameters=preempt_send_user_signal
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
RequeueExit=75
SlurmdTimeout=10
KillWait=10
MinJobAge=300
ReturnToService=2
SchedulerParameters=sched_interval=2,batch_sched_delay=0
{nodes}{partitions}""")
        self.variables = {
            "SLURM_CONF": str(self.config),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self) -> None:
        munge = self.folder / "munge"
        self._munged = self._spawn(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={munge}/key",
            f"--socket={munge}/sock",
            f"--pid-file={munge}/pid",
            f"--log-file={munge}/log",
            f"--seed-file={munge}/seed",
        )
        self._wait(lambda: (munge / "sock").exists(), "munged")
        self._controller = self._spawn("slurmctld", "-D", "-c")
        for name in self.nodes:
            self.start_node(name)
        states = ("sinfo", "--Node", "--noheader", "--format=%T")
        n = 2 * len(self.nodes)  # each is in two partitions
        self._wait(lambda: self.ask(*states).split() == ["idle"] * n, "the nodes")

    def _spawn(self, *words: str) -> subprocess.Popen[bytes]:
        path = shutil.which(words[0], path=self.variables["PATH"]) or words[0]
        environment = {**os.environ, **self.variables, **self.environment}
        with open(self.folder / "daemons.log", "ab") as log:
            return subprocess.Popen(
                [path, *words[1:]], stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def _wait(self, is_so: Any, what: str) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                if is_so():
                    return
            time.sleep(0.3)
        logs = "\n".join(path.read_text()[-1500:] for path in self.folder.glob("*.log"))
        raise RuntimeError(f"{what} did not come up:\n{logs}")

    def start_node(self, name: str) -> None:
        """Bring a node up."""
        self._nodes[name] = self._spawn("slurmd", "-D", "-N", name)

    def lose_node(self, name: str) -> None:
        """Everything of a node is dead at once."""
        mine = str(self.folder)
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                command = (path / "cmdline").read_bytes().decode(errors="replace")
                variables = (path / "environ").read_bytes().decode(errors="replace")
                is_step = "slurmstepd" in command and f"SLURM_CONF={mine}" in variables
                is_task = (
                    f"SLURMD_NODENAME={name}\0" in variables and f"SLURM_CONF={mine}" in variables
                )
                if is_step or is_task:
                    os.kill(int(path.name), signal.SIGKILL)
        process = self._nodes.pop(name)
        process.kill()
        process.wait()

    def ask(self, *words: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
            env={**os.environ, **self.variables},
        )
        return done.stdout

    def node_of(self, prefix: str) -> tuple[str, str]:
        """(id, node) of the running job whose name begins so; empty where none runs."""
        for line in self.ask("squeue", "--noheader", "--format=%i|%j|%T|%N").splitlines():
            number, name, state, node = line.split("|")
            if name.startswith(prefix) and state == "RUNNING":
                return number, node
        return "", ""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self.ask("scancel", "--state=RUNNING", "--signal=KILL", "--full", "--user=root")
        for name in list(self._nodes):
            self.lose_node(name)
        for process in (self._controller, self._munged):
            if process is not None:
                process.kill()
                process.wait()


class Hurry(threading.Thread):
    """Takes away the two minutes that a job which was queued again has to wait, and the pause of
    its node.
    """

    def __init__(self, cluster: Cluster, prefix: str) -> None:
        super().__init__(daemon=True)
        self.cluster, self.prefix, self.done = cluster, prefix, threading.Event()

    def run(self) -> None:
        """Until told to stop."""
        while not self.done.wait(1.0):
            for line in self.cluster.ask(
                "squeue", "--noheader", "--states=PENDING", "--format=%i|%j"
            ).splitlines():
                number, name = line.split("|")
                if name.startswith(self.prefix):
                    self.cluster.ask("scontrol", "update", f"JobId={number}", "StartTime=now")


def run_slurm(
    seeds: range, folder: Path, reference: dict[str, Any], n_lanes: int = 1, until: float = math.inf
) -> list[dict[str, Any]]:
    """Chains over one cluster, a pair of nodes for each lane."""
    from launch_chains import environment, side_by_side

    variables = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin",
    }
    with (
        Cluster(folder / "cluster", n_pairs=n_lanes) as cluster,
        environment(**{**cluster.variables, **variables}),
    ):

        def chain(seed: int, lane: int) -> dict[str, Any]:
            return slurm_chain(seed, folder / f"slurm{seed}", cluster, lane + 1, reference)

        return side_by_side(chain, seeds, folder, n_lanes, until)


def slurm_chain(
    seed: int, folder: Path, cluster: Cluster, pair: int, reference: dict[str, Any]
) -> dict[str, Any]:
    """One chain on a pair of nodes: the run is preempted, or its node is lost, once or twice."""
    from farthing.config.load import load_job
    from farthing.launch.prepare import Wishes, prepare
    from farthing.launch.session import Session
    from farthing.run.accounts import read_ledger
    from launch_chains import N_STEPS, QUICK, SAVE_STEPS, judged, write_job

    dice = random.Random(seed)
    job = write_job(folder, None)
    said: list[str] = []
    session = Session(
        prepare(load_job(job), Wishes(on=f"slurm:low{pair}"), datetime.now(UTC)), said.append
    )
    moments = sorted(dice.sample(range(1, N_STEPS // SAVE_STEPS), dice.choice((1, 1, 2))))
    lost: list[str] = []
    stop = threading.Event()

    def step() -> int:
        return max(
            [
                0,
                *(
                    account.committed
                    for account in read_ledger(session.folder / "ledger.jsonl").accounts
                ),
            ]
        )

    def disturb() -> None:
        for moment in moments:
            while step() < moment * SAVE_STEPS and not stop.is_set():
                time.sleep(0.05)
            number, node = cluster.node_of(session.prepared.launch_id)
            if stop.is_set() or not number:
                continue
            if dice.random() < 0.5:
                lost.append(f"preempted on {node} after step {step()}")
                words = [
                    f"--partition=high{pair}",
                    f"--nodelist={node}",
                    "--gres=gpu:1",
                    "--output=/dev/null",
                    "--job-name=better",
                ]
                cluster.ask("sbatch", *words, "--wrap=sleep 3")
            else:
                lost.append(f"node {node} lost after step {step()}")
                cluster.lose_node(node)
                time.sleep(1.0)
                cluster.start_node(node)
            time.sleep(4.0)

    hurry, thread = Hurry(cluster, session.prepared.launch_id), threading.Thread(target=disturb)
    hurry.start()
    thread.start()
    try:
        code = session.run(is_attended=True, tokenize=list, patience=QUICK)
    finally:
        stop.set()
        hurry.done.set()
        thread.join()
    wrong = judged(session, code, reference)
    return {
        "seed": seed,
        "kind": "slurm",
        "lost": lost,
        "n_machines": len(session.ledger.machines),
        "wrong": wrong,
        "said": said if wrong else [],
    }
