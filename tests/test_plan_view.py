"""The view of a plan: its figures add up, the same question gives the same bytes, and what is asked
for is found.
"""

import json
import re
from dataclasses import asdict, replace
from datetime import timedelta

import pytest

from farthing.planner.decide import decide
from farthing.planner.inputs import Study
from farthing.planner.machines import machine_of
from farthing.planner.memory import OnDevice
from farthing.planner.ownership import parse_owned
from farthing.planner.speed import Calibration, cpu_device
from farthing.planner.types import Machine
from farthing.prices.gpus import gpus
from farthing.prices.offers import Billing
from farthing.report.plan_compare import compare, find_plan
from farthing.report.plan_report import limits_in_words, ways_out
from farthing.report.plan_view import plan_view
from farthing.report.plan_words import say_cost
from farthing.report.words import say
from offers import TODAY, offer_of
from planned import OWN, ask


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return ask(tmp_path_factory.mktemp("job"), own=[parse_owned(OWN)])


@pytest.fixture(scope="module")
def typed(study):
    return plan_view(study, runs_per_month=24)


@pytest.fixture(scope="module")
def view(typed):
    return typed.to_json()


def test_the_parts_of_every_plan_add_up(view):
    assert len(view["plans"]) > 200
    for row in view["plans"]:
        memory, recipe, step = row["memory"], row["recipe"], row["step"]
        for parts, total in (
            (row["usd"], row["total_usd"]),
            (row["seconds"], row["wall_s"]),
            (step["parts"], step["seconds"]),
            (memory["parts"], memory["needed_bytes"]),
        ):
            assert sum(parts.values()) == pytest.approx(total, rel=1e-6)
        assert memory["needed_bytes"] <= memory["capacity_bytes"]
        for low, likely, high in (row["usd_range"], row["hours_range"], memory["range_bytes"]):
            assert 0 <= low <= likely <= high
        assert row["hours"] == pytest.approx(row["hours_range"][1])
        assert (row["spot"] is None) == (row["kind"] != "spot")
        assert (recipe["global_batch"], recipe["is_flat"]) == (16, True)
        assert recipe["n_micro_batches"] >= 1
        assert 0 < recipe["mean_tokens_at_once"] <= recipe["micro_batch_tokens"]
        assert f"up to {recipe['micro_batch_tokens']:,} tokens at a time" in recipe["words"]
        assert (row["n_gpus"] > 1) == ("where.gpus: all" in recipe["to_set"])
        for name in ("why", "confidence", "price_source", "price_date", "name"):
            assert row[name]


def test_offers_that_differ_in_place_alone_are_one_choice(view, study):
    names = [(row["provider"], row["gpu"], row["n_gpus"], row["kind"]) for row in view["plans"]]
    assert len(set(names)) == len(names) == view["n_choices"]
    assert [row["rank"] for row in view["plans"]] == list(range(1, len(names) + 1))
    assert (
        sum(1 + len(row["also_at"]) for row in view["plans"])
        == view["n_plans"]
        == len(study.answer.plans)
    )
    assert any(row["also_at"] for row in view["plans"])


def test_two_cheap_gpus_against_a_dear_one_have_both_dollars(view):
    found = view["two_or_one"]
    rows = {row["rank"]: row for row in view["plans"]}
    two, one = rows[found["rank"]], rows[found["other_rank"]]
    assert (two["n_gpus"], one["n_gpus"]) == (2, 1)
    assert two["kind"] == one["kind"] == "on-demand"
    assert two["usd_per_gpu_hour"] < one["usd_per_gpu_hour"]
    assert found["saved_usd"] == pytest.approx(one["total_usd"] - two["total_usd"])
    for row in (two, one):
        assert f"{row['name']} {say_cost(row['total_usd'])}" in found["words"]


def test_a_cap_that_the_range_passes_is_said(tmp_path, view):
    rented = [row for row in view["plans"] if row["kind"] != "own"]
    cheapest = min(rented, key=lambda row: row["total_usd"])
    cap = round(cheapest["total_usd"] * 1.1, 4)
    asked = ask(tmp_path, {"limits": {"max_usd": cap}}, gpu=[cheapest["gpu"]])
    capped = plan_view(asked).to_json()
    assert capped["best"]["usd_range"][2] > cap
    assert "the run saves and stops." in capped["answer"]
    assert "the run saves and stops." not in view["answer"]


def test_the_answer_says_what_to_do_and_what_it_comes_to(tmp_path, view):
    assert view["answer"].startswith("Use your own RTX 4090: $0.")
    assert "Rented: 1x " in view["answer"], "who owns nothing is told what to rent"
    one = plan_view(ask(tmp_path))
    assert find_plan(one, "1") == one.best, "`--explain 1` explains the headline"
    # dollars and hours with their ranges, and room in memory
    found = r"Rent 1x .*\(\S.* to .*\), .* \(.* to .*\), fits.* to spare"
    assert re.match(found, one.to_json()["answer"], re.DOTALL)
    assert "10,000 examples x 3 epochs, 1,875 steps of 16" in say("plan.txt", "summary", one.job)


def test_every_rejection_is_counted_with_its_reason_and_its_change(view, study):
    assert sum(one["n_offers"] for one in view["rejected"]) == len(study.answer.rejected) > 10
    for one in view["rejected"]:
        assert one["reason"]
        assert one["change"]
    distances = [one["distance"] for one in view["rejected"] if one["distance"] is not None]
    assert distances == sorted(distances)


def test_what_fits_nowhere_has_a_way_that_is_named_once(tmp_path):
    job = {"train": {"global_batch_size": 4096, "micro_batch_tokens": 1_000_000}}
    typed = plan_view(ask(tmp_path, job, gpu=["A10G"], max_gpus=1))
    found = typed.to_json()
    assert (found["plans"], found["best"]) == ([], None)
    assert found["answer"].startswith("Nothing can do this job as it is: none of ")
    (way,) = ways_out(typed)
    assert "train.micro_batch_tokens: " in way
    json.dumps(found, allow_nan=False)


def test_limits_are_told(tmp_path):
    found = plan_view(ask(tmp_path, gpu=["L4"], budget_usd=5.0, deadline_s=6 * 3600.0))
    assert limits_in_words(found) == "at most $5.00, done in 6 h 00 min from now, with 90% at least"
    assert all(row.total_usd <= 5 for row in found.plans)


def test_a_year_of_runs(view):
    years = view["years"]
    assert list(years["one_year_usd"].values()) == sorted(years["one_year_usd"].values())
    spot = next(row for row in view["plans"] if row["kind"] == "spot")
    assert years["one_year_usd"][f"rent {spot['name']}"] == pytest.approx(
        12 * 24 * spot["total_usd"], rel=1e-6
    )
    own = view["own"][0]
    running = own["hours"] * 0.45 * 0.15
    assert years["one_year_usd"]["buy 1x RTX 4090"] == pytest.approx(
        1600 + 12 * 24 * running, rel=1e-6
    )
    assert years["three_years_usd"]["buy 1x RTX 4090"] == pytest.approx(
        1600 + 36 * 24 * running, rel=1e-6
    )
    assert any(name.startswith("Together") for name in years["one_year_usd"])


def test_more_runs_than_a_month_has_hours_is_said(study):
    years = plan_view(study, runs_per_month=5000).years
    assert any("are more than one machine has" in note for note in years.notes)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("3", {"rank": 3}),
        ("h100", {"gpu": "H100-80GB", "n_gpus": 1}),
        ("2x RTX 4090", {"gpu": "RTX 4090", "n_gpus": 2}),
        ("A100 80GB spot", {"gpu": "A100-80GB", "kind": "spot"}),
        ("runpod/L40S", {"provider": "RunPod", "gpu": "L40S"}),
        ("L4", {"gpu": "L4"}),
        ("Lambda", {"provider": "Lambda"}),
        ("own", {"kind": "own"}),
    ],
)
def test_plans_are_found_by_rank_and_by_name(typed, name, found):
    assert asdict(find_plan(typed, name)).items() >= found.items()


def test_two_plans_are_compared_as_people_would_say_it(typed):
    def row(n_gpus, gpu, usd_per_gpu_hour, hours):
        sold = {"n_gpus": n_gpus, "gpu": gpu, "usd_per_gpu_hour": usd_per_gpu_hour}
        spent = {"total_usd": n_gpus * usd_per_gpu_hour * hours, "wall_s": hours * 3600}
        return replace(typed.plans[0], **sold, **spent, kind="on-demand", hours=hours)

    found = compare(row(1, "A100", 2.5, 10), row(2, "RTX 4090", 0.5, 7))
    assert found.words == (
        "1x A100 at $2.50 for 10 h 00 min = $25.00; 2x RTX 4090 at $0.50 each for 7 h 00 min ="
        " $7.00: 72 % less"
    )
    assert found.saved_share == pytest.approx(0.72)
    assert found.rows["hours"]["ratio"] == pytest.approx(0.7)
    same = compare(typed.plans[0], typed.plans[0])
    assert same.words.endswith(": costs the same")
    assert all(figures["ratio"] == 1 for figures in same.rows.values())


# ---- machines of one's own ----


def here(usd_per_hour: float, flops: float, **changes):
    offer = offer_of("", usd_per_hour, provider="this machine", instance="Old CPU")
    device = cpu_device("Old CPU", flops, 2 if flops < 1e12 else 200)
    machine = Machine("Old CPU", 1, device, "fp32", OnDevice(1 << 40), is_cuda=False)
    return replace(machine, is_local=True, **changes), [offer]


def with_here(study: Study, this):
    names = ("A100-80GB", "T4", "L4", "RTX 4090")
    offers = [one for one in study.catalog.offers if one.gpu in names and one.n_gpus == 1]
    rented = [(machine_of(gpus()[one.gpu], 1, study.wanted), [one]) for one in offers]
    answer = decide(study.wanted, [this, *rented])
    return plan_view(replace(study, answer=answer, own=())).to_json()


def test_this_machine_without_a_price_is_shown_apart_with_its_hours(study):
    found = with_here(study, here(0.0, 1e15))
    last = found["plans"][-1]
    assert last["kind"] == "here"
    assert "no price is given" in last["why"]
    assert "cheapest" not in last["why"]
    assert found["answer"].startswith("Rent ")
    assert "This machine: " in found["answer"]
    assert "no price given" in found["here"]["words"]
    assert found["here"]["rank"] == last["rank"]
    assert not last["on_front"]
    priced = with_here(study, here(0.0001, 1e15))
    assert priced["best"]["kind"] == "here", "with a price it is a choice like the others"


def test_the_first_is_at_a_price_that_can_be_had(study):
    """The others say what is the matter with theirs."""
    cheap = {
        "Market": {"billing": Billing("Market", prices_are="from")},
        "Packs": {"billing": Billing("Packs", pack_usd=50.0)},
        "Deposit": {"billing": Billing("Deposit", deposit_usd=50.0)},
        "Old": {"date": TODAY - timedelta(days=400)},
    }
    offers = [offer_of("L4", 0.2, provider=name, **terms) for name, terms in cheap.items()]
    machine = machine_of(gpus()["L4"], 1, study.wanted)
    offered = [(machine, [offer_of("L4", 0.5, provider="Firm"), *offers])]
    answer = decide(study.wanted, offered, today=TODAY)
    rows = plan_view(replace(study, answer=answer, own=())).to_json()["plans"]
    assert rows[0]["provider"] == "Firm"
    assert rows[0]["why"] == "the cheapest at a price and on a machine that can simply be had"
    others = {row["provider"]: row for row in rows[1:]}
    assert others.keys() == cheap.keys()
    assert all(row["price_notes"] for row in others.values())
    assert "400 days" in " ".join(others["Old"]["price_notes"])


def test_how_sure_a_plan_is_and_why(study):
    known = Calibration(
        n_runs=3, spread=0.06, source="3 runs of this model here", extra_bytes=1 << 30
    )
    rows = with_here(study, here(0.1, 1e15, calibration=known))["plans"]
    one = next(row for row in rows if row["kind"] == "here")
    said = "calibrated by 3 runs of this model here: seconds 0.94 to 1.1 times in 4 of 5 runs"
    assert one["confidence"] == one["pace"] == said
    assert one["memory"]["parts"]["measured beside the formula"] == 1 << 30
    bare = next(row for row in with_here(study, here(0.1, 1e15))["plans"] if row["kind"] == "here")
    assert "no run was measured on this processor" in bare["confidence"]
    sure = {row["gpu"]: row["confidence"] for row in rows}
    assert sure["A100-80GB"].startswith("never measured: take seconds as 0.")
    assert "published runs of" in sure["A100-80GB"]
    rented = next(row for row in rows if row["gpu"] == "A100-80GB")
    assert sure["A100-80GB"].startswith(f"{rented['pace']} (")
    assert "GPUs before Ampere" in sure["T4"]
