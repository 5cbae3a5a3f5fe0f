"""How processes that share a run find each other, and what is said where they can't: odd launches
as users make them.
"""

from __future__ import annotations

import json
import socket
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from farthing.dist import rendezvous
from farthing.dist.ranks import Ranks
from farthing.dist.rendezvous import RankLostError, meet
from farthing.errors import DiskFullError, InputError
from farthing.run.group import Elastic, Seat, seat_in
from farthing.train import rank_setup
from farthing.train.rank_setup import slots_of_run
from patience import until
from ranks_at_work import child, lora_job
from workshop import Heard, job_file

CPU = torch.device("cpu")
RANKS = {"RANK": "0", "WORLD_SIZE": "2"}
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
TASK = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*RANKS, *ADDRESS, *TASK, "FARTHING_RANKS_STORE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("farthing.run.group.os.isatty", lambda number: False)


@pytest.mark.parametrize(
    ("environ", "where"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE"),
        ({"RANK": "1"}, "RANK"),
        ({"RANK": "0", **ADDRESS}, "RANK"),
        (RANKS, "MASTER_ADDR, MASTER_PORT"),
        ({**RANKS, **ADDRESS, "MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({**RANKS, **ADDRESS, "MASTER_PORT": "tcp"}, "MASTER_PORT"),
        (TASK, "MASTER_ADDR, MASTER_PORT"),
        ({**TASK, **ADDRESS, "WORLD_SIZE": "4"}, "WORLD_SIZE"),
        ({**TASK, **ADDRESS, "RANK": "0"}, "RANK"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE"),
        ({"PMI_SIZE": "2", **ADDRESS}, "PMI_SIZE"),
    ],
)
def test_a_process_that_half_knows_of_others_is_not_trained_alone(environ, where):
    with pytest.raises(InputError) as refused:
        seat_in(environ)
    assert where in refused.value.where
    assert refused.value.to_do


def test_a_process_that_is_alone_or_knows_all_is_let_be():
    for alone in (
        {"WORLD_SIZE": "1"},
        {"PMI_SIZE": "1"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ):
        assert seat_in(alone) == Seat()
    assert seat_in({"RANK": "0", "WORLD_SIZE": "1"}) == Seat(by="a launcher"), (
        "nobody has to be found"
    )
    srun = {**TASK, **ADDRESS, "WORLD_SIZE": "2", "PMI_SIZE": "2"}
    assert seat_in(srun) == Seat(1, 2, 1, 2, "srun")
    one_a_node = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
    assert seat_in(srun | one_a_node) == Seat(1, 2, 0, 1, "srun")


def test_a_terminal_of_a_slurm_step_joins_nobody(monkeypatch):
    """`srun -n 2 --pty bash`: what is typed there is started once, and waited for others that
    nobody had started.
    """
    monkeypatch.setattr("farthing.run.group.os.isatty", lambda number: number == 0)
    with pytest.raises(InputError, match="one of the 2 tasks"):
        seat_in({**TASK, **ADDRESS})
    assert seat_in({**RANKS, **ADDRESS, **TASK}).by == "a launcher", (
        "torchrun in that terminal knows who is who"
    )


class Clock:
    """Seconds that pass where somebody sleeps."""

    now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def host(monkeypatch):
    """A store at an address that this process's environment has."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return dist.PrefixStore("farthing-0", store)


def test_a_port_that_is_in_use_is_said_and_not_tried_again(monkeypatch):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        with pytest.raises(InputError, match="is in use by another program"):
            meet(Seat(0, 2, by="a launcher"), CPU, 1.0)


def test_a_seat_that_another_run_has_is_not_taken(host):
    """Two runs with the port that launchers give by default: the second one's ranks would join the
    first one's.
    """
    host.add("taken-1", 1)
    with pytest.raises(InputError, match="is rank 1 already"):
        meet(Seat(1, 2, by="a launcher"), CPU, 1.0)


def test_who_does_not_come_is_named(host, tmp_path, monkeypatch, capfd):
    limits = {"JOIN_S": 0.1, "JOIN_HERE_S": 0.1, "SAY_AFTER_S": 0.05}
    limits["BEYOND_S"] = 300.0  # by a clock that runs by itself, and it ends this process
    for name, seconds in limits.items():
        monkeypatch.setattr(rendezvous, name, seconds)
    clock = Clock()
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=clock, sleep=clock.sleep))
    host.set("seat-0", json.dumps(["cpu", ""]))
    with pytest.raises(RankLostError, match=r"2 did not come within 0 s \(rank 2, 3\)") as lost:
        meet(Seat(1, 4, by="srun"), CPU, 0.1)
    assert lost.value.exit_code == 75
    assert "rank 1 of 4, started by srun, waits for rank 2, 3" in capfd.readouterr().err
    monkeypatch.setenv("FARTHING_RANKS_STORE", str(tmp_path / "store"))
    with pytest.raises(RankLostError) as lost:
        meet(Seat(1, 2, by="farthing"), CPU, 0.1)
    assert lost.value.exit_code == 76, "not that of one who was asked to leave"


@pytest.mark.parametrize(
    ("others", "says"),
    [
        (["cpu", ""], "rank 0 of 2 sees no GPU"),
        (["cuda", "here GPU-a"], "ranks 0 and 1 of 2 have the same GPU"),
        (["cuda", "here GPU-b"], ""),
    ],
)
def test_more_processes_than_gpus_are_refused_by_all_and_told_by_the_first(
    others, says, host, monkeypatch
):
    monkeypatch.setattr(rendezvous, "device_of", lambda device: ("cuda", "here GPU-a"))
    host.set("seat-0", json.dumps(others))
    if not says:
        meet(Seat(1, 2, by="torchrun"), CPU, 5.0)
        return
    with pytest.raises(InputError, match=says) as refused:
        meet(Seat(1, 2, by="torchrun"), CPU, 5.0)
    assert refused.value.is_told  # type: ignore[attr-defined]


def test_a_launcher_that_starts_more_than_the_job_says_is_told_of(tmp_path):
    job = lora_job(tmp_path, where={"gpus": 2})
    for seat, says in (
        (Seat(0, 4, 0, 4, "torchrun"), "where.gpus is 2, and torchrun has started 4"),
        (Seat(0, 4, 0, 2, "torchrun"), ""),
        (Seat(0, 2, 0, 2, "torchrun"), ""),
        (Seat(0, 1, 0, 1, "farthing"), ""),  # one of the two was lost
        (Seat(), "this is one process"),
    ):
        heard, ranks = Heard(), Ranks()
        ranks.seat, ranks.n = seat, seat.n
        slots_of_run(job.where, ranks, 0, heard)
        assert says in heard.warnings
        assert says or "where.gpus" not in heard.warnings


def test_retry_is_not_for_processes_that_a_launcher_has_started(tmp_path, monkeypatch, cli):
    for name, value in {**RANKS, **ADDRESS, "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    assert "torchrun has started the 2 processes" in cli.err("train", job_file(tmp_path), "--retry")


def test_a_rank_without_room_for_its_files_says_so(tmp_path, monkeypatch):
    """It was a crash, after which the others went on without that rank."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(DiskFullError, match="has no folder for its files"):
        rank_setup.own_folder()


@pytest.mark.parametrize("leaves", ["sys.exit(75)", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_a_wish_to_leave_while_others_are_not_there_yet_begins_nothing_again(leaves, monkeypatch):
    """Those that wait end as if one were lost; the one that was asked to leave has ended in order,
    or before it could listen."""
    monkeypatch.setattr("farthing.run.group.GRACE_S", 120.0)
    ends = ["sys.exit(76)", leaves, "os.kill(os.getpid(), signal.SIGKILL)"]
    attempt = Elastic(3, lambda seat, slot, number: child(ends[seat.index]), lambda text: None)
    assert attempt.wait() == 75
    assert attempt.n_begun == 1


def test_one_that_is_killed_before_all_have_met_takes_nobody_along(monkeypatch):
    """The others waited for it until they were killed as well, all were lost, and the command had
    ended.
    """
    started = []

    def start(seat, slot, number):
        started.append([number, slot])
        monkeypatch.setattr("farthing.run.group.GRACE_S", 0.5 if number == 1 else 120.0)
        dies = "os.kill(os.getpid(), signal.SIGKILL)"
        return child("sys.exit(0)" if number == 2 else dies if slot == 1 else "time.sleep(600)")

    assert Elastic(3, start, lambda text: None).wait() == 0
    assert started[3:] == [[2, 0], [2, 2]]


def test_a_run_that_is_finished_is_told_to_all_that_a_launcher_has_started(
    tmp_path, monkeypatch, cli
):
    """The first rank ended at once with 0, and the others waited three minutes for it and failed."""  # noqa: E501

    def joins(*_, **__):
        raise InputError("here the others are told")

    monkeypatch.setattr("farthing.run.folder.is_finished", lambda folder: True)
    monkeypatch.setattr("farthing.train.finished.receipt_of_finished", lambda job: "a receipt")
    monkeypatch.setattr("farthing.train.run.train", joins)
    for name, value in {**RANKS, **ADDRESS}.items():
        monkeypatch.setenv(name, value)
    assert "here the others are told" in cli.err("train", job_file(tmp_path))


def test_what_a_killed_rank_leaves_goes_with_the_meeting(tmp_path, monkeypatch):
    monkeypatch.setenv("FARTHING_RANKS_STORE", str(tmp_path / "attempt-1"))
    with rank_setup.own_folder() as folder:
        assert Path(folder).parent == tmp_path


def test_what_torch_would_wait_for_without_end_is_ended_in_words(monkeypatch, capfd):
    """torch's store waits for ever for a program that listens at its port and says nothing."""
    ended = []
    monkeypatch.setattr("farthing.dist.rendezvous.os._exit", ended.append)
    with rendezvous.bounded(Seat(1, 2, by="srun"), 0.05, "nobody answers"):
        until(lambda: ended)
    assert ended == [75]
    assert "rank 1 of 2 could not meet the others: nobody answers" in capfd.readouterr().err
    before = set(threading.enumerate())
    with rendezvous.bounded(Seat(1, 2, by="srun"), 600.0, "nobody answers"):
        (timer,) = set(threading.enumerate()) - before
    timer.join(60.0)
    assert not timer.is_alive(), "nobody waits for what is over"
    assert len(ended) == 1
