"""Finding the plan that a rank or a name means, and two plans side by side."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farthing.errors import InputError
from farthing.planner.ownership import saving
from farthing.prices.gpus import find_gpu, gpus
from farthing.report.plan_view import plain
from farthing.report.plan_words import LOCAL, say_cost, say_saving, say_short
from farthing.units import say_bytes, say_count, say_seconds, say_usd

SERVICE = "service"
Row = Mapping[str, Any]


def find_plan(view: Row, text: str, *, or_service: bool = False) -> Row:
    """The plan that a rank or a name means: `3`, `H100`, `2x RTX 4090 spot`, `verda/A100-80GB`,
    `own`.

    With `or_service` a service too: `Together`, which has machines as well: those are
    `Together/H100`.

    The first that answers to the name. Raises `InputError`, with the reason where all that
    answer were rejected.
    """
    rows: Sequence[Row] = view["plans"]
    wanted = text.strip()
    if re.fullmatch(r"#?\d+", wanted):
        rank = int(wanted.lstrip("#"))
        row = next((row for row in rows if row["rank"] == rank), None)
        if row is None:
            raise InputError(
                f"there is no plan {rank}", where="plan", to_do=f"give a rank from 1 to {len(rows)}"
            )
        return row
    if or_service and (service := _service(view, wanted)) is not None:
        return service
    found = next((row for row in rows if _answers(row, wanted)), None)
    if found is not None:
        return found
    no = next((one for one in view["rejected"] if _answers(one, wanted)), None)
    if no is not None:
        raise InputError(
            f"`{wanted}` was rejected: {no['reason']}", where="plan", to_do=no["change"]
        )
    to_do = 'give a rank, or a name such as "H100", "2x RTX 4090 spot" or "RunPod/L40S"'
    raise InputError(f"no plan is called `{wanted}`", where="plan", to_do=to_do)


def _service(view: Row, text: str) -> Row | None:
    """The service for a fee that a name means, with the little that there is to compare."""
    for one in view["managed"]:
        name = f"{one['provider']}, {one['what']}"
        if _key(text).startswith(_key(one["provider"])) and _key(text) in _key(name):
            found = {
                "rank": None,
                "name": name,
                "kind": SERVICE,
                "total_usd": one["usd"],
                "price_date": one["price_date"],
            }
            usd_range = [one["usd"], one["usd"], one.get("usd_high") or one["usd"]]
            return found | {"usd_range": usd_range, "you_get": one.get("you_get", "the model")}
    return None


def _answers(row: Mapping[str, Any], text: str) -> bool:
    """Whether a plan or a rejection is what `text` names."""
    provider, slash, rest = text.rpartition("/")
    rest = rest.strip().lower()
    for word, kinds in (
        ("on-demand", ("on-demand",)),
        ("on demand", ("on-demand",)),
        ("spot", ("spot",)),
    ):
        if rest.endswith(word):
            rest = rest.removesuffix(word).strip()
            if row["kind"] not in kinds:
                return False
            break
    if slash and _key(provider) not in _key(row["provider"]):
        return False
    count = re.match(r"(\d+)\s*x\s*", rest)
    if count:
        rest = rest[count.end() :]
        if row["n_gpus"] != int(count[1]):
            return False
    if not rest:
        return True
    if rest in ("own", "here", LOCAL) or _key(rest) == _key(row["provider"]):
        return rest in (row["kind"], row["provider"]) or _key(rest) == _key(row["provider"])
    names = {_key(row["gpu"])}
    if row["gpu"] in gpus():
        names |= {_key(alias) for alias in gpus()[row["gpu"]].aliases}
    if _key(rest) in names or _key(row["gpu"]).startswith(_key(rest)):
        return True
    try:
        return find_gpu(rest).name == row["gpu"]
    except InputError:
        return False


def _key(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def compare_plans(a: Row, b: Row) -> Row:
    """Two choices side by side: figures of both with the ratio b / a, the same in words for those
    who draw, and a sentence.

    A service's has dollars alone.
    """
    figures: dict[str, tuple[str, Callable[[Row], float | None], Callable[[Any], str]]] = {
        "total_usd": ("dollars", lambda row: row["total_usd"], say_cost),
        "hours": ("time", lambda row: row.get("hours"), lambda hours: say_seconds(hours * 3600)),
        "usd_per_hour": ("an hour", lambda row: row.get("usd_per_hour"), say_usd),
        "tokens_per_s": ("tokens/s", lambda row: _of(row, "step", "tokens_per_s"), say_count),
        "step_s": ("a step", lambda row: _of(row, "step", "seconds"), say_short),
        "memory_bytes": ("memory", lambda row: _of(row, "memory", "needed_bytes"), say_bytes),
        "capacity_bytes": ("of", lambda row: _of(row, "memory", "capacity_bytes"), say_bytes),
    }
    rows: dict[str, dict[str, float | None]] = {}
    table: list[list[str]] = []
    for name, (words, figure, say) in figures.items():
        rows[name] = _pair(figure(a), figure(b))
        table.append(_line(words, figure(a), figure(b), say))
    table += [[words, *(_text(say, row) for row in (a, b)), ""] for words, say in _WORDS.items()]
    for title, of, say in (("whole run", "seconds", say_seconds), ("one step", "parts", say_short)):
        parts = [
            (row.get("step") or {}).get(of, {}) if of == "parts" else row.get(of, {})
            for row in (a, b)
        ]
        table.append([title, "", "", ""])
        table += [
            _line(f"  {name}", parts[0].get(name), parts[1].get(name), say)
            for name in dict.fromkeys([*parts[0], *parts[1]])
        ]
    saved = saving(b["total_usd"], a["total_usd"])
    return dict(
        plain(
            {
                "a": {"rank": a["rank"], "name": a["name"]},
                "b": {"rank": b["rank"], "name": b["name"]},
                "rows": rows,
                "table": table,
                "saved_usd": saved.usd,
                "saved_share": saved.share,
                "words": f"{_sum_of(a)}; {_sum_of(b)}: {say_saving(saved)}",
            }
        )
    )


_WORDS: dict[str, Callable[[Row], str]] = {
    "dollar range": lambda row: "{} to {}".format(*(say_cost(row["usd_range"][i]) for i in (0, 2))),
    "time range": lambda row: "{} to {}".format(
        *(say_seconds(row["hours_range"][i] * 3600) for i in (0, 2))
    ),
    "at a time": lambda row: f"{row['recipe']['micro_batch_tokens']:,} tokens",
    "checkpointing": lambda row: row["recipe"]["checkpointing"],
    "precision": lambda row: row["recipe"]["precision"],
    "sharding": lambda row: row["recipe"]["sharding"],
    "interruptions": lambda row: (
        "none" if row["spot"] is None else f"{row['spot']['n_interruptions']:.2g}"
    ),
    "price of": lambda row: row["price_date"],
    "you get": lambda row: row.get("you_get", "the weights"),
}


def _of(row: Row, group: str, name: str) -> float | None:
    return (row.get(group) or {}).get(name)


def _text(say: Callable[[Row], str], row: Row) -> str:
    with contextlib.suppress(KeyError, TypeError):  # a service says no more than its dollars
        return str(say(row))
    return "-"


def _pair(a: float | None, b: float | None) -> dict[str, float | None]:
    return {"a": a, "b": b, "ratio": b / a if a and b is not None else None}


def _line(words: str, a: float | None, b: float | None, say: Callable[[Any], str]) -> list[str]:
    return [
        words,
        *("-" if x is None else say(x) for x in (a, b)),
        f"{b / a:.2f}" if a and b else "",
    ]


def _sum_of(row: Row) -> str:
    """`2x RTX 4090 at $0.50 each for 7 h = $7.00`."""
    if row["kind"] == SERVICE:
        return f"{row['name']} = {say_cost(row['total_usd'])}"
    each = " each" if row["n_gpus"] > 1 else ""
    price = (
        "" if row["usd_per_gpu_hour"] is None else f" at {say_usd(row['usd_per_gpu_hour'])}{each}"
    )
    kind = " spot" if row["kind"] == "spot" else ""
    return (
        f"{row['n_gpus']}x {row['gpu']}{kind}{price} for {say_seconds(row['wall_s'])} ="
        f" {say_cost(row['total_usd'])}"
    )
