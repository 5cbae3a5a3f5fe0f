"""Figures of a launch before and after it: what is asked for, what a dry run shows, when a provider
is asked again."""

import re
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml

from farthing.config.job import Job
from farthing.errors import InputError
from farthing.launch.driver import (
    NotFoundError,
    OutOfStockError,
    RefusedError,
    ServerError,
    UnauthorizedError,
    UnclearError,
    refusal,
)
from farthing.launch.http import Api, price_of
from farthing.launch.machines import MachineLedger, RentedMachine
from farthing.launch.prepare import NoBudgetError, Prepared, Wishes
from farthing.launch.registry import find_target
from farthing.launch.session import Session, dry_view, notes_of, said
from farthing.launch.wheel import wheel_of_this
from farthing.launch.words import Speaker, StoreWords, Word
from farthing.run.accounts import Account
from farthing.storage.files import seal
from farthing.storage.objects import StoreError, open_store
from launch_faults import prepared_for
from launched import Course
from launched import keys as keys
from offers import offer_of

NOW = 1_800_000_000.0


@pytest.fixture
def ledger(tmp_path):
    return MachineLedger(tmp_path / "run")


def view_of(tmp_path: Path, **plan):
    prepared = on("runpod", tmp_path)
    known = {"wall_s": 3600.0, "seconds": {"setup": 100.0, "waiting": 50.0}, "price_age_days": 3}
    plans = {prepared.offers[0]: SimpleNamespace(offer=prepared.offers[0], **known | plan)}
    prepared = replace(prepared, plans=plans, offers=prepared.offers * 2)
    session = Session(prepared, print, clock=lambda: NOW)
    return dry_view(session, session.next_ask(), tmp_path / "files", ["a", "b"])


def test_a_dry_run_shows_what_is_paid_and_what_is_the_most(tmp_path):
    view = view_of(tmp_path)
    assert view["seconds"] == {"boot": 240.0, "train": 3450.0, "teardown": 120.0}
    assert view["planned_usd"] == pytest.approx(3810 / 3600 * 0.4)
    most_s = int((4.0 - 120 / 3600 * 0.44) / 0.44 * 3600)
    assert (view["most_s"], view["most_usd"]) == (most_s, pytest.approx(most_s / 3600 * 0.4))
    assert (view["price_date"], view["n_inputs"], view["files"]) == ("2026-11-22", 0, ["a", "b"])
    assert len(view["next_offers"]) == 5
    (note,) = view["notes"]
    assert note.startswith("image: pytorch/pytorch:2.13.0-cuda12.6-cudnn9-runtime, on which this")
    assert said(view)[:3] == [
        "would rent   1x RTX 4090, on demand at RunPod: $0.40 an hour (2026-11-22)",
        "planned      $0.4233: boot $0.0267 (4 min 00 s), train $0.3833 (57 min 30 s), teardown"
        " $0.0133 (2 min 00 s)",
        "at most      9 h 03 min, $3.62 of $4.00",
    ]
    names = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"
    assert f"secrets      {names}: by name, the values are in no file" in said(view)
    assert said(view)[-1] == f"wrote        {tmp_path}/files: a, b"
    (*_, note) = view_of(tmp_path, wall_s=40_000.0)["notes"]
    assert note == "the plan takes longer than a limit allows: the run would stop unfinished"


def on(place: str, tmp_path: Path, **job) -> Prepared:
    """A launch of such a job on a target."""
    prepared = prepared_for("runpod", tmp_path / "run", 4.0, 0.4)
    target, at = find_target(place)
    values = prepared.job.model_dump(exclude_unset=True) | job
    return replace(prepared, job=Job.model_validate(values), target=target, at=at)


def view_here(tmp_path: Path, **job):
    offer = offer_of("", 0.4, provider="this machine", instance="here")
    session = Session(
        replace(on("local", tmp_path, **job), offers=(offer, offer)), print, clock=lambda: NOW
    )
    return dry_view(session, session.next_ask(), tmp_path, ["a"])


def test_a_run_on_a_machine_of_ones_own_has_no_boot_and_no_end_of_its_own(tmp_path):
    view = view_here(tmp_path)
    assert view["seconds"] == {"boot": 0.0, "teardown": 0.0}
    assert (view["planned_usd"], view["image"]) == (None, "")
    assert said(view)[0] == "would run    on this machine here: $0.40 an hour"
    assert "then         this machine here" in said(view)
    assert not any(line.startswith("planned") for line in said(view))
    free = view_here(tmp_path, limits={})
    assert "at most      nothing limits its time there" in said(free)
    by_time = view_here(tmp_path, limits={"max_hours": 2})
    assert (by_time["most_s"], by_time["max_usd"]) == (7200 + 120 + 120, None)
    assert "at most      2 h 04 min, $0.8267" in said(by_time)


@pytest.mark.parametrize(
    ("place", "note", "is_said"),
    [
        ("runpod", "tensorboard of train.report_to write on the machine alone", True),
        ("kubernetes:ml/claim", "write on the machine alone", False),
        ("lambda:us-east-1/key", "nothing at Lambda ends the machine when this process", True),
        ("runpod", "ends the machine when this process dies", False),
        ("runpod", "when_done does not run there: the launch gives the machine back", True),
        ("ssh:a", "when_done does not run there, and only you can end that machine", True),
        ("vertex:p/r", "the secrets have to be in Secret Manager of the project", True),
        ("runpod", "the secrets have to be in Secret Manager", False),
        ("ssh:a", "a rented host is not counted here", True),
        ("skypilot", "SkyPilot's jobs controller is not counted here", True),
    ],
)
def test_notes_of_a_dry_run(place, note, is_said, tmp_path):
    more = {"train": {"report_to": ["tensorboard"]}, "when_done": "sudo poweroff"}
    prepared, rented = on(place, tmp_path, **more), on("runpod", tmp_path)
    ask = Session(rented, print).next_ask()
    assert any(note in each for each in notes_of(prepared, ask)) is is_said


@pytest.mark.parametrize(("days", "is_said"), [(29, False), (30, True)])
def test_a_price_of_a_month_ago_is_said(days, is_said, tmp_path):
    view, note = view_of(tmp_path, price_age_days=days, seconds={}), "`farthing prices update`"
    assert any(f"{days} days old: {note}" in each for each in view["notes"]) is is_said
    assert view["seconds"]["train"] == 3600.0, "nothing of it is free"


def attempt(number: int, wall_s: float) -> Account:
    return Account(
        number, machine=f"f-{number}", spans={"compute": wall_s}, usd_per_hour=0.4, state="running"
    )


def test_a_machine_gets_what_others_and_attempts_elsewhere_have_left(ledger, tmp_path):
    prepared = on("runpod", tmp_path)
    ledger.note("f-1", "asked", NOW - 20_000, number=1, usd_per_hour=0.4)
    ledger.note("f-1", "gone", NOW - 20_000 + 9000)  # $1.00, of which $0.80 trained
    ledger.note("f-2", "asked", NOW - 9000, number=2, usd_per_hour=9.0)
    ledger.note("f-2", "refused", NOW - 8000)
    accounts = [attempt(1, 7200), attempt(2, 1800)]  # $0.20 elsewhere
    asked = prepared.ask(3, prepared.offers[0], ledger, accounts, NOW)
    assert asked.left_usd == pytest.approx(2.8)
    assert asked.told["max_usd"] == 3.785333, "4.00 - 0.20 - 2 minutes at 0.44"
    assert asked.most_s == int((2.8 - 120 / 3600 * 0.44) / 0.44 * 3600)
    assert asked.told["most_s"] == asked.most_s
    assert asked.name == f"{prepared.launch_id}-3"


def test_a_machine_that_could_not_train_a_minute_is_not_asked_for(ledger, tmp_path):
    prepared = on("runpod", tmp_path)

    def after(usd):
        spent = [Account(1, spans={"compute": 3600.0}, usd_per_hour=usd, state="limit")]
        return prepared.ask(1, prepared.offers[0], ledger, spent, NOW).most_s

    least_usd = (240 + 60 + 120 + 120) / 3600 * 0.44
    assert after(4.0 - least_usd - 1e-4) == 420
    with pytest.raises(NoBudgetError, match="not enough to boot"):
        after(4.0 - least_usd + 1e-4)


def test_a_deadline_is_the_end_of_a_machine_and_hours_are_those_of_training(ledger, tmp_path):
    def most_s(trained_s=0.0, **limits):
        prepared = on("runpod", tmp_path, limits=limits)
        accounts = [attempt(1, trained_s)] if trained_s else []
        return prepared.ask(1, prepared.offers[0], ledger, accounts, NOW).most_s

    assert most_s(deadline=datetime.fromtimestamp(NOW + 7200, UTC)) == 7200
    assert most_s(max_usd=4.0, deadline=datetime.fromtimestamp(NOW + 7200, UTC)) == 7200
    for hours in ({"max_hours": 2}, {"max_gpu_hours": 2}):
        assert most_s(**hours) == 7200 + 240 + 120 + 120, "boot, grace and teardown come on top"
    assert most_s(7260, max_hours=2) == 420
    why = (
        r"limits.max_hours leaves 6 min 59 s of RunPod RTX 4090: .* boot \(4 min 00 s\) .* \$0.8068"
    )
    with pytest.raises(NoBudgetError, match=why):
        most_s(7261, max_hours=2)
    with pytest.raises(NoBudgetError, match=r"max_hours leaves 0.0 s of"):
        most_s(9000, max_hours=2)


@pytest.mark.parametrize(("more_s", "may"), [(-30.0, False), (30.0, True)])
def test_spot_is_taken_as_long_as_a_quarter_and_two_boots_are_left(more_s, may, tmp_path):
    least_s = 1.25 * (3600.0 + 240.0) + 2 * 240.0
    deadline = datetime.fromtimestamp(NOW + least_s + more_s, UTC)
    prepared = on("runpod", tmp_path, limits={"max_usd": 4.0, "deadline": deadline})
    steady, spot = prepared.offers[:2]
    plan = SimpleNamespace(offer=steady, wall_s=3600.0)
    prepared = replace(prepared, plans={steady: plan}, n_steps=100)
    assert prepared.is_in_time(spot, NOW, 0) is may
    assert prepared.is_in_time(steady, NOW, 0)
    assert prepared.is_in_time(spot, NOW + 0.625 * 3600, 50) is may, "half of it is done"


def test_a_rented_machine_reads_a_job_of_its_own(ledger, tmp_path, monkeypatch):
    settings = {"AWS_REGION": "eu", "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "https://me:pw@hub"}
    for name, value in (settings | {"HF_TOKEN": "t"}).items():
        monkeypatch.setenv(name, value)
    more = {
        "model": "org/größe",
        "train": {"push_to_hub": True, "hub_model_id": "me/mine"},
        "limits": {"max_usd": 4.0, "deadline": "2027-01-15T10:00:00+01:00"},
    }
    prepared = on("runpod", tmp_path, **more)
    ask = prepared.ask(7, prepared.offers[1], ledger, [], NOW)
    assert ask.job_text.startswith("task: causal-lm\nmodel:\n  model_name_or_path: org/größe\n")
    assert yaml.safe_load(ask.job_text) == {
        "task": "causal-lm",
        "model": {"model_name_or_path": "org/größe"},
        "data": {"train": ["org/data"]},
        "train": more["train"],
        "limits": {"max_usd": 4.0, "deadline": "2027-01-15T09:00:00+00:00"},
        "output_dir": "./run",
        "output_store": "s3://bucket/run",
        "cache_dir": "./cache",
        "where": {"usd_per_hour": 0.4, "spot": True},
    }
    name = ask.name.removesuffix("-7")
    assert re.fullmatch("farthing-[0-9a-f]{8}", name)
    assert ask.told == {
        "name": f"{name}-7",
        "does": ["train", "--retry"],
        "store": "s3://bucket/run",
        "inputs": f"launch/{name}/inputs.json",
        "most_s": 3600,
        "boot_limit_s": 600.0,
        "usd_per_hour": 0.4,
        "max_usd": 3.985333,
        "n_gpus": 1,
    }
    assert (ask.disk_gb, ask.settings, ask.needs) == (
        100,
        {"AWS_REGION": "eu"},
        ("0.1.0", "datasets"),
    )
    assert "s3://bucket/run" in ask.fetch
    named = replace(prepared, wishes=Wishes(image="an/image", install="farthing==9", disk_gb=7))
    ask = named.ask(7, prepared.offers[1], ledger, [], NOW)
    assert (ask.image, ask.disk_gb, ask.fetch, ask.needs) == (
        "an/image",
        7,
        "",
        ("any", "datasets"),
    )
    assert ask.install == "python3 -m pip install --quiet farthing==9"
    ask = on("ssh:a", tmp_path).ask(1, prepared.offers[0], ledger, [], NOW)
    assert (ask.image, ask.settings) == ("", {"AWS_REGION": "eu", "HF_HUB_OFFLINE": "1"})


def test_a_target_needs_its_command_and_may_begin_a_job_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("hf", "sbatch"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    drivers = [Session(on(place, tmp_path), print).driver() for place in ("hf", "slurm")]
    assert [driver.restarts for driver in drivers] == [False, True]
    with pytest.raises(InputError, match="there is no command `kubectl` here"):
        Session(on("kubernetes", tmp_path), print).driver()


@pytest.mark.parametrize(
    ("place", "target", "at", "is_reached"),
    [
        ("kubernetes:ml", "kubernetes", "kubernetes:ml", True),
        ("kubernetes:ml", "kubernetes", "kubernetes:x", False),
        ("kubernetes", "kubernetes", "kubernetes", True),
        ("kubernetes:ml", "kubernetes", "", True),
        ("hf:team", "hf", "hf:other", False),
        ("runpod", "", "", True),
        ("runpod", "vast", "vast", False),
        ("slurm:low", "slurm", "slurm:high", True),
    ],
)
def test_a_machine_is_reached_where_it_was_asked_for(place, target, at, is_reached, tmp_path):
    machine = RentedMachine("farthing-1-1", target=target, on=at)
    assert on(place, tmp_path).reaches(machine) is is_reached


def test_offers_that_are_out_of_stock_are_asked_for_three_times_more(tmp_path):
    course = Course(tmp_path, script=["no stock"] * 100)
    began = course.world.now
    assert course.goes() == 75
    assert (course.world.n_created, course.world.machines) == (24, [])
    assert 900 <= course.world.now - began < 960
    assert sum("asking again in 5 min" in text for text in course.said) == 3


def test_a_machine_that_no_line_knows_is_asked_to_go_until_it_is_gone(tmp_path):
    course = Course(tmp_path, n_steps=10**9, script=["terminate fails three times"])
    course.dies(30)
    course.world.lines.clear()
    assert course.goes(at=tmp_path / "empty", stop=True) == 0
    assert (course.world.n_alive, course.world.machines[0].n_terminations) == (0, 4)
    assert sum("should not be there" in text for text in course.said) == 1


# ---- a provider's answers ----


@pytest.mark.parametrize(
    ("why", "status", "kind"),
    [
        ("no", 400, RefusedError),
        ("no", 402, UnauthorizedError),
        ("no", 404, NotFoundError),
        ("there are no longer any instances", 400, OutOfStockError),
        ("your balance is too low", 400, UnauthorizedError),
        ("Insufficient credit", 200, UnauthorizedError),
        ("this API key is not available", 401, UnauthorizedError),
        ("insufficient-capacity", 400, OutOfStockError),
    ],
)
def test_a_refusal_is_of_the_account_the_stock_or_the_request(why, status, kind):
    assert type(refusal(why, status)) is kind


@pytest.mark.parametrize(("how", "pauses"), [({}, [2.0, 4.0]), ({"n_tries": 1}, [])])
def test_what_fails_is_asked_again_after_two_and_four_seconds(how, pauses):
    slept, n_asked = [], []

    def failing(request):
        n_asked.append(1)
        return httpx.Response(500, json={"title": "x" * 300})

    api = Api("https://x/", {}, transport=httpx.MockTransport(failing), sleep=slept.append)
    with pytest.raises(ServerError) as caught:
        api.ask("GET", "/y", **how)
    assert (slept, len(n_asked)) == (pauses, 1 + len(pauses))
    assert str(caught.value) == f"status 500: {'x' * 200}"


def test_an_answer_of_sixteen_megabytes_is_read_and_no_longer_one():
    def answer(n):
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=f'"{"x" * n}"'))
        return Api("https://x", {}, transport=transport, sleep=lambda s: None).ask("GET", "/")

    assert len(answer((16 << 20) - 2)) == (16 << 20) - 2
    with pytest.raises(UnclearError, match="too long"):
        answer((16 << 20) - 1)


@pytest.mark.parametrize(
    ("told", "usd"),
    [("0.5", 0.5), (0, None), (-1, None), (100_000, None), (None, None), ("x", None)],
)
def test_a_price_is_a_number_of_dollars(told, usd):
    assert price_of(told) == usd


def test_a_farthing_without_its_metadata_can_not_be_sent(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(InputError, match="without its metadata"):
        wheel_of_this.__wrapped__()


# ---- what machines leave in the store ----


def test_words_of_a_machine(tmp_path, monkeypatch):
    store = open_store(str(tmp_path / "store"))
    words, speaker = StoreWords(store, "farthing-1"), Speaker(store, "farthing-1-1")
    speaker.booted()
    assert words.of("farthing-1-1") == Word(has_booted=True)
    speaker.beat("step 1")
    first = words.of("farthing-1-1").beat
    speaker.beat("step 1 and more")
    assert first not in ("", words.of("farthing-1-1").beat)
    assert words.log("farthing-1-1") == "step 1 and more"
    assert speaker.price() is None
    for usd, told in ((0.7, 0.7), (0.0, None), (100_000.0, None)):
        words.tell_price("farthing-1-1", usd)
        assert speaker.price() == told
    store.put("launch/farthing-1-1/price.json", seal({"usd_per_hour": 7}).encode()[:-1])
    assert speaker.price() is None
    speaker.left(3, "y" * 300)
    word = words.of("farthing-1-1")
    assert (word.code, word.why) == (3, "y" * 200)
    left = store.get("launch/farthing-1-1/left.json")
    store.put("launch/farthing-1-1/left.json", left.replace(b"3", b"0"))
    assert words.of("farthing-1-1").code is None
    speaker.booted()
    assert words.of("farthing-1-1").code is None

    slept = []
    monkeypatch.setattr("farthing.launch.words.time.sleep", slept.append)

    def away(*_):
        raise StoreError("away")

    monkeypatch.setattr(store, "put", away)
    speaker.left(0, "")
    assert slept == [3.0] * 5
    with pytest.raises(UnclearError, match="away"):
        words.tell_price("farthing-1-1", 1.0)
