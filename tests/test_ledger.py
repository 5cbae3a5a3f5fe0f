"""The money of a run under damage: ledgers with broken, changed or missing lines, none at all, and
kills while writing.
"""

import random
from pathlib import Path

import pytest

from attempts import Clock, attempt
from farthing.errors import (
    DataError,
    LimitError,
    RunChangedError,
    RunDamagedError,
    RunInterruptedError,
    RunTakenError,
)
from farthing.events import StepTaken
from farthing.report.receipt import build_receipt
from farthing.run.accounts import Account, as_line, read_ledger
from farthing.run.folder import keep, witnesses_of
from farthing.run.ledger import Ledger, Meter
from farthing.run.opening import opened
from farthing.storage.files import commit_folder
from interrupted import terminate, when
from killed import killed_at
from workshop import Heard, job_file, make_job, read_json, train

PRICES = (3.6, 7.2, 1.8)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def three_attempts(path: Path) -> Clock:
    """200 s at three prices, an attempt of 100, 60 and 40 s: 0.10 + 0.12 + 0.02 dollars."""
    clock = Clock()
    for price, first, last in zip(PRICES, (0, 10, 16), (10, 16, 20), strict=True):
        attempt(path, clock, price, first, last, end="interrupted")
    return clock


def sums_of(path: Path) -> tuple[float, float]:
    """Seconds and dollars."""
    accounts = read_ledger(path).accounts
    return sum(a.wall_s for a in accounts), sum(a.usd for a in accounts)


# ---- damaged lines ----


def test_a_changed_digit_anywhere_is_noticed_and_no_money_is_forgotten(path):
    three_attempts(path)
    content, chance = path.read_bytes(), random.Random(1)
    lines = [at for at, byte in enumerate(content) if byte == 10]
    digits = [at for at, byte in enumerate(content[: lines[1]]) if chr(byte).isdigit()]
    for at in chance.sample(digits, 150):
        digit = b"%d" % ((content[at] - 48 + chance.randint(1, 9)) % 10)
        path.write_bytes(content[:at] + digit + content[at + 1 :])
        found = read_ledger(path)
        assert found.n_broken == 1
        assert sums_of(path) == pytest.approx((200, 0.24)), "the line after knows the sum"


def test_a_changed_digit_in_the_newest_line_leaves_its_twin(path):
    three_attempts(path)
    content = path.read_bytes()
    for line in content.splitlines()[-2:]:
        at = content.rindex(line) + line.index(b"usd_per_hour") + 15
        path.write_bytes(content[:at] + b"9" + content[at + 1 :])
        assert sums_of(path) == pytest.approx((200, 0.24))
        assert read_ledger(path).accounts[-1].state == "interrupted"


@pytest.mark.parametrize("gone", [[0], [1], [0, 1]])
def test_removed_lines_are_made_good_from_what_later_ones_know(gone, path, tmp_path):
    clock = three_attempts(path)
    lines = path.read_text().splitlines(keepends=True)
    left = "".join(line for index, line in enumerate(lines) if index not in gone)
    path.write_text(left)
    with opened(tmp_path, 0.0) as again:
        said = again.damage_in_words()
        assert said is not None
        assert "ledger.jsonl was damaged (lines are missing; kept as" in said
        assert "are known in sum only, and stay on the bill" in said
        again.ledger.withdraw()
    path.write_text(left)
    found = read_ledger(path)
    assert found.is_damaged
    assert sums_of(path) == pytest.approx((200, 0.24))
    attempt(path, clock, 3.6, 20, 21, end="finished")
    assert sums_of(path) == pytest.approx((210, 0.25))
    assert not read_ledger(path).is_damaged, "said once, then it is on a line of its own"
    assert read_ledger(path).accounts[0].number == 0
    assert path.with_name("ledger.jsonl.damaged-1").exists()


@pytest.mark.parametrize(
    ("past_s", "past_usd", "lost"),
    [(10.009, 0.01, None), (10.5, 0.01, (0.5, 0.0)), (10.0, 0.0102, (0.001, 0.0002))],
)
def test_what_a_later_line_knows_besides_is_made_good_but_for_rounding(
    past_s, past_usd, lost, tmp_path
):
    first = Account(1, "1", usd_per_hour=3.6, spans={"compute": 10.0}, step=9, committed=8)
    later = Account(2, "2", past_s=past_s, past_usd=past_usd)
    (tmp_path / "l").write_text(as_line(first) + as_line(later))
    found = read_ledger(tmp_path / "l")
    assert found.is_damaged == (lost is not None)
    if lost is not None:
        made_good = found.accounts[0]
        assert (made_good.wall_s, made_good.usd) == pytest.approx(lost)
        assert (made_good.ended, made_good.line) == ("lost", 1)


def bear_witness(folder: Path, ledger: Ledger, step: int, run_id: str = "run-1"):
    """A checkpoint whose manifest knows what was spent."""
    facts = {"kind": "farthing checkpoint", "step": step, "run_id": run_id, **ledger.witness()}
    commit_folder(folder / "checkpoints" / f"step-{step:08d}-0001", lambda draft: None, facts)


@pytest.mark.parametrize("left", [None, b"", b"\xff\x00\n" * 9])
def test_a_ledger_that_is_lost_is_made_good_from_the_checkpoints(left, path, tmp_path):
    clock = Clock()
    keep(tmp_path / "run.json", {"run_id": "run-1"})
    ledger = attempt(path, clock, 3.6, 0, 10)
    bear_witness(tmp_path, ledger, 10)
    ledger = attempt(path, clock, 7.2, 10, 16)
    bear_witness(tmp_path, ledger, 16)
    bear_witness(tmp_path, ledger, 99, run_id="another")
    path.unlink()
    if left is not None:
        path.write_bytes(left)
    receipt = build_receipt(tmp_path)
    assert (receipt.wall_s, receipt.usd) == pytest.approx((160, 0.22))
    assert sum(span.usd for span in receipt.spans) == pytest.approx(receipt.usd)
    assert receipt.ledger.lost_usd == pytest.approx(0.22)
    ledger = Ledger(path, Meter(clock=clock), 3.6, witnesses_of(tmp_path))
    assert ledger.spent_usd == pytest.approx(0.22), "the cap counts it"
    assert ledger.committed_step == 16
    assert ledger.damage is not None


@pytest.mark.parametrize("left", ["run.json", "log.jsonl", "checkpoints"])
def test_nothing_known_of_the_money_is_refused_until_it_is_asked_for(left, tmp_path):
    if left == "checkpoints":
        facts = {"kind": "farthing checkpoint", "step": 5, "run_id": "run-1", "attempt": 1}
        commit_folder(tmp_path / "checkpoints/step-00000005-0001", lambda draft: None, facts)
    else:
        (tmp_path / left).write_text("{}\n")
    for _ in range(2):  # and again
        with (
            pytest.raises(RunDamagedError, match="its cost so far is unknown") as caught,
            opened(tmp_path, 1.0) as new,
        ):
            new.refuse_forgotten(allow_restart=False)
        assert "--allow-restart" in str(caught.value)
    with opened(tmp_path, 1.0) as new:
        new.refuse_forgotten(allow_restart=True)
    with opened(tmp_path, 1.0) as new:
        new.refuse_forgotten(allow_restart=False)


def test_a_running_attempt_writes_its_line_again_when_the_ledger_is_taken_away(path):
    clock = Clock()
    attempt(path, clock, 3.6, 0, 10, end="interrupted")
    ledger = attempt(path, clock, 3.6, 10, 12)
    for damage in (path.unlink, lambda: path.write_bytes(b""), lambda: path.write_bytes(b"x" * 9)):
        damage()
        clock.now += 10
        ledger.write()
    assert sums_of(path) == pytest.approx((150, 0.15))


def test_a_run_with_a_damaged_ledger_says_so_keeps_its_bill_and_goes_on(tmp_path):
    job = make_job(tmp_path, max_steps=4, save_steps=2, limits={"max_hours": 1})
    stopped = train(job, when(StepTaken, 2, terminate))  # type: ignore[arg-type]
    assert stopped.state == "interrupted"
    ledger, checkpoints = tmp_path / "run/ledger.jsonl", tmp_path / "run/checkpoints"
    ledger.write_text("not a ledger\n")
    heard = Heard()
    done = train(job, heard)
    assert "ledger.jsonl was damaged (1 line can't be read" in heard.warnings
    assert done.state == "finished"
    manifest = read_json(next(checkpoints.glob("step-00000002-*/manifest.json")))
    assert done.receipt.ledger.lost_usd == pytest.approx(manifest["spent_usd"], rel=1e-3)
    assert done.receipt.usd > manifest["spent_usd"]
    assert sum(span.usd for span in done.receipt.spans) == pytest.approx(done.receipt.usd, rel=0.01)


# ---- kills while the ledger is written again ----


def test_a_kill_at_any_file_operation_of_a_ledger_loses_nothing_of_it(path):
    clock = three_attempts(path)
    content, n_kills = path.read_bytes(), 0

    def begin_and_grow():
        ledger = Ledger(path, Meter(clock=clock), 3.6)
        ledger.write()
        ledger.begin_at(20)
        for step in range(21, 24):
            ledger.at_step(step, {})
            ledger.write(notice={"what": "x" * 3000, "at": 1.0, "is_certain": False})
        ledger.end("interrupted")

    for k in range(1, 200):
        path.write_bytes(content)
        was_killed = killed_at(k, begin_and_grow)
        found = read_ledger(path)
        assert not found.is_damaged
        assert [a.wall_s for a in found.accounts][:3] == pytest.approx([100, 60, 40])
        if not was_killed:
            break
        n_kills += 1
    assert n_kills > 10
    assert len(found.accounts[-1].notices) == 3


def test_attempts_that_are_brought_back_come_before_the_one_under_way(path, tmp_path, monkeypatch):
    clock = Clock()
    three_attempts(tmp_path / "stored")
    monkeypatch.setenv("FARTHING_MACHINE", "m")
    ledger = attempt(path, clock, 3.6, 0, 21)
    bear_witness(tmp_path, ledger, 21)
    for _ in range(2):
        ledger.take_in(read_ledger(tmp_path / "stored").accounts)
        assert sums_of(path) == pytest.approx((410, 0.45))
    assert ledger.mine.number == 4
    found = read_ledger(path, witnesses_of(tmp_path))
    assert [each.machine for each in found.accounts] == ["", "", "", "m"]
    assert not found.is_damaged


def test_a_beat_takes_no_room_on_the_disk(tmp_path):
    clock = Clock()
    ledger = attempt(tmp_path / "l", clock, 3.6, 0, 2)
    sizes = []
    for _ in range(600):
        clock.now += 10
        ledger.beat()
        sizes.append((tmp_path / "l").stat().st_size)
    assert max(sizes[300:]) < 1.1 * max(sizes[:300])
    assert sums_of(tmp_path / "l")[0] == pytest.approx(6020)


# ---- attempts that are none ----


def test_an_attempt_that_is_refused_leaves_no_trace(tmp_path):
    with pytest.raises(DataError), opened(tmp_path / "a/b/run", 1.0):
        raise DataError("no such file")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("of the person's own")
    with pytest.raises(DataError), opened(tmp_path / "mine", 1.0):
        raise DataError("no such file")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("error", [RunChangedError("another run"), RunTakenError("by another")])
def test_an_attempt_at_another_run_is_not_on_its_bill(error, path, tmp_path):
    three_attempts(path)
    before = sums_of(path)

    def ends(*, is_accepted):
        with opened(tmp_path, 3600.0) as new:
            new.is_accepted = is_accepted
            raise error

    for is_accepted in (False, True):
        with pytest.raises(type(error)):
            ends(is_accepted=is_accepted)
        assert (sums_of(path) > before) == is_accepted
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (DataError("no such file"), "failed"),
        (LimitError("the cap"), "limit"),
        (RunInterruptedError("SIGTERM"), "interrupted"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_an_attempt_at_its_own_run_ends_as_what_has_ended_it(error, state, path, tmp_path):
    three_attempts(path)
    before = sums_of(path)
    with pytest.raises(type(error)), opened(tmp_path, 3600.0) as new:
        raise error
    assert read_ledger(path).accounts[-1].state == state
    assert new.ledger.spent_usd > before[1]


def test_the_age_of_a_process_is_counted_once(tmp_path):
    for name in ("a", "b", "c"):
        with opened(tmp_path / name, 1.0):
            pass
    assert sums_of(tmp_path / "c/ledger.jsonl")[0] < 5


def test_a_job_that_is_wrong_or_of_another_folder_leaves_the_bill_as_it_was(tmp_path, cli):
    path = job_file(tmp_path, max_steps=2, output_dir="run")
    ledger = tmp_path / "run/ledger.jsonl"
    ledger.parent.mkdir()
    three_attempts(ledger)
    before = sums_of(ledger)

    cli("train", path, "--set", "train.no_such_key=1", code=2)
    assert sums_of(ledger) == before
    cli("train", path, "--set", "limits.max_hours=1s", code=3)
    assert sums_of(ledger)[1] < before[1] + 1.0, "the age of the process, at the job's price"
    priced = [account.usd_per_hour for account in read_ledger(ledger).accounts]
    assert priced == [*PRICES, 3.6]
    cli("train", path, "--set", "limits.max_hours=1s", code=3)
    assert len(read_ledger(ledger).accounts) == 4, "asking again costs nothing"
