"""`farthing train`: start a job or continue it, on the bill from the first second; with --retry,
attempts as children.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
from pathlib import Path
from typing import IO, Any

from farthing.cli.console import complain, print_json, put, rich_console
from farthing.cli.leaving import leave_before_the_start, n_processes_of, say_end
from farthing.cli.parser import JOB, in_range
from farthing.errors import EXIT_CODES, EXIT_FINISHED, FarthingError, InputError, JobError
from farthing.run.group import Seat, seat_in, sit_down
from farthing.run.guard import forget_done, tell
from farthing.run.signals import handled

GOES_ON_UNREAD = True
"""Training does not end because nobody reads what it prints."""
FINISHED_ALREADY = "the run had finished already; nothing was trained"

ARGUMENTS = {
    **JOB,
    "--allow-restart": (
        "start over if every checkpoint is damaged; start the bill at $0 if the ledger is gone"
    ),
    "--dry-run": "show limits, price and `when_done`, without starting",
    "--retry [N:=3]": (
        "restart after interruptions, crashes and kills, until N attempts in a row saved nothing"
    ),
    "--from RUN[:STEP]": "start from another run's weights; the receipt includes that run's cost",
    "--json": "print the receipt as JSON; progress goes to stderr",
}
RARE = {
    "--deepspeed FILE": "read parallelism settings from a deepspeed file; unsupported keys are"
    " listed",
    "--accelerate FILE": "read parallelism settings from an accelerate file; unsupported keys are"
    " listed",
    "--local_rank --local-rank N": "set by deepspeed; farthing reads the environment instead",
}


def run(arguments: argparse.Namespace) -> int:
    """One attempt, or with --retry as many as it takes; then the receipt.

    The garbage collector is off until the loop runs: libraries that are imported leave no garbage,
    and to look for it takes a quarter of the start.
    """
    gc.disable()
    try:
        return _run(arguments)
    finally:
        gc.enable()


def _run(arguments: argparse.Namespace) -> int:
    if arguments.from_ is not None:
        arguments.set = [
            *arguments.set,
            f"model.from_run={json.dumps(arguments.from_, ensure_ascii=False)}",
        ]
    in_range("--retry", arguments.retry, 1)
    seat = seat_in(os.environ)
    if arguments.retry is not None and seat.n > 1:
        raise InputError(
            f"{seat.by} has started the {seat.n} processes of the run, and begins them again or"
            " does not",
            where="--retry",
            to_do="leave it out, or start `farthing train --retry` by itself with where.gpus",
        )
    if seat.by:
        sit_down(seat, os.environ)
    if arguments.deepspeed or arguments.accelerate:
        arguments.set = [*arguments.set, *_from_launchers(arguments, is_told=seat.is_first)]
    if not seat.is_first:
        return _compute_along(arguments)
    from farthing.config.preflight import load_job_or_tell_all, look_over
    from farthing.report.receipt import leave_receipt
    from farthing.run.folder import is_finished
    from farthing.run.opening import opened
    from farthing.train.budget import RunLimits, refuse_start

    try:
        job = load_job_or_tell_all(arguments.job, arguments.set)
    except JobError as error:
        if error.rest is not None and not arguments.dry_run:
            tell(folder=error.rest.output_dir, when_done=error.rest.when_done)
        raise
    folder = Path(job.output_dir)
    if arguments.dry_run:
        refuse_start(job)
        return _show_dry_run(job)
    offer = _scaling_offer(arguments, job)
    if seat.n == 1 and is_finished(folder):  # else the others wait, and are told together
        from farthing.run.exported import damaged_checkpoints
        from farthing.train.finished import receipt_of_finished

        if done := receipt_of_finished(job):
            for text in damaged_checkpoints(folder):
                complain(text)
            return _show_end(arguments, "finished", FINISHED_ALREADY, done)
    tell(folder=str(folder), when_done=job.when_done)
    refuse_start(job)
    n_ranks = 1 if seat.by else n_processes_of(job, on_cpu=True)
    if arguments.retry is not None or n_ranks > 1:
        look_over(job)
        return _train_until_it_ends(arguments, folder, n_ranks)
    with opened(folder, job.usd_per_hour, seat.n) as attempt:  # on the bill from here on
        RunLimits(job, attempt.ledger).tell_guard()
        outcome = _train_once(arguments, job, offer, attempt)
    if isinstance(outcome, str):
        return _show_end(arguments, "limit", outcome, leave_receipt(folder))
    return _show_end(arguments, outcome.state, outcome.reason, outcome.receipt, goes_on=True)


def _show_dry_run(job: Any) -> int:
    """The job's limits, what bills on after it, and whether `when_done` can be run here."""
    import shlex
    import shutil

    from farthing.train.budget import say_what_bills_on
    from farthing.units import say_seconds, say_usd

    limits = job.limits
    print(f"an hour costs {say_usd(job.usd_per_hour)}")
    if limits.max_usd is not None:
        print(f"it stops at {say_usd(limits.max_usd)}")
    if limits.max_hours is not None:
        print(f"it stops after {say_seconds(limits.max_hours * 3600)}")
    if limits.max_gpu_hours is not None:
        print(f"it stops after {limits.max_gpu_hours:g} GPU-hours")
    if limits.deadline is not None:
        print(f"it stops at {limits.deadline}")
    for line in say_what_bills_on(job):
        print(line)
    words = shlex.split(job.when_done or "")
    if words and shutil.which(words[0]) is None:
        print(f"warning: `{words[0]}` of when_done is not found on this machine")
    print("dry run: nothing was started")
    return EXIT_FINISHED


def _from_launchers(arguments: argparse.Namespace, *, is_told: bool) -> list[str]:
    """Overrides for the job out of configurations of DeepSpeed and accelerate; what became of each
    line is told.
    """
    from farthing.config.importers.launchers import beside
    from farthing.config.load import load_job

    files = [
        (kind, name) for kind in ("deepspeed", "accelerate") if (name := getattr(arguments, kind))
    ]
    overrides, said = beside(load_job(arguments.job, arguments.set), files)
    for line in said if is_told else ():
        complain(line)
    return overrides


def _train_once(arguments: argparse.Namespace, job: Any, offer: str, attempt: Any) -> Any:
    """The `Outcome` of an attempt that is on the bill; why it was not begun, where a limit has no
    room for it.
    """
    from farthing.config.preflight import look_over
    from farthing.events import Note, Working
    from farthing.report.terminal import Terminal
    from farthing.train.budget import RunLimits, say_what_bills_on

    console, seat = rich_console(stderr=arguments.json, goes_on=True), seat_in(os.environ)
    if seat.n == 1 and (reason := RunLimits(job, attempt.ledger).stopped_before_start()):
        return reason
    forget_done(attempt.folder)
    look_over(job)
    terminal = Terminal(console, job.train.logging_steps)
    for line in [*say_what_bills_on(job), *([offer] if offer else [])]:
        terminal(Note(line))
    terminal(Working("loading torch and transformers"))

    def leave(number: int, frame: Any) -> None:
        with contextlib.suppress(Exception):  # whatever it is, we were asked to leave
            attempt.ledger.end("interrupted")
        leave_before_the_start(number, frame)

    try:
        with handled(leave):  # until the run itself listens
            from farthing.train.run import train

            gc.freeze()  # what the loop looks through later is what the run has made
            outcome = train(job, terminal, allow_restart=arguments.allow_restart, begun=attempt)
    finally:
        terminal.close()
    return outcome


def _train_until_it_ends(arguments: argparse.Namespace, folder: Path, n_ranks: int) -> int:
    """Attempts as children, each of them several where GPUs share the run; with --json the receipt
    of the last one is printed."""
    import tempfile

    from farthing.run.folder import LEDGER
    from farthing.run.group import Elastic, environ_of, until_it_ends
    from farthing.run.ledger import end_for
    from farthing.run.supervisor import Child, Supervisor, begin

    words = ["train", arguments.job]
    for value in arguments.set:
        words += ["--set", value]
    words += ["--json"] if arguments.json else []
    with (
        tempfile.TemporaryFile() as printed,
        tempfile.TemporaryDirectory(prefix="farthing-ranks-") as meeting,
    ):

        def emptied() -> IO[bytes] | None:
            printed.seek(0)
            printed.truncate()
            return printed if arguments.json else None

        def start(number: int) -> Child:
            def command(attempt: int) -> list[str]:
                is_restart = arguments.allow_restart and (number, attempt) == (0, 1)
                return [*words, "--allow-restart"] if is_restart else words

            if n_ranks == 1:
                return begin(command(1), stdout=emptied())

            def start_rank(seat: Seat, slot: int, attempt: int) -> subprocess.Popen[bytes]:
                place = Path(meeting) / f"attempt-{number}-{attempt}"
                environ = environ_of(seat, slot, place, os.environ)
                out = emptied() if seat.is_first else subprocess.DEVNULL
                return begin(command(attempt), stdout=out, environ=environ)

            return Elastic(n_ranks, start_rank, complain, lambda: end_for(folder / LEDGER))

        if arguments.retry is None:
            code = until_it_ends(start(0))
        else:
            code = Supervisor(folder, start, complain, tries=arguments.retry).run()
        printed.seek(0)
        put(printed.read().decode())
    return code


def _compute_along(arguments: argparse.Namespace) -> int:
    """A rank that is not the first: it computes, and is silent. An error of all is told by the
    first alone.
    """
    from farthing.config.load import load_job

    with handled(leave_before_the_start):
        job = load_job(arguments.job, arguments.set)
        from farthing.train.run import train

    # as on the first rank, which would wait before the first step for what is looked through here
    gc.freeze()
    try:
        return train(job, lambda event: None).exit_code
    except FarthingError as error:
        if getattr(error, "is_told", False):
            return error.exit_code
        raise


def _show_end(
    arguments: argparse.Namespace, state: str, reason: str, receipt: Any, *, goes_on: bool = False
) -> int:
    """The receipt, and how it ended."""
    from farthing.report.draw import draw
    from farthing.report.receipt_report import receipt_report

    console = rich_console(stderr=arguments.json, goes_on=goes_on)
    if arguments.json:
        print_json(receipt.to_json())
    else:
        console.print()
        draw(console, receipt_report(receipt))
        console.print()
    say_end(console, state, reason)
    return EXIT_CODES[state]


def _scaling_offer(arguments: argparse.Namespace, job: Any) -> str:
    """The linear scaling rule, when the command line changes the global batch but not the learning
    rate.
    """
    if not arguments.set or job.train.learning_rate_batch_size:
        return ""
    from farthing.config.load import load_job

    try:
        plain = load_job(arguments.job)
    except FarthingError:
        return ""
    if plain.global_batch_size == job.global_batch_size or plain.learning_rate != job.learning_rate:
        return ""
    scaled = job.learning_rate * job.global_batch_size / plain.global_batch_size
    return (
        f"the global batch is {job.global_batch_size} instead of {plain.global_batch_size}; the"
        f" linear scaling rule would make the learning rate {scaled:g}: --set"
        f" train.learning_rate_batch_size={plain.global_batch_size}"
    )
