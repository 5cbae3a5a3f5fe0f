"""The links of a lease in a real store: who waits how long, which links stay, and what they say."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from farthing.errors import RunInterruptedError
from farthing.storage import lease as lease_module
from farthing.storage.lease import Gaps, Lease, LeaseLostError, newest_words
from farthing.storage.objects import Store, StoreError, open_store


class Clock:
    """Seconds that pass only where somebody waits."""

    now = 1000.0

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(lease_module, "seconds_since_boot", lambda: made.now)
    times = SimpleNamespace(time=lambda: 1.8e9 + made.now, sleep=made.sleep)
    monkeypatch.setattr(lease_module, "time", times)
    return made


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "store"))


def lease_in(folder: Path, lease_s: float = 60.0, said: list[str] | None = None) -> Lease:
    folder.mkdir()
    words = [{"by": folder.name}]
    return Lease(folder, lease_s, lambda: words, (said if said is not None else []).append)


def never() -> bool:
    return False


@pytest.fixture
def first(clock, store, tmp_path):
    """Whoever has begun the run."""
    lease = lease_in(tmp_path / "first")
    assert lease.claim(store, never) == []
    return lease


def links_in(store: Store) -> list[str]:
    return sorted(store.list("writers/"))


def test_a_run_that_was_given_back_is_taken_at_once_with_the_words_of_who_had_it(
    first, clock, store, tmp_path
):
    second = lease_in(tmp_path / "second")
    first.release(store)
    with pytest.raises(LeaseLostError, match="given the run back"):  # a thread that comes late
        first.renew(store)
    assert newest_words(store) == [{"by": "first"}]
    assert second.claim(store, never) == [{"by": "first"}]
    assert clock.now == 1000.0
    assert (first.epoch, second.epoch) == (1, 3)


def test_the_folder_that_held_a_run_takes_it_again_at_once(first, clock, store, tmp_path):
    again = Lease(tmp_path / "first", 60.0, list, print)
    assert again.claim(store, never) == []
    assert clock.now == 1000.0
    (tmp_path / "first").rename(tmp_path / "gone")
    lease_in(tmp_path / "first").claim(store, never)
    assert clock.now >= 1060.0, "another folder of this path"


@pytest.mark.parametrize(("lease_s", "waits_s"), [(0.5, 0.5), (864_000.0, 3600.0)])
def test_a_silent_holder_is_waited_for_as_long_as_its_lease_and_an_hour_at_most(
    lease_s, waits_s, clock, store, tmp_path
):
    said = []
    lease_in(tmp_path / "first", lease_s).claim(store, never)
    lease_in(tmp_path / "second", 1.0, said).claim(store, never)
    assert waits_s <= clock.now - 1000.0 < waits_s + 0.1
    assert len(said) == 1
    assert "held this run last" in said[0]


def test_a_holder_that_gives_back_while_it_is_waited_for_is_not_waited_for_any_longer(
    first, clock, store, tmp_path
):
    second = lease_in(tmp_path / "second")

    def released_after_10_s():
        if clock.now == 1010.0:
            first.release(store)
        return False

    assert second.claim(store, released_after_10_s) == [{"by": "first"}]
    assert clock.now == 1011.0


def test_who_waits_for_a_lease_can_be_told_to_leave(first, clock, store, tmp_path):
    with pytest.raises(RunInterruptedError):
        lease_in(tmp_path / "second").claim(store, lambda: clock.now >= 1005.0)
    assert clock.now == 1005.0
    lease_in(tmp_path / "third").release(store)
    assert links_in(store) == ["writers/00000001.json"]


def test_renewals_keep_the_last_eight_links_and_the_epoch(first, clock, store):
    for _ in range(20):
        clock.now += 20.0
        first.renew(store)
        assert first.renewed_at == clock.now
    assert first.epoch == 1
    assert links_in(store) == [f"writers/{number:08d}.json" for number in range(14, 22)]


@pytest.mark.parametrize("late_s", [10.0, 31.0])
def test_a_list_that_is_late_is_waited_for_half_a_minute(
    late_s, clock, store, tmp_path, monkeypatch
):
    real = store.list
    monkeypatch.setattr(
        store, "list", lambda prefix: real(prefix) if clock.now >= 1000.0 + late_s else {}
    )
    first = lease_in(tmp_path / "first")
    if late_s > 30:
        with pytest.raises(StoreError, match="can't keep two machines apart"):
            first.claim(store, never)
        assert 1030.0 <= clock.now <= 1030.5
    else:
        first.claim(store, never)
        assert clock.now == 1010.0


def test_a_store_that_overwrites_is_named(clock, store, tmp_path, monkeypatch):
    said = []
    lease_in(tmp_path / "first", 60.0, said).claim(store, never)
    assert said == []
    real = store.create
    monkeypatch.setattr(store, "create", lambda key, data: real(key, data) or "condition" in key)
    lease_in(tmp_path / "first/other", 1.0, said)
    Lease(tmp_path / "first", 60.0, list, said.append).claim(store, never)
    assert len(said) == 1
    assert "overwrites where it was told not to" in said[0]


def test_a_damaged_link_is_that_of_a_live_holder_whose_words_stand_in_the_one_before(
    first, clock, store, tmp_path
):
    first.renew(store)
    first.renew(store)
    whole = store.get("writers/00000003.json")
    for damaged in (b"", b"[]", whole[:-9], whole.replace(b'first"', b'third"')):
        store.put("writers/00000003.json", damaged)
        assert newest_words(store) == [{"by": "first"}]
    said = []
    assert lease_in(tmp_path / "second", 7.0, said).claim(store, never) == [{"by": "first"}]
    assert said[0].startswith("somebody whose newest word, writers/00000003.json, is damaged held")
    assert clock.now >= 1007.0
    with pytest.raises(LeaseLostError):
        first.renew(store)
    store.put("writers/00000005.json", b"")
    with pytest.raises(StoreError, match=r"00000005\.json is damaged"):
        lease_in(tmp_path / "third", 0.0)._add(store, 5, 5, [])


@pytest.mark.parametrize(("gap_s", "is_gap"), [(10.0, False), (10.5, True), (-10.5, True)])
def test_a_gap_is_longer_than_the_lease_in_either_direction(gap_s, is_gap):
    now = [0.0]
    gaps = Gaps(10.0, (lambda: now[0],))
    now[0] = gap_s
    gaps.tick()
    now[0] += 1
    assert gaps.taken() is is_gap, "also where another thread has ticked since"
    assert not gaps.taken()
