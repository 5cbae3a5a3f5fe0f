"""A small job to launch, keys that are none, and launches at a provider that is played."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from fake_clouds import World
from farthing.launch.driver import Driver
from farthing.launch.http import Api
from farthing.launch.machines import MachineLedger
from farthing.launch.supervise import Launch
from launch_faults import Fate, Killed, prepared_for, supervise

ALIVE = Fate(None, is_before=False)


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "no key")


def job_at(folder: Path, tiny_folders: dict[str, Path], **more: Any) -> Path:
    """A job file with a small model and data, both here."""
    (folder / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 40)
    values = {
        "task": "causal-lm",
        "model": {"model_name_or_path": str(tiny_folders["llama"]), "init": "random"},
        "data": "./data.jsonl",
        "method": "full",
        "limits": {"max_usd": 2},
        "output_dir": "./run",
        "cache_dir": "./cache",
        **more,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(values))
    return folder / "job.yaml"


class Course:
    """A launch with its provider, its run folder and what it says."""

    def __init__(
        self, folder: Path, provider: str = "runpod", max_usd: float = 4.0, **world: Any
    ) -> None:
        self.world, self.run, self.said = World(provider, **world), folder / "run", list[str]()
        self.prepared = prepared_for(provider, self.run, max_usd, 0.4)

    def goes(self, fate: Fate = ALIVE, at: Path | None = None, **how: Any) -> int:
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

    def dies(self, n: int, at: Path | None = None) -> None:
        """A process that is killed at its n-th call, when a machine is there."""
        with pytest.raises(Killed):
            self.goes(Fate(n, is_before=False), at)
        assert self.world.n_alive == 1

    @property
    def ledger(self) -> MachineLedger:
        return MachineLedger(self.run)

    def is_counted(self, **about: float) -> None:
        """The ledger has what the provider bills."""
        assert self.ledger.usd(self.world.now) == pytest.approx(self.world.usd, **about)


class Answers:
    """What a provider answers, in order, the last for ever; and what it was asked."""

    def __init__(self, *answers: tuple[int, Any], **headers: str) -> None:
        self.left, self.headers = list(answers), headers
        self.asked: list[tuple[str, str]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.method, request.url.path))
        status, body = self.left[0]
        del self.left[: len(self.left) > 1]
        text = body if isinstance(body, str) else json.dumps(body)
        headers = {**self.headers, **({"Location": text} if status == 302 else {})}
        return httpx.Response(status, text=text, headers=headers)


def api_of(answer: Callable[[httpx.Request], httpx.Response]) -> Api:
    """Requests that this answers, on 2001-09-09 at 01:46:40."""
    transport = httpx.MockTransport(answer)
    keys = {"Authorization": "Bearer key"}
    return Api(
        "https://x", keys, transport=transport, sleep=lambda s: None, clock=lambda: 1_000_000_000.0
    )
