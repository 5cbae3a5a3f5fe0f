"""Services that fine-tune for you, beside renting and owning; and what somebody paid, beside what
it costs here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from farthing.planner.managed import bills, say_size
from farthing.prices.offers import Offer
from farthing.storage.files import Json
from farthing.units import say_usd

if TYPE_CHECKING:
    from farthing.planner.inputs import Study


def services(study: Study) -> list[Json]:
    """Services that train for a fee, and whether they take this model: those that are known, then
    those of a price file.
    """
    job, wanted = study.job, study.wanted
    known = bills(wanted, job.task, job.model.model_name_or_path, job.max_length, study.today)
    return [
        {
            "provider": bill.service.provider,
            "what": bill.service.model or say_size(bill.service),
            "usd": bill.usd,
            "usd_high": bill.usd_high,
            "usd_unpacked": bill.usd_unpacked,
            "n_tokens": bill.n_tokens,
            "unit": "million_tokens",
            "usd_per_unit": bill.service.usd,
            "you_get": bill.service.you_get,
            "afterwards": bill.service.afterwards,
            "ends": bill.service.ends.isoformat() if bill.service.ends else None,
            "price_source": bill.service.source,
            "price_date": bill.service.date.isoformat(),
            "takes_the_model": bill.service.method != "closed",
        }
        for bill in known
    ] + [
        {
            "provider": offer.provider,
            "what": offer.instance,
            "usd": usd,
            "unit": offer.unit,
            "usd_per_unit": offer.usd,
            "price_source": offer.source,
            "price_date": offer.date.isoformat(),
            "takes_the_model": _takes(offer, study),
        }
        for offer, usd in study.answer.managed
    ]


def fees(managed: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Dollars of a run at services that take the model: all of a price file's, and the cheapest of
    those that are known.
    """
    taking = [one for one in managed if one["takes_the_model"]]
    known = sorted((one for one in taking if "you_get" in one), key=lambda one: float(one["usd"]))[
        :1
    ]
    of_file = [one for one in taking if "you_get" not in one]
    return {f"{one['provider']}, {one['what']}": float(one["usd"]) for one in (*of_file, *known)}


def _takes(offer: Offer, study: Study) -> bool:
    """Whether the service names this model, or a range of sizes and a method that it is in."""
    if offer.unit == "run":
        return True
    billions = study.wanted.shape.n_parameters / 1e9
    size = re.search(r"(?:up to (\d+)B)|(?:(\d+)B to (\d+)B)", offer.instance)
    if size:
        low, high = (0.0, float(size[1])) if size[1] else (float(size[2]), float(size[3]))
        is_lora = "lora" in offer.instance.lower()
        return low * 0.97 <= billions < (high + 1) and is_lora == (study.wanted.method != "full")
    name = study.job.model.model_name_or_path.rpartition("/")[2].lower()
    return offer.instance.lower().removesuffix(" hosted") == name


def paid_view(best: Mapping[str, Any] | None, paid_usd: float) -> Json:
    """What was paid beside what the best plan costs."""
    here = best["total_usd"] if best else None
    saved, ratio = None if here is None else paid_usd - here, paid_usd / here if here else None
    return {"usd": paid_usd, "here_usd": here, "saved_usd": saved, "ratio": ratio}


def service_lines(view: Mapping[str, Any]) -> list[str]:
    """Lines for terminal and page, a heading first; none where there is nothing to say."""
    rows = [_line(each) for each in view["managed"]]
    paid = view.get("paid")
    if paid:
        if paid["here_usd"] is None:
            rows.append(
                f"you paid {say_usd(paid['usd'])}: no plan here has a price to compare it with"
            )
        else:
            more = (
                f"{paid['ratio']:.1f} times as much"
                if paid["ratio"] and paid["ratio"] >= 1.05
                else "no more"
            )
            rows.append(
                f"you paid {say_usd(paid['usd'])}: here it is {say_usd(paid['here_usd'])}; that was"
                f" {more}"
            )
    return (
        ["Services that fine-tune for you, by the trained token; hosting comes on top", *rows]
        if rows
        else []
    )


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
