"""Every figure of a few plans, worked once: a change of the arithmetic shows here, and nowhere by
itself.
"""

from dataclasses import replace

import pytest

from farthing.data.lengths import from_mean
from farthing.planner.speed import Calibration
from farthing.planner.spot import Interruptions, weibull
from farthing.planner.types import Answer, JobSpec
from farthing.prices.offers import Billing
from planned import H, decide, place, wanted_of

A100 = place("A100-80GB", 2.0)
CHEAP = place("A100-80GB", 1.0)
UPPER = tuple(f"layers.{n}.self_attn.{name}_proj" for n in (14, 15) for name in "qv")
PAIRS = from_mean(4000, 400.0, 512, mean_target=8.0)
BASE_8B = {"model": "meta-llama/Llama-3.1-8B", "method": "full"}
T5 = {"model": "google/flan-t5-base", "method": "full", "lengths": PAIRS, "eval_lengths": PAIRS}
A100_SPOT = place("A100-80GB", 0.8, spot=True)


def zone(_) -> Interruptions:
    """Half a day of capacity, an hour without, in the mean; three spells were seen."""
    return Interruptions(weibull(12 * H), weibull(1 * H), n_spells=3.0)


def plans(wanted: JobSpec, *places) -> Answer:
    return decide(wanted, list(places), hazard=zone)


WANTED = wanted_of(n_epochs=30.0)
ON_DEMAND = {
    "hours": (1.217, 1.583, 2.886),
    "usd": (2.438, 3.171, 5.776),
    "interval": 305.3,
    "seconds": {
        "download": 24.7,
        "start-up": 12.5,
        "tokenizing": 12.1,
        "training": 5408.3,
        "export": 0.6,
        "setup": 240.0,
        "checkpoints": 1.4,
    },
}
ON_SPOT = {
    "hours": (1.233, 1.735, 3.905),
    "usd": (0.983, 1.282, 2.335),
    "interval": 79.2,
    "seconds": ON_DEMAND["seconds"]
    | {"checkpoints": 5.3, "lost work": 6.3, "restarts": 36.8, "waiting": 498.6},
}
IN_FP16 = ON_DEMAND | {"hours": (1.217, 1.583, 4.469), "usd": (2.438, 3.171, 8.942)}


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (A100, ON_DEMAND),
        (A100_SPOT, ON_SPOT),
        (A100.but(precision_note="may overflow", precision="fp16"), IN_FP16),
    ],
)
def test_what_a_plan_comes_to(where, expected):
    """Spot is wider than what is interrupted, and a run that may overflow could be done twice."""
    (plan,) = plans(WANTED, where).plans
    assert expected == {
        "hours": tuple(round(each, 3) for each in plan.hours_range),
        "usd": tuple(round(each, 3) for each in plan.usd_range),
        "interval": round(plan.interval_s, 1),
        "seconds": {name: round(each, 1) for name, each in plan.seconds.items()},
    }


@pytest.mark.parametrize(
    ("asked", "where", "expected"),
    [  # hours, dollars, GiB of the GPU and of main memory, and of a step: s, tokens, micro-batches
        ({}, A100, (0.231, 0.466, 22.18, 0.0, 0.2884, 7747, 1.0)),
        ({"may_go_packed": False}, A100, (0.262, 0.529, 12.6, 0.0, 0.349, 8656, 5.58)),
        ({"target_modules": UPPER}, A100, (0.1604, 0.3212, 5.72, 0.0, 0.1534, 7747, 1.0)),
        ({}, place("A100-80GB", 4.0, 2), (0.159, 0.641, 14.53, 0.0, 0.1509, 7747, 1.0)),
        (
            {"method": "qlora"},
            place("RTX 4090", 0.5),
            (0.356, 0.182, 15.56, 0.0, 0.5291, 7747, 1.28),
        ),
        ({"method": "qlora"}, place("T4", 0.3), (1.573, 0.477, 6.24, 0.0, 2.8642, 7747, 4.31)),
        (
            BASE_8B,
            place("RTX 4090", 0.5).sold(ram_gib=256.0),
            (14.512, 10.754, 18.26, 119.66, 27.2965, 7747, 1.28),
        ),
        (BASE_8B, place("A100-80GB", 16.0, 8), (0.431, 9.807, 42.72, 0.0, 0.5485, 7747, 1.0)),
        (T5 | {"max_new_tokens": 256}, A100, (0.093, 0.275, 14.33, 0.0, 0.1032, 13056, 1.0)),
    ],
)
def test_what_other_ways_to_train_come_to(asked, where, expected):
    (plan,) = plans(wanted_of(**asked), where).plans
    on, recipe = plan.on, plan.recipe
    found = (plan.hours_range.likely, plan.total_usd, on.memory_range.likely / 2**30)
    found += (on.host_bytes / 2**30, on.step.seconds, on.step.n_padded_tokens)
    assert (*found, recipe.n_micro_batches) == pytest.approx(expected, rel=4e-3)


LIMITS = [
    ("max_usd", 0.0, "costs $1.28, the cap is $0.00", "limits.max_usd: 1.29", 1282075115.5621),
    (
        "max_usd",
        1.2,
        "costs $1.28, the cap is $1.20",
        "limits.max_usd: 1.29, or train.max_steps: 16596 of 18750",
        1.0684,
    ),
    (
        "max_hours",
        1.5,
        "takes 1 h 44 min, the cap is 1 h 30 min",
        "limits.max_hours: 1.74, or train.max_steps: 15028 of 18750",
        1.1565,
    ),
    (
        "max_gpu_hours",
        1.0,
        "takes 1.73 GPU-hours, the cap is 1 GPU-hours",
        "limits.max_gpu_hours: 1.74, or 10,000 samples/min instead of 5,764, or"
        " train.max_steps: 9100 of 18750",
        1.7348,
    ),
    (
        "deadline_s",
        1.5 * H,
        "ends 14 min 05 s after the deadline",
        "a deadline 2 h 25 min later",
        2.6032,
    ),
]


@pytest.mark.parametrize(("limit", "value", "reason", "change", "distance"), LIMITS)
def test_what_passes_a_limit_and_what_would_not(limit, value, reason, change, distance):
    (found,) = plans(replace(WANTED, **{limit: value}), A100_SPOT).rejected
    assert (found.reason, found.change, round(found.distance, 4)) == (reason, change, distance)


def test_the_limits_themselves_are_kept():
    """What ends at its limit to the last digit passes none."""
    (plan,) = plans(WANTED, A100).plans
    limits = {"max_usd": plan.total_usd, "max_hours": plan.wall_s / H}
    assert len(plans(replace(WANTED, **limits), A100).plans) == 1
    below = {name: value * (1 - 1e-9) for name, value in limits.items()}
    assert not plans(replace(WANTED, **below), A100).plans
    asked = replace(WANTED, deadline_s=4 * H)
    (plan,) = plans(asked, A100).plans
    assert plans(replace(asked, confidence=plan.chance), A100).plans


def test_chances_of_a_deadline():
    found = plans(replace(WANTED, deadline_s=4 * H), A100, A100_SPOT).plans
    assert [round(plan.chance or 0, 4) for plan in found] == [0.9336, 0.9913]


@pytest.mark.parametrize(
    ("deadline_h", "confidence", "share", "later", "distance"),
    [
        (1.7, 0.9, "55%", "1 h 12 min", 1.701),
        (1.7, 0.99, "55%", "2 h 15 min", 2.319),
    ],
)
def test_a_deadline_that_is_not_sure_enough_is_refused_with_one_that_is(
    deadline_h, confidence, share, later, distance
):
    asked = replace(WANTED, deadline_s=deadline_h * H, confidence=confidence)
    (found,) = plans(asked, A100).rejected
    assert found.reason == f"it is done by the deadline with {share} only"
    assert found.change == f"a deadline {later} later"
    assert found.distance == pytest.approx(distance, abs=0.006)
    assert len(plans(replace(asked, confidence=0.5), A100).plans) == 1


@pytest.mark.parametrize(
    ("saves", "interval_s"),
    [
        ({"save_steps": 100}, 28.84),
        ({"save_every_s": 600.0}, 600.0),
        ({"save_steps": 100, "save_every_s": 600.0}, 28.84),
    ],
)
def test_checkpoints_are_as_far_apart_as_the_job_says(saves, interval_s):
    (plan,) = plans(wanted_of(**saves), A100).plans
    assert plan.interval_s == pytest.approx(interval_s, rel=1e-3)


def test_a_job_on_spot_that_is_over_before_a_checkpoint_pays_has_one_at_its_end():
    (plan,) = plans(wanted_of(max_steps=200), A100_SPOT).plans
    assert plan.interval_s == plan.seconds["training"]


def test_the_late_end_of_a_range_that_may_never_end_is_ten_times_the_likely():
    zone = Interruptions(weibull(100.0), n_spells=1.0)
    (plan,) = decide(wanted_of(max_steps=200), [A100_SPOT], hazard=lambda _: zone).plans
    assert plan.hours_range.high == pytest.approx(10 * plan.hours_range.likely)


def test_a_disk_is_paid_for_as_long_as_its_machine():
    """Ten cents a GB and month where nothing else is known, for the model and three checkpoints."""
    (plan,) = plans(WANTED, A100).plans
    gb = (2 * WANTED.shape.n_parameters + 3 * WANTED.save_bytes) / 1e9
    expected = gb * 0.1 * plan.wall_s / H / 730
    assert plan.usd["storage"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("days", "prices_are", "less", "more"),
    [
        (90, "", 0, 0),
        (91, "", 0.0747945, 0.0747945),  # three tenths a year
        (2000, "", 0.9, 0.9),
        (0, "from", 0, 0.3),
    ],
)
def test_an_old_price_may_have_changed_and_the_lowest_may_be_gone(days, prices_are, less, more):
    offer = A100.aged(days).sold(billing=Billing("A", prices_are=prices_are))
    sure, found = (plans(WANTED, each).plans[0].usd_range for each in (A100, offer))
    assert found.low == pytest.approx(sure.low * (1 - less))
    assert found.high == pytest.approx(sure.high * (1 + more))


@pytest.mark.parametrize(("usd", "cap"), [(99.994, "100.00"), (99.495, "99.50"), (100.4, "101")])
def test_a_cap_that_would_do_is_rounded_up(usd, cap):
    one, two = (plans(WANTED, place("A100-80GB", price)).plans[0].total_usd for price in (1, 2))
    dear = place("A100-80GB", 1 + (usd - one) / (two - one))
    (found,) = plans(replace(WANTED, max_usd=50.0), dear).rejected
    assert found.change.partition(", or ")[0] == f"limits.max_usd: {cap}"


def test_spot_with_on_demand_behind_it_has_its_own_figures_and_is_not_refused_besides():
    """Capacity for 42 minutes in the mean, and three hours without."""
    spot, own = A100_SPOT.sold(usd=2.0), place("A100-80GB", 9.0)

    def fleeting(_):
        return Interruptions(weibull(0.701 * H), weibull(3 * H))

    asked = replace(wanted_of(n_epochs=20.0), deadline_s=8.92 * H)
    (alone,) = decide(asked, [spot], hazard=fleeting).rejected
    assert alone.reason == "spot is done by the deadline with 57% only"
    cheaper = decide(asked, [spot, place("A100-80GB", 1.5)], hazard=fleeting)
    assert cheaper.rejected == (alone,), "on demand by itself costs less"
    soon = decide(replace(asked, deadline_s=1.7 * H), [spot, own], hazard=fleeting)
    assert not soon.plans, "with on demand behind it neither is sure"
    found = decide(asked, [spot, own, place("A100-80GB", 12.0)], hazard=fleeting)
    assert not found.rejected
    mixed = found.plans[0]
    assert mixed.mixture == (
        "spot alone meets the deadline with 57%; with on demand when it falls behind it saves 22%"
        " of $9.75"
    )
    assert [round(each, 4) for each in mixed.usd_range] == [4.3765, 7.5979, 13.1906]
    assert mixed.wall_s == pytest.approx(7312.407)
    assert [round(each, 2) for each in mixed.hours_range] == [2.03, 2.03, 8.92]


def test_a_machine_that_is_taken_back_too_early_is_no_first_choice():
    """Its longest run holds the likely end, and not the late one."""
    short = CHEAP.sold(billing=Billing("A", most_hours=2.0), provider="short")
    long = CHEAP.sold(billing=Billing("A", most_hours=3.0), provider="long")
    other = A100.sold(provider="other")
    assert plans(WANTED, short, other).plans[0].offer.provider == "other"
    assert plans(WANTED, long, other).plans[0].offer.provider == "long"


def test_what_was_measured_narrows_the_hours_to_its_own_error():
    measured = A100.but(calibration=Calibration(n_runs=3, spread=0.08, source="three runs"))
    (plan,) = plans(WANTED, measured).plans
    hours = plan.hours_range
    assert (hours.low / hours.likely, hours.high / hours.likely) == pytest.approx((0.92, 1.08))
