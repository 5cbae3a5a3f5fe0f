"""`farthing launch`: run a job on a rented or remote machine, watch it, give it back."""

from __future__ import annotations

import argparse
import contextlib
import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farthing import clock
from farthing.cli.console import print_json, write
from farthing.cli.parser import add_options, add_set_argument, as_json, in_range
from farthing.errors import (
    EXIT_CRASH,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_LIMIT,
    FarthingError,
    InputError,
)
from farthing.printable import printable, printable_lines

GOES_ON_UNREAD = True
"""A machine is watched and given back, whether what is printed is read or not."""
NOTHING_YET = "nothing has been launched yet"
NOTHING = {"kind": "farthing launch", "machines": [], "usd": 0.0}
ACTIONS = ("status", "logs", "stop", "attach")
AGENT, NEEDS = "agent", "needs"
"""What a rented machine runs."""

RARE = ("--image", "--install", "--disk", "--boot-limit", "--prices")
"""Options that only `--help-all` shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = (
        "job file (YAML). status: machines, dollars, progress. logs: the newest machine's last"
        " output. stop: destroy all machines and wait for confirmation. attach: resume the watch"
    )
    parser.add_argument("words", nargs="+", metavar="[status|logs|stop|attach] JOB", help=words)
    add_set_argument(parser)
    options = {
        "--yes": "rent and train; without it, a dry run",
        "--on TARGET": (
            "local, ssh:HOST, slurm, kubernetes, vertex:PROJECT/REGION, skypilot, runpod, vast,"
            " lambda:REGION/KEY, hf (default: provider of the cheapest plan)"
        ),
        "--offer OFFER": 'rank or name in `farthing plan`: 3, "RTX 4090 spot", RunPod/L40S',
        "--attended": (
            "allow providers without auto-termination; billing continues if this process is killed"
        ),
        "--image IMAGE": "container image with farthing installed",
        "--install REQUIREMENT": "pip requirement to install in place of this farthing",
        "--disk N=100": "GB on the disk of a rented machine",
        "--boot-limit MIN=10.0": "minutes in which a machine must boot",
        "--prices FILE": "use only the prices in this CSV file",
        **as_json("the result", progress=True),
    }
    add_options(parser, options)
    parser.set_defaults(image="", install="")


def run(arguments: argparse.Namespace) -> int:
    first, *rest = arguments.words
    if first == AGENT and len(rest) == 2:
        from farthing.launch.agent import run_agent

        return run_agent(*rest)
    if first == NEEDS and rest:
        from farthing.launch.wheel import say_lacking

        return say_lacking(rest[0], rest[1:])
    action, words = (first, rest) if first in ACTIONS else ("", arguments.words)
    if len(words) != 1:
        raise InputError(
            f"{len(words)} job files", where="launch", to_do="name one: farthing launch job.yaml"
        )
    if action and arguments.yes:
        raise InputError("only one can be done", where=f"{action}, --yes", to_do="leave one")
    arguments.job = words[0]
    gc.disable()
    try:
        session = _session(arguments, action)
        if session is None:
            print_json(NOTHING) if arguments.json else print(NOTHING_YET)
            return EXIT_FINISHED
        if action == "status":
            return _show_standing(session, as_json=arguments.json)
        if action == "logs":
            print(printable_lines(session.log()))
            return EXIT_FINISHED
        if not (arguments.yes or action):
            return _show_dry(session, arguments)
    finally:
        gc.enable()
    return _do(session, action, arguments)


def _session(arguments: argparse.Namespace, action: str) -> Any:
    """The launch of a job; None where its standing is asked for and nothing was launched."""
    from farthing.config.load import load_job
    from farthing.config.preflight import look_over
    from farthing.launch.prepare import Wishes, prepare
    from farthing.launch.session import Session
    from farthing.report.plan_compare import find_in_study

    in_range("--disk", arguments.disk, 10, 20_000)
    in_range("--boot-limit", arguments.boot_limit, 1, 120)
    job = load_job(arguments.job, arguments.set)
    asks = action in ("", "attach")
    if asks:
        # a folder travels as it is: a rented machine can't mend what it lacks
        look_over(job, only_plans=not Path(job.model.model_name_or_path).is_absolute())
    on, boot_s = arguments.on or _where_it_is(job, arguments, action), arguments.boot_limit * 60
    if on is None and action == "status":
        return None
    wishes = Wishes(
        on,
        arguments.offer,
        find_in_study,
        arguments.image,
        arguments.install,
        arguments.disk,
        boot_s,
        arguments.prices,
    )
    prepared = prepare(job, wishes, clock.now().replace(microsecond=0), asks=asks)
    return Session(prepared, lambda text: write(f"farthing: {printable_lines(text)}"))


def _where_it_is(job: Any, arguments: argparse.Namespace, action: str) -> str | None:
    """Where the machines of the launch are: nobody has to name the target twice. Raises
    `InputError`, and `StoreUnavailableError` where a store that does not answer might know.
    """
    from farthing.launch.session import where_it_is

    on = None if arguments.offer else where_it_is(job, only_open=not action)
    if on is None and action in ("logs", "stop", "attach"):
        raise InputError(
            "no launch is recorded in this folder or in the store",
            where=action,
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
    searches_s = _searches_s(session, ask.offer, arguments)
    view = dry_view(session, ask, folder, sorted(session.files_of(ask)), searches_s)
    if arguments.json:
        print_json(view)
    else:
        print("\n".join(map(printable, said(view))))
        print("\nDry run: nothing was rented. --yes rents and trains.")
    return EXIT_FINISHED


def _searches_s(session: Any, offer: Any, arguments: argparse.Namespace) -> float | None:
    """Seconds that the job's search should take on an offer; None where that can't be told, and
    for a job that is no search.
    """
    from farthing.search.bill import priced
    from farthing.search.run import MOST_TRIALS

    job, prepared = session.prepared.job, session.prepared
    if not job.search.is_asked:
        return None
    names = (offer.provider,) if prepared.target.is_rented else ()
    bill = priced(job, arguments.job, provider=names, prices=arguments.prices)
    if bill is None:
        return None
    kind = offer.kind if prepared.target.is_rented else "here"
    name = f"{max(1, offer.n_gpus)}x {offer.gpu} {kind.replace('-', ' ')} at {offer.provider}"
    rows = bill.of(bill.n_trials(MOST_TRIALS))["machines"]
    found = [row for row in rows if row["kind"] == "here" == kind or row["name"] == name]
    return found[0]["hours"] * 3600 if found else None


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end the watch as Ctrl-C does; one that nohup ignores stays ignored."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _do(session: Any, action: str, arguments: argparse.Namespace) -> int:
    from farthing.report.receipt import leave_receipt
    from farthing.run.folder import LEDGER
    from farthing.units import say_usd

    code = EXIT_FINISHED
    with _interruptible():
        try:
            if action == "stop":
                code = EXIT_FINISHED if session.stop() else EXIT_CRASH
            else:
                code = session.run(
                    is_attended=arguments.attended,
                    tokenize=lambda: _token_sets(session.prepared.job),
                    is_new=action != "attach",
                )
        except KeyboardInterrupt:
            return _left_alone(session)
        except Exception:
            with contextlib.suppress(FarthingError):
                _say_open(session)
            raise
    standing = session.standing()
    if session.prepared.job.search.is_asked:
        _bring_winner(session.prepared.job)
    elif (session.folder / LEDGER).exists() and not session.prepared.folder:
        leave_receipt(session.folder)
    if arguments.json:
        print_json(standing | {"exit_code": code})
        return code
    for row in standing["machines"]:
        parts = ", ".join(f"{name} {say_usd(usd)}" for name, usd in row["usd_of"].items() if usd)
        _say(
            f"{row['name']}  {row['provider']} {row['instance']}  {say_usd(row['usd'])} "
            f"({parts}; {say_usd(row['usd_per_hour'])} an hour, {row['price_from']})  {row['why']}"
        )
    has_receipt = (session.folder / LEDGER).exists()
    where = f"; `farthing report {standing['run']}` has the receipt" if has_receipt else ""
    _say(f"{say_usd(standing['usd'])} in all{where}")
    _say_still_billed(standing)
    if code == EXIT_LIMIT:
        write("farthing: stopped by a limit; raise it and launch again to continue")
    return code


def _bring_winner(job: Any) -> None:
    """The receipt of a search that came back from its store, and its winner's run."""
    from farthing.run.accounts import read_ledger
    from farthing.run.folder import LEDGER, SEARCH_LOG
    from farthing.search.receipt import leave_receipt
    from farthing.search.record import SearchRecord

    folder = Path(job.output_dir)
    if not (folder / SEARCH_LOG).exists():
        return
    with contextlib.closing(SearchRecord(folder)) as record:
        usd = sum(account.usd for account in read_ledger(folder / LEDGER).ordered)
        leave_receipt(job, record, usd)


def _left_alone(session: Any) -> int:
    """The watch was interrupted. Machines that nothing else ends are ended now; of the others the
    price, the latest end and the commands are printed.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a closed terminal sends two
    if session.ledger.open and not session.driver().ends_by_itself:
        write("farthing: nothing else ends the machine, so it is ended now; Ctrl-C again to leave")
        try:
            session.stop()
        except (KeyboardInterrupt, FarthingError, OSError) as error:
            write(f"farthing: {error or 'interrupted'}")
    _say_open(session)
    return EXIT_INTERRUPTED


def _say_open(session: Any) -> None:
    """The machines that may still be billed, and the commands for them."""
    job = session.prepared.job.output_dir
    for line in session.open_in_words():
        write(f"farthing: STILL BILLED: {printable(line)}")
    if session.ledger.open:
        write(
            "farthing: `farthing launch attach JOB` resumes the watch, `farthing launch stop JOB`"
            f" ends the machines ({job})"
        )


def _show_standing(session: Any, *, as_json: bool) -> int:
    from farthing.units import say_seconds, say_usd

    standing = session.standing()
    code = EXIT_CRASH if standing["not_known"] else EXIT_FINISHED
    if as_json:
        print_json(standing)
        return code
    for row in standing["machines"]:
        _say(
            f"{row['name']}  {row['state']:8} {row['provider']} {row['instance']} "
            f" {say_seconds(row['wall_s'])}  {say_usd(row['usd'])} "
            f" ({say_usd(row['usd_per_hour'])} an hour, {row['price_from']})  {row['why']}"
        )
    if not standing["machines"] and not standing["not_known"]:
        print(NOTHING_YET)
    strays = sorted(
        set(standing["there_now"] or {}) - {row["name"] for row in standing["machines"]}
    )
    for name in strays:
        _say(f"{name}  there, and in no line of this folder: farthing launch stop destroys it")
    if standing["committed_step"] is not None:
        is_search = session.prepared.job.search.is_asked
        unit = "result of trials" if is_search else "step"
        print(
            f"saved up to {unit} {standing['committed_step']:,}; {say_usd(standing['usd'])} so far"
        )
    _say_still_billed(standing)
    if standing["not_known"]:
        write(f"farthing: could not ask: {printable(standing['not_known'])}")
        write(
            "farthing: the lines above are all that this folder knows; there may be more machines"
        )
    return code


def _say_still_billed(standing: Any) -> None:
    for each in standing["still_billed"]:
        _say(f"still billed: {each['what']}  (ends with: {each['ends']})")


def _say(text: str) -> None:
    """A line, which may have names of others in it, to stdout."""
    print(printable(text))


def _token_sets(job: Any) -> list[Path]:
    """The data of a job tokenized here, where that costs nothing: the folders of its token sets."""
    from farthing.events import ignore
    from farthing.train.resolve import open_examples, resolve

    train, held_out = open_examples(resolve(job), ignore)
    return list(dict.fromkeys(each.tokens.folder for each in (train, held_out) if each is not None))
