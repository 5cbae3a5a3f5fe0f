"""What is said of a plan in words, for all who draw it: dollars, the job in one line, limits, when
buying pays back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from farthing.planner.ownership import Saving
from farthing.units import plural, say_count, say_seconds, say_usd

LOCAL, OWN = "this machine", "own"
RENTED = ("on-demand", "spot")
"""The kinds of what is rented."""


def machine_of(n_gpus: int, gpu: str) -> str:
    """`2x A100-80GB`, `A100-80GB`."""
    return f"{n_gpus}x {gpu}" if n_gpus > 1 else gpu


def what_to_do(best: Mapping[str, Any]) -> str:
    """`Rent 1x L4 spot at GCP, on demand when it falls behind the deadline`."""
    verb = {"own": "Use your ", "here": "Use "}.get(best["kind"], "Rent ")
    with_own = (
        ", on demand when it falls behind the deadline"
        if best["spot"] and best["spot"]["mixture"]
        else ""
    )
    return f"{verb}{best['name']}{with_own}"


def usd_in_words(row: Mapping[str, Any]) -> str:
    """`$0.40 (0.31 to 0.52)`."""
    low, likely, high = (say_cost(usd) for usd in row["usd_range"])
    return (
        f"{likely} ({low.removeprefix('$')} to {high.removeprefix('$')})"
        if has_price(row)
        else "no price is given"
    )


def must_buy_more(row: Mapping[str, Any]) -> bool:
    """Whether more has to be bought than the run uses, such as a whole pack of credits."""
    return bool(row["up_front_usd"] > row["total_usd"] + 0.005)


def hours_in_words(row: Mapping[str, Any]) -> str:
    """`27 min (19 min to 36 min)`."""
    low, likely, high = (say_seconds(hours * 3600) for hours in row["hours_range"])
    return f"{likely} ({low} to {high})"


def micro_batches_in_words(recipe: Mapping[str, Any]) -> str:
    """`3.7 micro-batches of up to 8,192 tokens, end to end`."""
    n = recipe["n_micro_batches"]
    number = f"{n:.0f}" if n == round(n) else f"{n:.1f}"
    one_or_more = "micro-batch" if n == 1 else "micro-batches"
    laid = "end to end" if recipe["is_flat"] else "padded"
    return f"{number} {one_or_more} of up to {recipe['micro_batch_tokens']:,} tokens, {laid}"


def has_price(row: Mapping[str, Any]) -> bool:
    """Whether the dollars of a plan mean anything: a machine of one's own may have no price."""
    return row["kind"] != "here" or bool(row["usd_per_hour"])


def say_cost(usd: float | None) -> str:
    """`$0.78`, `$12.30`, `$1,234`: as many digits as an estimate deserves."""
    if usd is None:
        return say_usd(usd)
    if 0 < abs(usd) < 0.1:
        return f"${usd:.{min(6, 1 - math.floor(math.log10(abs(usd))))}f}"
    return f"${usd:,.2f}" if abs(usd) < 1000 else f"${usd:,.0f}"


def say_saving(saved: Saving) -> str:
    """`45 % less`."""
    if saved.share is None:
        return f"{say_cost(-saved.usd)} more" if saved.usd else "costs the same"
    if abs(saved.share) < 0.005:
        return "costs the same"
    return f"{abs(saved.share) * 100:.0f} % {'less' if saved.is_one else 'more'}"


def ways_out(view: Mapping[str, Any]) -> list[str]:
    """The nearest ways to make the job possible, in words."""
    return [
        f"{_where(way)}: {cause_of(way['reason'])}; try {way['change']}" for way in view["nearest"]
    ]


def _where(way: Mapping[str, Any]) -> str:
    what = f"{way['n_gpus']}x {way['gpu']}" if way["kind"] != "here" else LOCAL
    if way["kind"] in ("here", "own"):
        return what
    price = "" if way["usd_per_hour"] is None else f" at {say_usd(way['usd_per_hour'])} an hour"
    return f"{what} {way['kind'].replace('-', ' ')}{price}"


def cause_of(reason: str) -> str:
    """A reason without the recipe in brackets behind it."""
    return re.sub(r" \([^()]*\)$", "", reason)


def other_ways(view: Mapping[str, Any]) -> dict[str, str]:
    """This machine, what is sooner, spot or not, two GPUs or one: what there is to say of each, by
    name.
    """
    here = {} if view["here"] is None else {view["here"]["name"]: view["here"]["words"]}
    names = {
        "sooner": "sooner",
        "spot_or_not": "spot or not",
        "two_or_one": "two cheap or one dear",
    }
    return here | {name: view[key]["words"] for key, name in names.items() if view[key]}


def summary(view: Mapping[str, Any]) -> str:
    """The job in one line."""
    job = view["job"]
    share = job["n_trainable"] / max(1, job["n_parameters"])
    trained = (
        ""
        if job["n_trainable"] == job["n_parameters"]
        else f", {say_count(job['n_trainable'])} ({share:.1%}) trained"
    )
    epochs = f" x {plural_of(job['n_epochs'], 'epoch')}" if job["n_epochs"] is not None else ""
    return (
        f"{job['model']} ({say_count(job['n_parameters'])} parameters{trained}), {job['method']},"
        f" {job['task']}: {plural(job['n_examples'], 'example')}{epochs},"
        f" {plural(job['n_steps'], 'step')} of {job['global_batch']}, {say_count(job['n_tokens'])}"
        f" tokens ({job['mean_tokens']:,.0f} an example on average, {job['longest_tokens']:,} at"
        " most)"
    )


def limits_in_words(view: Mapping[str, Any]) -> str:
    """`at most $5.00, within 12 h`; nothing where there are none."""
    limits = view["job"]["limits"]
    words = []
    if limits["max_usd"] is not None:
        words.append(f"at most {say_cost(limits['max_usd'])}")
    if limits["max_hours"] is not None:
        words.append(f"at most {say_seconds(limits['max_hours'] * 3600)}")
    if limits["max_gpu_hours"] is not None:
        words.append(f"at most {limits['max_gpu_hours']:g} GPU-hours")
    if limits["deadline_s"] is not None:
        words.append(
            f"done in {say_seconds(limits['deadline_s'])} from now, on spot with"
            f" {limits['confidence']:.0%} at least"
        )
    return ", ".join(words)


def break_even_words(own: Mapping[str, Any], one: Mapping[str, Any]) -> str:
    """When buying a machine pays back against one way of renting."""
    price = "" if one["usd_per_own_hour"] is None else f"{say_usd(one['usd_per_own_hour'])} an hour"
    if not one["is_equal"]:
        whose = "the best rent" if one["rank"] is not None else "its fee"
        price = f"{whose}, {price.removesuffix(' an hour')} for what it does in an hour"
    rent = f"{one['name']} ({price})"
    if one["break_even_hours"] is None:
        return f"bought for {say_cost(own['price_usd'])} it never pays for itself against {rent}"
    months = one["break_even_months"]
    long = f"{months:,.1f} months" if months < 36 else f"{months / 12:,.0f} years"
    return (
        f"bought for {say_cost(own['price_usd'])} it pays for itself after"
        f" {one['break_even_hours']:,.0f} h of use, {long} with {one['hours_per_month']:.3g} h a"
        f" month, against {rent}"
    )


def say_short(seconds: float) -> str:
    """`1 min 20 s`, `81.3 ms`."""
    return say_seconds(seconds) if seconds >= 1 else f"{seconds * 1000:,.1f} ms"


YEARS = ("way", "#a year", "#three years", "#saved in a year")
"""Heads of the rows of a project; those that begin with # are of numbers."""


def year_rows(years: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """What each way comes to, and what it saves in a year against the dearest: `$1,620 (94%)`;
    nothing for that one.
    """
    for name, usd in years["one_year_usd"].items():
        saved = years["saved_in_a_year"].get(name)
        words = (
            f"{say_cost(saved['usd'])} ({saved['share']:.0%})"
            if saved and saved["usd"] and saved["share"]
            else ""
        )
        yield name, say_cost(usd), say_cost(years["three_years_usd"][name]), words


def comparison_names(comparison: Mapping[str, Any]) -> list[str]:
    """What two choices that are side by side are called."""
    both = comparison["a"], comparison["b"]
    return [one["name"] if one["rank"] is None else f"{one['rank']}: {one['name']}" for one in both]


def plural_of(n: float, word: str) -> str:
    """`1 epoch`, `2.5 epochs`."""
    return f"{n:g} {word}" if n == 1 else f"{n:g} {word}s"
