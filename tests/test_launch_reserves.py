"""What an adopting watcher ends, how a killed child ends, what is kept back of a deadline."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from fake_clouds import Machine as CloudMachine
from farthing.launch.machines import MachineLedger
from farthing.launch.prepare import Prepared
from farthing.prices.offers import boot_of
from launch_faults import prepared_for
from launched import Course
from launched import keys as keys


def there(course: Course, number: int, *events: str) -> CloudMachine:
    """A machine that an earlier watcher asked for: in its ledger, in the store and in the cloud."""
    world, ledger = course.world, course.ledger
    name = f"{course.prepared.launch_id}-{number}"
    asked = {"target": "runpod", "provider": "RunPod", "usd_per_hour": 0.4, "left_usd": 4.0}
    ledger.note(name, "asked", world.now, number=number, most_s=30_000, **asked)
    for event in events:
        ledger.note(name, event, world.now, **({"id": str(number)} if event == "created" else {}))
    world.keep(name, ledger.rows[name])
    ledger.close()
    machine = CloudMachine(str(number), name, "", world.now, 0.4, world.now + 30_000, None, 4.0)
    machine.prices = [(world.now, 0.4)]
    world.machines.append(machine)
    return machine


def test_of_two_machines_the_younger_is_adopted_and_the_older_is_ended(tmp_path):
    course = Course(tmp_path, n_steps=240)
    older, younger = (there(course, number, "created") for number in (1, 2))
    began = course.world.now
    assert course.goes() == 0
    assert older.gone_at is not None
    assert older.gone_at - began < 60, "before the younger one trained"
    assert younger.trained_s > 0
    assert (len(course.world.machines), course.world.n_alive) == (2, 0)


def test_a_machine_that_was_left_and_not_ended_is_ended_before_another_is_rented(tmp_path):
    course = Course(tmp_path, n_steps=24)
    left = there(course, 1, "created", "left")
    assert course.goes() == 0
    assert left.gone_at is not None
    assert left.gone_at <= course.world.machines[1].made_at
    assert course.world.n_alive == 0


def with_limits(prepared: Prepared, **limits: object) -> Prepared:
    """The same launch under other limits."""
    values = prepared.job.model_dump(exclude_unset=True) | {"limits": limits}
    return replace(prepared, job=type(prepared.job).model_validate(values))


def test_a_deadline_is_the_end_of_a_machine_and_hours_are_those_of_training(tmp_path):
    now = datetime(2026, 11, 22, 12, tzinfo=UTC)
    prepared = prepared_for("runpod", tmp_path / "run", 4.0, 0.4)
    offer, ledger = prepared.offers[0], MachineLedger(tmp_path / "run")
    boot_s = boot_of("RunPod").seconds
    by_deadline = with_limits(prepared, deadline=now + timedelta(hours=2))
    assert by_deadline.ask(1, offer, ledger, [], now.timestamp()).most_s == 7200
    by_hours = with_limits(prepared, max_hours=2)
    asked = by_hours.ask(1, offer, ledger, [], now.timestamp())
    assert asked.most_s == int(7200 + boot_s + 120 + 120), "boot, grace and teardown come on top"


@pytest.mark.parametrize(("more_s", "may"), [(-30.0, False), (30.0, True)])
def test_spot_is_taken_as_long_as_a_quarter_and_two_boots_are_left(more_s, may, tmp_path):
    deadline = datetime(2026, 11, 23, tzinfo=UTC)
    prepared = with_limits(
        prepared_for("runpod", tmp_path / "run", 4.0, 0.4), max_usd=4.0, deadline=deadline
    )
    spot, steady = prepared.offers[1], prepared.offers[0]

    class Timed:
        offer, wall_s = steady, 3600.0

    boot_s = boot_of("RunPod").seconds
    least_s = 1.25 * (3600.0 + boot_s) + 2 * boot_s
    prepared = replace(
        prepared,
        plans={steady: Timed()},  # type: ignore[dict-item]
    )
    at = deadline.timestamp() - least_s - more_s
    assert prepared.is_in_time(spot, at, 0) is may
    assert prepared.is_in_time(steady, at, 0)
    half = replace(prepared, n_steps=100).is_in_time
    assert half(spot, at + 0.625 * 3600, 50) is may, "half of it is done"
