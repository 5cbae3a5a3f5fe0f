"""Own or rent, against worked figures."""

import pytest

from farthing.errors import InputError
from farthing.planner.ownership import (
    Owned,
    Way,
    break_even_months,
    parse_owned,
    run_on_own,
    saving,
    yearly_usd,
)

# ---- worked figures ----


# ---- owning ----

KNOWN = {"price_usd": 1600, "power_kw": 0.5, "usd_per_kwh": 0.2}
KNOWN |= {"resale_share": 0.25, "life_months": 30}
OWN = Owned("RTX 4090", **KNOWN)


def test_a_run_of_ones_own_is_electricity_and_wear():
    used = Owned("RTX 4090", **KNOWN, hours_per_month=100, other_usd_per_h=0.05)
    parts = run_on_own(used, 10)
    assert parts == {
        "electricity": pytest.approx(10 * 0.5 * 0.2),
        "wear": pytest.approx(10 * 1200 / (30 * 100)),
        "other": pytest.approx(0.5),
    }
    assert sum(run_on_own(used, 3000).values()) == pytest.approx(1200 + 3000 * (0.1 + 0.05)), (
        "a life of runs is its price"
    )


def test_break_even_is_the_formula():
    assert break_even_months(OWN, 0.5, 1) == pytest.approx((1600 - 400) / (0.5 - 0.5 * 0.2))
    assert break_even_months(OWN, 75, 150) == pytest.approx(break_even_months(OWN, 0.5, 1) / 150)
    dear = Owned("RTX 4090", **KNOWN, other_usd_per_h=0.4)
    assert break_even_months(dear, 0.5, 1) is None, "running it costs as much as renting"
    assert break_even_months(dear, 0.4, 1) is None
    assert break_even_months(Owned("T4"), 0.5, 1) == 0, "what is paid off pays at once"
    assert break_even_months(OWN, 20, 300) is None
    assert break_even_months(OWN, 0, 0) is None


def test_a_year_counts_what_is_paid_at_the_start_less_what_is_got_back():
    ways = {"own": Way(20 * OWN.running_usd_per_h, OWN.lost_usd), "rent": Way(20 * 0.5)}
    assert yearly_usd(ways, 4) == {"rent": 480, "own": pytest.approx(1600 - 400 + 48 * 2)}
    assert list(yearly_usd(ways, 20, n_years=3)) == ["own", "rent"]


def test_a_saving_may_be_none():
    dearer = saving(12, 10)
    assert dearer.usd == -2
    assert dearer.share == pytest.approx(-0.2)
    assert saving(5, 0).share is None


# ---- what people write ----


def test_what_people_write_of_their_gpus():
    assert parse_owned("RTX 4090:1600usd:0.45kW") == Owned("RTX 4090", 1, 1600, 0.45)
    full = parse_owned(
        "2x rtx3090 : $1400 : 700 W : kwh=0.30usd : resale=30% : life=24mo : other=0.02usd :"
        " use=100h"
    )
    assert full == Owned("RTX 3090", 2, 1400, 0.7, 0.30, 0.3, 24, 0.02, 100)
    assert parse_owned("a6000:price=3000:power=300W:resale=0.5").resale_share == 0.5


def test_power_that_is_not_said_is_the_gpus_own_and_a_price_that_is_not_said_is_nothing():
    assert parse_owned("4x RTX 4090") == Owned("RTX 4090", 4, 0.0, 1.8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RTX 4900:1600usd", "did you mean"),
        ("RTX 4090:abc", "'abc' is not an amount of dollars"),
        ("RTX 4090:1600eur", "only US dollars"),
        ("RTX 4090:-5usd", "'-5usd' is not an amount"),
        ("RTX 4090:", "'' is not an amount"),
        ("RTX 4090:1600usd:1700usd", "says price_usd once more"),
        ("RTX 4090:resele=1", "did you mean `resale`?"),
        ("RTX 4090:colour=red", "known: price, power, kwh, resale, life, other, use"),
        ("RTX 4090:resale=2", "not a share"),
        ("RTX 4090:resale=much", "not a share"),
        ("RTX 4090:power=5", "not a power"),
        ("RTX 4090:life=0", "above 0"),
        ("RTX 4090:life=long", "not a number of months"),
        ("RTX 4090:use=1000h", "at most 744"),
        ("RTX 4090:kwh=nan", "not an amount"),
        ("0x RTX 4090", "0 GPUs"),
        ("", "no GPU"),
    ],
)
def test_mistakes_in_it_are_named(text, words):
    with pytest.raises(InputError, match=words) as caught:
        parse_owned(text)
    assert caught.value.where == f"own: {text}"
