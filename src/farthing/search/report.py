"""A search as sections, for the terminal and for its page: one HTML file without scripts."""

from __future__ import annotations

from collections.abc import Sequence

from farthing.report.blocks import (
    Cell,
    Drawing,
    Listed,
    Paragraph,
    Section,
    Table,
    listed,
    sections,
)
from farthing.report.chart import Axes, Line, figure
from farthing.report.html import page
from farthing.search.halving import SHARES
from farthing.storage.files import Json
from farthing.units import plural, say_count, say_seconds, say_usd


def search_report(receipt: Json) -> list[Section]:
    """The receipt for a terminal."""
    return sections(
        Section("", (_trials(receipt),)),
        Section("", (_rungs(receipt),)),
        Section("", (Listed((*in_words(receipt), _dollars(receipt))),)),
        _next(receipt)._replace(title=""),
    )


def search_page(receipt: Json) -> str:
    """The page; every text of others is escaped."""
    reason = f", {receipt['reason']}" if receipt["reason"] else ""
    head = Paragraph(
        f"{receipt['folder']}: {receipt['state']}{reason}. {_dollars(receipt)}.", "answer"
    )
    scored = [each for each in receipt["trials"] if each["score"] is not None]
    drawings = [_by_dollars(receipt, scored), _curves(receipt, scored)] if scored else []
    report = sections(
        Section("", (head,)),
        listed("Result", in_words(receipt)),
        _next(receipt),
        *(Section(drawing.title, (drawing,)) for drawing in drawings),
        Section("Trials", (_trials(receipt),)),
        Section("Rungs", (_rungs(receipt),)),
    )
    title = f"farthing search: {receipt['folder']}"
    return page("farthing search", title, report, f"farthing {receipt['version']}")


def _next(receipt: Json) -> Section:
    return Section("Next", tuple(Paragraph(command, "code") for command in receipt["next"]))


def bill_report(bill: Json) -> list[Section]:
    """What a search will cost, and what to know before."""
    rungs = ", ".join(
        f"{plural(each['trials'], 'trial')} to {_percent(each['fraction'])} of the steps"
        for each in bill["rungs"]
    )
    n, runs = bill["n_settings"], bill["full_trainings"]
    possible = "" if n is None else f" of {plural(n, 'possible setting')}"
    words = (
        f"search: {plural(bill['trials'], 'trial')}{possible}. {rungs}: as much training as"
        f" {runs:.3g} full trial{'' if runs == 1 else 's'}"
    )
    rows = tuple(
        (
            each["name"],
            say_usd(each["usd"]),
            f"{say_usd(each['usd_range'][0])} to {say_usd(each['usd_range'][-1])}",
            say_seconds(each["hours"] * 3600),
        )
        for each in bill["machines"][:5]
    )
    table = Table(("the search on", "#dollars", "range", "#time"), rows)
    return [Section("", (*map(Paragraph, (words, *bill["warnings"])), table))]


def in_words(receipt: Json) -> list[str]:
    """The receipt in sentences, the winner first."""
    lines, metric = [], receipt["metric"]
    scale, points = (100, " points") if metric in SHARES else (1, "")
    if winner := receipt["winner"]:
        lines.append(f"winner: trial {winner['trial']}, {metric} {_score(winner)}")
        if winner["fraction"] < 1.0:
            lines.append(f"trained for {_percent(winner['fraction'])} of its steps only")
    if margin := receipt["margin"]:
        noise = {True: ", within noise", False: ", beyond noise", None: ""}
        said, bounds = f"{scale * margin['better_by']:.3g}{points}", margin["interval"]
        said += f" ({scale * bounds[0]:.2g} to {scale * bounds[1]:.2g})" if bounds else ""
        said += noise[margin["is_within_noise"]]
        if margin["at_fraction"] < 1:
            said += f" at {_percent(margin['at_fraction'])} of their steps"
        lines.append(f"better than trial {margin['second']} by {said}")
    lines += [
        f"trial {row['trial']}: {row['metric']} {_score(row)} on {row['n_examples']:,} examples"
        " that no choice was made on"
        for row in receipt["confirmed"]
    ]
    for each in receipt["models"] if len(receipt["models"]) > 1 else ():
        said = "not tried" if each["trial"] is None else f"{metric} {_score(each)}"
        usd = each["usd_per_million_tokens"]
        serves = f"; serves at {say_usd(usd)} a million tokens" if usd else ""
        lines.append(f"{each['model']} ({say_count(each['n_parameters'])}): {said}{serves}")
    does, unit = f"lower the {metric} by", ""
    if receipt["greater_is_better"]:
        does, unit = "add", points or f" {metric}"
    for each in receipt["gains"]:
        is_rows = each["of"] == "rows"
        what = f"{each['more']:,} more rows" if is_rows else "another epoch"
        span = f"{scale * each['low']:.2g} to {scale * each['high']:.2g}{unit}"
        basis = "" if is_rows else " (by the curve within this run)"
        lines.append(f"{what} should {does} {span} for {say_usd(each['usd'])}{basis}")
    saved = receipt["saved"]
    lines.append(
        f"saved {say_usd(saved['stopping_usd'])} by stopping trials,"
        f" {say_usd(saved['promotion_usd'])} by promoting from checkpoints,"
        f" {say_usd(saved['sharing_usd'])} by tokenizing once"
    )
    return lines


def _dollars(receipt: Json) -> str:
    said = f"{say_usd(receipt['usd'])} for {plural(len(receipt['trials']), 'trial')}"
    if receipt["max_usd"] is not None:
        said += f" of the cap of {say_usd(receipt['max_usd'])}"
    planned, machines = receipt["planned_usd"], receipt["machines"]
    said += f"; {say_usd(planned)} were planned" if planned else ""
    usd = sum(each["usd"] for each in machines)
    return said + (f"; {say_usd(usd)} for {plural(len(machines), 'machine')}" if machines else "")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _score(row: Json) -> str:
    """A score with its interval, where it has one."""
    if row["score"] is None:
        return ""
    bounds = row["interval"]
    return f"{row['score']:.4g}" + (f" ({bounds[0]:.3g} to {bounds[1]:.3g})" if bounds else "")


def _trials(receipt: Json) -> Table:
    """Every trial, the winner first."""
    rows = []
    for each in sorted(receipt["trials"], key=lambda one: not _is_winner(receipt, one)):
        values = [each["settings"].get(key, "") for key in receipt["varied"]]
        settings = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in values]
        state = each["state"] + (f" on {each['n_rows']:,} rows" if each["n_rows"] else "")
        state += f": {each['reason']}" if each["reason"] else ""
        figures = _percent(each["fraction"]), _score(each), say_usd(each["usd"]), state[:120]
        rows.append((str(each["trial"]), *settings, *figures))
    heads = "#trial", *receipt["varied"], "#trained", f"={receipt['metric']}", "#dollars", "state"
    return Table(heads, tuple(rows), caption="Trials")


def _rungs(receipt: Json) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (_percent(each["fraction"]), str(each["n_trials"]), say_usd(each["usd"]))
        for each in receipt["rungs"]
    )
    return Table(("#of the steps", "#trials", "#dollars"), rows, caption="Rungs")


# ---- drawings ----


def _is_winner(receipt: Json, trial: Json) -> bool:
    return bool(receipt["winner"]) and trial["trial"] == receipt["winner"]["trial"]


def _edges(values: Sequence[float]) -> tuple[float, float]:
    """A little below the least and above the largest."""
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    return low - room, high + room


def _by_dollars(receipt: Json, scored: Sequence[Json]) -> Drawing:
    at = {each["trial"]: (each["usd"], each["score"]) for each in scored}
    usd, scores = zip(*at.values(), strict=True)
    dots = []
    for each in scored:
        mark = "marked demand" if _is_winner(receipt, each) else "dot spot"
        words = f"trial {each['trial']}: {each['score']:.4g} for {say_usd(each['usd'])}"
        dots.append((mark, at[each["trial"]], 4.5, words))
    return figure(
        "Score against dollars",
        f"{receipt['metric']} of every trial by its dollars; the line joins those that no other"
        " beats for as few.",
        Axes(_edges(usd), _edges(scores), say_usd, "{:.4g}".format),
        key={"winner": "round c1", "other trials": "round c2"},
        paths=[("front", [at[trial] for trial in receipt["front"]])],
        dots=dots,
    )


def _curves(receipt: Json, scored: Sequence[Json]) -> Drawing:
    lines = []
    for each in sorted(scored, key=lambda one: _is_winner(receipt, one)):
        points = [(step / each["n_steps"], y) for step, y in each["curve"] if y is not None]
        colour = 1 if _is_winner(receipt, each) else 8
        lines.append(Line(f"trial {each['trial']}", points, colour, dots=True))
    scores = [y for line in lines for _, y in line.points]
    return figure(
        "Learning curves",
        f"{receipt['metric']} of every trial over its steps.",
        Axes((0.0, 1.0), _edges(scores), _percent, "{:.4g}".format),
        key={"winner": "c1", "other trials": "c8"},
        lines=lines,
    )
