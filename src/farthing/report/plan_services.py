"""Services that fine-tune for you, beside renting and owning; and what somebody paid, beside what it costs here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farthing.report.plan_types import Paid
from farthing.units import say_usd


def paid_view(best: Mapping[str, Any] | None, paid_usd: float | None) -> Paid | None:
    """`paid` of a plan's view: what was paid beside what the best plan costs."""
    if paid_usd is None:
        return None
    here = best["total_usd"] if best else None
    return Paid(paid_usd, here, None if here is None else paid_usd - here, paid_usd / here if here else None)


def service_lines(view: Mapping[str, Any]) -> list[str]:
    """Lines for terminal and page, a heading first; none where there is nothing to say."""
    rows = [_line(each) for each in view["managed"]]
    paid = view.get("paid")
    if paid:
        if paid["here_usd"] is None:
            rows.append(f"you paid {say_usd(paid['usd'])}: no plan here has a price to compare it with")
        else:
            more = f"{paid['ratio']:.1f} times as much" if paid["ratio"] and paid["ratio"] >= 1.05 else "no more"
            rows.append(f"you paid {say_usd(paid['usd'])}: here it is {say_usd(paid['here_usd'])}; that was {more}")
    return ["Services that fine-tune for you, by the trained token; hosting comes on top", *rows] if rows else []


def _line(each: Mapping[str, Any]) -> str:
    cost = say_usd(each["usd"])
    if each.get("usd_high", 0) > each["usd"] * 1.001:
        cost += f" to {say_usd(each['usd_high'])}"
    words = f"{cost}  {each['provider']} ({each['what']})"
    if each.get("you_get"):
        words += f": you get {each['you_get']}"
    elif not each["takes_the_model"]:
        words += ": not this model"
    if each.get("afterwards"):
        words += f", then {each['afterwards']}"
    if (each.get("usd_unpacked") or 0) > each["usd"] * 1.05:
        words += f"; {say_usd(each['usd_unpacked'])} without packing (rows x max length)"
    if each.get("ends"):
        words += f"; no new jobs from {each['ends']}"
    return f"{words} ({each['price_source']}, {each['price_date']})"
