"""Seconds and dollars: spans that add up, prices that follow the attempt, ledgers torn by kills."""

import contextlib
import errno
import os
import random
import time
from pathlib import Path

import psutil
import pytest

from attempts import Clock, attempt
from farthing.errors import DiskFullError
from farthing.run import ledger as ledger_module
from farthing.run.accounts import Account, AttemptMark, as_line, read_ledger, with_redone
from farthing.run.ledger import Ledger, Meter, end_for, seconds_since_process_start
from farthing.run.opening import opened
from patience import until


def read_attempts(path: Path) -> list[Account]:
    """The attempts of a ledger."""
    return with_redone(read_ledger(path).accounts)


def test_spans_add_up_to_the_wall_time_however_they_nest():
    clock = Clock()
    meter = Meter(already_s=2.0, clock=clock)
    clock.now += 1
    with meter.span("evaluation"):
        clock.now += 3
        with meter.span("data_wait"):
            clock.now += 0.5
        clock.now += 2
    meter.enter("idle")
    clock.now += 4
    assert meter.wall_s == pytest.approx(12.5)
    assert meter.spans == pytest.approx(
        {"start_up": 3.0, "evaluation": 5.0, "data_wait": 0.5, "idle": 4.0}
    )


def test_a_span_ends_with_an_error_too():
    clock = Clock()
    meter = Meter(clock=clock)
    with contextlib.suppress(ValueError), meter.span("compute"):
        clock.now += 1
        raise ValueError
    clock.now += 2
    assert meter.wall_s == 3
    assert meter.spans == {"start_up": 2.0, "compute": 1.0}


def test_seconds_go_to_the_work_that_was_waited_for_and_no_more_than_there_are():
    meter = Meter(already_s=5.0)
    with meter.span("idle"):
        meter.move("start_up", "ranks", 2.0)
        assert (meter.spans["start_up"], meter.spans["ranks"]) == (pytest.approx(3, abs=0.5), 2)
        meter.move("ranks", "compute", 9.0)
        meter.move("export", "compute", 9.0)
    assert (meter.spans["ranks"], meter.spans["compute"], meter.spans["export"]) == (0, 2, 0)


@pytest.mark.parametrize(
    ("age_s", "counted_s"),
    [(0.5, 0.5), (3599.0, 3599.0), (3600.5, 0.0), (-1.0, 0.0)],
)
@pytest.mark.parametrize("has_proc", [True, False])
def test_a_process_counts_its_age_of_up_to_an_hour(has_proc, age_s, counted_s, monkeypatch):
    booted_s = psutil.boot_time()
    born_s = psutil.Process().create_time()
    since_boot_s = born_s - booted_s
    monkeypatch.setattr(ledger_module, "seconds_since_boot", lambda: since_boot_s + age_s)
    if not has_proc:
        monkeypatch.setattr("os.sysconf", lambda name: int("none"))
        monkeypatch.setattr("time.time", lambda: born_s + age_s)
    assert seconds_since_process_start() == pytest.approx(counted_s, abs=0.02)


def test_a_span_without_a_name_on_the_receipt_is_refused():
    with pytest.raises(KeyError), Meter().span("coffee"):
        pass


def test_a_line_is_written_every_half_second_and_before_a_checkpoint_bears_witness(tmp_path):
    clock = Clock()
    ledger = attempt(tmp_path / "l", clock, 3.6, 7, 8)
    for passed_s, known_s in ((0.25, 10.0), (0.25, 10.5)):
        clock.now += passed_s
        ledger.beat()
        (account,) = read_attempts(tmp_path / "l")
        assert (account.wall_s, account.began, account.first_step) == (known_s, True, 7)
    assert account.line == 3
    ledger.held_up_by_save(0.2)
    clock.now += 0.25
    witness = ledger.witness()
    (account,) = read_attempts(tmp_path / "l")
    known = {"spent_s": 10.75, "spent_usd": pytest.approx(0.01075)}
    assert witness == {"attempt": 1, "attempt_id": account.id, **known}
    assert (account.wall_s, account.n_saves, account.held_up_s) == (10.75, 1, 0.2)


def test_what_is_noted_of_an_attempt_is_its_most_and_its_newest():
    account = Account(1)
    account.note({})
    assert (account.committed, account.exported, account.peak_bytes) == (-1, None, None)
    account.note({"committed": 4, "exported": 4, "peak_bytes": 70, "mfu": 0.5, "tokens": 8})
    account.note({"committed": 2, "peak_bytes": 50, "out_of_memory": {"step": 3}, "tokens": 0})
    account.note({"loss": 1.0})
    assert (account.committed, account.exported, account.peak_bytes) == (4, 4, 70)
    assert (account.out_of_memory, account.facts) == ([{"step": 3}], {"mfu": 0.5, "tokens": 8})
    for number in range(60):
        account.note({"notice": number + 1})
    assert [each["notice"] for each in account.notices] == [*range(11, 61)]


def test_a_clock_behind_an_earlier_attempt_is_known(tmp_path):
    accounts = [Account(n, str(n), at=at) for n, at in ((1, 1000.0), (2, 900.0))]
    (tmp_path / "l").write_text("".join(map(as_line, accounts)))
    back_s = [
        Ledger(tmp_path / "l", Meter(now=lambda at=at: at), 1).clock_back_s
        for at in (940.0, 1001.0)
    ]
    assert back_s == [60.0, 0.0]
    first = Ledger(tmp_path / "none", Meter(already_s=40.0, now=lambda: 0.0), 1)
    assert first.clock_back_s == 0.0


def test_a_clock_that_was_set_bills_nothing_after_a_kill(tmp_path):
    began = Account(1, at=time.time() - 1800, spans={"compute": 9.0})
    (tmp_path / "l").write_text(as_line(began))
    end_for(tmp_path / "l")
    assert read_ledger(tmp_path / "l").accounts[0].wall_s == pytest.approx(9, abs=5)


def test_time_is_on_the_bill_while_nobody_says_anything_and_its_end_is_on_the_disk(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("farthing.run.ledger.BEAT_S", 0.01)
    forced = []
    monkeypatch.setattr("farthing.run.ledger.fsync_path", forced.append)
    ledger = Ledger(tmp_path / "l", Meter(already_s=40.0, now=lambda: 1000.0), 1)
    ledger.write()
    began_s = read_attempts(tmp_path / "l")[0].started_at
    assert began_s == pytest.approx(960, abs=5)
    ledger.keep_beating()
    until(lambda: read_attempts(tmp_path / "l")[0].line > 2)
    ledger.close()
    (account,) = read_attempts(tmp_path / "l")
    assert (account.started_at, account.at, forced) == (began_s, 1000.0, [tmp_path / "l"])
    ledger.withdraw()
    ledger.close()
    assert not (tmp_path / "l").exists()
    assert len(forced) == 1


def test_work_done_again_is_counted_once_as_redone(tmp_path):
    clock = Clock()
    attempt(tmp_path / "l", clock, 1, 0, 10)
    attempt(tmp_path / "l", clock, 1, 8, 9)  # lost steps 9 and 10 of the first
    attempt(tmp_path / "l", clock, 1, 4, 20, end="finished")  # lost all after step 4
    redone = [a.redone_s for a in read_attempts(tmp_path / "l")]
    assert redone == pytest.approx([60, 10, 0])


def test_work_until_a_step_is_on_the_line_between_the_nearest_marks():
    early = AttemptMark(4, 0, 0, 0.0, 0, {"compute": 40.0})
    late = AttemptMark(8, 0, 0, 0.0, 0, {"compute": 90.0, "optimizer": 10.0, "evaluation": 5.0})
    account = Account(1, step=8, marks=[early, late])
    found = [account.work_until(step) for step in (-1, 0, 2, 4, 6, 8, 9)]
    assert found == [0, 0, 20, 40, 70, 100, 100]


def test_an_attempt_that_never_began_loses_no_work(tmp_path):
    clock = Clock()
    attempt(tmp_path / "l", clock, 1, 0, 10)
    Ledger(tmp_path / "l", Meter(clock=clock), 1).write()
    attempt(tmp_path / "l", clock, 1, 10, 12, end="finished")
    attempts = read_attempts(tmp_path / "l")
    assert [a.began for a in attempts] == [True, False, True]
    assert sum(a.redone_s for a in attempts) == 0


def test_the_first_forecast_is_the_one_that_is_kept(tmp_path):
    clock = Clock()
    ledger = Ledger(tmp_path / "l", Meter(clock=clock), 1)
    ledger.begin_at(0)
    ledger.write(forecast={"wall_s": 10})
    ledger.write(forecast={"wall_s": 20})
    assert Ledger(tmp_path / "l", Meter(clock=clock), 1).forecast == {"wall_s": 10}


# ---- where the seconds went over time ----


def test_stretches_add_up_to_the_spans_however_many_there_were():
    draw, account = random.Random(0), Account(1)
    account.spans = dict.fromkeys(("compute", "optimizer", "evaluation"), 0.0)
    for step in range(3000):
        account.spans[draw.choice(list(account.spans))] += draw.uniform(0, 2)
        if draw.random() < 0.3:  # a meter gives seconds to another span after they were written
            moved = min(0.5, account.spans["compute"])
            account.spans["compute"] -= moved
            account.spans["optimizer"] += moved
        account.step, account.n_saves = step, step // 100
        account.facts = {"tokens": 10 * step}
        account.mark()
        assert len(account.marks) <= 32
    stretches = account.stretches
    summed = {name: sum(s.spans.get(name, 0.0) for s in stretches) for name in account.spans}
    assert summed == pytest.approx(account.spans, abs=0.01)
    assert [stretch.step for stretch in stretches] == sorted(each.step for each in stretches)
    assert stretches[-1][:2] == (2999, 29990)
    assert sum(stretch.n_saves for stretch in stretches) == 29
    longest = max(sum(stretch.spans.values()) for stretch in stretches)
    assert longest < sum(account.spans.values()) / 8, "no stretch hides the rest"
    assert all(seconds >= 0 for stretch in stretches for seconds in stretch.spans.values())


def test_a_ledger_keeps_the_stretches_of_an_attempt(tmp_path):
    clock = Clock()
    meter = Meter(clock=clock)
    ledger = Ledger(tmp_path / "l", meter, 3.6)
    ledger.begin_at(10)
    for step in range(1, 101):
        with meter.span("compute" if step <= 50 else "evaluation"):
            clock.now += 1
        facts = {"tokens": 7 * step, "utilisation_percent": 20 if step <= 50 else 80}
        ledger.at_step(10 + step, facts)
    ledger.end("finished")
    account = read_ledger(tmp_path / "l").accounts[0]
    stretches = account.stretches
    assert len(stretches) == len(account.marks)
    assert stretches[-1][:2] == (110, 700)
    assert stretches[0].spans.keys() == {"compute"}
    assert stretches[-1].spans.keys() == {"evaluation"}
    busy = [each.busy / each.n_busy for each in stretches]
    assert (busy[0], busy[-1]) == (20, 80)


def test_a_disk_that_is_full_takes_the_bill_in_the_place_of_the_last(tmp_path, monkeypatch):
    clock = Clock()
    ledger = attempt(tmp_path / "l", clock, 3.6, 0, 5)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("farthing.run.ledger.write_text", full)
    clock.now += 1000
    ledger.beat()
    assert read_ledger(tmp_path / "l").accounts[0].wall_s == pytest.approx(1050)
    assert not read_ledger(tmp_path / "l").is_damaged
    with pytest.raises(DiskFullError, match="No space left"), opened(tmp_path / "run", 1.0):
        pass
