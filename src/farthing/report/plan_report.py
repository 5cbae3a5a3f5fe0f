"""A plan as sections: the short answer, the whole one, one choice explained, two compared, and the
page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from farthing.planner.ranking import TIE
from farthing.planner.types import AGED_PRICE_DAYS, OLD_PRICE_DAYS
from farthing.report.blocks import (
    Bars,
    Block,
    Cell,
    Listed,
    Section,
    Stack,
    Table,
    Text,
    listed,
    sections,
)
from farthing.report.html import page
from farthing.report.plan_asides import SERVING_HEADS
from farthing.report.plan_scatter import cost_against_time
from farthing.report.plan_types import Choice, Refused, machine_name
from farthing.report.plan_view import PlanView
from farthing.report.plan_words import cost_range, say_cost, say_short, span, time_range
from farthing.report.words import cards, lines, pairs, say
from farthing.units import plural, say_bytes, say_seconds, say_usd

N_BRIEF, N_WHOLE, N_PAGE, N_MEMORY, N_WHY_NOT, N_NAMED = 5, 10, 20, 14, 6, 5
ON_COMMAND_LINE = "given on the command line: "
LEGEND = (
    f"By dollars, within {TIE:.0%} or a cent the sooner first; the first can be had at its price. "
    "* "
    "no other choice is both cheaper and sooner. Ranges hold for 4 of 5 runs. wait: for spot "
    "capacity, not paid for. price: `from` is the lowest of a marketplace, `buy` what has to be "
    "bought"
)
_CUTS = {"why this rank": 40, "at": 6, "machine": 12}


# ---- the short answer ----


def brief(view: PlanView, next_step: str = "", n_shown: int | None = None) -> list[Section]:
    """What to take, what it costs, what to check, and the command that is `next_step`."""
    best, job = view.best, view.job
    answer = (
        view.answer if best is None else f"{say('plan.txt', 'to_do', best)}: {cost_range(best)}"
    )
    head: list[Block] = [Text(answer, "answer")]
    if best is not None:
        head.append(Text(say("plan.txt", "time_and_memory", best)))
    head.append(Text(say("plan.txt", "job_in_short", job), "soft"))
    if limits := limits_in_words(view):
        chance = f"; chance {best.chance:.0%}" if best and best.chance is not None else ""
        head.append(Text(f"limits: {limits}{chance}", "soft"))
    if best is None:
        return sections(Section("", tuple(head)))
    shown = list(view.plans[: n_shown or N_BRIEF])
    here = next((one for one in view.plans if one.kind == "here"), None)
    rest = [Text(words, "soft") for words in (_order(view), _the_rest(view, shown)) if words]
    choices = shown if here is None or here in shown else [*shown, here]
    supposed = re.sub(r" \([^()]*\)|, and memory .*", "", best.confidence)
    supposed = f"{job.lengths_source.removeprefix(ON_COMMAND_LINE)}; {supposed}"
    oldest = max(one.price_age_days for one in shown)
    old = oldest if oldest > OLD_PRICE_DAYS else 0
    last: list[Block] = [
        pairs("plan.txt", "facts", view, best, supposed, to_check(view, best), old)
    ]
    if next_step:
        last.append(Text(f"next      {next_step}", "code"))
    table = choices_table(choices)
    return sections(
        Section("", tuple(head)),
        Section("", (table, *rest)),
        Section("", tuple(last)),
        *beside(view),
    )


def limits_in_words(view: PlanView) -> str:
    """`at most $5.00, done in 12 h from now`; nothing where there are none."""
    return ", ".join(lines("plan.txt", "limits", view.job.limits))


def _order(view: PlanView) -> str:
    rows, best = view.plans, view.best
    cheapest = min(one.total_usd for one in rows if one.is_priced or one is rows[0])
    first = best.total_usd if best else cheapest
    but = f", within {TIE:.0%} or a cent by time"
    if first > cheapest:
        but = "; 1 is the first to be had at its price"
    return f"By dollars{but}. Ranges: 4 of 5 runs."


def _the_rest(view: PlanView, shown: Sequence[Choice]) -> str:
    n_rest, n_refused = len(view.plans) - len(shown), sum(one.n_offers for one in view.rejected)
    parts = [f"{plural(n_rest, 'more choice')}"] if n_rest else []
    parts += [f"{plural(n_refused, 'offer')} refused"] if n_refused else []
    return f"{', '.join(parts)}: --all" if parts else ""


def to_check(view: PlanView, best: Choice) -> str:
    """The one thing that is most likely to make the plan wrong."""
    return lines("plan.txt", "to_check", view.job, best)[0]


def choices_table(choices: Sequence[Choice]) -> Table:
    """A line a choice; a column that says nothing is left out."""
    heads = (
        "##",
        "machine",
        "at",
        "#$",
        "range",
        "#time",
        "range ",
        "#wait",
        "price, age",
        "why this rank",
    )
    rows = [_cells(one) for one in choices]
    kept = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    table = tuple(tuple(row[i] for i in kept) for row in rows)
    return Table(tuple(heads[i] for i in kept), table, "Choices", cuts=_CUTS)


def _cells(one: Choice) -> tuple[str, ...]:
    low, usd, high = (say_cost(value).removeprefix("$") for value in one.usd_range)
    soon, likely, late = (value * 3600 for value in one.hours_range)
    return (
        f"{one.rank}{'*' if one.on_front else ''}",
        one.machine + (" spot" if one.spot else ""),
        one.provider if one.kind != "here" else "here",
        usd if one.is_priced else "?",
        f"{low}-{high}" if one.is_priced else "",
        span(likely, likely),
        span(soon, late),
        span(one.waiting_s, one.waiting_s) if one.waiting_s >= 60 else "",
        _price_words(one),
        one.why,
    )


def _price_words(one: Choice) -> str:
    """`from`, `389d`, `buy $9.99`: whose price it is, its age where it is not new, what to buy."""
    words = [one.price_is] if one.price_is else []
    if one.price_age_days >= AGED_PRICE_DAYS:
        words.append(say_age(one.price_age_days))
    if one.must_buy_more:
        words.append(f"buy {say_cost(one.up_front_usd)}")
    return " ".join(words)


# ---- the whole answer ----


def say_age(days: int) -> str:
    """Short, for a column: 391d, or 5y from two years on."""
    return f"{days}d" if days < 730 else f"{days // 365}y"


def whole(view: PlanView, limit: int | None = None) -> list[Section]:
    """What to do first, then the choices, then the reasons."""
    shown = view.plans[: limit or N_WHOLE]
    n_rest, n_also = len(view.plans) - len(shown), sum(row.n_also for row in shown)
    more = [f"{plural(n_rest, 'more choice')} (--limit N)"] if n_rest > 0 else []
    also = f"{plural(n_also, 'offer')} like these in other places, at the same price or more"
    more += [also] if n_also else []
    rest = [Text(f"and {'; '.join(more)}", "soft")] if more else []
    legend = Text(LEGEND, "soft")
    table: tuple[Block, ...] = (choices_table(shown), *rest, legend) if shown else ()
    ways = [f"{name}: {words}" for name, words in other_ways(view).items()]
    return sections(
        header(view),
        Section("", table),
        listed("Other ways", ways),
        why_not(view),
        savings(view),
        *beside(view),
        services(view),
        *sources(view),
    )


def header(view: PlanView) -> Section:
    """The answer in a sentence, and the question in a few lines."""
    blocks = [Text(view.answer, "answer"), Text(summary(view), "soft")]
    blocks.append(Text(f"lengths: {view.job.lengths_source}", "soft"))
    if words := limits_in_words(view):
        best = view.best
        chance = f"; in time with {best.chance:.0%}" if best and best.chance is not None else ""
        blocks.append(Text(f"limits: {words}{chance}", "soft"))
    return Section("", tuple(blocks))


def summary(view: PlanView) -> str:
    """The job in one line."""
    return say("plan.txt", "summary", view.job)


def other_ways(view: PlanView) -> dict[str, str]:
    """This machine, what is sooner, spot or not, two GPUs or one."""
    found = {} if view.here is None else {view.here.name: view.here.words}
    pairs = ("sooner", view.sooner), ("spot or not", view.spot_or_not)
    for name, one in (*pairs, ("two cheap or one dear", view.two_or_one)):
        if one is not None:
            found[name] = one.words
    return found


def why_not(view: PlanView) -> Section | None:
    """Refusals for one reason, of whatever GPUs, in two lines; the commonest first, or the nearest
    where nothing can.
    """
    groups: dict[tuple[str, str], list[Refused]] = {}
    rejected = [one for one in view.rejected if one.kind not in ("here", "own")]
    for one in rejected:
        groups.setdefault((one.cause, one.change_kind), []).append(one)
    ordered = list(groups.values())  # the nearest first
    if view.plans:
        ordered.sort(key=lambda ones: -sum(one.n_offers for one in ones))
    items = []
    for ones in ordered[:N_WHY_NOT]:
        names = list(dict.fromkeys(machine_name(one.n_gpus, one.gpu) for one in ones))
        more = f" and {len(names) - N_NAMED} more" if len(names) > N_NAMED else ""
        n = plural(sum(one.n_offers for one in ones), "offer")
        such = "" if len(names) == 1 else f"{names[0]} "
        reason = f"{such}{ones[0].reason}; try {ones[0].change}"
        items.append(f"{n}: {', '.join(names[:N_NAMED])}{more}: {reason}")
    if len(ordered) > N_WHY_NOT:
        items.append(
            f"and {plural(len(ordered) - N_WHY_NOT, 'more reason')}: --json --all has them"
        )
    n_all = plural(sum(one.n_offers for one in rejected), "offer")
    return listed(f"Why not the other {n_all}", items)


def savings(view: PlanView) -> Section | None:
    blocks: list[Block] = []
    if view.savings is not None:
        steps = tuple(one.words for one in view.savings.rungs)
        blocks = [Text(view.savings.words), Listed(steps)]
    if view.methods:
        ways = [
            f"{one.method} on no machine of the offers asked for"
            if one.usd is None
            else f"{one.method} {say_cost(one.usd)} ({one.where})"
            for one in view.methods
        ]
        blocks.append(Text(f"By method: {', '.join(ways)}"))
    return Section("What each choice saves", tuple(blocks)) if blocks else None


def beside(view: PlanView) -> list[Section]:
    """What was asked for beside the choices: so many runs, figures of one's own, own machines,
    serving, what was paid.
    """
    found: list[Section | None] = []
    if view.runs is not None:
        found.append(listed(plural(view.runs.n_runs, "run"), view.runs.words))
    if view.by_hand is not None:
        found.append(listed("By your own figures (P: the price of an hour)", view.by_hand.words))
    for own in view.own:
        blocks: list[Block] = [Text(own.words)]
        if own.total_usd is not None:
            parts = " + ".join(f"{name} {say_usd(usd)}" for name, usd in own.usd.items())
            shared = f" (wear shared by {own.hours_per_month:,.0f} h of use a month)"
            blocks.append(Text(f"{parts}{shared if own.price_usd else ''}", "soft"))
            if own.price_usd and own.against:
                blocks.append(Listed(tuple(one.words for one in own.against)))
        found.append(Section(f"Own {own.name}", tuple(blocks)))
    if years := view.years:
        title = f"{years.runs_per_month:g} runs a month"
        heads = ("way", "#a year", "#three years", "#saved in a year")
        notes = [Text(note, "soft") for note in years.notes]
        found.append(Section(title, (Table(heads, years.rows, caption=title), *notes)))
    if serving := view.serving:
        rows = tuple(row.cells for row in serving.shown) if serving.rows else ()
        blocks = [Text(serving.answer)]
        if rows:
            blocks.append(Table(SERVING_HEADS, rows, "Serving"))
            n = len(serving.rows) - len(rows)
            more = f"and {n} more (--json --all has all); " if n > 0 else ""
            what = "$/M out: a million tokens written at this traffic, always on; GB: weights alone"
            blocks.append(Text(more + what, "soft"))
            blocks += [Text(words, "soft") for words in serving.assumptions]
        else:
            why = [f"{x.n_gpus}x {x.gpu} in {x.precision}: {x.why}" for x in serving.refused]
            blocks.append(Listed(tuple(why[:N_WHY_NOT])))
        found.append(Section("Serving", tuple(blocks)))
    if view.paid is not None:
        found.append(Section("Paid", (Text(view.paid.words),)))
    return sections(*found)


def services(view: PlanView) -> Section | None:
    title = "Services that fine-tune for you, by the trained token; hosting comes on top"
    return listed(title, (say("plan.txt", "service", one) for one in view.managed))


def sources(view: PlanView) -> list[Section]:
    best, found = view.best, []
    blocks = [Text(view.prices.words)]
    if best is not None:
        if best.is_rented:
            blocks.append(Text(f"the one above: {say('plan.txt', 'price', best)}", "soft"))
        found = [Section("Confidence", (Text(best.confidence),))]
    own = view.job.lengths_source
    notes = [Text(note, "soft") for note in view.notes if not note.endswith(own)]
    found = [Section("Prices", tuple(blocks)), *found, Section("Notes", tuple(notes))]
    return sections(*found, Section("Assumptions", (Text("; ".join(view.assumptions)),)))


def ways_out(view: PlanView) -> list[str]:
    """The nearest ways to make the job possible."""
    return lines("plan.txt", "ways_out", view.nearest)


# ---- one choice ----


def explained(row: Choice) -> list[Section]:
    """What one choice is made of: recipe, memory, step, whole run, dollars, spot."""
    memory, step = row.memory, row.step
    low, _, high = (say_bytes(n) for n in memory.range_bytes)
    device = "Memory" if row.is_cpu else "Memory of one GPU"
    title = f"{device} ({low} to {high}), at its peak in the {memory.moment}, of what it has"
    free, whole = max(0.0, memory.spare_bytes), f"The whole run: {time_range(row)}"
    bars = (
        Bars(title, memory.parts, memory.capacity_bytes, say_bytes, free),
        Bars("One step", step.parts, step.seconds, say_short),
        Bars(whole, row.seconds, row.wall_s, say_seconds),
        Bars(f"Dollars: {cost_range(row)}", row.usd, row.total_usd, say_usd),
    )
    head = Section(
        f"Plan {row.rank}: {row.name}", (Text(row.why), pairs("plan.txt", "explained", row))
    )
    return sections(head, *(Section("", (bar,)) for bar in bars), listed("", row.price_notes))


def compared(view: PlanView) -> Section | None:
    """Two ways side by side, with ratios."""
    found = view.comparison
    if found is None:
        return None
    heads = ("", f"#{found.a}", f"#{found.b}", "#ratio")
    return Section("", (Text(found.words, "answer"), Table(heads, found.table, "Side by side")))


# ---- the page ----


def plan_page(view: PlanView) -> str:
    """The whole page."""
    rows, best = view.plans, view.best or (view.plans[0] if view.plans else None)
    report: list[Section | None] = [header(view), compared(view)]
    if best is not None:
        report += [Section("", (cards("plan.txt", "cards", best),))]
        if drawing := cost_against_time(rows, best):
            report.append(Section("Cost against time", (drawing,)))
        note = Text("* no other choice is both cheaper and sooner.", "soft")
        choices = Section("Choices", (note, choices_table(rows)._replace(n_open=N_PAGE)))
        report += [_memory(rows), *explained(best), choices]
    else:
        report.append(listed("The nearest ways", ways_out(view), is_ordered=True))
    ways = [f"{name}: {words}" for name, words in other_ways(view).items()]
    report += [listed("Other ways", ways), services(view), savings(view), *beside(view)]
    report += [_why_not(view), listed("Assumptions", view.assumptions)]
    words = [view.prices.words, *view.notes]
    if best is not None and best.is_rented:
        words.insert(1, f"the price of {best.name}: {best.price_source}, {best.price_date}")
    report.append(listed("Sources", words))
    title = f"farthing plan: {view.job.model}"
    return page("farthing plan", title, sections(*report), f"farthing {view.version}, {view.date}")


def _memory(rows: Sequence[Choice]) -> Section:
    """The memory of the best plan of each GPU, against what the GPU has."""
    first: dict[tuple[str, int], Choice] = {}
    for row in rows:
        first.setdefault((row.gpu, row.n_gpus), row)
    cells: list[tuple[Cell, ...]] = []
    for row in list(first.values())[:N_MEMORY]:
        memory, recipe = row.memory, row.recipe
        low, needed, high = (say_bytes(n) for n in memory.range_bytes)
        bar = Stack(memory.parts, memory.capacity_bytes)
        computed = f"{recipe.micro_batch_tokens:,} tokens, {recipe.checkpointing}"
        there = say_bytes(memory.capacity_bytes)
        cells.append((row.machine, bar, needed, f"{low} to {high}", there, computed))
    heads = ("=GPU", "|", "#needed", "#range", "#there", "micro-batch, checkpointing")
    words = (
        "Each bar is the whole memory of its GPU, grey where free. Of the recipes that fit, the "
    )
    words += "quickest is taken."
    table = Table(heads, tuple(cells), "Memory", words, has_key=True)
    return Section("Memory of one GPU", (table,))


def _why_not(view: PlanView) -> Section | None:
    rows = tuple(
        (
            machine_name(one.n_gpus, one.gpu),
            one.reason + (f" ({one.detail})" if one.detail else ""),
            one.change,
            one.kind,
            f"{one.n_offers:,}",
            "" if one.usd_per_hour is None else say_usd(one.usd_per_hour),
        )
        for one in view.rejected
    )
    heads = ("GPU", "why not", "what would let it in", "=kind", "#offers", "#from, an hour")
    n = plural(sum(one.n_offers for one in view.rejected), "offer")
    table = Table(heads, rows, "Why not", n_open=40)
    return Section(f"Why not the other {n}", (table,)) if rows else None
