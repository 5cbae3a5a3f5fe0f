"""Spot: closed forms, renewal against drawn paths, fits, oracles worked by hand, and jobs replayed
on measured traces.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import spot_replay
from farthing.errors import InputError
from farthing.planner.spot import (
    Interruptions,
    Now,
    SaveSchedule,
    best_interval_s,
    choose,
    draw_paths,
    drawn_together,
    expect,
    expect_range,
    fit,
    prior,
    young_interval_s,
)
from farthing.planner.uptime import Measured, Spell, Weibull, fit_law, spells_of

H = 3600.0
BURSTY = Interruptions(Weibull(3 * H, 0.6), Weibull(1 * H, 0.7))


def exponential(mean_s: float) -> Interruptions:
    """Interruptions at a constant rate, capacity back at once."""
    return Interruptions(Weibull(mean_s))


def measured(zone: Interruptions, n: int, seed: int = 1) -> Interruptions:
    """A zone fitted to spells drawn from another."""
    chance = np.random.default_rng(seed)
    assert zone.down is not None
    up, down = (
        [Spell(float(length), 0.0) for length in law.draw(chance, n)]
        for law in (zone.up, zone.down)
    )
    return fit(up, down)


# ---- oracles ----


def test_half_price_with_ten_percent_overhead_saves_45_percent() -> None:
    work_s = 300_000 / 1100 * 60
    assert work_s / H == pytest.approx(4.55, abs=0.005)
    # 6 s of saving per minute of work, nothing ever interrupted
    saves = SaveSchedule(60, 6, 0)
    choice = choose(work_s, saves, exponential(1e12), spot_usd_per_h=0.5, on_demand_usd_per_h=1.0)
    assert (choice.best.kind, choice.ways[0].usd) == ("spot", pytest.approx(4.55, abs=0.005))
    assert choice.best.usd == pytest.approx(2.5, abs=0.005)
    assert choice.why.startswith("spot saves 45% of $4.55 on demand")


def test_an_interruption_in_8_hours_and_a_12_hour_job() -> None:
    # restart and loss of 5 min each: save every 4 min, half of it lost on average, and 3 min to
    # restart
    expected = expect(12 * H, SaveSchedule(240, 0, 180), exponential(8 * H))
    assert expected.n_interruptions == pytest.approx(1.5, abs=0.03)
    assert 7 <= (expected.lost_s + expected.restart_s) / 60 <= 10
    lost_5 = expect(12 * H, SaveSchedule(600, 0, 0), exponential(8 * H))
    assert lost_5.lost_s / lost_5.n_interruptions / 60 == pytest.approx(5, abs=0.1)
    assert 7.5 <= lost_5.lost_s / 60 <= 10


@pytest.mark.parametrize("mean_h", [2, 4, 8])
def test_checkpoints_every_5_min_and_half_price_are_still_about_half_the_cost(
    mean_h: float,
) -> None:
    work_s = 400_000 / 1200 * 60
    assert work_s / H == pytest.approx(5.56, abs=0.005)
    expected = expect(work_s, SaveSchedule(300, 5, 180), exponential(mean_h * H))
    assert expected.billed_s / work_s * 0.5 == pytest.approx(0.5, abs=0.035)


# ---- closed forms ----


@pytest.mark.parametrize(
    ("work_h", "tau", "save", "restart"),
    [(10, 900, 20, 300), (100, 36, 5, 60), (500, 300, 60, 600)],
)
def test_exponential_spells_give_dalys_formula(
    work_h: float, tau: float, save: float, restart: float
) -> None:
    mean_s = 4 * H
    expected = expect(work_h * H, SaveSchedule(tau, save, restart), exponential(mean_s))
    daly = (
        mean_s * math.exp(restart / mean_s) * math.expm1((tau + save) / mean_s) * work_h * H / tau
    )
    assert expected.billed_s == pytest.approx(daly, rel=1e-6)
    assert expected.wall_s == expected.billed_s
    assert expected.n_interruptions == pytest.approx(daly / mean_s, rel=1e-6)


def test_the_best_interval_of_exponential_spells_is_dalys() -> None:
    assert young_interval_s(20, 4 * H) == pytest.approx(math.sqrt(2 * 20 * 4 * H))
    assert young_interval_s(20, 4 * H) / 60 == pytest.approx(12.6, abs=0.1)
    for save_s in (5, 30, 300):
        x = save_s / (2 * 4 * H)
        daly = young_interval_s(save_s, 4 * H) * (1 + math.sqrt(x) / 3 + x / 9) - save_s
        assert best_interval_s(save_s, 300, exponential(4 * H)) == pytest.approx(daly, rel=0.02)


def test_no_interval_does_better_than_the_best_one() -> None:
    for zone in (BURSTY, measured(BURSTY, 500)):
        best = best_interval_s(30, 300, zone)
        hours = [
            expect(100 * H, SaveSchedule(tau, 30, 300), zone).billed_s
            for tau in (best, best / 2, best * 2)
        ]
        assert hours[0] < min(hours[1:])


# ---- renewal equations against drawn paths ----


@pytest.mark.parametrize(
    "zone", [BURSTY, measured(BURSTY, 300), Interruptions(Weibull(2 * H), Weibull(H, 2.0))]
)
@pytest.mark.parametrize("work_h", [0.2, 3, 30])
def test_expected_times_are_the_mean_of_drawn_paths(zone: Interruptions, work_h: float) -> None:
    saves = SaveSchedule(1200, 30, 300)
    expected = expect(work_h * H, saves, zone)
    certain = replace(zone, drift=0.0, n_spells=math.inf)
    paths = draw_paths(work_h * H, saves, certain, deadline_s=1e12, n_paths=40_000)
    assert expected.billed_s == pytest.approx(paths.spot_s.mean(), rel=0.01)
    assert expected.wall_s == pytest.approx(paths.wall_s.mean(), rel=0.02)


def test_thousands_of_stretches_go_on_as_the_first() -> None:
    """Beyond the stretches that are solved one by one, growth is even: a job twice as long at half
    the detail agrees.
    """
    zone = Interruptions(Weibull(1 * H, 0.7), Weibull(0.5 * H))
    exact, grown = (expect(hours * H, SaveSchedule(60, 1, 30), zone).billed_s for hours in (49, 98))
    paths = draw_paths(98 * H, SaveSchedule(60, 1, 30), zone, deadline_s=1e12, n_paths=4000)
    assert grown == pytest.approx(paths.spot_s.mean(), rel=0.003)
    assert grown == pytest.approx(2 * exact, rel=0.01)


def test_a_job_that_can_never_save_is_said_never_to_end() -> None:
    zone = fit([Spell(600, 0), Spell(900, 0)], [Spell(60, 0)])
    assert expect(5 * H, SaveSchedule(1800, 10, 60), zone).billed_s == math.inf
    choice = choose(
        5 * H, SaveSchedule(1800, 10, 60), zone, spot_usd_per_h=0.1, on_demand_usd_per_h=1
    )
    assert choice.best.kind == "on demand"


# ---- models ----


def test_short_means_and_survivals_are_those_of_the_law() -> None:
    chance = np.random.default_rng(3)
    for law in (BURSTY.up, measured(BURSTY, 200).up):
        drawn, rest = law.draw(chance, 200_000), law.draw_rest(chance, 200_000)
        for t in (300.0, 5000.0, 60_000.0):
            assert float(law.survival(t)) == pytest.approx((drawn >= t).mean(), abs=0.005)
            assert float(law.lived(t)) == pytest.approx(np.minimum(drawn, t).mean(), rel=0.02)
            assert float(law.lived_square(t)) == pytest.approx(
                (np.minimum(drawn, t) ** 2).mean(), rel=0.04
            )
            assert 1 - float(law.lived(t)) / law.mean_s == pytest.approx(
                (rest >= t).mean(), abs=0.01
            )


def test_the_young_are_at_risk() -> None:
    def loss(zone: Interruptions, age_s: float) -> float:
        now, then = zone.up.survival([age_s, age_s + 600])
        return 1 - float(then / now)

    assert loss(BURSTY, 0) > 2 * loss(BURSTY, 2 * H)
    assert loss(exponential(4 * H), 0) == pytest.approx(loss(exponential(4 * H), 9 * H))


def test_fits_find_the_law_again_with_spells_cut_short() -> None:
    chance = np.random.default_rng(0)
    lengths, cuts = BURSTY.up.draw(chance, 4000), chance.exponential(8 * H, 4000)
    spells = [Spell(min(a, b), 0.0, a > b) for a, b in zip(lengths, cuts, strict=True)]
    assert 0.2 < np.mean([spell.is_censored for spell in spells]) < 0.6
    found = fit_law(spells, "weibull")
    assert isinstance(found, Weibull)
    assert (found.shape, found.scale_s) == (
        pytest.approx(0.6, rel=0.05),
        pytest.approx(3 * H, rel=0.08),
    )
    for t in (600, H, 5 * H):
        assert float(fit_law(spells).survival(t)) == pytest.approx(
            float(BURSTY.up.survival(t)), abs=0.03
        )
    # worked by hand: 2, 3 cut short, 5, 8 cut short; 1/4 at 2, half of the other 3/4 at 5, the rest
    # at 8 (Efron)
    few = fit_law([Spell(5, 0), Spell(2, 0), Spell(8, 0, True), Spell(3, 0, True)])
    assert [float(few.survival(t)) for t in (2, 2.1, 5, 5.1, 8, 8.1)] == pytest.approx(
        [1, 0.75, 0.75, 0.375, 0.375, 0]
    )
    assert fit_law(
        [Spell(5, 0), Spell(2, 0), Spell(8, 0, True)], "exponential"
    ).mean_s == pytest.approx(15 / 2)


def test_spells_are_read_from_a_trace() -> None:
    up, down = spells_of([1, 1, 0, 2, 2, 2, 0, 0, 1], 10)
    assert up == [Spell(30, 60), Spell(10, 90, True)]
    assert down == [Spell(10, 30), Spell(20, 80)]
    assert spells_of([1, 1, 0, 2, 2, 2, 0, 0, 1], 10, nodes=2)[0] == [Spell(30, 60)]
    with pytest.raises(InputError, match="no capacity"):
        fit(*spells_of([0, 0, 0], 10))


def test_newer_spells_count_more() -> None:
    spells = [Spell(H, 0.0), Spell(3 * H, 10 * H)]
    assert fit_law(spells).mean_s == pytest.approx(2 * H)
    assert fit_law(spells, half_life_s=10 * H).mean_s == pytest.approx((0.5 * 1 + 3) / 1.5 * H)


def test_zones_are_drawn_together() -> None:
    zones = [
        Interruptions(Weibull(1 * H), Weibull(4 * H)),
        Interruptions(Weibull(4 * H), Weibull(1 * H)),
    ]
    for share, means in ((0, [1, 4]), (0.5, [2**0.5, 2**1.5]), (1, [2, 2])):
        assert [zone.up.mean_s / H for zone in drawn_together(zones, share)] == pytest.approx(means)
        assert [
            zone.down.mean_s / H for zone in drawn_together(zones, share) if zone.down
        ] == pytest.approx(means[::-1])


def test_few_spells_and_priors_have_wide_ranges() -> None:
    few, many, guess = measured(BURSTY, 8), measured(BURSTY, 2000), prior()
    assert few.spread > many.spread > 1
    assert guess.spread > many.spread
    assert guess.is_prior
    assert not many.is_prior
    assert prior(8).mean_between_s == pytest.approx(guess.mean_between_s / 2.7, rel=0.02)
    assert prior(8).spread > guess.spread
    good, likely, bad = expect_range(12 * H, SaveSchedule(1200, 30, 300), guess)
    assert good.wall_s < likely.wall_s < bad.wall_s
    assert good.billed_s < likely.billed_s < bad.billed_s


# ---- which way ----


def test_the_mixture_meets_deadlines_that_spot_alone_would_miss() -> None:
    saves = SaveSchedule(1200, 30, 300)
    for deadline_h in (32, 36, 45, 60, 90):
        alone, mixed = (
            draw_paths(30 * H, saves, BURSTY, deadline_s=deadline_h * H, falls_back=both)
            for both in (False, True)
        )
        assert mixed.chance_by(deadline_h * H) == 1
        assert alone.chance_by(deadline_h * H) < 1
    choice = choose(
        30 * H, saves, BURSTY, spot_usd_per_h=1, on_demand_usd_per_h=3, deadline_s=45 * H
    )
    assert choice.best.kind == "mixture"
    assert "spot alone meets the deadline with" in choice.why
    cost = {way.kind: way.usd for way in choice.ways}
    assert cost["spot"] < cost["mixture"] < cost["on demand"]
    again = choose(
        30 * H, saves, BURSTY, spot_usd_per_h=1, on_demand_usd_per_h=3, deadline_s=45 * H
    )
    assert again == choice


def test_spot_that_costs_more_or_ends_late_is_not_chosen() -> None:
    saves = SaveSchedule(1200, 30, 300)
    dear = choose(30 * H, saves, BURSTY, spot_usd_per_h=2.9, on_demand_usd_per_h=3)
    assert dear.best.kind == "on demand"
    assert "with what it loses" in dear.why
    late = choose(30 * H, saves, BURSTY, spot_usd_per_h=1, on_demand_usd_per_h=3, deadline_s=20 * H)
    assert "no way meets the deadline" in late.why


# ---- replays ----


def second_by_second(
    trace: spot_replay.Trace, work_s: int, saves: SaveSchedule, start_s: int
) -> tuple[int, int, int]:
    """Wall and billed seconds and interruptions of one job: the plainest loop there is."""
    second, wall, billed, hits = start_s, 0, 0, 0
    safe = work = restart = saving = 0
    was_up = False
    while True:
        is_up = trace.available[second // trace.gap_s % len(trace.available)] >= 1
        if was_up and not is_up:
            hits, work, saving, restart = hits + 1, safe, 0, int(saves.restart_s)
        if is_up:
            billed += 1
            if restart:
                restart -= 1
            elif saving:
                saving -= 1
                safe = work if saving == 0 else safe
            else:
                work += 1
                if work - safe == saves.interval_s or work == work_s:
                    saving = int(saves.save_s)
        was_up = is_up
        second, wall = second + 1, wall + 1
        if safe == work_s:
            return wall, billed, hits


@pytest.mark.parametrize("seed", range(7))
def test_replays_are_those_of_a_loop_over_seconds(seed: int) -> None:
    chance = np.random.default_rng(seed)
    lengths = chance.integers(1, [9, 5] * 6)
    data = [int(i % 2 == seed % 2) for i, length in enumerate(lengths) for _ in range(length)]
    if seed in (2, 3):
        data += [data[0]] * 2  # a spell that goes on over the end
    data = [1] * 9 if seed == 6 else data
    trace, saves = spot_replay.Trace("small", 40, tuple(data)), SaveSchedule(50, 7, 20)
    starts = sorted(
        {0, *(int(s) for s in chance.integers(0, 40 * len(data), 40)), 40 * len(data) - 1}
    )
    for work_s in (30, 170, 500):
        found = spot_replay.replay(trace, work_s, saves, starts)
        plain = [second_by_second(trace, work_s, saves, start) for start in starts]
        assert list(zip(found.wall_s, found.billed_s, found.n_interruptions, strict=True)) == plain


def measured_traces() -> list[spot_replay.Trace]:
    """The traces beside the test data, or a skip that says so."""
    data = os.environ.get("FARTHING_DATA")
    folder = Path(data).parent / "spot" if data else None
    if folder is None or not folder.is_dir():
        pytest.skip("needs a folder `spot` of traces beside the folder named by FARTHING_DATA")
    return spot_replay.read_traces(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "most_wall"),
    [("hold-out", 25), pytest.param("rolling", 20, marks=pytest.mark.slow), ("same half", 5)],
)
def test_replayed_cost_and_hours_are_about_the_predicted_ones(way: str, most_wall: float) -> None:
    """Hours miss the target of 15 % on unseen halves, because capacity drifts: docs/log.md. Without
    drift they keep it.
    """
    result = spot_replay.judge_all(measured_traces(), way)
    assert result["mean_error_percent"]["billed_h"] < 5
    assert result["mean_error_percent"]["wall_h"] < most_wall
    assert result["wall_in_range_percent"] > 80
    assert result["chance_error_points"] < 15


def test_measured_spells_are_not_exponential() -> None:
    shapes = [
        fit_law(spells_of(trace.available, trace.gap_s)[0], "weibull")
        for trace in measured_traces()
    ]
    assert all(isinstance(law, Weibull) and law.shape < 1 for law in shapes)


# ---- what is known now, and what is not known of a zone ----


@pytest.mark.parametrize("law", [Weibull(H, 0.6), measured(BURSTY, 4000).up])
def test_the_rest_of_a_spell_of_a_known_age(law: Weibull | Measured) -> None:
    """Of those that have lasted as long, by the law's own survival; young spells are at risk, old
    ones last.
    """
    chance = np.random.default_rng(3)
    for age_s in (0.0, 0.5 * H, 2 * H):
        rest = law.draw_after(chance, 20_000, age_s)
        assert (rest >= 0).all()
        for t_s in (0.2 * H, H):
            share = float(law.survival(age_s + t_s) / law.survival(age_s))
            assert float(np.mean(rest >= t_s)) == pytest.approx(share, abs=0.02)
    assert np.median(law.draw_after(chance, 5000, 3 * H)) > np.median(
        law.draw_after(chance, 5000, 0.0)
    )


def test_a_spell_older_than_any_that_was_seen_lasts_about_as_long_again() -> None:
    law = Measured(np.array([600.0, 1200.0]), np.array([0.5, 0.5]))
    assert np.median(law.draw_after(np.random.default_rng(0), 20_000, 5 * H)) == pytest.approx(
        5 * H, rel=0.05
    )


def test_a_zone_that_is_up_now_is_likelier_to_be_in_time() -> None:
    zone = measured(BURSTY, 300)
    chances = [
        draw_paths(
            H, SaveSchedule(600, 10, 120), replace(zone, now=now), deadline_s=2 * H
        ).chance_by(2 * H)
        for now in (Now(True, 6 * H), None, Now(False, 6 * H))
    ]
    assert chances[0] > chances[1] > chances[2]


def test_what_is_not_known_of_a_zone_widens_its_chances() -> None:
    sure = Interruptions(Weibull(4 * H), Weibull(H))
    vague = replace(sure, drift=1.0)
    assert [weight for _, weight in sure.perhaps()] == [1.0]
    zones, weights = zip(*vague.perhaps(), strict=True)
    assert sum(weights) == pytest.approx(1.0)
    assert zones[1].mean_between_s > zones[0].mean_between_s > zones[2].mean_between_s
    saves = SaveSchedule(600, 10, 120)
    likely = [
        draw_paths(H, saves, zone, deadline_s=4 * H).chance_by(4 * H) for zone in (sure, vague)
    ]
    assert likely[1] < likely[0] - 0.02, "what was likely is less so"
