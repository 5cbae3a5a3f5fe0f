"""When a machine that is watched has to go, to the second. Provider and store follow a script."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from farthing.errors import InputError, RunInterruptedError
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
UNHEARD, OVER = "no answer for 3 min 10 s", "its time is over"
DEAR = "$0.4402 an hour instead of $0.40: the cap does not allow it for that long"


def refuse(machine: Any) -> None:
    raise RefusedError("no")


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


@pytest.mark.parametrize(
    ("shows", "says", "traits", "ending", "n"),
    [
        ({0: RUNS}, {}, {}, (None, "not booted after 10 min 10 s", 610, 610, 610), 1),
        ({0: WAITS, 900: RUNS}, {}, {}, (None, "not booted after 15 min 00 s", 900), 1),
        ({0: RUNS, 100: None}, {}, {}, (None, LOST, 100, 120, 100), 3),
        ({0: RUNS, 100: None}, {50: UP}, {}, (None, "taken away", 100, 120, 100), 3),
        ({0: RUNS, 100: None, 120: RUNS}, {50: UP}, {}, (None, SILENT, 660), 3),
        ({0: None}, {}, {}, (None, LOST, 0, 130, 0), 3),
        ({0: RUNS, 50: AWAY, 240: RUNS}, {0: UP}, {}, (None, UNHEARD, 230, 245), 3),
        (
            {0: RUNS, 50: NO_KEY, 99: RUNS, 200: NO_KEY, 300: RUNS},
            {0: UP},
            {},
            (None, SILENT, 610),
            3,
        ),
        ({0: RUNS}, {30: UP}, {}, (None, SILENT, 640), 3),
        ({0: RUNS}, {30: UP, 60: BEATS[0]}, {}, (None, SILENT, 670), 3),
        ({0: {"is_over": True, "code": 1}}, {}, {}, (1, "left with 1", 0), 1),
        ({0: RUNS, 50: {"is_over": True}}, {0: UP}, {}, (None, "it ended without a word", 70), 3),
        ({0: RUNS}, {0: UP, 50: Word(code=2)}, {}, (2, "left with 2", 50), 1),
        ({0: RUNS}, {0: UP, 50: AWAY, 90: LEFT}, {}, (75, "told to", 90), 3),
        ({0: RUNS}, {50: LEFT, 90: Word(code=0)}, {"restarts": True}, (0, "left with 0", 90), 1),
        ({0: RUNS}, {}, {"secure": refuse}, (None, "it could not be given its end (no)", 0, 0), 1),
    ],
)
def test_a_machine_goes_when_it_has_to(shows, says, traits, ending, n, tmp_path):
    course = Course(tmp_path)
    code, *machines = watched(course, Played(course, shows, says, **traits))
    assert machines[0][: len(ending)] == ending
    assert (len(machines), code) == (n, 75 if ending[0] is None else ending[0])


@pytest.mark.parametrize(
    ("usd_per_hour", "why", "left", "is_told"),
    [
        (None, OVER, 3220, False),
        (0.40003, OVER, 3220, False),
        (0.40005, OVER, 3220, True),
        (0.44, "the cap is reached at the price that is charged", 3210, True),
        (0.4402, DEAR, 0, True),
    ],
)
def test_a_machine_goes_before_its_price_passes_the_cap(usd_per_hour, why, left, is_told, tmp_path):
    course = Course(tmp_path, max_usd=0.4)
    driver = Played(course, {0: {"usd_per_hour": usd_per_hour}}, BEATS)
    code, machine, *more = watched(course, driver)
    assert (code, *machine[1:]) == (3, why, left, left, left)
    assert any("the provider charges" in text for text in course.said) is is_told
    rows = next(iter(course.ledger.rows.values()))
    events = ["asked", "created", "priced", "booted", "left", "gone"]
    kept = {"priced": usd_per_hour, "booted": left}
    assert [row["event"] for row in rows] == [each for each in events if kept.get(each, True)]
    assert [each[1:3] for each in more] == ([] if left else [(OVER, 2920)])
    made = "made (RunPod 1x RTX 4090 secure, id 7), $0.40 an hour, "
    assert any(made in text for text in course.said)


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


def test_a_deletion_is_asked_for_until_it_is_confirmed_ever_more_slowly(tmp_path):
    course = Course(tmp_path)
    driver = Played(course, {0: RUNS}, {0: UP, 50: Word(code=3)}, lingers_s=250.0)
    assert watched(course, driver) == [3, (3, "left with 3", 50, 50, 50)]
    (at,), (asked,) = driver.made.values(), driver.deleted.values()
    assert [each - at for each in asked] == [50, 55, 65, 85, 125, 185, 245, 305]


@pytest.mark.parametrize(
    ("ends_by_itself", "asked", "gone"), [(True, None, 3152), (False, 5055, 5055)]
)
def test_a_machine_of_which_nothing_is_heard_is_billed_to_its_own_end(
    ends_by_itself, asked, gone, tmp_path
):
    course = Course(tmp_path, max_usd=0.4)
    shows = {0: RUNS, 3000: AWAY, 5000: None}
    driver = Played(course, shows, BEATS, ends_by_itself=ends_by_itself)
    code, (_, why, left, _, gone_at) = watched(course, driver)
    assert (code, left, gone_at) == (3, 3180, gone)
    assert why.startswith(UNHEARD)


def test_a_host_that_does_not_answer_is_left_after_a_minute_and_asked_again(tmp_path):
    course = Course(tmp_path)
    driver = Played(course, {0: RUNS, 50: AWAY}, {0: UP}, may_overlap=True)
    assert watched(course, driver, 2)[0] == 75
    first, *later = driver.made.values()
    assert [at - first for at in later] == [305, 570], "lost after 230 s and 190 s"
    assert sum("not confirmed gone" in text for text in course.said) == len(course.ledger.open) == 3


def test_the_account_that_may_not_rent_ends_what_is_there(tmp_path):
    course = Course(tmp_path)
    shows, refuses = {0: RUNS, 50: AWAY, 310: RUNS}, [None, NO_KEY]
    driver = Played(course, shows, {0: UP}, refuses=refuses, may_overlap=True)
    with pytest.raises(InputError, match="no key"):
        watched(course, driver)
    assert [machine.state for machine in course.ledger.machines.values()] == ["gone", "refused"]


def test_a_key_that_is_refused_for_three_minutes_ends_the_watch(tmp_path):
    course = Course(tmp_path)
    began = course.world.now
    with pytest.raises(InputError, match=r"still billed: farthing-.*-1"):
        watched(course, Played(course, {0: RUNS, 50: NO_KEY}, {0: UP}))
    assert course.world.now - began == 230


@pytest.mark.parametrize(("ago", "left"), [(590, 20), (600, 610)])
def test_an_adopted_machine_has_its_time_to_boot(ago, left, tmp_path):
    course = Course(tmp_path)
    driver, name = Played(course, {0: RUNS}, {}), f"{course.prepared.launch_id}-1"
    now = course.world.now
    asked = {"number": 1, "usd_per_hour": 0.4, "most_s": 30_000, "left_usd": 4.0}
    course.ledger.note(name, "asked", now - ago, target="runpod", **asked)
    course.ledger.note(name, "created", now - ago, id="7")
    driver.made[name] = now - ago
    watched(course, driver)
    assert driver.deleted[name][0] - now == left


@pytest.mark.parametrize("on", ["", "vast"])
def test_a_machine_elsewhere_is_named_before_anything_is_done(on, tmp_path):
    course = Course(tmp_path)
    course.ledger.note("farthing-1-1", "asked", 1e9, number=1, target="vast", on=on)
    launch = course.on(Played(course, {}, {}))
    for does in (launch.run, launch.stop):
        with pytest.raises(InputError, match="farthing-1-1 of this launch is at vast") as caught:
            does()
        assert "--on vast" in caught.value.to_do


def test_offers_follow_each_other_and_the_lost_one_comes_last(tmp_path):
    course = Course(tmp_path)
    watched(course, Played(course, {0: RUNS, 100: None}, {0: UP}), 2)
    gpus = [machine.gpu for machine in course.ledger.machines.values()]
    assert gpus == ["RTX 4090", "RTX 3090", "RTX 4090"]


@pytest.mark.parametrize(("left_s", "gpu"), [(5220.0, "RTX 4090"), (5290.0, "RTX 3090")])
def test_spot_is_not_rented_where_the_deadline_leaves_no_room(left_s, gpu, tmp_path):
    course = Course(tmp_path)
    deadline = datetime.fromtimestamp(course.world.now + left_s, UTC)
    job = course.prepared.job
    limits = job.limits.model_copy(update={"deadline": deadline})
    job = job.model_copy(update={"limits": limits})
    steady, spot = course.prepared.offers[:2]
    plans: Any = {steady: SimpleNamespace(offer=steady, wall_s=3600.0)}
    course.prepared = replace(course.prepared, job=job, plans=plans, offers=(spot, steady))
    watched(course, Played(course, {0: RUNS}, {0: UP, 10: Word(code=3)}), 2)
    assert [machine.gpu for machine in course.ledger.machines.values()] == [gpu]


@pytest.mark.parametrize(("states", "n"), [(["finished"], 0), (["finished", "running"], 1)])
def test_a_run_that_has_ended_rents_nothing(states, n, tmp_path):
    course = Course(tmp_path)
    accounts = [Account(number, state=state) for number, state in enumerate(states, 1)]
    course.world.accounts = lambda: accounts  # type: ignore[method-assign]
    code, *machines = watched(course, Played(course, {0: RUNS}, {0: Word(code=3)}))
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


def test_a_machine_that_nobody_wrote_down_is_counted_at_the_dearest_price(tmp_path):
    course = Course(tmp_path)
    one, other = course.prepared.offers[:2]
    other = other._replace(provider="Vast.ai", usd=0.6)
    course.prepared = replace(course.prepared, offers=(one, other))
    driver, first = Played(course, {0: RUNS}, {0: Word(code=3)}), course.prepared.launch_id
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
    is_known, shows, waited_s, tmp_path
):
    course = Course(tmp_path)
    driver, began = Played(course, shows, {0: Word(code=3)}), course.world.now
    name = f"{course.prepared.launch_id}-1"
    driver.made[name] = began
    if is_known:
        course.ledger.note(name, "asked", began, number=1, target="runpod", usd_per_hour=0.4)
        course.ledger.note(name, "created", began, id="7")
        assert watched(course, driver)[0] == 3
    else:
        with pytest.raises(RunInterruptedError, match="has not answered for 15 min") as caught:
            watched(course, driver)
        assert caught.value.where == "--on"
    assert course.world.now - began == waited_s
    assert sum("does not answer" in text for text in course.said) == 1


@pytest.mark.parametrize(("is_away", "ending"), [(False, "stopped by the user"), (True, SILENT)])
def test_a_launch_is_stopped_on_demand_and_not_by_a_store_that_is_away(is_away, ending, tmp_path):
    course = Course(tmp_path)

    def is_stopped() -> bool:
        if is_away:
            raise AWAY
        return course.world.now >= 1_800_000_050

    def committed() -> int:
        raise AWAY

    course.world.is_stopped = is_stopped  # type: ignore[method-assign]
    course.world.committed = committed  # type: ignore[method-assign]
    code, machine, *_ = watched(course, Played(course, {0: RUNS}, {0: UP}))
    assert (code, machine[1:3]) == (75, (ending, 610 if is_away else 50))
    assert ("stopped by `farthing launch stop`" in course.said) is not is_away
    assert {each.committed for each in course.ledger.machines.values()} == {0}


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_stop_ends_what_is_known_here_and_says_where_it_could_not_look(is_whole, tmp_path):
    course = Course(tmp_path)

    def kept() -> Any:
        raise AWAY

    if not is_whole:
        course.world.kept = kept  # type: ignore[method-assign]
    driver, now = Played(course, {0: RUNS}, {}), course.world.now
    for number, events in ((1, ("asked", "created")), (2, ("asked",))):
        name = f"{course.prepared.launch_id}-{number}"
        for event in events:
            course.ledger.note(name, event, now, number=number, target="runpod", id="7")
        driver.made[name] = now
    assert course.on(driver).stop() is is_whole
    assert [each.why for each in course.ledger.machines.values()] == ["stopped by the user"] * 2
    assert any("only machines known here are stopped" in text for text in course.said) != is_whole


@pytest.mark.parametrize(("pause_s", "n"), [(20.0, 0), (21.0, 1)])
def test_a_watcher_that_slept_makes_sure_that_the_launch_is_still_its_own(pause_s, n, tmp_path):
    course, reclaimed = Course(tmp_path), list[float]()
    launch, sleep = (
        course.on(Played(course, {0: RUNS}, {0: UP, 50: Word(code=3)})),
        course.world.sleep,
    )

    def sleeps(seconds: float) -> None:
        sleep(seconds + (pause_s if course.world.now == 1_800_000_020 else 0.0))

    launch.sleep, launch.reclaim = sleeps, lambda: reclaimed.append(course.world.now)
    assert (launch.run(), len(reclaimed)) == (3, n)
