"""What may befall whoever watches a launch: sleep, a clock that is set, a full disk, damaged notes,
answers of another form.
"""

import errno
import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from fake_clouds import World
from farthing.errors import InputError
from farthing.launch import agent as agent_module
from farthing.launch.agent import HostAgent
from farthing.launch.driver import UnclearError
from farthing.launch.http import Api
from farthing.launch.machines import RentedMachine
from farthing.launch.session import Session
from farthing.launch.targets.lambda_cloud import Lambda
from farthing.launch.targets.runpod import RunPod
from farthing.launch.targets.vast import Vast
from farthing.launch.words import StoreWords, Word
from farthing.storage.logs import SummedLines
from farthing.storage.objects import open_store
from hosts import ask_for, machine_of
from hosts import host as host
from launch_faults import prepared_for
from launched import Answers, Course, Played, api_of, job_at
from launched import keys as keys
from patience import until

# ---- time ----


def test_a_watcher_that_was_asleep_does_not_take_its_own_silence_for_the_machines(
    tmp_path, monkeypatch
):
    """A lid is closed for an hour while a machine trains; the network comes back a minute after the
    lid was opened.
    """
    course = Course(tmp_path, n_steps=600)
    world, real, handle = course.world, World.sleep, World.handle
    slept = []

    def sleep(self, seconds):
        real(self, seconds)
        if world.saved > 24 and not slept:
            slept.append(world.now)
            real(self, 3600.0)
            slept.append(world.now)

    def handle_where_there_is_a_network(self, request):
        if slept and world.now < slept[1] + 60:
            raise httpx.ConnectError("no network yet")
        return handle(self, request)

    monkeypatch.setattr(World, "sleep", sleep)
    monkeypatch.setattr(World, "handle", handle_where_there_is_a_network)
    assert course.goes() == 0
    assert len(slept) == 2
    assert len(world.machines) == 1, "it was at work all the while"


def test_a_clock_that_is_set_ends_no_machine(tmp_path, monkeypatch):
    session = Session(prepared_for("runpod", tmp_path / "run", 4.0, 0.4), lambda text: None)
    answer = Answers((200, "{}"), Date="Sun, 06 Nov 1994 08:49:37 GMT")
    api = Api("https://x", {}, transport=httpx.MockTransport(answer))
    before = session.clock()
    real = time.time()
    for jump in (2 * 86400.0, -2 * 86400.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: real + jump)
        api.ask("GET", "/")
        assert abs(session.clock() - before) < 60
        assert abs(784111777 - before - api.clock_offset_s) < 60, "the provider's is the same"


def test_an_answer_with_an_old_date_takes_nothing_off_the_bill(tmp_path):
    course = Course(tmp_path, n_steps=60)
    handle = course.world.handle

    def from_a_cache(request):
        answer = handle(request)
        if request.method == "DELETE":
            answer.headers["Date"] = "Sun, 06 Nov 1994 08:49:37 GMT"
        return answer

    course.world.handle = from_a_cache  # type: ignore[method-assign]
    assert course.goes() == 0
    course.is_counted(rel=0.01)


# ---- a disk without room ----


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_machine_is_watched_and_given_back_though_nothing_can_be_written_down(
    tmp_path, monkeypatch
):
    course, real = Course(tmp_path, n_steps=60), SummedLines.append

    def append(lines, row):
        real(lines, row) if row["event"] == "asked" else full()

    monkeypatch.setattr(SummedLines, "append", append)
    assert course.goes() == 0
    world = course.world
    assert (world.n_alive, len(world.machines), world.saved) == (0, 1, 60)
    assert sum("No space left" in text for text in course.said) == 1
    events = [row["event"] for row in world.lines[world.machines[0].name]]
    assert events == ["asked", "created", "booted", "left", "gone"], "the store knows it"


def test_nothing_is_rented_that_can_not_be_written_down_before(
    tmp_path, tiny_folders, cli, monkeypatch
):
    monkeypatch.setenv("FARTHING_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(SummedLines, "append", full)
    words = "launch", job_at(tmp_path, tiny_folders), "--yes", "--on", "local"
    assert "the run folder can't be written: No space left" in cli.err(*words, code=75)
    assert not (tmp_path / "home").exists()


def test_a_machine_without_room_for_the_inputs_says_so_and_another_one_may_do(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agent_module, "fetch_inputs", full)
    facts = {"name": "farthing-1-1", "store": str(tmp_path / "store"), "inputs": "x"}
    facts |= {"boot_limit_s": 600.0, "usd_per_hour": 1.0}
    assert HostAgent(Path("job.yaml"), facts).run() == 75
    word = StoreWords(open_store(str(tmp_path / "store"))).of("farthing-1-1")
    assert (word.code, "No space left" in word.why) == (75, True)


# ---- two at once ----


def test_a_machine_that_is_refused_as_a_lost_one_still_trains_ends_no_launch(tmp_path):
    """The first host answers nobody from some moment on and trains until 1000 s have passed: one
    that begins before is refused.
    """
    course = Course(tmp_path, max_usd=400.0)
    world, began = course.world, course.world.now
    driver = Played(course, {0: {}}, {}, may_overlap=True)

    def look(machine):
        if machine.number == 1 and world.now - began > 100:
            raise UnclearError("no route to host")
        return Played.look(driver, machine)

    def word_of(name):
        """The one that is lost saves a step each second."""
        world.saved = int(world.now - began)
        machine = course.ledger.machines[name]
        code = 2 if machine.asked_at - began < 1000.0 else 0
        return Word(True, None if machine.number == 1 else code, beat=f"{world.now}")

    driver.look, world.of = look, word_of  # type: ignore[method-assign]
    assert course.on(driver).run() == 0
    assert 2 < len(course.ledger.machines) < 30
    assert [machine.number for machine in course.ledger.open] == [1], (
        "said, and counted until it is confirmed"
    )


# ---- what is known of machines is damaged ----


def damage(path: Path, old: str, new: str):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.fixture
def lost(tmp_path):
    """Whoever rented its machine has died."""
    course = Course(tmp_path, n_steps=120)
    course.dies(25)
    return course


def test_the_price_of_a_machine_that_is_damaged_here_comes_back_from_the_store(lost):
    damage(lost.run / "machines.jsonl", '"usd_per_hour": 0.4', '"usd_per_hour": 0.1')
    assert lost.goes() == 0
    assert list(lost.ledger.machines) == [machine.name for machine in lost.world.machines]
    lost.is_counted(abs=0.03)


def test_without_any_line_of_its_price_nothing_more_is_rented_and_stop_still_works(lost):
    damage(lost.run / "machines.jsonl", '"usd_per_hour": 0.4', '"usd_per_hour": 0.1')
    lost.world.lines.clear()
    with pytest.raises(InputError, match="the cap can't be kept"):
        lost.goes()
    assert len(lost.world.machines) == 1
    lost.goes(stop=True)
    assert lost.world.n_alive == 0


def test_stop_ends_every_machine_though_what_the_store_knows_of_them_is_damaged(
    lost, tmp_path, monkeypatch
):
    def kept(self):
        raise InputError("what is known of a machine is damaged", where="store", to_do="look")

    monkeypatch.setattr(World, "kept", kept)
    lost.said.clear()
    lost.goes(at=tmp_path / "elsewhere", stop=True)
    assert lost.world.n_alive == 0
    assert "damaged" in lost.said[0]


# ---- answers of no known form ----


@pytest.mark.parametrize("client", [RunPod, Vast, Lambda])
@pytest.mark.parametrize(
    "answer",
    [
        '{"pods": 3, "instances": [{}], "data": "x"}',
        '{"error": "busy"}',
        "",
    ],
)
def test_a_list_that_is_none_is_no_answer(client, answer):
    with pytest.raises(UnclearError):
        client(api_of(Answers((200, answer)))).names("farthing-1")
    if "error" in answer:  # nor is it an acknowledgement
        with pytest.raises(UnclearError, match="busy"):
            client(api_of(Answers((200, answer)))).delete(RentedMachine("farthing-1-1", id="1"))


@pytest.mark.parametrize(
    ("provider", "is_twice"), [("runpod", False), ("vast", False), ("lambda", True)]
)
def test_a_creation_answered_with_something_else_is_looked_for_by_name(
    provider, is_twice, tmp_path
):
    """And one that a proxy had carried out twice leaves one machine."""
    course = Course(tmp_path, provider, n_steps=60)
    world, real = course.world, course.world.create

    def made_and_garbled(*args):
        status, value = real(*args)
        if is_twice:
            world.machines.insert(0, replace(world.machines[0], id="7"))
            return status, value
        return (status, [json.dumps(value)]) if world.n_created == 1 else (status, value)

    world.create = made_and_garbled  # type: ignore[method-assign]
    assert course.goes() == 0
    assert (world.n_alive, len(world.machines), world.n_double) == (0, 1 + is_twice, 0)
    course.is_counted(abs=0.001)


# ---- hosts ----


def test_a_number_that_another_process_has_got_since_is_not_ours(host, tmp_path):
    """After a loss without a word the number of our process went to somebody else's session: it is
    neither ours nor ended.
    """
    ask = ask_for("forever")
    host.create(ask, 1.0)
    home = tmp_path / "home" / ask.name
    pid = int((home / "pid").read_text())
    subprocess.run(["pkill", "-KILL", "-s", str(pid)], check=True)
    until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    )
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        (home / "pid").write_text(f"{other.pid}\n")  # as if the number had come round
        seen = host.look(machine_of(ask))
        assert (seen.is_over, seen.is_paid) == (True, False)
        assert host.names("farthing-12345678") == {}
        (home / "asked").write_text("1\n")  # long ago: what answers no polite signal is killed
        host.destroy(machine_of(ask))
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
        other.kill()


def test_what_was_begun_is_known_though_the_connection_was_cut_in_that_moment(
    host, tmp_path, monkeypatch
):
    tell = host.tell

    def cut(where, script):
        lines = script.splitlines(keepends=True)
        begun = next(n for n, line in enumerate(lines) if line.startswith("setsid"))
        end = next(n for n in range(begun, len(lines)) if lines[n].rstrip().endswith("&"))
        tell(where, "".join(lines[: end + 1]))
        raise UnclearError("cut off")

    ask = ask_for("forever")
    with monkeypatch.context() as patch:
        patch.setattr(host, "tell", cut)
        with pytest.raises(UnclearError):
            host.create(ask, 1.0)
    seen = until(lambda: host.look(machine_of(ask)))
    assert not seen.is_over
    host.destroy(machine_of(ask))
    until(lambda: host.look(machine_of(ask)).is_over)
