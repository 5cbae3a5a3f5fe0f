"""Scripted clouds that nobody bills for: the HTTP of RunPod and Vast.ai over a clock of their own,
with faults by order.

A machine here boots, trains, saves and leaves as farthing on a real one would, in virtual
seconds, so that hundreds of faulty launches take a minute. What a machine has really cost is kept
here, apart from the ledger of the launch.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import httpx

from farthing.launch.driver import UnclearError
from farthing.launch.words import Word
from farthing.run.accounts import Account

FAULTS = (
    "",
    "create answers 500 after creating",
    "create never answers after creating",
    "create never answers",
    "no stock",
    "never boots",
    "dies in boot",
    "taken away",
    "falls silent",
    "leaves with 75",
    "terminate fails three times",
    "list is late",
    "list shows the dead",
    "the API is away",
    "its end can't be scheduled",
    "refused for good",
    "costs a little more than listed",
    "costs more than listed",
    "costs three times as much",
    "costs less than listed",
    "gets dearer on the way",
    "too many requests",
    "server errors",
    "the key is refused",
    "the store is away",
)
BOOT_S, STEP_S, SAVE_EVERY = 120.0, 10.0, 12


@dataclass
class Machine:
    """A machine of the fake cloud. Times are seconds of its clock."""

    id: str
    name: str
    fault: str
    made_at: float
    usd_per_hour: float
    ends_at: float | None
    own_end: float | None
    """When what runs on it deletes it, where it does: not before it has booted."""
    most_train_usd: float
    prices: list[tuple[float, float]] = field(default_factory=list)
    """(from when, dollars an hour) as they are charged."""
    gone_at: float | None = None
    why_gone: str = ""
    left: tuple[int, str] | None = None
    trained_s: float = 0.0
    trained_from: float | None = None
    n_terminations: int = 0


@dataclass
class World:
    """A provider, its machines, the store with what they leave there, and the clock of it all."""

    provider: str
    n_steps: int = 600
    now: float = 1_800_000_000.0
    script: list[str] = field(default_factory=list)
    """The fault of each creation, in order; none after the last."""
    usd_per_hour: float = 0.4
    machines: list[Machine] = field(default_factory=list)
    saved: int = 0
    n_double: int = 0
    away_until: float = 0.0
    refuses: tuple[float, float, int] = (0.0, 0.0, 0)
    """(from, until, status) of answers that are none."""
    store_away_until: float = 0.0
    n_created: int = 0
    n_unanswered: int = 0
    """Creations that made nothing, and were not answered."""
    stopped: bool = False
    holder: int = 0
    """Whose launch it is: the last process that claimed it."""
    told: dict[str, float] = field(default_factory=dict)
    """The price that each machine was told."""
    lines: dict[str, list[Any]] = field(default_factory=dict)
    """What the store has of each machine."""
    run_files: dict[str, Any] = field(default_factory=dict)
    asks: dict[str, Any] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    is_attended: bool = True
    """Whether a process of ours is alive and awake."""
    unattended_usd: float = 0.0
    """What machines have cost while none was."""
    unseen_usd: float = 0.0
    """What of that is because of prices above those that were asked for."""
    unattended_s: float = 0.0

    # ---- time ----

    def clock(self) -> float:
        """Seconds since 1970."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let everything happen that happens meanwhile, at a grain of a step."""
        until = self.now + seconds
        while self.now < until:
            step = min(STEP_S, until - self.now)
            self.now += step
            self._live(step)

    @contextlib.contextmanager
    def unattended(self) -> Iterator[None]:
        """Within the block no process of ours is alive and awake."""
        was_attended, self.is_attended = self.is_attended, False
        try:
            yield
        finally:
            self.is_attended = was_attended

    def _live(self, step_s: float) -> None:
        if not self.is_attended:
            self.unattended_s += step_s
            for machine in self.machines:
                if machine.gone_at is None:
                    price, asked = machine.prices[-1][1], self.asks[machine.name].usd_per_hour
                    self.unattended_usd += step_s / 3600 * price
                    self.unseen_usd += step_s / 3600 * max(0.0, price - asked)
        training = 0
        for machine in self.machines:
            if machine.gone_at is not None:
                continue
            if machine.ends_at is not None and self.now >= machine.ends_at:
                machine.gone_at, machine.why_gone = machine.ends_at, "its own end"
                continue
            age = self.now - machine.made_at
            if machine.fault == "dies in boot" and age > BOOT_S / 2:
                machine.gone_at, machine.why_gone = self.now, "died in boot"
                continue
            if machine.fault == "never boots" or age < BOOT_S:
                continue
            if machine.own_end is not None and (
                machine.left is not None or self.now >= machine.own_end
            ):
                machine.gone_at, machine.why_gone = self.now, "it deleted itself"
                continue
            if machine.left is not None:
                continue
            if machine.fault == "taken away" and machine.trained_s > 400:
                machine.gone_at, machine.why_gone = self.now, "taken away"
                continue
            training += 1
            self._train(machine, step_s)
        self.n_double += training > 1

    def _train(self, machine: Machine, step_s: float) -> None:
        if machine.fault == "falls silent" and machine.trained_s > 300:
            machine.trained_s += step_s  # paid for, and nothing comes of it
            return
        machine.trained_from = self.now if machine.trained_from is None else machine.trained_from
        machine.trained_s += step_s
        if machine.trained_s % (SAVE_EVERY * STEP_S) < step_s:
            self.saved = min(self.n_steps, self.saved + SAVE_EVERY)
        is_dearer = machine.fault == "gets dearer on the way" and machine.trained_s > 200
        if is_dearer and len(machine.prices) == 1:
            machine.prices.append((self.now, 1.5 * self.usd_per_hour))
        spent = sum(
            each.trained_s / 3600 * self.told.get(each.name, self.usd_per_hour)
            for each in self.machines
        )
        if self.saved >= self.n_steps:
            machine.left = (0, "finished")
        elif spent >= machine.most_train_usd:
            machine.left = (3, "stopped by the cap")
        elif machine.fault == "leaves with 75" and machine.trained_s > 500:
            machine.left = (75, "interrupted")

    # ---- what is true afterwards ----

    @property
    def n_alive(self) -> int:
        """Machines that still cost money."""
        return sum(machine.gone_at is None for machine in self.machines)

    @property
    def loading(self) -> list[Machine]:
        """Machines of Vast.ai that never booted and are still there: as long as one is loading its
        disk is charged, its GPU is not (docs.vast.ai/guides/reference/billing)."""
        return [
            m
            for m in self.machines
            if self.provider == "vast" and m.gone_at is None and m.fault == "never boots"
        ]

    def usd_of(self, machine: Machine) -> float:
        """What a machine has cost up to now, counted from its making."""
        end, total = self.now if machine.gone_at is None else machine.gone_at, 0.0
        for n, (since, price) in enumerate(machine.prices):
            until = machine.prices[n + 1][0] if n + 1 < len(machine.prices) else end
            total += max(0.0, min(end, until) - since) / 3600 * price
        return total

    @property
    def usd(self) -> float:
        """What all machines have really cost."""
        return sum(map(self.usd_of, self.machines))

    # ---- the store (StoreWords) ----

    def _store(self) -> None:
        if self.now < self.store_away_until:
            self.sleep(2.0)
            raise UnclearError("the store is away")

    def run_file(self, name: str) -> Any:
        """See `StoreWords`."""
        return self.run_files.get(name, {})

    def tell_price(self, name: str, usd_per_hour: float) -> None:
        """See `StoreWords`."""
        self._store()
        self.told[name] = usd_per_hour

    def of(self, name: str) -> Word:
        """See `farthing.launch.words.StoreWords`."""
        self._store()
        machine = next((each for each in reversed(self.machines) if each.name == name), None)
        if (
            machine is None
            or self.now - machine.made_at < BOOT_S
            or machine.fault in ("never boots", "dies in boot")
        ):
            return Word()
        code, why = machine.left or (None, "")
        is_silent = machine.fault == "falls silent" and machine.trained_s > 300
        is_gone = machine.gone_at is not None
        beat = "silent" if is_silent else f"{machine.gone_at if is_gone else self.now // 30}"
        return Word(has_booted=True, code=code, why=why, beat=beat)

    def is_stopped(self) -> bool:
        """See `StoreWords`."""
        self._store()
        return self.stopped

    def committed(self) -> int:
        """See `StoreWords`."""
        self._store()
        return self.saved

    def accounts(self) -> list[Account]:
        """See `StoreWords`."""
        self._store()
        trained = [
            (n, machine)
            for n, machine in enumerate(self.machines, 1)
            if machine.trained_from is not None
        ]
        return [
            Account(
                n,
                state="finished"
                if machine.left is not None and machine.left[0] == 0
                else "running",
                machine=machine.name,
                spans={"compute": machine.trained_s},
                usd_per_hour=self.told.get(machine.name, self.usd_per_hour),
            )
            for n, machine in trained
        ]

    def keep(self, name: str, rows: list[Any]) -> None:
        """See `StoreWords`."""
        self._store()
        self.lines[name] = list(rows)

    def kept(self) -> dict[str, list[Any]]:
        """See `StoreWords`."""
        self._store()
        return {name: list(rows) for name, rows in self.lines.items()}

    # ---- HTTP ----

    def handle(self, request: httpx.Request) -> httpx.Response:
        """One request."""
        method, path, body = request.method, request.url.raw_path.decode(), request.content
        self.requests.append((method, path, body.decode()))
        self.sleep(0.2)
        if self.now < self.away_until:
            self.sleep(30.0)
            raise httpx.ReadTimeout("away")
        since, until, status = self.refuses
        if since <= self.now < until:
            value: Any = {"error": "not now"}
        else:
            try:
                status, value = getattr(self, f"_{self.provider}")(
                    method, path, json.loads(body) if body else None
                )
            except TimeoutError as error:
                raise httpx.ReadTimeout(str(error)) from error
        return httpx.Response(
            status,
            headers={"Date": format_datetime(datetime.fromtimestamp(self.now, UTC), usegmt=True)},
            content=b"" if value is None else json.dumps(value).encode(),
        )

    def _make(self, name: str, ends_at: float | None, own_end: float | None) -> Machine:
        fault = self.script[self.n_created] if self.n_created < len(self.script) else ""
        ask = self.asks[name]
        boot_usd = BOOT_S / 3600 * self.usd_per_hour
        told = ask.told
        cap = told["max_usd"] - boot_usd
        number = str(1000 + len(self.machines))
        times = {
            "costs a little more than listed": 1.05,
            "costs more than listed": 1.3,
            "costs three times as much": 3.0,
            "costs less than listed": 0.6,
        }
        listed = ask.usd_per_hour
        price = listed * times[fault] if fault in times else listed
        if fault in times:
            # the same host asks the same price again
            self.script.insert(self.n_created + 1, "")
        machine = Machine(number, name, fault, self.now, price, ends_at, own_end, cap)
        machine.prices = [(self.now, price)]
        return machine

    def create(
        self, name: str, ends_at: float | None, own_end: float | None, refusal: Any, made: Any
    ) -> tuple[int, Any]:
        """A creation, as the script has it. `refusal(is_stock)` and `made(id)` are the provider's
        answers.
        """
        machine = self._make(name, ends_at, own_end)
        self.n_created += 1
        fault = machine.fault
        if fault in ("no stock", "refused for good"):
            return refusal(fault == "no stock")
        if fault == "create never answers":
            self.n_unanswered += 1
            self.sleep(30)
            raise TimeoutError("no answer")
        self.machines.append(machine)
        if fault == "the API is away":
            self.away_until = self.now + 240
        for name, status, after, lasts in (
            ("too many requests", 429, 60, 200),
            ("server errors", 503, 60, 200),
            ("the key is refused", 401, 300, 100),
        ):
            if fault == name:
                self.refuses = (self.now + after, self.now + after + lasts, status)
        if fault == "the store is away":
            self.store_away_until = self.now + 300
        if fault == "create answers 500 after creating":
            return 500, {"error": "internal"}
        if fault == "create never answers after creating":
            self.sleep(30)
            raise TimeoutError("no answer")
        return made(machine.id)

    def _listed(self) -> list[Machine]:
        found = []
        for machine in self.machines:
            late = (
                90.0
                if machine.fault in ("list is late", "create never answers after creating")
                else 0.0
            )
            dead = 60.0 if machine.fault == "list shows the dead" else 0.0
            is_there = machine.gone_at is None or self.now - machine.gone_at < dead
            if is_there and self.now - machine.made_at >= late:
                found.append(machine)
        return found

    def _end(self, number: str) -> tuple[int, Any]:
        machine = next((each for each in self.machines if each.id == number), None)
        if machine is None or machine.gone_at is not None:
            return 404, {"error": "no such machine"}
        machine.n_terminations += 1
        if machine.fault == "terminate fails three times" and machine.n_terminations <= 3:
            return 500, {"error": "try again"}
        machine.gone_at, machine.why_gone = self.now, "destroyed"
        return 200, {"success": True}

    def _charged(self, number: str) -> float:
        machine = next(each for each in self.machines if each.id == number)
        return machine.prices[-1][1]

    def _runpod(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/graphql":
            pod = body["variables"]["input"]
            ends = datetime.fromisoformat(pod["terminateAfter"].replace("Z", "+00:00")).timestamp()
            kind = "podRentInterruptable" if "bidPerGpu" in pod else "podFindAndDeployOnDemand"

            def refusal(is_stock: bool) -> tuple[int, Any]:
                why = (
                    "There are no longer any instances available"
                    if is_stock
                    else "insufficient funds"
                )
                return 200, {"errors": [{"message": why}], "data": {kind: None}}

            return self.create(
                pod["name"],
                ends,
                None,
                refusal,
                lambda number: (
                    200,
                    {"data": {kind: {"id": number, "costPerHr": self._charged(number)}}},
                ),
            )
        if method == "DELETE":
            return self._end(path.rsplit("/", 1)[1])
        return 200, {
            "pods": [
                {
                    "id": m.id,
                    "name": m.name,
                    "status": "RUNNING",
                    "costPerHr": self._charged(m.id),
                }
                for m in self._listed()
            ]
        }

    def _lambda(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/api/v1/instance-operations/launch":

            def refusal(is_stock: bool) -> tuple[int, Any]:
                why = "insufficient-capacity" if is_stock else "invalid api key"
                return (400 if is_stock else 403), {"error": why}

            return self.create(
                body["name"],
                None,
                None,
                refusal,
                lambda number: (200, {"data": {"instance_ids": [number]}}),
            )
        if path == "/api/v1/instance-operations/terminate":
            return self._end(body["instance_ids"][0])
        return 200, {
            "data": [
                {
                    "id": m.id,
                    "name": m.name,
                    "status": "active",
                    "instance_type": {"price_cents_per_hour": 100 * self._charged(m.id)},
                }
                for m in self._listed()
            ]
        }

    def _vast(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/api/v0/bundles/":
            return 200, {"offers": [{"id": 77}]}
        if path.startswith("/api/v0/asks/"):

            def refusal(is_stock: bool) -> tuple[int, Any]:
                return (
                    (404, {"error": "no_such_ask"})
                    if is_stock
                    else (403, {"msg": "insufficient credit"})
                )

            script, asked_at = body["args"][-1], float(body["env"]["FARTHING_CREATED_AT"])
            most = re.search(r"^left=\$\(\(FARTHING_CREATED_AT \+ (\d+) - ", script, re.MULTILINE)
            own_end = asked_at + float(most[1]) if most else None
            return self.create(
                body["label"],
                None,
                own_end,
                refusal,
                lambda n: (200, {"success": True, "new_contract": int(n)}),
            )
        if path == "/api/v0/commands/schedule_job/":
            machine = next(each for each in self.machines if each.id == str(body["instance_id"]))
            if machine.fault == "its end can't be scheduled":
                return 400, {"msg": "bad request"}
            if body["request_method"] == "DELETE" and body["api_endpoint"].endswith(
                f"/{machine.id}/"
            ):
                machine.ends_at = float(body["start_time"])
            return 200, {"success": True}
        if method == "DELETE":
            return self._end(path.rstrip("/").rsplit("/", 1)[1])
        return 200, {
            "instances": [
                {
                    "id": int(m.id),
                    "label": m.name,
                    "actual_status": "running",
                    "dph_total": self._charged(m.id),
                }
                for m in self._listed()
            ]
        }
