"""`farthing launch`: take a job to a machine elsewhere, watch it there, and give the machine back.
Dry unless --yes.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

from farthing import clock
from farthing.cli.console import print_json, write
from farthing.cli.parser import add_job_arguments
from farthing.errors import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_LIMIT, InputError
from farthing.printable import printable, printable_lines

GOES_ON_UNREAD = True
"""A machine is watched and given back, whether what is printed is read or not."""
NOTHING_YET = "nothing was launched yet"
NOTHING = {"kind": "farthing launch", "machines": [], "usd": 0.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `farthing launch`."""
    add_job_arguments(parser)
    add = parser.add_argument
    text = (
        "local, ssh:HOST, slurm, kubernetes, vertex:PROJECT/REGION, skypilot, runpod, vast,"
        " lambda:REGION/KEY, hf"
    )
    add(
        "--on",
        metavar="TARGET",
        help=f"{text} (default: by which the best planned offer is rented)",
    )
    add(
        "--offer",
        metavar="OFFER",
        help='a rank or a name of `farthing plan`: 3, "RTX 4090 spot", RunPod/L40S',
    )
    add(
        "--yes",
        action="store_true",
        help="rent and train; without it files are written and the bill is shown",
    )
    add(
        "--status",
        action="store_true",
        help="the machines of this launch, what each has cost, and how far the run is",
    )
    add("--logs", action="store_true", help="the end of what the newest machine has printed")
    add(
        "--stop",
        action="store_true",
        help="destroy its machines, and ask until each is confirmed to be gone",
    )
    add("--attach", action="store_true", help="go on watching a launch that was begun before")
    add(
        "--attended", action="store_true", help="rent where nothing but this process ends a machine"
    )
    add("--image", default="", help="container image with farthing in it")
    add(
        "--install",
        default="",
        metavar="REQUIREMENT",
        help="what pip installs where farthing is missing",
    )
    add(
        "--disk",
        type=int,
        default=100,
        metavar="GB",
        help="disk of a rented machine (default: 100)",
    )
    add(
        "--boot-limit",
        type=float,
        default=10.0,
        metavar="MIN",
        help="minutes until a machine has to be up (default: 10)",
    )
    add("--prices", metavar="FILE", help="use only the prices of this CSV file")
    add("--aboard", metavar="FILE", help=argparse.SUPPRESS)
    add("--json", action="store_true", help="print the result as JSON; progress goes to stderr")


def run(arguments: argparse.Namespace) -> int:
    """Show what would be done, or do it."""
    if arguments.aboard:
        from farthing.launch.agent import run_agent

        return run_agent(arguments.job, arguments.aboard)
    gc.disable()
    try:
        session = _session(arguments)
        if session is None:
            print_json(NOTHING) if arguments.json else print(NOTHING_YET)
            return EXIT_FINISHED
        if arguments.status:
            return _show_standing(session, as_json=arguments.json)
        if arguments.logs:
            print(printable_lines(session.log()))
            return EXIT_FINISHED
        if not (arguments.yes or arguments.stop or arguments.attach):
            return _show_dry(session, arguments)
    finally:
        gc.enable()
    return _do(session, arguments)


def _session(arguments: argparse.Namespace) -> Any:
    """The launch of a job; None where its standing is asked for and nothing was launched."""
    from farthing.config.load import load_job
    from farthing.config.preflight import look_over
    from farthing.launch.prepare import Wishes, prepare
    from farthing.launch.session import Session

    if (
        sum(
            map(
                bool,
                (arguments.status, arguments.logs, arguments.stop, arguments.attach, arguments.yes),
            )
        )
        > 1
    ):
        raise InputError(
            "only one can be done",
            where="--yes, --status, --logs, --stop, --attach",
            to_do="leave one",
        )
    for name, value, low, high in (
        ("--disk", arguments.disk, 10, 20_000),
        ("--boot-limit", arguments.boot_limit, 1, 120),
    ):
        if not low <= value <= high:
            raise InputError(f"{value:g}", where=name, to_do=f"give {low} to {high}")
    job = load_job(arguments.job, arguments.set)
    if not (arguments.status or arguments.logs or arguments.stop):
        look_over(job, only_plans=True)
    on, boot_s = arguments.on or _where_it_is(job, arguments), arguments.boot_limit * 60
    if on is None and arguments.status:
        return None
    wishes = Wishes(
        on,
        arguments.offer,
        arguments.image,
        arguments.install,
        arguments.disk,
        boot_s,
        arguments.prices,
    )
    asks = not (arguments.status or arguments.logs or arguments.stop)
    prepared = prepare(job, wishes, clock.now().replace(microsecond=0), asks=asks)
    return Session(prepared, lambda text: write(f"farthing: {printable_lines(text)}"))


def _where_it_is(job: Any, arguments: argparse.Namespace) -> str | None:
    """Where the machines of the launch are: nobody has to name the target twice. Raises
    `InputError`.
    """
    from farthing.launch.session import where_it_is

    about_it = [
        f"--{name}" for name in ("status", "logs", "stop", "attach") if getattr(arguments, name)
    ]
    on = None if arguments.offer else where_it_is(job, only_open=not about_it)
    if on is None and about_it and about_it != ["--status"]:
        raise InputError(
            "nothing was launched from this folder, nor by way of this store",
            where=about_it[0],
            to_do="launch with --yes, or name where to look: --on TARGET",
        )
    return on


def _show_dry(session: Any, arguments: argparse.Namespace) -> int:
    from farthing.launch.session import dry_view, said
    from farthing.launch.supervise import NoBudgetError

    try:
        ask = session.next_ask()
    except NoBudgetError as error:
        raise InputError(str(error), where="limits", to_do="raise the limit") from None
    folder = session.write(ask)
    view = dry_view(session, ask, folder, sorted(session.files_of(ask)))
    if arguments.json:
        print_json(view)
    else:
        print("\n".join(map(printable, said(view))))
        print("\nnothing was rented; the same with --yes does it")
    return EXIT_FINISHED


def _do(session: Any, arguments: argparse.Namespace) -> int:
    from farthing.report.receipt import leave_receipt
    from farthing.run.folder import LEDGER
    from farthing.units import say_usd

    code = EXIT_FINISHED
    try:
        if arguments.stop:
            session.stop()
        else:
            code = session.run(
                is_attended=arguments.attended,
                tokenize=lambda: _token_sets(session.prepared.job),
                is_new=not arguments.attach,
            )
    except KeyboardInterrupt:
        open_ = ", ".join(machine.name for machine in session.ledger.open) or "none"
        write(
            f"farthing: no longer watched: {open_}; --attach goes on watching, --stop destroys what"
            " there is"
        )
        return EXIT_INTERRUPTED
    standing = session.standing()
    if (session.folder / LEDGER).exists() and not session.prepared.folder:
        leave_receipt(session.folder)
    if arguments.json:
        print_json(standing | {"exit_code": code})
        return code
    for row in standing["machines"]:
        parts = ", ".join(f"{name} {say_usd(usd)}" for name, usd in row["usd_of"].items() if usd)
        _say(
            f"{row['name']}  {row['provider']} {row['instance']}  {say_usd(row['usd'])}  ({parts}) "
            f" {row['why']}"
        )
    has_receipt = (session.folder / LEDGER).exists()
    where = f"; `farthing report {standing['run']}` has the receipt" if has_receipt else ""
    _say(f"{say_usd(standing['usd'])} in all{where}")
    if code == EXIT_LIMIT:
        write("farthing: stopped by a limit; raise it and launch again to go on")
    return code


def _show_standing(session: Any, *, as_json: bool) -> int:
    from farthing.units import say_seconds, say_usd

    standing = session.standing()
    if as_json:
        print_json(standing)
        return EXIT_FINISHED
    for row in standing["machines"]:
        _say(
            f"{row['name']}  {row['state']:8} {row['provider']} {row['instance']} "
            f" {say_seconds(row['wall_s'])}  {say_usd(row['usd'])}  {row['why']}"
        )
    if not standing["machines"]:
        print(NOTHING_YET)
    strays = sorted(
        set(standing["there_now"] or {}) - {row["name"] for row in standing["machines"]}
    )
    for name in strays:
        _say(f"{name}  there, and in no line of this folder: --stop destroys it")
    if standing["not_known"]:
        _say(f"not asked: {standing['not_known']}")
    if standing["committed_step"] is not None:
        print(f"saved up to step {standing['committed_step']:,}; {say_usd(standing['usd'])} so far")
    return EXIT_FINISHED


def _say(text: str) -> None:
    """A line, which may have names of others in it, to stdout."""
    print(printable(text))


def _token_sets(job: Any) -> list[Path]:
    """The data of a job tokenized here, where that costs nothing: the folders of its token sets."""
    from farthing.events import ignore
    from farthing.train.setup import open_examples, open_inputs

    inputs = open_inputs(job)
    train, held_out = open_examples(job, inputs, ignore, lambda: False)
    return list(dict.fromkeys(each.tokens.folder for each in (train, held_out) if each is not None))
