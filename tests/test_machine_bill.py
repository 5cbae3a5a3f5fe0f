"""What each rented machine has cost, by what it did: figures worked by hand."""

import pytest

from farthing.launch.machines import MachineLedger, RentedMachine, bill_by_machine, bill_of
from farthing.run.accounts import Account


def machine(number: int, **more) -> RentedMachine:
    """Asked for at 1000 s, booted at 1100 s, left at 1500 s, gone at 1520 s, at $3.60 an hour."""
    times = {"asked_at": 1000.0, "booted_at": 1100.0, "left_at": 1500.0, "gone_at": 1520.0}
    known = {"number": number, "usd_per_hour": 3.6, "is_paid_in_queue": True, **times}
    return RentedMachine(f"farthing-{number}", **(known | more))


def attempt(number: int, started_at: float, seconds: float, of: int = 1) -> Account:
    spans = {"compute": seconds}
    return Account(number, machine=f"farthing-{of}", started_at=started_at, spans=spans)


def parts_of(row) -> list[float]:
    assert row["usd"] == pytest.approx(row["wall_s"] / 1000)
    assert row["usd_of"] == pytest.approx({name: s / 1000 for name, s in row["seconds"].items()})
    return [round(row["seconds"][name], 6) for name in ("boot", "train", "teardown", "idle")]


def test_a_machine_boots_trains_and_ends_and_the_rest_is_idle():
    attempts = [attempt(1, 1120.0, 300.0), attempt(2, 1450.0, 40.0)]
    (row,) = bill_by_machine([machine(1)], attempts, 2000.0)
    assert (row["wall_s"], row["state"]) == (520.0, "gone")
    assert parts_of(row) == [120.0, 340.0, 20.0, 40.0]


@pytest.mark.parametrize(
    ("known", "parts"),
    [
        ({}, [100.0, 0.0, 20.0, 400.0]),
        ({"booted_at": None}, [500.0, 0.0, 20.0, 0.0]),
        ({"booted_at": None, "left_at": None}, [520.0, 0.0, 0.0, 0.0]),
        ({"gone_at": None}, [100.0, 0.0, 500.0, 400.0]),
        ({"is_paid_in_queue": False}, [0.0, 0.0, 20.0, 400.0]),
    ],
)
def test_a_machine_without_an_attempt_boots_until_it_has_booted_or_left(known, parts):
    (row,) = bill_by_machine([machine(1, **known)], [], 2000.0)
    assert parts_of(row) == parts


def test_a_queued_job_that_nobody_saw_begin_costs_what_its_attempts_did(tmp_path):
    ledger, account = MachineLedger(tmp_path), attempt(1, 1120.0, 300.0)
    account.usd_per_hour = 3.6
    name, known = account.machine, {"usd_per_hour": 3.6, "is_paid_in_queue": False}
    ledger.note(name, "asked", 1000.0, number=1, **known)
    for event in ("created", "left", "gone"):
        ledger.note(name, event, 9000.0)
    assert ledger.spent_usd([account], 9999.0) == pytest.approx(0.3)
    (row,) = bill_of(tmp_path, [account], 9999.0, [])
    assert parts_of(row) == [0.0, 300.0, 0.0, 0.0]


def test_attempts_of_two_machines_at_once_belong_to_each():
    older, younger = machine(1), machine(2, asked_at=1300.0, booted_at=1350.0, gone_at=1800.0)
    attempts = [attempt(1, 1400.0, 100.0), attempt(2, 1120.0, 90.0, of=2)]
    rows = bill_by_machine([older, younger], attempts, 2000.0)
    assert [row["seconds"]["train"] for row in rows] == [100.0, 90.0]


def test_no_part_is_longer_than_what_is_left_where_clocks_differ():
    (row,) = bill_by_machine([machine(1)], [attempt(1, 1010.0, 600.0)], 2000.0)
    assert parts_of(row) == [0.0, 520.0, 0.0, 0.0]


def test_a_damaged_line_is_named_and_a_machine_is_billed_from_what_is_left(tmp_path):
    ledger = MachineLedger(tmp_path)
    ledger.note("f-1", "asked", 1000.0, number=1, usd_per_hour=3.6)
    for event, at in (("priced", 1200.0), ("created", 1100.0), ("gone", 1300.0)):
        ledger.note("f-1", event, at, usd_per_hour=at / 1000 * 3.6)
    assert ledger.machines["f-1"].usd(0.0) == pytest.approx(0.2 * 1.1 + 0.1 * 1.2)
    text = (tmp_path / "machines.jsonl").read_text()
    (tmp_path / "machines.jsonl").write_text(text.replace("asked", "Asked"))
    (row,) = bill_of(tmp_path, [], 2000.0, damaged := [])
    assert row["wall_s"] == 200.0
    assert damaged == ["machines.jsonl has 1 damaged line: machines may cost more"]


def test_a_refused_machine_is_on_no_bill():
    assert bill_by_machine([machine(1, is_refused=True)], [], 2000.0) == []
