"""When a machine that is watched has to go, to the second. Provider and store follow a script."""

from dataclasses import replace
from typing import Any

import pytest

from farthing.errors import InputError, RunChangedError, RunInterruptedError
from farthing.launch.driver import RefusedError, UnauthorizedError, UnclearError
from farthing.launch.words import Word
from farthing.run.accounts import Account
from launched import Course, Played
from launched import keys as keys

AWAY, UP, RUNS = UnclearError("away"), Word(has_booted=True), dict[str, Any]()
WAITS, LEFT = {"is_waiting": True}, Word(code=75, why="told to")
NO_KEY = UnauthorizedError("no key")
BEATS = {at: Word(has_booted=True, beat=str(at)) for at in range(0, 9000, 500)}
LOST, SILENT = "gone before it had booted", "no sign of it for 10 min 00 s"
UNHEARD, LATE = "no answer for 3 min 10 s", "its time is over"
ENDED = f"{UNHEARD}; no answer, and its own time-out has passed"
OVER, KEPT, NEVER = {"is_over": True}, {"ends_by_itself": False}, -1_800_000_000
DEAR = "$0.4402 an hour instead of $0.40: the cap does not allow it for that long"
THERE, BOOTED, DONE = {0: RUNS}, {0: UP}, {0: Word(code=3)}
UP_AND_DONE = {0: UP, 50: Word(code=3)}


@pytest.fixture
def course(tmp_path):
    return Course(tmp_path)


def refuse(machine):
    raise RefusedError("no")


def away():
    raise AWAY


def asked(course: Course, driver: Played, number: int, *events: str, ago: float = 0.0) -> str:
    """The name of a machine that was asked for so long ago."""
    name, then = f"{course.prepared.launch_id}-{number}", course.world.now - ago
    for event in ("asked", *events):
        known = {"number": number, "usd_per_hour": 0.4} if event == "asked" else {"id": "7"}
        course.ledger.note(name, event, then, target="runpod", **known)
    driver.made[name] = then
    return name


def watched(course: Course, driver: Played, n_offers: int = 1) -> list[Any]:
    """The exit code of a launch, and of each machine (code, why, left, asked to go, gone), by
    seconds from its request.
    """
    course.prepared = replace(course.prepared, offers=course.prepared.offers[:n_offers])
    found: list[Any] = [course.on(driver).run()]
    for name, machine in course.ledger.machines.items():
        times = machine.left_at, driver.deleted.get(name, [0.0])[0], machine.gone_at
        since = [round((at or 0.0) - machine.asked_at, 1) for at in times]
        found.append((machine.code, machine.why, *since))
    return found


def at(usd_per_hour: float) -> dict[int, Any]:
    return {0: {"usd_per_hour": usd_per_hour}}


TAKEN = {0: RUNS, 100: None}
UNHEARD_AT_ITS_END = {0: RUNS, 3000: AWAY, 5000: None}
QUEUE = {"is_paid_in_queue": False}
LATE_IN_A_QUEUE = {0: WAITS, 4000: RUNS, 4100: AWAY, 5000: None}


@pytest.mark.parametrize(
    ("shows", "says", "traits", "ending", "ended"),
    [
        (THERE, {}, {}, (None, "not booted after 10 min 10 s", 610, 610, 610), (75, 1)),
        ({0: WAITS, 900: RUNS}, {}, QUEUE, (None, "not booted after 10 min 10 s", 1500), (75, 1)),
        ({0: WAITS, 60: {"stuck": "no image"}}, {}, {}, (None, "no image", 60), (75, 1)),
        (TAKEN, {50: UP}, {}, (None, "taken away", 100, 120, 100), (75, 3)),
        (TAKEN | {120: RUNS}, {50: UP}, {}, (None, SILENT, 660), (75, 3)),
        ({0: None}, {}, {}, (None, LOST, 0, 130, 0), (75, 3)),
        ({0: OVER}, {}, {}, (None, "it ended before it had booted", 20), (75, 1)),
        ({0: {"is_over": True, "code": 1}}, {}, {}, (1, "left with 1", 0), (1, 1)),
        ({0: RUNS, 50: OVER}, BOOTED, {}, (None, "it ended without a word", 70), (75, 3)),
        (
            THERE,
            {50: LEFT, 90: Word(code=0)},
            {"restarts": True},
            (0, "left with 0", 90),
            (0, 1),
        ),
        (
            THERE,
            {},
            {"secure": refuse},
            (None, "it could not be given its end (no)", 0),
            (75, 1),
        ),
        (THERE, BEATS, {}, (3, LATE, 3220, 3220, 3220), (3, 1)),
        (at(0.44), BEATS, {}, (3, "the cap is reached at the price that is charged", 3210), (3, 1)),
        (at(0.4402), BEATS, {}, (None, DEAR, 0), (3, 2)),
        (UNHEARD_AT_ITS_END, BEATS, {}, (None, ENDED, 3180, NEVER, 3152), (3, 1)),
        (UNHEARD_AT_ITS_END, BEATS, KEPT, (None, UNHEARD, 3180, 5055, 5055), (3, 1)),
        (
            LATE_IN_A_QUEUE,
            {4050: UP},
            QUEUE,
            (None, UNHEARD, 4280, 5015, 5015),
            (75, 3),
        ),
    ],
)
def test_a_machine_goes_when_it_has_to(shows, says, traits, ending, ended, tmp_path):
    course = Course(tmp_path, max_usd=0.4)
    code, *machines = watched(course, Played(course, shows, says, **traits))
    assert machines[0][: len(ending)] == ending
    assert (code, len(machines)) == ended
    vain = "3 machines in a row saved nothing new: stopped"
    assert (course.said[-1] == vain) is (len(machines) == 3)


def test_an_offer_whose_price_rises_twice_is_left_out(tmp_path):
    course = Course(tmp_path, max_usd=0.4)
    course.prepared = replace(course.prepared, offers=course.prepared.offers[:1])
    driver = Played(course, {}, BEATS)
    launch = course.on(driver)
    launch.write = lambda ask: driver.shows.update({0: {"usd_per_hour": 1.2 * ask.usd_per_hour}})
    assert launch.run() == 75
    prices = [round(machine.usd_per_hour, 3) for machine in course.ledger.machines.values()]
    assert prices == [0.48, 0.576]
    assert course.said[-1].startswith("no offer is left that could be had")


def test_a_job_that_never_says_that_it_booted_is_billed_from_when_its_queue_let_it_begin(course):
    shows = {0: WAITS, 100: RUNS, 400: OVER}
    watched(course, Played(course, shows, {}, **QUEUE))
    (machine,) = course.ledger.machines.values()
    assert machine.billed_s(0.0) == machine.gone_at - machine.asked_at - 100


def test_a_deletion_is_asked_for_until_it_is_confirmed_ever_more_slowly(course):
    driver = Played(course, THERE, UP_AND_DONE, lingers_s=250.0)
    assert watched(course, driver) == [3, (3, "left with 3", 50, 50, 50)]
    (at,), (asked,) = driver.made.values(), driver.deleted.values()
    assert [each - at for each in asked] == [50, 55, 65, 85, 125, 185, 245, 305]


def test_a_host_that_does_not_answer_is_left_after_a_minute_and_asked_again(course):
    driver = Played(course, {0: RUNS, 50: AWAY}, BOOTED, may_overlap=True)
    assert watched(course, driver, 2)[0] == 75
    first, *later = driver.made.values()
    assert [at - first for at in later] == [305, 570], "lost after 230 s and 190 s"
    assert sum("not confirmed gone" in text for text in course.said) == len(course.ledger.open) == 3


def test_the_account_that_may_not_rent_ends_what_is_there(course):
    shows, refuses = {0: RUNS, 50: AWAY, 310: RUNS}, [None, NO_KEY]
    driver = Played(course, shows, BOOTED, refuses=refuses, may_overlap=True)
    with pytest.raises(InputError, match="no key"):
        watched(course, driver)
    assert [machine.state for machine in course.ledger.machines.values()] == ["gone", "refused"]


def test_a_key_that_is_refused_for_three_minutes_ends_the_watch(course):
    began = course.world.now
    with pytest.raises(InputError, match=r"still billed: .*, \$0.40 an hour, .* more at the most"):
        watched(course, Played(course, {0: RUNS, 50: NO_KEY}, BOOTED))
    assert course.world.now - began == 230


@pytest.mark.parametrize(
    ("ago", "says", "left"), [(590, {}, 20), (600, {}, 610), (600, BEATS, 2940)]
)
def test_an_adopted_machine_has_its_time_to_boot_and_the_cap_of_the_job_today(
    ago, says, left, tmp_path
):
    course = Course(tmp_path, max_usd=0.4)
    driver, now = Played(course, THERE, says), course.world.now
    name = asked(course, driver, 1, "created", ago=ago)
    watched(course, driver)
    assert driver.deleted[name][0] - now == left


@pytest.mark.parametrize(
    ("events", "deletions", "made_at"),
    [(["created"], [0, 10, 20, 30], 0), (["created", "left"], [0, 5, 15, 35], 35)],
)
def test_what_an_earlier_watcher_left_is_ended(events, deletions, made_at, course):
    driver = Played(course, THERE, UP_AND_DONE, lingers_s=30.0)
    asked(course, driver, 1, *events)
    if not made_at:  # the younger of two is watched on
        asked(course, driver, 2, "created")
    watched(course, driver)
    (began, second), (asked_at, _) = driver.made.values(), driver.deleted.values()
    assert [at - began for at in asked_at] == deletions
    assert second - began == made_at


@pytest.mark.parametrize("on", ["", "vast"])
def test_a_machine_elsewhere_is_named_before_anything_is_done(on, course):
    course.ledger.note("farthing-1-1", "asked", 1e9, number=1, target="vast", on=on)
    launch = course.on(Played(course, {}, {}))
    for does in (launch.run, launch.stop):
        with pytest.raises(InputError, match="farthing-1-1 of this launch is at vast") as caught:
            does()
        assert "--on vast" in caught.value.to_do


def test_offers_follow_each_other_and_the_lost_one_comes_last(course):
    watched(course, Played(course, {0: RUNS, 100: None}, BOOTED), 2)
    gpus = [machine.gpu for machine in course.ledger.machines.values()]
    assert gpus == ["RTX 4090", "RTX 3090", "RTX 4090"]


def test_a_launch_refuses_a_store_with_the_run_of_another_job(course):
    identity = {"train.learning_rate": 7.0}
    course.world.run_files, course.world.committed = {"run.json": {"identity": identity}}, lambda: 4
    with pytest.raises(RunChangedError, match="learning_rate"):
        course.on(Played(course, {}, {})).run()


@pytest.mark.parametrize(
    ("states", "files", "n"),
    [
        (["finished"], {}, 0),
        (["finished", "running"], {}, 1),
        (["finished", "failed"], {"run.json": {"finished": True}}, 0),
        (["finished"], {"job.json": {"train": {"max_steps": 9}}}, 1),
    ],
)
def test_a_run_that_has_ended_rents_nothing(states, files, n, course):
    accounts = [Account(number, state=state) for number, state in enumerate(states, 1)]
    course.world.accounts, course.world.run_files = lambda: accounts, files
    code, *machines = watched(course, Played(course, THERE, DONE))
    assert (len(machines), code) == (n, 3 * n)


@pytest.mark.parametrize(
    ("shows", "max_usd", "ended", "state", "gone"),
    [
        ({0: None}, 4.0, 120, "refused", None),
        ({0: AWAY, 150: None}, 4.0, 270, "refused", None),
        ({0: AWAY, 160: None}, 4.0, 280, "gone", 160),
        ({0: AWAY, 4000: None}, 0.4, 4120, "gone", 3152),
        ({0: None, 90: {"usd_per_hour": 0.41}}, 4.0, 100, "gone", 100),
    ],
)
def test_a_machine_of_a_request_without_an_answer_is_looked_for(
    shows, max_usd, ended, state, gone, tmp_path
):
    course = Course(tmp_path, max_usd=max_usd)
    driver = Played(course, shows, {0: UP, 100: Word(code=3)}, refuses=[AWAY])
    began = course.world.now
    watched(course, driver)
    machine, *_ = course.ledger.machines.values()
    assert (course.world.now - began, machine.state) == (ended, state)
    assert machine.gone_at == (gone and began + gone)
    assert [price for _, price in machine.charged] == ([0.41] if ended == 100 else [])


def test_a_machine_that_nobody_wrote_down_is_counted_at_the_dearest_price(course):
    one, other = course.prepared.offers[:2]
    other = other._replace(provider="Vast.ai", usd=0.6)
    course.prepared = replace(course.prepared, offers=(one, other))
    driver, first = Played(course, THERE, DONE), course.prepared.launch_id
    driver.made |= {f"{first}-5": course.world.now - 600, f"{first}-x": course.world.now}
    assert watched(course, driver, 2) == [3, (3, "left with 3", 0, 0, 0)]
    machine = course.ledger.machines[f"{first}-5"]
    assert (machine.number, machine.provider, machine.usd_per_hour) == (5, "RunPod", 0.6)
    assert list(driver.deleted) == [f"{first}-x", f"{first}-5"]
    assert f"{first}-5 is there already: continuing with it" in course.said


@pytest.mark.parametrize(
    ("is_known", "shows", "waited_s"),
    [(False, {0: AWAY}, 910), (True, {0: AWAY, 2000: RUNS}, 2000)],
)
def test_a_provider_that_does_not_answer_is_waited_for_where_something_is_rented(
    is_known, shows, waited_s, course
):
    driver, began = Played(course, shows, DONE), course.world.now
    if is_known:
        asked(course, driver, 1, "created")
        assert watched(course, driver)[0] == 3
    else:
        driver.made[f"{course.prepared.launch_id}-1"] = began
        with pytest.raises(RunInterruptedError, match="has not answered for 15 min") as caught:
            watched(course, driver)
        assert caught.value.where == "--on"
    assert course.world.now - began == waited_s
    assert sum("does not answer" in text for text in course.said) == 1


@pytest.mark.parametrize(("is_away", "ending"), [(False, "stopped by the user"), (True, SILENT)])
def test_a_launch_is_stopped_on_demand_and_not_by_a_store_that_is_away(is_away, ending, course):

    until = 1_800_000_050
    course.world.is_stopped = away if is_away else lambda: course.world.now >= until
    course.world.committed = away
    code, machine, *_ = watched(course, Played(course, THERE, BOOTED))
    assert (code, machine[1:3]) == (75, (ending, 610 if is_away else 50))
    assert ("stopped by `farthing launch stop`" in course.said) is not is_away
    assert {each.committed for each in course.ledger.machines.values()} == {0}


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_stop_ends_what_is_known_here_and_says_where_it_could_not_look(is_whole, course):

    if not is_whole:
        course.world.kept = away
    driver = Played(course, THERE, {})
    asked(course, driver, 1, "created")
    asked(course, driver, 2)
    assert course.on(driver).stop() is is_whole
    assert [each.why for each in course.ledger.machines.values()] == ["stopped by the user"] * 2
    assert any("only machines known here are stopped" in text for text in course.said) != is_whole


@pytest.mark.parametrize(("pause_s", "n_away", "n"), [(20.0, 0, 0), (21.0, 1, 2), (21.0, 99, 5)])
def test_a_watcher_that_slept_makes_sure_that_the_launch_is_still_its_own(
    pause_s, n_away, n, course
):
    """Its network may come back later; what is there is ended all the same."""
    reclaimed = list[float]()
    world = course.world

    def reclaim():
        reclaimed.append(world.now)
        if len(reclaimed) <= n_away:
            raise AWAY

    launch = course.on(Played(course, THERE, UP_AND_DONE))
    more = {1_800_000_020: pause_s}
    launch.sleep = lambda seconds: world.sleep(seconds + more.get(world.now, 0.0))
    launch.reclaim = reclaim
    assert (launch.run(), len(reclaimed)) == (3, n)
