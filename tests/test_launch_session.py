"""One call of `farthing launch` from beginning to end, at a provider that is played."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farthing.errors import InputError, RunInterruptedError, StoreUnavailableError
from farthing.launch.driver import UnauthorizedError, UnclearError
from farthing.launch.inputs import Packed
from farthing.launch.machines import MachineLedger
from farthing.launch.session import Session, where_it_is
from farthing.launch.words import Speaker
from farthing.storage.lease import Lease, LeaseLostError
from farthing.storage.objects import StoreError, open_store
from launched import Course, Played
from launched import keys as keys

OVER = {0: {"is_over": True, "code": 3}}


class Rented:
    """A session whose driver this is, with a folder for a store."""

    def __init__(self, folder: Path, shows: dict[int, Any], **traits):
        course = Course(folder)
        self.driver, self.said = Played(course, shows, {}, **traits), course.said
        job = course.prepared.job.model_copy(update={"output_store": str(folder / "store")})
        target = replace(course.prepared.target, client=lambda api: self.driver)
        prepared = replace(course.prepared, job=job, target=target)
        self.name, self.clock = f"{prepared.launch_id}-1", course.world.clock
        self.session = Session(prepared, self.said.append, clock=self.clock)

    def run(self, **how) -> int:
        return self.session.run(**{"is_attended": False, "tokenize": list, **how})

    def is_there(self):
        """A machine of this launch, which no line knows."""
        self.driver.made[self.name] = self.clock()


@pytest.fixture
def rent(tmp_path, monkeypatch):
    monkeypatch.setenv("RUNPOD_API_KEY", "key")
    monkeypatch.setattr("farthing.launch.session.STORE_S", 0.1)
    monkeypatch.setattr("farthing.launch.session.LOOK_S", 0.1)
    return lambda shows=OVER, **traits: Rented(tmp_path, shows, **traits)


def away(*_):
    raise UnclearError("away")


def no_store(*_):
    raise StoreError("away")


def test_a_launch_sends_its_inputs_rents_and_brings_the_run_back(rent, tmp_path, monkeypatch):
    taken = list[Any]()
    monkeypatch.setattr("farthing.launch.session.take_run", lambda *each: taken.append(each))
    rented, data, tokens = rent(), tmp_path / "rows.jsonl", tmp_path / "tokens"
    data.write_text("{}\n")
    tokens.mkdir()
    (tokens / "ids.bin").write_bytes(b"123")
    packed = Packed(((data, "inputs/train-0/rows.jsonl"),))
    rented.session.prepared = replace(rented.session.prepared, packed=packed)
    rented.session.words().ask_to_stop(is_wanted=True)  # earlier
    assert rented.run(tokenize=lambda: [tokens]) == 3
    assert rented.said[0].startswith("inputs: 3 files, ")
    assert [text[-5:] for text in rented.said[:2]] == ["store", " sent"]
    assert len(list((tmp_path / "store/inputs").iterdir())) == 3, "and the wheel"
    kept = (tmp_path / "run/launch/launched.yaml").read_text()
    wanted = ["task", "model", "data", "limits", "output_dir", "output_store"]
    assert [line.split(":")[0] for line in kept.splitlines() if line[0] not in " -"] == wanted
    assert len(taken) == 1
    monkeypatch.setattr("farthing.launch.session.take_run", no_store)
    rented.session.bring_back()
    assert rented.said[-1] == "the run is in the store, and could not be brought back: away"


def test_attach_needs_a_machine(rent):
    rented = rent()
    with pytest.raises(InputError, match="no machine of this launch is there"):
        rented.run(is_new=False)
    rented.is_there()
    assert rented.run(is_new=False) == 3


@pytest.mark.parametrize(
    ("error", "kind", "where", "why"),
    [
        (UnauthorizedError("no"), InputError, "environment", "RunPod refuses the credentials"),
        (UnclearError("away"), RunInterruptedError, "--on", "RunPod does not answer"),
    ],
)
def test_a_provider_is_asked_before_anything_is_sent(error, kind, where, why, rent, tmp_path):
    rented = rent({0: error})
    rented.is_there()
    with pytest.raises(kind, match=why) as caught:
        rented.run(is_new=kind is InputError)
    assert caught.value.where == where
    assert not (tmp_path / "store/inputs").exists()
    standing = rented.session.standing()
    assert standing["not_known"] == f"{where}: {why} ({error})"
    assert (standing["there_now"], standing["committed_step"]) == (None, 0)


def test_a_stop_is_told_to_whoever_watches_and_ends_the_machine(rent, monkeypatch):
    rented = rent({0: {}})
    rented.is_there()
    for event in ("asked", "created"):
        rented.session.ledger.note(rented.name, event, rented.clock(), target="runpod", id="7")
    assert rented.session.stop() is True
    assert rented.session.words().is_stopped()
    assert list(rented.driver.deleted) == [rented.name]


def test_the_newest_machine_is_the_one_whose_words_are_shown(rent, tmp_path):
    rented = rent()
    with pytest.raises(InputError, match="nothing has been launched yet"):
        rented.session.log()
    for number in (10, 9):
        name = f"{rented.name}{number}"
        rented.session.ledger.note(name, "asked", 1e9 + number, number=number)
    rented.session.ledger, name = MachineLedger(rented.session.folder), f"{rented.name}10"
    assert rented.session.log() == f"{name} has printed nothing yet"
    rented.driver.log = lambda machine: f"of {machine.name}"
    assert rented.session.log() == f"of {name}"
    speaker = Speaker(open_store(str(tmp_path / "store")), name)
    speaker.beat("step 1")
    assert rented.session.log() == "step 1"

    speaker.beat("")
    rented.driver.log = away
    with pytest.raises(InputError, match=r"no logs \(away\)"):
        rented.session.log()


def test_a_watch_keeps_its_lease_and_ends_where_it_is_lost(rent, monkeypatch):
    session, now, slept, renewed = rent().session, [1000.0], list[float](), list[float]()
    for module in ("launch.session", "storage.lease"):
        monkeypatch.setattr(f"farthing.{module}.seconds_since_boot", lambda: now[0])
    monkeypatch.setattr("farthing.launch.session.time.sleep", slept.append)
    (session.folder / "launch").mkdir(parents=True)
    with session.only_watcher() as (sleep, reclaim):
        monkeypatch.setattr(Lease, "renew", lambda *_: renewed.append(now[0]))
        for now[0] in (1019.0, 1021.0):
            sleep(2.0)
        assert (slept, renewed) == ([2.0, 2.0], [1021.0])

        monkeypatch.setattr(Lease, "renew", no_store)
        sleep(1.0)  # nobody else can take the launch either
        with pytest.raises(UnclearError, match="the store does not answer"):
            reclaim()

        def lost(*_):
            raise LeaseLostError("by another")

        monkeypatch.setattr(Lease, "renew", lost)
        with pytest.raises(RunInterruptedError, match="another process has taken this launch over"):
            reclaim()
    monkeypatch.setattr(Lease, "claim", no_store)
    with pytest.raises(StoreUnavailableError, match="the store does not answer"):
        session.only_watcher().__enter__()


@pytest.mark.parametrize(
    ("ended", "only_open", "place"),
    [
        ((), True, "slurm:b"),
        ((2,), True, "vast"),
        ((2,), False, "vast"),
        ((1, 2), True, None),
        ((1, 2), False, "slurm:b"),
    ],
)
def test_a_launch_is_where_its_newest_open_machine_is(ended, only_open, place, rent):
    session = rent().session
    job, ledger = session.prepared.job, session.ledger
    assert where_it_is(job, only_open=only_open) is None
    for number, target, on in ((1, "vast", ""), (2, "slurm", "slurm:b")):
        ledger.note(f"f-{number}", "asked", 1e9, number=number, target=target, on=on)
        if number in ended:
            ledger.note(f"f-{number}", "gone", 1e9)
    assert where_it_is(job, only_open=only_open) == place
    session.words().keep("f-1", ledger.rows["f-1"])
    (session.folder / "machines.jsonl").unlink()
    known = where_it_is(job, only_open=only_open)
    assert known == (None if only_open else "vast"), "the store is asked for all, not for open ones"
    assert not (session.folder / "machines.jsonl").exists()
