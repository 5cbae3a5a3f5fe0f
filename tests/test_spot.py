"""Spot: closed forms, renewal against drawn paths, fits, oracles worked by hand, and jobs replayed
on measured traces.
"""

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
    SaveSchedule,
    Spell,
    WorkRange,
    best_interval_s,
    chance_by,
    expect,
    fit,
    fit_spells,
    mixture,
    prior,
    spells_of,
    weibull,
    young_interval_s,
)

H = 3600.0
BURSTY = Interruptions(weibull(4.5 * H, 0.6), weibull(1.3 * H, 0.7))


def exponential(mean_s: float) -> Interruptions:
    """Interruptions at a constant rate, capacity back at once."""
    return Interruptions(weibull(mean_s))


def measured(zone: Interruptions, n: int, seed: int = 1) -> Interruptions:
    """A zone fitted to spells drawn from another."""
    chance = np.random.default_rng(seed)
    up, down = (
        [Spell(float(length), 0.0) for length in law.at(chance.random(n))]
        for law in (zone.up, zone.down)
    )
    return fit(up, down)


# ---- closed forms ----


@pytest.mark.parametrize(
    ("work_h", "tau", "save", "restart"),
    [(10, 900, 20, 300), (500, 300, 60, 600)],
)
def test_exponential_spells_give_dalys_formula(work_h, tau, save, restart):
    mean_s = 4 * H
    expected = expect(work_h * H, SaveSchedule(tau, save, restart), exponential(mean_s))
    daly = (
        mean_s * math.exp(restart / mean_s) * math.expm1((tau + save) / mean_s) * work_h * H / tau
    )
    assert expected.billed_s == pytest.approx(daly, rel=5e-4)
    assert expected.wall_s == expected.billed_s
    assert expected.n_interruptions == pytest.approx(daly / mean_s, rel=0.01)


def test_the_best_interval_of_exponential_spells_is_dalys():
    assert young_interval_s(20, 4 * H) == pytest.approx(math.sqrt(2 * 20 * 4 * H))
    for save_s in (5, 30, 300):
        x = save_s / (2 * 4 * H)
        daly = young_interval_s(save_s, 4 * H) * (1 + math.sqrt(x) / 3 + x / 9) - save_s
        assert best_interval_s(save_s, 300, exponential(4 * H)) == pytest.approx(daly, rel=0.025)


def test_a_job_that_can_never_save_is_said_never_to_end():
    zone = fit([Spell(600, 0), Spell(900, 0)], [Spell(60, 0)])
    assert expect(5 * H, SaveSchedule(1800, 10, 60), zone).billed_s == math.inf


def test_a_job_twice_as_long_takes_twice_as_long():
    zone = Interruptions(weibull(H, 0.7), weibull(0.5 * H))
    one, two = (expect(n * H, SaveSchedule(60, 1, 30), zone) for n in (500, 1000))
    assert two == pytest.approx([2 * part for part in one], rel=1e-3), "beyond drawn spells too"
    assert two.billed_s == pytest.approx(2 * one.billed_s, rel=5e-4)


# ---- models ----


def test_fits_find_the_law_again_with_spells_cut_short():
    chance = np.random.default_rng(0)
    lengths, cuts = BURSTY.up.at(chance.random(4000)), chance.exponential(8 * H, 4000)
    spells = [Spell(min(a, b), 0.0, a > b) for a, b in zip(lengths, cuts, strict=True)]
    assert 0.2 < np.mean([spell.is_censored for spell in spells]) < 0.6
    found, n = fit_spells(spells)
    assert n < 4000
    quantiles = np.array([0.2, 0.5, 0.7])
    assert found.at(quantiles) == pytest.approx(BURSTY.up.at(quantiles), rel=0.06)
    # worked by hand: 2, 3 cut short, 5, 8 cut short; 1/4 at 2, half of the other 3/4 at 5, the rest
    # at 8 (Efron)
    few, _ = fit_spells([Spell(5, 0), Spell(2, 0), Spell(8, 0, True), Spell(3, 0, True)])
    assert list(few.lengths_s) == [2, 5, 8]
    assert few.shares == pytest.approx([0.25, 0.375, 0.375])


def test_spells_are_read_from_a_trace():
    up, down = spells_of([1, 1, 0, 2, 2, 2, 0, 0, 1], 10)
    assert up == [Spell(30, 60), Spell(10, 90, True)]
    assert down == [Spell(10, 30), Spell(20, 80)]
    with pytest.raises(InputError, match="no capacity"):
        fit(*spells_of([0, 0, 0], 10))


def test_newer_spells_count_more():
    spells = [Spell(H, 0.0), Spell(3 * H, 10 * H)]
    assert fit_spells(spells)[0].mean_s == pytest.approx(2 * H)
    newer, _ = fit_spells(spells, half_life_s=10 * H)
    assert newer.mean_s == pytest.approx((0.5 * 1 + 3) / 1.5 * H)


def test_few_spells_and_priors_have_wide_ranges():
    few, many, guess = measured(BURSTY, 8), measured(BURSTY, 2000), prior()
    assert few.spread > many.spread > 1
    assert guess.spread > many.spread
    assert prior(8).up.mean_s == pytest.approx(guess.up.mean_s / 2.7, rel=0.005)
    assert prior(8).spread > guess.spread
    saves, (good, bad) = SaveSchedule(1200, 30, 300), guess.good_and_bad
    hours = [expect(12 * H, saves, zone) for zone in (good, guess, bad)]
    assert hours[0].wall_s < hours[1].wall_s < hours[2].wall_s
    assert hours[0].billed_s < hours[1].billed_s < hours[2].billed_s


# ---- in time ----


def test_the_mixture_meets_deadlines_that_spot_alone_would_miss():
    saves = SaveSchedule(1200, 30, 300)
    on_demand_s = []
    for deadline_h in (32, 36, 45, 60):
        asked = deadline_h * H, WorkRange(30 * H), saves, BURSTY
        both = mixture(*asked)
        assert both.chance == pytest.approx(1.0)
        assert chance_by(*asked) < 1
        on_demand_s.append(both.on_demand_s)
        assert mixture(*asked) == both
    assert on_demand_s == sorted(on_demand_s, reverse=True), "more time needs less of it"


def test_a_pace_that_is_not_known_is_as_uncertain_in_the_mixture_as_on_demand():
    """0.8 to 1.6 times the likely work: 16.8 % of a normal law take 8.5 h at most, 93.3 % 17 h."""
    work, saves = WorkRange(10 * H, 0.8, 1.6), SaveSchedule(1200, 1, 1)
    assert np.quantile(work.each_s, [0.1, 0.5, 0.9]) / H == pytest.approx([8, 10, 16], abs=0.2)
    chances = [mixture(hours * H, work, saves, BURSTY).chance for hours in (8.5, 10.8, 17)]
    assert chances == pytest.approx([0.168, 0.568, 0.933], abs=0.005)
    alone = [chance_by(hours * H, work, saves, BURSTY) for hours in (8.5, 10.8, 17)]
    assert all(a <= b for a, b in zip(alone, chances, strict=True))


# ---- replays ----


def measured_traces():
    """The traces beside the test data, or a skip that says so."""
    data = os.environ.get("FARTHING_DATA")
    folder = Path(data).parent / "spot" if data else None
    if folder is None or not folder.is_dir():
        pytest.skip("needs a folder `spot` of traces beside the folder named by FARTHING_DATA")
    return spot_replay.read_traces(folder)


@pytest.mark.slow
def test_replayed_cost_and_hours_are_about_the_predicted_ones():
    """Hours miss the target of 15 % on unseen halves, because capacity drifts: evidence/log.md."""
    result = spot_replay.judge_all(measured_traces())
    assert result["mean_error_percent"]["billed_h"] < 5
    assert result["mean_error_percent"]["wall_h"] < 25
    assert result["wall_in_range_percent"] > 80


# ---- what is not known of a zone ----


def test_what_is_not_known_of_a_zone_widens_its_chances():
    sure = Interruptions(weibull(4 * H), weibull(H))
    vague = replace(sure, drift=1.0)
    assert [weight for _, weight in sure.scenarios] == [1.0]
    zones, weights = zip(*vague.scenarios, strict=True)
    assert sum(weights) == pytest.approx(1.0)
    assert zones[1].up.mean_s > zones[0].up.mean_s > zones[2].up.mean_s
    saves = SaveSchedule(600, 10, 120)
    likely = [chance_by(4 * H, WorkRange(H), saves, zone) for zone in (sure, vague)]
    assert likely[1] < likely[0] - 0.02, "what was likely is less so"
