"""The page of a plan: whole HTML, nothing from elsewhere, everything escaped, the figures of the
view.
"""

import re
from dataclasses import replace

import pytest

from farthing.planner.ownership import parse_owned, saving
from farthing.planner.types import Range
from farthing.report.plan_report import plan_page
from farthing.report.plan_view import plan_view
from farthing.report.plan_words import say_cost
from farthing.units import say_seconds
from pages import NASTY, Read, nasty
from planned import OWN, ask


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    few = {"own": [parse_owned(OWN)], "gpu": ["RTX 4090", "A100-80GB", "H100-80GB", "T4"]}
    found = ask(tmp_path_factory.mktemp("job"), **few, deadline_s=40 * 3600.0)
    return plan_view(found, runs_per_month=24)


def test_the_page_is_whole_and_nothing_is_loaded_from_elsewhere(view):
    page = plan_page(view)
    read = Read(page)
    read.must_be_whole(page)
    assert read.count("title") > 1, "of the page, and of what is drawn"
    assert read.count("table") == read.count("thead") == read.count("tbody") >= 6


def test_what_comes_from_outside_is_only_text(view):
    changed = nasty(view, ("spot", "on-demand", "own", "here"))
    years = replace(
        changed.years,
        one_year_usd={NASTY: 1.0},
        three_years_usd={NASTY: 3.0},
        saved_in_a_year={NASTY: saving(1.0, 2.0)},
    )
    changed = replace(changed, years=years)
    read = Read(plan_page(changed))
    assert read.count("script") == 0
    assert read.text.count(NASTY) > 100


def test_the_figures_are_those_of_the_view(view):
    read = Read(plan_page(view))
    best = view.best
    assert view.answer in read.text
    assert say_cost(best.total_usd) in read.text
    for name in (*best.seconds, *best.step.parts, *best.memory.parts, *best.usd):
        assert name in read.text
    for row in view.plans[:20]:
        assert say_seconds(row.wall_s) in read.text
        assert row.why in read.text
    assert read.count("tr") > len(view.plans) + len(view.rejected)
    n_dots = sum(tag == "circle" for tag, _ in read.tags)
    assert n_dots == sum(row.total_usd > 0 for row in view.plans)
    for words in (*view.assumptions, *view.notes, view.prices.words):
        assert words.replace("`", "") in read.text, "commands are drawn as code"
    for one in view.rejected:
        assert one.reason in read.text
        assert one.change in read.text
    assert "buy 1x RTX 4090" in read.text
    assert "24 runs a month" in read.text


def test_bars_do_not_pass_what_is_there(view):
    page = plan_page(view)
    stacks = re.findall(r'<div class="stack"[^>]*>(.*?)</div>', page)
    assert len(stacks) > 20
    for stack in stacks:
        assert sum(float(width) for width in re.findall(r"width:([\d.]+)%", stack)) <= 100.01


def test_a_page_when_nothing_fits(tmp_path):
    read = Read(plan_page(plan_view(ask(tmp_path, budget_usd=0.01))))
    assert "Nothing can do this job" in read.text
    assert "The nearest ways" in read.text
    assert "limits.max_usd: " in read.text
    assert read.count("svg") == 0


def test_choices_between_two_times_that_have_a_name_are_drawn(view):
    """Between three months and a year no time is named."""
    hours = Range(4390.0, 4400.0, 4410.0)
    rows = tuple(
        replace(row, hours=4400.0, hours_range=hours, wall_s=4400.0 * 3600)
        for row in view.plans[:5]
    )
    read = Read(plan_page(replace(view, plans=rows, best=rows[0])))
    assert sum(tag == "circle" for tag, _ in read.tags) == len(rows)
