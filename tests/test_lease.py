"""Who holds a run where machines are suspended, clocks differ by days and jump, and lists are late.

A world of two machines in simulated time: each has its own clocks, one store is shared.
"""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from farthing.storage import lease as lease_module
from farthing.storage.lease import Gaps, Lease, LeaseLostError, bills_left
from farthing.storage.objects import StoreError
from mirrored import Model
from thinned import thinned

LEASE_S, RENEW_S = 60.0, 20.0
DAYS_S = 86400.0


class Shelf(Model):
    """`late` of the newest keys are missing in its lists."""

    late = 0

    def list(self, prefix):
        there = [*self.objects][: len(self.objects) - self.late]
        return {key: entry for key, entry in super().list(prefix).items() if key in there}


class World:
    """Seconds that pass for all; what a machine sees of them depends on its clocks."""

    def __init__(self):
        self.now = 0.0
        self.at_work = None
        self.others = []

    def sleep(self, seconds):
        """One machine waits; the others go about their work meanwhile."""
        waits, self.now = self.at_work, self.now + seconds
        for act in self.others:
            act()
        self.at_work = waits


class Machine:
    """A machine that may hold the run. `boot_stops`: its clocks stand still while it is paused."""

    def __init__(self, world, shelf, folder, skew_s):
        self.world, self.shelf, self.skew_s = world, shelf, skew_s
        self.lost_s = 0.0
        self.suspended_until = 0.0
        self.renewed_at = -1e9
        self.was_told = False
        folder.mkdir()
        self.lease = Lease(folder, LEASE_S, lambda: [{"by": folder.name}], lambda text: None)
        self.gaps = Gaps(LEASE_S, (self.boot, self.wall))

    def boot(self):
        return 1000.0 + self.world.now - self.lost_s

    def wall(self):
        return 1.8e9 + self.skew_s + self.boot()

    def suspend(self, seconds, *, boot_stops):
        self.suspended_until = self.world.now + seconds
        self.lost_s += seconds if boot_stops else 0.0

    def claim(self):
        self.world.at_work = self
        self.lease.claim(self.shelf, lambda: False)  # type: ignore[arg-type]
        self.renewed_at = self.world.now

    def act(self):
        """Renew when it is time, unless asleep or told that the run is lost."""
        self.world.at_work = self
        is_due = self.world.now - self.renewed_at >= RENEW_S
        if self.was_told or self.world.now < self.suspended_until:
            return
        self.gaps.tick()
        if is_due and self.lease.epoch:
            try:
                self.lease.renew(self.shelf)  # type: ignore[arg-type]
                self.renewed_at = self.world.now
            except LeaseLostError:
                self.was_told = True


@pytest.fixture
def world(monkeypatch):
    made = World()

    def of_machine(name):
        return lambda: getattr(made.at_work, name)()

    monkeypatch.setattr(lease_module, "seconds_since_boot", of_machine("boot"))
    clocks = SimpleNamespace(time=of_machine("wall"), sleep=made.sleep)
    monkeypatch.setattr(lease_module, "time", clocks)
    return made


def two(world: World, tmp_path: Path, skew_s: float) -> tuple[Machine, Machine, Shelf]:
    """The first has the run."""
    shelf = Shelf()
    first = Machine(world, shelf, tmp_path / "first", 0.0)
    second = Machine(world, shelf, tmp_path / "second", skew_s)
    first.claim()
    return first, second, shelf


@pytest.mark.parametrize("skew_s", [-2 * DAYS_S, -130.0, 0.0, 130.0, 2 * DAYS_S])
def test_a_live_holder_keeps_the_run_whatever_the_clocks_say(skew_s, world, tmp_path):
    first, second, _ = two(world, tmp_path, skew_s)
    world.others = [first.act]
    world.now = RENEW_S - 1  # its link is as old as it ever gets
    with pytest.raises(LeaseLostError, match="is training this run"):
        second.claim()
    assert not first.was_told


@pytest.mark.parametrize("seed", thinned(range(60), 5))
def test_a_holder_that_slept_learns_that_it_lost_the_run_and_leaves_its_bill(seed, world, tmp_path):
    """Suspended for seconds to days; clocks that count this, or stand still, or jump."""
    dice = random.Random(seed)
    first, second, shelf = two(world, tmp_path, dice.choice([0, 130, -DAYS_S, 2 * DAYS_S]))
    for _ in range(dice.randint(0, 30)):
        world.sleep(RENEW_S)
        first.act()
    boot_stops = dice.random() < 0.5
    sleeps_s = dice.choice([100, 130, 600, 3600, DAYS_S]) * dice.uniform(1, 1.3)
    first.suspend(sleeps_s, boot_stops=boot_stops)
    if dice.random() < 0.3:
        first.skew_s += dice.choice([-2, 2]) * DAYS_S
    began, world.others = world.now, [first.act]
    second.claim()
    assert world.now - began <= LEASE_S + 2
    world.others = [second.act]
    while world.now < first.suspended_until + 1:
        world.sleep(RENEW_S)
    if not boot_stops:
        assert first.gaps.taken(), "it asks before it goes on"
    world.others = [second.act, first.act]
    world.sleep(RENEW_S + 1)
    assert first.was_told
    assert not second.was_told
    first.lease.leave_bill(shelf)  # type: ignore[arg-type]
    known = set()
    assert bills_left(shelf, known, print) == [{"by": "first"}]  # type: ignore[arg-type]
    assert bills_left(shelf, known, print) == []  # type: ignore[arg-type]
    for _ in range(20):
        world.sleep(RENEW_S)
    assert not second.was_told


def test_both_suspended_as_virtual_machines_on_one_laptop(world, tmp_path):
    first, second, _ = two(world, tmp_path, 0.0)
    asleep = False

    def lid():
        nonlocal asleep
        if not asleep:
            asleep = True
            world.now += DAYS_S
        first.act()

    world.others = [lid]
    with pytest.raises(LeaseLostError):
        second.claim()
    assert not first.was_told


@pytest.mark.parametrize("lost", ["create", "list"])
def test_a_lost_answer_does_not_make_a_holder_a_stranger_to_itself(
    lost, world, tmp_path, monkeypatch
):
    first, _, shelf = two(world, tmp_path, 0.0)
    real = getattr(shelf, lost)

    def unanswered(*arguments):
        real(*arguments)
        raise StoreError("no answer")

    for _ in range(3):
        monkeypatch.setattr(shelf, lost, unanswered)
        with pytest.raises(StoreError):
            first.lease.renew(shelf)  # type: ignore[arg-type]
        monkeypatch.setattr(shelf, lost, real)
        first.lease.renew(shelf)  # type: ignore[arg-type]
    assert list(shelf.list("writers/")) == [f"writers/{n:08d}.json" for n in range(1, 8)]


@pytest.mark.parametrize("late", [1, 3])
def test_a_list_that_lacks_the_newest_links_lets_nobody_in_beside_the_holder(late, world, tmp_path):
    first, second, shelf = two(world, tmp_path, 0.0)
    for _ in range(12):
        world.sleep(RENEW_S)
        first.act()
    shelf.late = late
    world.others = [first.act]
    with pytest.raises((LeaseLostError, StoreError)):
        second.claim()
    shelf.late = 0
    world.sleep(RENEW_S)
    assert not first.was_told
