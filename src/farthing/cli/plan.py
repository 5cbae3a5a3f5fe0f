"""`farthing plan`: every offer and recipe for a job, ranked, without torch and without network.
Trains nothing.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farthing import clock
from farthing.cli.console import complain, print_json, rich_console, write_page
from farthing.cli.parser import JOB, in_range
from farthing.errors import EXIT_FINISHED, EXIT_MISTAKE, InputError
from farthing.printable import printable

if TYPE_CHECKING:
    from farthing.report.blocks import Section
    from farthing.report.plan_view import PlanView

ARGUMENTS = {
    **JOB,
    "--gpu GPU...": 'only these GPUs: "RTX 4090", h100',
    "--provider PROVIDER...": "only these providers",
    "--offers {spot,on-demand}": "only these",
    "--budget USD": "maximum dollars, instead of limits.max_usd",
    "--deadline WHEN": 'finish by "2026-12-01 18:00", or within 12h, 90min, 2d',
    "--all": "show refusals with reasons, savings and sources too",
    "--explain [PLAN]": "show the parts of the best plan, or of the named one",
    "--compare A B": 'ranks, names, "A100 at $2.50 for 10h", "NAME: $250"',
    "--html FILE": "also write the plan as one self-contained page",
    "--json": "print everything as JSON",
}
RARE = {
    "--limit N": "choices to show; 0 shows all (default: 5; with --all 10, with --json all)",
    "--prices FILE": "use only the prices of this CSV file",
    "--serve [TRAFFIC]": (
        'add the cost of serving: "requests=2000/day,input=800,output=200,latency=2s", or'
        " nothing for the default traffic"
    ),
    "--region REGION...": "only these regions; a prefix such as us- works",
    "--max-gpus N:=8": "maximum GPUs of a machine",
    "--own GPU:PRICE:POWER...": 'your own GPU, such as "RTX 4090:1600usd:0.45kW"',
    "--runs N": "add the cost of N such runs",
    "--runs-per-month N:float": "add the yearly cost of N such runs a month",
    "--traces DIR": (
        "folder with your own traces of spot capacity, used instead of the built-in ones where"
        " they tell more"
    ),
    "--torch VERSION": (
        "torch version of rented machines, e.g. 2.13.0+cu126 (default: the one installed here)"
    ),
    "--examples N": "plan for N examples; with --mean-tokens without reading the data",
    "--mean-tokens M:float": "average tokens of these examples",
    "--paid USD": "a service's fee for this job, to compare with the cost here",
    "--samples-per-min N:float": "your own speed in samples a minute",
    "--tokens-per-s N:float": "your own speed in tokens a second",
    "--spot-discount SHARE": "discount of an hour on spot, e.g. 50%%",
    "--spot-overhead SHARE": "extra hours on spot, e.g. 10%%",
    "--interrupted-every TIME": "mean time between interruptions, e.g. 8h",
    "--restart TIME": "time to resume after an interruption, e.g. 3min",
    "--step-time BEFORE AFTER": "step time before and after a change, e.g. 200ms 130ms",
}


def run(arguments: argparse.Namespace) -> int:
    from farthing.report.plan_compare import compare, find_side
    from farthing.report.plan_report import plan_page

    view, bill = _view(arguments)
    impossible = None if view.plans else _impossible(arguments, view)
    if arguments.compare and not impossible:
        a, b = (find_side(view, name) for name in arguments.compare)
        view = replace(view, comparison=compare(a, b, arguments.runs, arguments.runs_per_month))
    if arguments.html is not None:
        write_page(Path(arguments.html), plan_page(view))
    if not arguments.json:
        _draw(arguments, view, bill, impossible)
        if arguments.html is not None:
            print(f"\nwrote {printable(arguments.html)}")
        return EXIT_FINISHED
    found = view.to_json(is_whole=arguments.all, limit=arguments.limit)
    if bill is not None:
        found["search"] = bill
    if impossible is None:
        print_json(found)
        return EXIT_FINISHED
    print_json(found | impossible.as_dict())
    complain(impossible)
    return EXIT_MISTAKE


def _view(arguments: argparse.Namespace) -> tuple[PlanView, Any]:
    """The plan to show, and the bill of the job as a search; None where it is none."""
    from farthing.planner.ownership import parse_owned
    from farthing.planner.serving import parse_traffic
    from farthing.planner.throughput_arithmetic import parse_figures
    from farthing.units import parse_usd

    given, now = vars(arguments), clock.now().replace(second=0, microsecond=0)
    for name, least in (("max_gpus", 1), ("limit", 0), ("examples", 1), ("runs", 1)):
        in_range(f"--{name.replace('_', '-')}", given[name], least)
    in_range("--runs-per-month", arguments.runs_per_month, 1e-6, 1e6)
    more = {
        "own": [parse_owned(text) for text in arguments.own],
        "budget_usd": _parsed(parse_usd, arguments.budget, "--budget", "--budget 5"),
        "deadline_s": _parsed(
            lambda text: _seconds_until(text, now),
            *(arguments.deadline, "--deadline", '"2026-12-01 18:00" or 12h'),
        ),
        "torch": arguments.torch,
        "traces": None if arguments.traces is None else Path(arguments.traces),
    }
    figures = parse_figures(given)
    paid_usd = _parsed(parse_usd, arguments.paid, "--paid", "--paid 5")
    traffic = None if arguments.serve is None else parse_traffic(arguments.serve)
    if arguments.html is not None:
        _check_page_path(Path(arguments.html))

    from farthing.config.preflight import load_job_or_tell_all, look_over
    from farthing.planner.inputs import PlanOptions, study_job
    from farthing.report.plan_view import plan_view

    with_data = arguments.examples is None
    job = load_job_or_tell_all(arguments.job, arguments.set, only_plans=True, with_data=with_data)
    look_over(job, only_plans=True, with_data=with_data)
    names = ("gpu", "provider", "region", "max_gpus", "prices", "mean_tokens")
    asked = {name: given[name] for name in names}
    asked |= {"kind": arguments.offers, "n_examples": arguments.examples}
    study = study_job(job, PlanOptions(**asked, **more), now=now)
    view = plan_view(study, arguments.runs_per_month, figures, traffic, arguments.runs, paid_usd)
    return view, _search_bill(job, arguments.job, asked) if job.search.is_asked else None


def _search_bill(job: Any, place: str, asked: dict[str, Any]) -> Any:
    """The bill of the job as a search; None where its trials can't be planned."""
    from farthing.search.bill import priced
    from farthing.search.run import MOST_TRIALS, check
    from farthing.search.space import refuse_choices

    check(job)
    refuse_choices(job, place)
    bill = priced(job, place, **asked)
    return bill and bill.of(bill.n_trials(MOST_TRIALS))


def _impossible(arguments: argparse.Namespace, view: PlanView) -> InputError:
    from farthing.report.plan_report import ways_out

    ways = "".join(f"\n    {number}. {way}" for number, way in enumerate(ways_out(view), 1))
    what = f"none of {view.n_offers:,} offers can do this job"
    return InputError(what, where=arguments.job, to_do=f"the nearest ways:{ways}")


def _draw(
    arguments: argparse.Namespace, view: PlanView, bill: Any, impossible: InputError | None
) -> None:
    from farthing.report.draw import draw
    from farthing.report.plan_compare import find_plan
    from farthing.report.plan_report import beside, brief, compared, explained, header, whole

    console = rich_console()
    limit = len(view.plans) if arguments.limit == 0 else arguments.limit
    report: list[Section] = []
    if arguments.compare and (pair := compared(view)):
        report.append(pair)
    if arguments.explain is not None and not impossible:
        report += [*header(view), *explained(find_plan(view, arguments.explain or "1"))]
    if report:
        report += beside(view)
    elif arguments.all:
        report = whole(view, limit)
    else:
        report = brief(view, _next_step(arguments, view, bill), limit)
    draw(console, report)
    if impossible:
        raise impossible
    if bill:
        from farthing.search.report import bill_report

        console.print()
        draw(console, bill_report(bill))


def _next_step(arguments: argparse.Namespace, view: PlanView, bill: Any) -> str:
    """The command that takes the job to the best choice; empty where there is none."""
    from farthing.launch.registry import TARGETS

    best, verb = view.best, "search" if bill else "train"
    if best is None:
        return ""
    said = {each.partition("=")[0] for each in arguments.set}
    keys = (key for key in best.recipe.to_set if key.partition(":")[0] not in said)
    to_set = [key.replace(": ", "=") for key in keys]
    changes = [word for each in (*arguments.set, *to_set) for word in ("--set", each)]
    words = " ".join(shlex.quote(word) for word in (arguments.job, *changes))
    if best.kind == "here":
        return f"farthing {verb} {words}"
    if best.kind == "own":
        return f"on that machine: farthing {verb} {words}"
    if any(best.provider in target.providers for target in TARGETS.values()):
        spot = " spot" if best.kind == "spot" else ""
        offer = shlex.quote(f"{best.provider}/{best.n_gpus}x {best.gpu}{spot}")
        return f"farthing launch {words} --offer {offer}  (rents nothing without --yes)"
    price = f"--set where.usd_per_hour={best.usd_per_hour:g}"
    return f"rent it at {best.provider}, then: farthing launch {words} --on ssh:HOST {price}"


def _parsed(read: Callable[[str], float], text: str | None, where: str, such: str) -> float | None:
    """An option as a number. Raises `InputError`."""
    try:
        return None if text is None else read(text)
    except (ValueError, OverflowError) as error:
        raise InputError(str(error), where=where, to_do=f"e.g. {such}") from None


def _seconds_until(text: str, now: datetime) -> float:
    """Seconds from now to a moment, or a duration from now."""
    from farthing.units import parse_hours

    try:
        is_moment = "-" in text or "T" in text
        moment_s = datetime.fromisoformat(text).timestamp() if is_moment else 0.0
        seconds = moment_s - now.timestamp() if is_moment else parse_hours(text) * 3600
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is neither a date nor a duration") from None
    if seconds <= 0:
        raise ValueError(f"{text} is in the past")
    return seconds


def _check_page_path(path: Path) -> None:
    if path.is_dir():
        raise InputError(
            "is a folder", where=f"--html {path}", to_do="name a file, such as plan.html"
        )
    if not path.parent.is_dir():
        raise InputError("no such folder", where=f"--html {path.parent}", to_do="make it first")
