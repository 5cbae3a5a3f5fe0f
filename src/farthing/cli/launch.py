"""`farthing launch`: run a job on a rented or remote machine, watch it, give it back."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farthing import clock
from farthing.cli.console import print_json, write
from farthing.cli.parser import SET, in_range
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

ARGUMENTS = {
    **SET,
    "--yes": "rent and train; without it, a dry run",
    "--on TARGET": (
        "local, ssh:HOST, slurm, kubernetes, vertex:PROJECT/REGION, skypilot, runpod, vast,"
        " lambda:REGION/KEY, hf (default: provider of the cheapest plan)"
    ),
    "--offer OFFER": 'rank or name in `farthing plan`: 3, "RTX 4090 spot", RunPod/L40S',
    "--attended": (
        "allow providers without auto-termination; billing continues if this process is killed"
    ),
    "--json": "print the result as JSON; progress goes to stderr",
}
RARE = {
    "--image IMAGE:=": "container image with farthing installed",
    "--install REQUIREMENT:=": "pip requirement to install in place of this farthing",
    "--disk N:=100": "GB on the disk of a rented machine",
    "--boot-limit MIN:=10.0": "minutes in which a machine must boot",
    "--prices FILE": "use only the prices in this CSV file",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = (
        "job file (YAML). status: machines, dollars, progress. logs: the newest machine's last"
        " output. stop: destroy all machines and wait for confirmation. attach: resume the watch."
        " These four find the launches of this folder without JOB"
    )
    parser.usage = "%(prog)s [options] JOB\n       %(prog)s [options] status|logs|stop|attach [JOB]"
    parser.add_argument("words", nargs="+", metavar="JOB", help=words)


def run(arguments: argparse.Namespace) -> int:
    first, *rest = sorted(arguments.words, key=lambda word: word not in ACTIONS)
    if first == AGENT and len(rest) == 2:
        from farthing.launch.agent import run_agent

        return run_agent(*rest)
    if first == NEEDS and rest:
        from farthing.launch.wheel import say_lacking

        return say_lacking(rest[0], rest[1:])
    action, words = (first, rest) if first in ACTIONS else ("", [first, *rest])
    if action and not words:
        words = _launched_here()
        if action == "status" and len(words) != 1:
            return _show_all(arguments, words)
        if not words:
            to_do = f"name the job: farthing launch {action} job.yaml"
            raise InputError("no launch was made in this folder", where=action, to_do=to_do)
    if len(words) != 1:
        verb = f"farthing launch {action}".strip()
        found = f"{len(words)} job files{': ' if words else ''}{', '.join(words)}"
        raise InputError(found, where="launch", to_do=f"name one: {verb} job.yaml")
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


def _launched_here() -> list[str]:
    """The job files that launches have left in run folders in and below this one. Folders that
    can't be read are told. Raises `InputError` where nothing else is there: they may hold one.
    """
    from farthing.launch.session import JOB_KEPT

    found, closed = [], list[OSError]()
    for where, folders, files in os.walk(".", onerror=closed.append):
        path = Path(where, Path(JOB_KEPT).name)
        if path.name in files and path.match(JOB_KEPT):
            found.append(str(path))
        folders[:] = [
            name for name in folders if not name.startswith(".") and name != "node_modules"
        ]
    unknown = [f"{each.filename}: can't be read ({each.strerror})" for each in closed]
    if unknown and not found:
        to_do = "name the job file, or make it readable"
        raise InputError("its launches are not known", where=unknown[0], to_do=to_do)
    for words in unknown:
        _tell(f"{words}, so its launches are not known")
    return sorted(found)


def _show_all(arguments: argparse.Namespace, jobs: list[str]) -> int:
    """The status of every launch of this folder."""
    standings, codes = [], [EXIT_FINISHED]
    for arguments.job in jobs:
        try:
            session = _session(arguments, "status")
        except FarthingError as error:  # the others are shown all the same
            _tell(f"{arguments.job}: {error}")
            codes.append(error.exit_code)
            continue
        if session is None:  # nothing was rented after all
            continue
        if arguments.json:
            standings.append(session.standing())
            codes.append(EXIT_CRASH if standings[-1]["not_known"] else EXIT_FINISHED)
        else:
            _say(f"{session.folder}:")
            codes.append(_show_standing(session, as_json=False))
    if arguments.json:
        usd = sum(standing["usd"] for standing in standings)
        print_json({"kind": "farthing launches", "launches": standings, "usd": usd})
    elif len(codes) == 1:
        print(NOTHING_YET)
    return max(codes)


def _session(arguments: argparse.Namespace, action: str) -> Any:
    """The launch of a job; None where its standing is asked for and nothing was launched. Raises
    `InputError`, and `StoreUnavailableError` where a store that does not answer might know.
    """
    from farthing.config.load import load_job
    from farthing.config.preflight import look_over
    from farthing.launch.prepare import Wishes, prepare
    from farthing.launch.session import JOB_KEPT, Session, where_it_is
    from farthing.report.plan_compare import find_in_study

    in_range("--disk", arguments.disk, 10, 20_000)
    in_range("--boot-limit", arguments.boot_limit, 1, 120)
    path, moved = Path(arguments.job), list[str]()
    if path.match(JOB_KEPT):  # of a run folder that may have been moved
        moved = [f"output_dir={json.dumps(str(path.parents[1]), ensure_ascii=False)}"]
    job = load_job(path, [*moved, *arguments.set])
    asks = action in ("", "attach")
    if asks:
        # a folder travels as it is: a rented machine can't mend what it lacks
        look_over(job, only_plans=not Path(job.model.model_name_or_path).is_absolute())
    on = arguments.on
    if not on and not arguments.offer:
        on = where_it_is(job, only_open=not action)
    if not on and action == "status":
        return None
    if not on and action:
        raise InputError(
            "no launch is recorded in this folder or in the store",
            where=action,
            to_do="launch with --yes, or name where to look: --on TARGET",
        )
    wishes = Wishes(
        on,
        arguments.offer,
        find_in_study,
        arguments.image,
        arguments.install,
        arguments.disk,
        arguments.boot_limit * 60,
        arguments.prices,
    )
    prepared = prepare(job, wishes, clock.now().replace(microsecond=0), asks=asks)
    return Session(prepared, _tell)


def _show_dry(session: Any, arguments: argparse.Namespace) -> int:
    from farthing.launch.prepare import NoBudgetError
    from farthing.launch.session import dry_view, said

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

    job, is_rented = session.prepared.job, session.prepared.target.is_rented
    if not job.search.is_asked:
        return None
    names = (offer.provider,) if is_rented else ()
    bill = priced(job, arguments.job, provider=names, prices=arguments.prices)
    kind = offer.kind.replace("-", " ")
    key, wanted = "kind", "here"
    if is_rented:
        key, wanted = "name", f"{max(1, offer.n_gpus)}x {offer.gpu} {kind} at {offer.provider}"
    rows = bill.of(bill.n_trials(MOST_TRIALS))["machines"] if bill else []
    return next((row["hours"] * 3600 for row in rows if row[key] == wanted), None)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end the watch as Ctrl-C does; one that nohup ignores stays ignored."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {key: handler for key, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _do(session: Any, action: str, arguments: argparse.Namespace) -> int:
    from farthing.report.receipt import leave_receipt
    from farthing.run.folder import LEDGER
    from farthing.units import say_usd

    job = session.prepared.job
    with _interruptible():
        try:
            if action == "stop":
                code = EXIT_FINISHED if session.stop() else EXIT_CRASH
            else:
                code = session.run(
                    is_attended=arguments.attended,
                    tokenize=lambda: _token_sets(job),
                    is_new=action != "attach",
                )
        except KeyboardInterrupt:
            return _left_alone(session)
        except FarthingError:
            with contextlib.suppress(FarthingError):
                _say_open(session)
            raise
        except Exception:  # a fault of ours
            _left_alone(session)
            raise
    standing, has_receipt = session.standing(), (session.folder / LEDGER).exists()
    if job.search.is_asked:
        from farthing.search.receipt import leave_receipt_of_copy

        leave_receipt_of_copy(job)
    elif has_receipt and not session.prepared.folder:
        leave_receipt(session.folder)
    if arguments.json:
        print_json(standing | {"exit_code": code})
        return code
    for row in standing["machines"]:
        parts = ", ".join(f"{name} {say_usd(usd)}" for name, usd in row["usd_of"].items() if usd)
        _say(_row(row, f"{row['provider']} {row['instance']}", f"{parts}; "))
    where = f"; `farthing report {standing['run']}` has the receipt" if has_receipt else ""
    _say(f"{say_usd(standing['usd'])} in all{where}", *_still_billed(standing))
    if code == EXIT_LIMIT:
        _tell("stopped by a limit; raise it and launch again to continue")
    return code


def _left_alone(session: Any) -> int:
    """The watch has ended early. Machines that nothing else ends are ended now; of the others the
    price, the latest end and the commands are printed.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a closed terminal sends two
    if session.ledger.open and not session.driver().ends_by_itself:
        _tell("nothing else ends the machine, so it is ended now; Ctrl-C again to leave")
        try:
            session.stop()
        except (KeyboardInterrupt, FarthingError, OSError) as error:
            _tell(str(error) or "interrupted")
    _say_open(session)
    return EXIT_INTERRUPTED


def _say_open(session: Any) -> None:
    """The machines that may still be billed, and the commands for them."""
    for line in session.open_in_words():
        _tell(f"STILL BILLED: {line}")
    if session.ledger.open:
        _tell(
            "`farthing launch attach JOB` resumes the watch, `farthing launch stop JOB` ends the"
            f" machines ({session.prepared.job.output_dir})"
        )


def _show_standing(session: Any, *, as_json: bool) -> int:
    from farthing.units import say_seconds, say_usd

    standing = session.standing()
    code = EXIT_CRASH if standing["not_known"] else EXIT_FINISHED
    if as_json:
        print_json(standing)
        return code
    for row in standing["machines"]:
        where = f"{row['state']:8} {row['provider']} {row['instance']}"
        _say(_row(row, f"{where}  {say_seconds(row['wall_s'])}"))
    if not standing["machines"] and not standing["not_known"]:
        _say(NOTHING_YET)
    known = {row["name"] for row in standing["machines"]}
    for name in sorted(set(standing["there_now"] or {}) - known):
        _say(f"{name}  there, and in no line of this folder: farthing launch stop destroys it")
    if standing["committed_step"] is not None:
        unit = "result of trials" if session.prepared.job.search.is_asked else "step"
        usd = say_usd(standing["usd"])
        _say(f"saved up to {unit} {standing['committed_step']:,}; {usd} so far")
    _say(*_still_billed(standing))
    if standing["damaged"]:
        _tell(standing["damaged"])
    if standing["not_known"]:
        _tell(f"could not ask: {printable(standing['not_known'])}")
        _tell("the lines above are all that this folder knows; there may be more machines")
    return code


def _row(row: Any, where: str, parts: str = "") -> str:
    """A machine with its dollars."""
    from farthing.units import say_usd

    price = f"{parts}{say_usd(row['usd_per_hour'])} an hour, {row['price_from']}"
    return f"{row['name']}  {where}  {say_usd(row['usd'])} ({price})  {row['why']}"


def _still_billed(standing: Any) -> list[str]:
    billed = standing["still_billed"]
    return [f"still billed: {each['what']}  (ends with: {each['ends']})" for each in billed]


def _say(*lines: str) -> None:
    """Lines, which may have names of others in them, to stdout."""
    for line in lines:
        print(printable(line))


def _tell(text: str) -> None:
    """To stderr."""
    write(f"farthing: {printable_lines(text)}")


def _token_sets(job: Any) -> list[Path]:
    """The folders of the job's token sets, tokenized here, where that costs nothing."""
    from farthing.events import ignore
    from farthing.train.resolve import open_examples, resolve

    train, held_out = open_examples(resolve(job), ignore)
    return list(dict.fromkeys(each.tokens.folder for each in (train, held_out) if each is not None))
