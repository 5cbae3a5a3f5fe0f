"""A small job to launch, keys that are none, and launches at a provider that is played."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from fake_clouds import World
from farthing.launch.driver import Created, Driver, InstanceStatus, ListingDriver, UnclearError
from farthing.launch.http import Api
from farthing.launch.machines import MachineLedger, RentedMachine
from farthing.launch.request import LaunchRequest
from farthing.launch.supervise import Launch
from farthing.launch.words import Word
from launch_faults import Fate, Killed, prepared_for, supervise
from offers import offer_of

ALIVE = Fate(None, is_before=False)


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "no key")


def job_at(folder: Path, tiny_folders, **more) -> Path:
    """A job file with a small model and data, both here."""
    (folder / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 40)
    values = {
        "task": "causal-lm",
        "model": {"model_name_or_path": str(tiny_folders["llama"]), "init": "random"},
        "data": "./data.jsonl",
        "method": "full",
        "limits": {"max_usd": 2},
        "where": {"device": "cpu", "usd_per_hour": 1},
        "output_dir": "./run",
        "cache_dir": "./cache",
        **more,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(values))
    return folder / "job.yaml"


def ask_of(target: str, **more) -> LaunchRequest:
    """A machine for a small job; `more` are fields of `LaunchRequest`."""
    known = {"at": "", "offer": offer_of("L40S", 0.4), "usd_per_hour": 0.4, "most_s": 60}
    known |= {"job_text": "task: x", "told": {"name": "x"}, "image": "an/image"}
    return LaunchRequest("farthing-12345678-1", target, **known | more)


class Course:
    """A launch with its provider, its run folder and what it says."""

    def __init__(self, folder: Path, provider: str = "runpod", max_usd: float = 4.0, **world):
        self.world, self.run, self.said = World(provider, **world), folder / "run", []
        self.prepared = prepared_for(provider, self.run, max_usd, 0.4)

    def goes(self, fate: Fate = ALIVE, at: Path | None = None, **how) -> int:
        """A process that watches it from a folder; its exit code."""
        how = {"say": self.said.append, **how}
        return supervise(self.world, self.prepared, at or self.run, fate, **how)

    def on(self, driver: Driver) -> Launch:
        """The launch, on machines of another kind."""
        world = self.world
        return Launch(
            self.prepared,
            self.ledger,
            driver,
            world,  # type: ignore[arg-type]
            write=lambda ask: None,
            say=self.said.append,
            clock=world.clock,
            sleep=world.sleep,
            awake=world.clock,
        )

    def dies(self, n: int, at: Path | None = None):
        """A process that is killed at its n-th call, when a machine is there."""
        with pytest.raises(Killed):
            self.goes(Fate(n, is_before=False), at)
        assert self.world.n_alive == 1

    @property
    def ledger(self) -> MachineLedger:
        return MachineLedger(self.run)

    def is_counted(self, **about: float):
        """The ledger has what the provider bills."""
        assert self.ledger.usd(self.world.now) == pytest.approx(self.world.usd, **about)


class Played(ListingDriver):
    """Each machine is shown, and speaks, as a script has it by its age; an error in it is raised.
    One that is deleted is shown `lingers_s` longer. `refuses` are answers to requests, the first
    first. `traits` are those of a driver.
    """

    def __init__(
        self,
        course: Course,
        shows: dict[int, Any],
        says: dict[int, Any],
        lingers_s: float = 0.0,
        refuses: Sequence[Exception | None] = (),
        **traits,
    ) -> None:
        self.clock, self.shows, self.lingers_s = course.world.clock, shows, lingers_s
        self.refuses = [*refuses]
        self.made, self.deleted = dict[str, float](), dict[str, list[float]]()
        vars(self).update(traits)
        course.world.of = lambda name: self._now(says, name) or Word()  # type: ignore[method-assign]

    def _now(self, script: dict[int, Any], name: str):
        age = self.clock() - self.made[name]
        found = [each for since, each in script.items() if since <= age]
        if found and isinstance(found[-1], Exception):
            raise found[-1]
        return found[-1] if found else None

    def create(self, ask: LaunchRequest, asked_at: float) -> Created:
        error = self.refuses.pop(0) if self.refuses else None
        if error is None or isinstance(error, UnclearError):
            self.made[ask.name] = self.clock()
        if error is not None:
            raise error
        return Created("7")

    def listed(self, prefix: str) -> list[InstanceStatus]:
        found = {name: self._now(self.shows, name) for name in self.made}
        gone = {n for n, at in self.deleted.items() if self.clock() >= at[0] + self.lingers_s}
        return [
            InstanceStatus(name, "7", **facts)
            for name, facts in found.items()
            if facts is not None and name not in gone
        ]

    def delete(self, machine: RentedMachine) -> None:
        self._now(self.shows, machine.name)
        self.deleted.setdefault(machine.name, []).append(self.clock())


class Answers:
    """What a provider answers, in order, the last for ever; and what it was asked."""

    def __init__(self, *answers, **headers: str):
        self.left, self.headers = list(answers), headers
        self.asked = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.method, request.url.path))
        status, body = self.left[0]
        del self.left[: len(self.left) > 1]
        text = body if isinstance(body, str) else json.dumps(body)
        headers = {**self.headers, **({"Location": text} if status == 302 else {})}
        return httpx.Response(status, text=text, headers=headers)


def api_of(answer) -> Api:
    """Requests that this answers, on 2001-09-09 at 01:46:40."""
    transport = httpx.MockTransport(answer)
    keys = {"Authorization": "Bearer key"}
    return Api(
        "https://x", keys, transport=transport, sleep=lambda s: None, clock=lambda: 1_000_000_000.0
    )
