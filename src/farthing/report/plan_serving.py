"""What answering with the trained model costs, as plain values and as the cells of a table. Refuses
to draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from farthing.planner.serving import (
    ERROR,
    ERROR_UNSEEN,
    SEEN,
    SERVERLESS_TIMES,
    WARM_S,
    Served,
    Traffic,
    serve,
)
from farthing.report.plan_words import LOCAL, OWN, machine_of, say_cost
from farthing.storage.files import Json
from farthing.units import say_seconds

if TYPE_CHECKING:
    from farthing.planner.inputs import Study

LOADS = (1.0, 0.3, 0.05)
COLUMNS = (
    "=machine",
    "=weights",
    "#GB",
    "#streams",
    "#tok/s",
    "#first token",
    "#answer",
    "#$/month on",
    "#$/month to zero",
    "#$/M in",
    "#$/M out",
)
_N_SHOWN = 8
_ASKED = ("requests_per_day", "input_tokens", "output_tokens", "latency_s")
Row = Mapping[str, Any]


def serving_view(study: Study, traffic: Traffic) -> Json:
    """The traffic on every kind of machine that was asked for. Raises `InputError` where serving is
    not known.
    """
    offers = [plan.offer for plan in study.answer.plans] + [
        one.offer for one in study.answer.rejected
    ]
    found, refused = serve(study.wanted.shape, traffic, offers)
    rows = [_row(one) for one in found]
    return {
        "traffic": {name: getattr(traffic, name) for name in _ASKED},
        "answer": _answer(rows, traffic),
        "rows": rows,
        "refused": [one._asdict() for one in refused],
        "assumptions": [
            (
                "engines on NVIDIA GPUs as they were published from 2023 to 2026: tokens/s within"
                f" {ERROR:.0%}, {ERROR_UNSEEN:.0%} on GPUs without a row"
            ),
            (
                f"going to zero costs {SERVERLESS_TIMES:g} times the hourly price while it is on,"
                f" which it stays for {WARM_S:.0f} s after each answer"
            ),
            (
                "`farthing export` writes bf16; the others take a tool that quantizes, and what"
                " that loses is not judged here"
            ),
            "many adapters of one base model can share a machine: k of them cost a k-th each",
        ],
    }


def _row(one: Served) -> Json:
    server, traffic = one.server, one.traffic
    error = ERROR if server.gpu.name in SEEN else ERROR_UNSEEN
    speed = one.capacity_tokens_per_s
    busy = min(1.0, one.load / one.n_machines)
    return {
        "machine": machine_of(server.n_gpus, server.gpu.name),
        "gpu": server.gpu.name,
        "n_gpus": server.n_gpus,
        "precision": server.precision,
        "provider": one.offer.provider,
        "usd_per_hour": one.usd_per_hour,
        "price_date": one.offer.date.isoformat(),
        "weights_bytes": server.weights_bytes,
        "cache_bytes_per_token": server.cache_bytes_per_token,
        "room_bytes": server.room_bytes,
        "most_tokens": server.room_bytes / server.cache_bytes_per_token,
        "n_streams": one.n_streams,
        "tokens_per_s": speed,
        "tokens_per_s_range": [speed * (1 - error), speed * (1 + error)],
        "one_stream_tokens_per_s": 1 / server.decode_s(traffic, 1),
        "first_token_s": server.prefill_s(traffic),
        "answer_s": one.alone_s,
        "load": one.load,
        "n_machines": one.n_machines,
        "always_on_usd_per_month": one.always_on_usd,
        "to_zero_usd_per_month": one.to_zero_usd(),
        "to_zero_first_token_s": one.cold_start_s + server.prefill_s(traffic),
        "break_even_requests_per_hour": one.break_even_requests_per_hour,
        "usd_per_million_at_load": {
            f"{load:.0%}": dict(zip(("input", "output"), one.usd_per_million(load), strict=True))
            for load in LOADS
        },
        "usd_per_million": dict(zip(("input", "output"), one.usd_per_million(busy), strict=True)),
    }


def _answer(rows: list[Json], traffic: Traffic) -> str:
    what = (
        f"{traffic.requests_per_day:,.0f} requests a day of {traffic.input_tokens:,.0f} tokens in"
        " and "
    )
    what += f"{traffic.output_tokens:,.0f} out"
    if not rows:
        return f"No machine of these can answer {what} as asked."
    best = rows[0]
    on, zero = best["always_on_usd_per_month"], best["to_zero_usd_per_month"]
    machines = f"{best['n_machines']} machines of " if best["n_machines"] > 1 else ""
    at = {OWN: " of your own", LOCAL: f" of {LOCAL}"}.get(
        best["provider"], f" at {best['provider']}"
    )
    where = f"{machines}{best['machine']}{at} in {best['precision']}"
    way = "always on" if on <= zero else "going to zero between answers"
    other = f"going to zero {say_cost(zero)}" if on <= zero else f"always on {say_cost(on)}"
    return (
        f"Serving {what}: {where}, {say_cost(min(on, zero))} a month {way} ({other}); always on is"
        f" cheaper above {best['break_even_requests_per_hour']:,.0f} requests an hour. After a"
        f" silence the first token takes {say_seconds(best['to_zero_first_token_s'])} from zero,"
        f" else {_short(best['first_token_s'])}."
    )


def serving_cells(row: Row) -> tuple[str, ...]:
    """A row as text, in the order of `COLUMNS`."""
    more = f" x{row['n_machines']}" if row["n_machines"] > 1 else ""
    per_million = row["usd_per_million"]
    return (
        f"{row['machine']}{more}, {row['provider']}",
        row["precision"],
        f"{row['weights_bytes'] / 1e9:.1f}",
        f"{row['n_streams']:,}",
        f"{row['tokens_per_s']:,.0f}",
        _short(row["first_token_s"]),
        _short(row["answer_s"]),
        say_cost(row["always_on_usd_per_month"]),
        say_cost(row["to_zero_usd_per_month"]),
        say_cost(per_million["input"]),
        say_cost(per_million["output"]),
    )


def shown(serving: Row) -> list[Row]:
    """The cheapest machine in every precision that it has, then the others in their cheapest,
    `_N_SHOWN` at most.
    """
    rows = serving["rows"]
    of_best = [row for row in rows if row["machine"] == rows[0]["machine"]] if rows else []
    others = {row["machine"]: row for row in reversed(rows) if row not in of_best}
    ordered = sorted(others.values(), key=rows.index)
    return [*of_best, *ordered][:_N_SHOWN]


def _short(seconds: float) -> str:
    return (
        say_seconds(seconds)
        if seconds >= 10
        else f"{seconds:.1f} s"
        if seconds >= 1
        else f"{seconds * 1000:.0f} ms"
    )
