"""A plan as sections: the short answer, the whole one, one choice, two compared, the page."""

from __future__ import annotations

from collections.abc import Sequence

from farthing.planner.ranking import TIE
from farthing.planner.types import AGED_PRICE_DAYS, OLD_PRICE_DAYS
from farthing.report.blocks import (
    Bars,
    Block,
    Cell,
    Paragraph,
    Section,
    Stack,
    Table,
    listed,
    sections,
)
from farthing.report.html import page
from farthing.report.plan_scatter import cost_against_time
from farthing.report.plan_types import Choice, Refused, machine_name
from farthing.report.plan_view import PlanView
from farthing.report.plan_words import cost_range, say_short, time_range
from farthing.report.words import cards, lines, pairs, report, say, table
from farthing.units import plural, say_bytes, say_seconds, say_usd

N_BRIEF, N_WHOLE, N_PAGE, N_MEMORY, N_WHY_NOT, N_NAMED = 5, 10, 20, 14, 6, 5
ON_COMMAND_LINE = "given on the command line: "
_CUTS = {"why this rank": 40, "at": 6, "machine": 12}


def brief(view: PlanView, next_step: str = "", n_shown: int | None = None) -> list[Section]:
    """What to take, what it costs, what to check, and the command that is `next_step`."""
    best, limits, shown = view.best, limits_in_words(view), list(view.plans[: n_shown or N_BRIEF])
    if best is None:
        return report("plan.txt", "brief", view, None, view.answer, limits, TIE, False, 0, 0, "")
    to_do = f"{say('plan.txt', 'to_do', best)}: {cost_range(best)}"
    here = [one for one in view.plans if one.kind == "here" and one not in shown]
    supposed = f"{view.job.lengths_source.removeprefix(ON_COMMAND_LINE)}; {best.pace}"
    oldest = max(one.price_age_days for one in shown)
    old = oldest if oldest > OLD_PRICE_DAYS else 0
    facts = pairs("plan.txt", "facts", view, best, supposed, to_check(view, best), old)
    n_rest, n_refused = len(view.plans) - len(shown), view.n_offers - view.n_plans
    cheapest = min(one.total_usd for one in view.plans if one.is_priced or one is best)
    is_dearer = best.total_usd > cheapest
    rest = to_do, limits, TIE, is_dearer, n_rest, n_refused, next_step
    choices = choices_table([*shown, *here[:1]])
    found = report("plan.txt", "brief", view, best, *rest, choices=choices, facts=facts)
    return [*found, *beside(view)]


def limits_in_words(view: PlanView) -> str:
    return ", ".join(lines("plan.txt", "limits", view.job.limits))


def to_check(view: PlanView, best: Choice) -> str:
    """The one thing that is most likely to make the plan wrong."""
    return lines("plan.txt", "to_check", view.job, best)[0]


def choices_table(choices: Sequence[Choice]) -> Table:
    """A line a choice; a column that says nothing is left out."""
    heads, rows, *_ = table("plan.txt", "choices_table", choices, AGED_PRICE_DAYS)
    kept = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    shown = tuple(tuple(row[i] for i in kept) for row in rows)
    return Table(tuple(heads[i] for i in kept), shown, "Choices", cuts=_CUTS)


def whole(view: PlanView, limit: int | None = None) -> list[Section]:
    """What to do first, then the choices, then the reasons."""
    shown = view.plans[: limit or N_WHOLE]
    n_rest, n_also = len(view.plans) - len(shown), sum(row.n_also for row in shown)
    choices = choices_table(shown)
    return [
        *header(view),
        *(report("plan.txt", "choices", n_rest, n_also, TIE, table=choices) if shown else ()),
        *report("plan.txt", "other_ways", view),
        *why_not(view),
        *report("plan.txt", "savings", view),
        *beside(view),
        *report("plan.txt", "services", view),
        *report("plan.txt", "sources", view, view.best),
    ]


def header(view: PlanView) -> list[Section]:
    return report("plan.txt", "header", view, limits_in_words(view))


def why_not(view: PlanView) -> list[Section]:
    """Refusals by reason, the commonest first, or the nearest where nothing can."""
    reasons: dict[tuple[str, str], list[Refused]] = {}
    for one in view.rejected:
        if one.kind not in ("here", "own"):
            reasons.setdefault((one.cause, one.change_kind), []).append(one)
    groups = [  # the nearest first
        (
            sum(one.n_offers for one in ones),
            list(dict.fromkeys(machine_name(one.n_gpus, one.gpu) for one in ones)),
            ones[0],
        )
        for ones in reasons.values()
    ]
    if view.plans:
        groups.sort(key=lambda group: -group[0])
    n_all = sum(n for n, *_ in groups)
    return report("plan.txt", "why_not", groups[:N_WHY_NOT], n_all, len(groups), N_NAMED)


def beside(view: PlanView) -> list[Section]:
    """What was asked for beside the choices, such as serving or own machines."""
    blocks: dict[str, Block] = {}
    if view.years:
        title = f"{view.years.runs_per_month:g} runs a month"
        blocks["years"] = table("plan.txt", "years_table", view.years)._replace(caption=title)
    if view.serving and view.serving.rows:
        shown = table("plan.txt", "serving_table", view.serving.shown)
        blocks["serving"] = shown._replace(title="Serving")
    return report("plan.txt", "beside", view, N_WHY_NOT, **blocks)


def ways_out(view: PlanView) -> list[str]:
    """The nearest ways to make the job possible."""
    return lines("plan.txt", "ways_out", view.nearest)


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
        f"Plan {row.rank}: {row.name}", (Paragraph(row.why), pairs("plan.txt", "explained", row))
    )
    return sections(head, *(Section("", (bar,)) for bar in bars), listed("", row.price_notes))


def compared(view: PlanView) -> Section | None:
    found = view.comparison
    if found is None:
        return None
    heads = ("", f"#{found.a}", f"#{found.b}", "#ratio")
    return Section(
        "", (Paragraph(found.words, "answer"), Table(heads, found.table, "Side by side"))
    )


def plan_page(view: PlanView) -> str:
    rows, best = view.plans, view.best
    found: list[Section | None] = [*header(view), compared(view)]
    if best is not None:
        found.append(Section("", (cards("plan.txt", "cards", best),)))
        if drawing := cost_against_time(rows, best):
            found.append(Section("Cost against time", (drawing,)))
        note = Paragraph("* no other choice is both cheaper and sooner.", "soft")
        choices = Section("Choices", (note, choices_table(rows)._replace(n_open=N_PAGE)))
        found += [_memory(rows), *explained(best), choices]
    else:
        found.append(listed("The nearest ways", ways_out(view)))
    for name in ("other_ways", "services", "savings"):
        found += report("plan.txt", name, view)
    found += [*beside(view), _why_not(view), *report("plan.txt", "page_sources", view, best)]
    title = f"farthing plan: {view.job.model}"
    return page("farthing plan", title, sections(*found), f"farthing {view.version}, {view.date}")


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
    words = "Each bar is the whole memory of its GPU, grey where free. Of the recipes that fit, "
    words += "the quickest is taken."
    found = Table(heads, tuple(cells), "Memory", words, has_key=True)
    return Section("Memory of one GPU", (found,))


def _why_not(view: PlanView) -> Section | None:
    n = plural(view.n_offers - view.n_plans, "offer")
    rows = table("plan.txt", "refused_table", view.rejected)._replace(title="Why not", n_open=40)
    return Section(f"Why not the other {n}", (rows,)) if view.rejected else None
