"""The front door: argv in, words and exit codes out. Nobody imports it.

Torch is imported by the verbs that need it, so that `--help` and a wrong job file answer at once.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import farthing
from farthing.device_memory import set_allocator
from farthing.errors import (
    EXIT_CRASH,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_LIMIT,
    EXIT_MISTAKE,
    FarthingError,
    JobError,
    UserMistake,
)
from farthing.printable import printable, printable_lines

DESCRIPTION = "Fine-tune a language model for the fewest dollars: resumable to the bit, with its bill."
FINISHED_ALREADY = "it was finished already; nothing was trained"
EPILOG = "exit codes: 0 finished, 1 crash, 2 mistake in the input, 3 stopped by a limit, 75 interrupted (run it again)"


def entry() -> None:
    """The `farthing` command."""
    ended_with: list[int] = []
    atexit.register(_leave_at_once, ended_with)  # the first to be registered is the last to be called
    ended_with.append(main())
    sys.exit(ended_with[0])


def _leave_at_once(ended_with: list[int]) -> None:
    """End the process without taking its libraries apart: with torch that takes up to seconds, which would be paid for."""
    if ended_with:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(ended_with[0])


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns the exit code. Who reads our words may stop reading: then the rest of them goes nowhere."""
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _discard(sys.stdout)
        return EXIT_FINISHED
    except SystemExit:  # of argparse, after its help
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
            raise
        _discard(sys.stdout)
        return EXIT_FINISHED


def _discard(stream: Any) -> None:
    """From now on what is written to a stream whose reader is gone goes nowhere, also at the end of the process."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream of a test has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _complain(what: object) -> None:
    """Our own words, which may hold names and texts of others, to stderr. Of several problems each has lines of its own."""
    problems = what.problems if isinstance(what, JobError) else [what]
    _write("farthing: " + "\n".join(printable_lines(problem) for problem in problems))


def _write(text: str) -> None:
    """To stderr; that nobody reads it changes no exit code."""
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        _discard(sys.stderr)


def _run(argv: list[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    set_allocator(os.environ)  # before torch is imported
    as_json: bool = getattr(arguments, "json", False)
    try:
        return int(arguments.run(arguments))
    except FarthingError as error:
        if as_json:
            _print_json(error.as_dict())
        if not as_json or not sys.stderr.isatty():
            _complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        _complain("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and arguments.run not in (_train, _probe):
            raise  # those go on when nobody reads: a pipe that breaks in them is another
        _write(printable_lines(traceback.format_exc()).rstrip())
        _complain(f"crashed: {type(error).__name__}: {error}")
        _write("  to do: report the lines above; what was saved is whole, the same command goes on")
        return EXIT_CRASH


def _print_json(value: Any) -> None:
    """A value for programs whose exit code has to stay what it is, whoever reads."""
    try:
        print(json.dumps(value, indent=1), flush=True)
    except BrokenPipeError:
        _discard(sys.stdout)


class _Parser(argparse.ArgumentParser):
    """Repeats what was typed without obeying it."""

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message("\n".join(map(printable, message.split("\n"))), file)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="farthing", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"farthing {farthing.__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def verb(name: str, run: Any, summary: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=summary, description=summary, epilog=EPILOG)
        sub.set_defaults(run=run)
        return sub

    sub = verb("init", _init, "write a commented starter job, the demo, or the JSON Schema of job files")
    sub.add_argument("path", nargs="?", help="where to write (default: job.yaml; with --demo: demo/)")
    sub.add_argument("--task", choices=("causal-lm", "seq2seq", "classification"), default="causal-lm")
    sub.add_argument("--demo", action="store_true", help="a small model, data and job that run offline in a minute")
    sub.add_argument("--schema", action="store_true", help="print the JSON Schema of the job file, for editors")
    sub.add_argument("--json", action="store_true", help="print what was written as JSON")

    sub = verb("plan", _plan, "where to run a job: does it fit, how long, how many dollars, and why not elsewhere")
    _job_arguments(sub)
    sub.add_argument("--gpu", action="append", default=[], help='only such GPUs: "RTX 4090", h100 (repeatable)')
    sub.add_argument("--provider", action="append", default=[], help="only these (repeatable)")
    sub.add_argument("--region", action="append", default=[], help="or its beginning, such as us- (repeatable)")
    sub.add_argument("--offers", choices=("spot", "on-demand"), help="only of this kind")
    sub.add_argument("--max-gpus", type=int, default=8, metavar="N", help="most GPUs of one machine (default: 8)")
    sub.add_argument("--budget", metavar="USD", help="at most so many dollars, instead of limits.max_usd")
    sub.add_argument("--deadline", metavar="WHEN", help='"2026-12-01 18:00", or from now: 12h, 90min, 2d')
    sub.add_argument(
        "--own",
        action="append",
        default=[],
        metavar="GPU:PRICE:POWER",
        help='such as "RTX 4090:1600usd:0.45kW" (repeatable)',
    )
    sub.add_argument(
        "--runs-per-month", type=float, metavar="N", help="what a project of so many runs comes to in a year"
    )
    sub.add_argument(
        "--traces", metavar="DIR", help="traces of spot capacity, instead of the prior where they tell more"
    )
    sub.add_argument("--prices", metavar="FILE", help="a CSV of prices of your own, taken alone")
    sub.add_argument(
        "--torch",
        metavar="VERSION",
        help="what rented machines get, e.g. 2.13.0+cu126 (default: as it is installed here)",
    )
    sub.add_argument("--examples", type=int, metavar="N", help="plan for so many examples, whatever the data ...")
    sub.add_argument("--mean-tokens", type=float, metavar="M", help="... of so many tokens in the mean")
    sub.add_argument(
        "--samples-per-min", type=float, metavar="N", help="by hand: what a throughput that you know comes to"
    )
    sub.add_argument("--tokens-per-s", type=float, metavar="N", help="by hand: the same in tokens")
    sub.add_argument("--spot-discount", metavar="SHARE", help="by hand: how much less an hour on spot costs, e.g. 50%%")
    sub.add_argument("--spot-overhead", metavar="SHARE", help="by hand: how many more hours it takes there, e.g. 10%%")
    sub.add_argument("--interrupted-every", metavar="TIME", help="by hand: e.g. 8h; with the job's train.save_minutes")
    sub.add_argument("--restart", metavar="TIME", help="by hand: from an interruption until work goes on, e.g. 3min")
    sub.add_argument("--step-time", nargs=2, metavar=("BEFORE", "AFTER"), help="by hand: of a step, e.g. 200ms 130ms")
    sub.add_argument("--limit", type=int, metavar="N", help="choices to show, 0 for all (default: 10; with --json all)")
    sub.add_argument(
        "--explain", nargs="?", const="", metavar="PLAN", help="the components of the best plan, or of a rank or name"
    )
    sub.add_argument("--compare", nargs=2, metavar=("A", "B"), help='two ranks or names: "H100" "2x RTX 4090 spot"')
    sub.add_argument("--html", metavar="FILE", help="write the plan as one self-contained page as well")
    sub.add_argument("--json", action="store_true", help="print everything as JSON")

    sub = verb("train", _train, "start a job, or continue it where it was interrupted")
    _job_arguments(sub)
    sub.add_argument(
        "--allow-restart",
        action="store_true",
        help="start from zero when no checkpoint is whole, count from zero when the ledger is gone",
    )
    sub.add_argument(
        "--retry",
        nargs="?",
        type=int,
        const=3,
        metavar="N",
        help="begin again after interruptions, crashes and kills, until N attempts in a row saved nothing (default: 3)",
    )
    sub.add_argument("--json", action="store_true", help="print the receipt as JSON; progress goes to stderr")

    sub = verb("probe", _probe, "a minute of real steps to find the cheapest way to compute a job here")
    _job_arguments(sub)
    sub.add_argument("--seconds", type=float, default=60.0, metavar="S", help="time to spend (default: 60)")
    sub.add_argument("--json", action="store_true", help="print every trial as JSON; progress goes to stderr")

    sub = verb("report", _report, "print the receipt of a run, or compare two")
    sub.add_argument("folder", help="run folder (output_dir)")
    sub.add_argument("baseline", nargs="?", help="run folder to compare with")
    sub.add_argument("--json", action="store_true")

    sub = verb("export", _export, "write the trained model of a run as an adapter or merged into its base")
    sub.add_argument("folder", help="run folder (output_dir)")
    sub.add_argument("--output", required=True, help="new folder for the model")
    sub.add_argument("--format", choices=("adapter", "merged"), default="merged")
    sub.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the merged weights")
    sub.add_argument(
        "--trust-remote-code", action="store_true", help="run the code that comes with the base model, as the job does"
    )
    sub.add_argument("--json", action="store_true")

    sub = verb("prices", _prices, "show what GPUs cost, or refresh the prices from public feeds")
    sub.add_argument("action", nargs="?", choices=("update",), help="update: refresh the prices kept in the cache")
    sub.add_argument("--gpu", help='such as "RTX 4090" or h100')
    sub.add_argument("--provider")
    sub.add_argument("--region", help="or its beginning, such as us-")
    sub.add_argument("--kind", choices=("spot", "on-demand"))
    sub.add_argument("--sort", choices=("usd-per-gpu", "usd", "age"), default="usd-per-gpu")
    sub.add_argument("--limit", type=int, metavar="N", help="rows to show, 0 for all (default: 20; with --json all)")
    sub.add_argument("--prices", metavar="FILE", help="a CSV of prices of your own, taken alone")
    sub.add_argument("--json", action="store_true")

    sub = verb("doctor", _doctor, "check this machine, and a job before it starts")
    sub.add_argument("job", nargs="?", help="job file (YAML)")
    sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the job")
    sub.add_argument("--json", action="store_true")
    return parser


def _console(*, stderr: bool = False, goes_on: bool = False) -> Any:
    """Where people read; a log has no edge at column 80. What `goes_on` does so when nobody reads any more."""
    from farthing.report.safe import SafeConsole

    class Door(SafeConsole):
        def on_broken_pipe(self) -> None:
            if not goes_on:
                raise BrokenPipeError
            _discard(self.file)

    console = Door(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120
    return console


def _job_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("job", help="job file (YAML)")
    sub.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key, e.g. --set train.learning_rate=1e-4 (repeatable)",
    )


# ---- verbs ----


def _init(arguments: argparse.Namespace) -> int:
    if arguments.schema:
        from farthing.config.load import job_schema

        print(json.dumps(job_schema(), indent=1))
        return EXIT_FINISHED
    if arguments.demo:
        from farthing.tiny import write_demo

        folder = Path(arguments.path or "demo")
        if folder.exists() and any(folder.iterdir()):
            raise UserMistake("the folder is not empty", where=str(folder), to_do="name a new one")
        written = write_demo(folder)
    else:
        from farthing.config.starter import starter

        written = Path(arguments.path or "job.yaml")
        if written.exists():
            raise UserMistake("there is such a file already", where=str(written), to_do="name another")
        if not written.parent.is_dir():
            raise UserMistake("no such folder", where=str(written.parent), to_do="make it first")
        written.write_text(starter(arguments.task), encoding="utf-8")
    next_step = f"farthing train {written}" if arguments.demo else f"farthing doctor {written}"
    if arguments.json:
        print(json.dumps({"written": str(written), "next": next_step}))
    else:
        print(f"wrote {printable(written)}\nnext: {printable(next_step)}")
    return EXIT_FINISHED


def _plan(arguments: argparse.Namespace) -> int:
    import gc

    gc.disable()  # a plan is a second of making small values; looking for garbage would take a quarter of it
    try:
        return _make_plan(arguments)
    finally:
        gc.enable()


def _make_plan(arguments: argparse.Namespace) -> int:
    from datetime import datetime

    from farthing.config.load import load_job
    from farthing.planner.ownership import parse_owned
    from farthing.planner.throughput_arithmetic import parse_figures

    now = datetime.now().astimezone().replace(second=0, microsecond=0)
    for name, least in (("max_gpus", 1), ("limit", 0), ("examples", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise UserMistake(f"{value} is too few", where=f"--{name.replace('_', '-')}", to_do=f"give {least} or more")
    runs: float | None = arguments.runs_per_month
    if runs is not None and not 0 < runs <= 1e6:
        raise UserMistake(f"{runs:g} runs a month", where="--runs-per-month", to_do="give a number above 0")
    own = [parse_owned(text) for text in arguments.own]
    budget_usd, deadline_s = _dollars(arguments.budget), _seconds_until(arguments.deadline, now)
    figures = parse_figures(
        arguments.samples_per_min, arguments.tokens_per_s, arguments.spot_discount, arguments.spot_overhead,
        arguments.interrupted_every, arguments.restart, arguments.step_time,
    )  # fmt: skip
    html = None if arguments.html is None else _page_path(Path(arguments.html))
    job = load_job(arguments.job, arguments.set)

    from farthing.planner.inputs import study_job
    from farthing.planner.preflight import look_over
    from farthing.report.plan_compare import compare_plans, find_plan
    from farthing.report.plan_view import plan_view
    from farthing.report.plan_words import ways_out

    look_over(job, only_plans=True, with_data=arguments.examples is None)
    study = study_job(
        job,
        now=now,
        prices=arguments.prices,
        gpu=arguments.gpu,
        provider=arguments.provider,
        region=arguments.region,
        kind=arguments.offers,
        max_gpus=arguments.max_gpus,
        own=own,
        budget_usd=budget_usd,
        deadline_s=deadline_s,
        n_examples=arguments.examples,
        mean_tokens=arguments.mean_tokens,
        traces=None if arguments.traces is None else Path(arguments.traces),
        torch=arguments.torch,
    )
    view = plan_view(study, runs, figures)
    impossible = None
    if not view["plans"]:
        ways = "".join(f"\n    {number}. {way}" for number, way in enumerate(ways_out(view), 1))
        impossible = UserMistake(
            f"none of {view['n_offers']:,} offers can do this job",
            where=arguments.job,
            to_do=f"the nearest ways:{ways}",
        )
    pair = [find_plan(view, name) for name in arguments.compare] if arguments.compare and not impossible else []
    if pair:
        view["comparison"] = compare_plans(*pair)
    if html is not None:
        from farthing.durability.files import write_text
        from farthing.report.plan_page import plan_page

        try:
            write_text(html, plan_page(view))
        except OSError as error:
            raise UserMistake(f"can't be written: {error.strerror}", where=str(html), to_do="check the path") from None
    if arguments.json:
        if arguments.limit:
            view["plans"] = view["plans"][: arguments.limit]
        if impossible:
            view |= impossible.as_dict()
        print(json.dumps(view, indent=1, allow_nan=False))
        if impossible:
            _complain(impossible)
        return EXIT_MISTAKE if impossible else EXIT_FINISHED
    from farthing.report.plan_table import draw_compared, draw_components, draw_header, draw_nothing, draw_plan

    console = _console()
    if impossible:
        draw_nothing(console, view)
        raise impossible
    if pair:
        draw_compared(console, view["comparison"], *pair)
    elif arguments.explain is not None:
        draw_header(console, view)
        draw_components(console, find_plan(view, arguments.explain or str((view["best"] or {"rank": 1})["rank"])))
    else:
        draw_plan(console, view, len(view["plans"]) if arguments.limit == 0 else arguments.limit)
    if html is not None:
        print(f"\nwrote {printable(html)}")
    return EXIT_FINISHED


def _dollars(text: str | None) -> float | None:
    from farthing.units import parse_usd

    if text is None:
        return None
    try:
        return parse_usd(text)
    except ValueError as error:
        raise UserMistake(str(error), where="--budget", to_do="e.g. --budget 5") from None


def _seconds_until(text: str | None, now: Any) -> float | None:
    """Seconds from now to a moment, or a duration from now."""
    from datetime import datetime

    from farthing.units import parse_hours

    if text is None:
        return None
    try:
        if "-" in text or "T" in text:
            moment = datetime.fromisoformat(text)
            seconds = float(moment.timestamp() - now.timestamp())
        else:
            seconds = parse_hours(text) * 3600
    except (ValueError, OverflowError):
        raise UserMistake(
            f"{text!r} is neither a moment nor a duration", where="--deadline", to_do='e.g. "2026-12-01 18:00" or 12h'
        ) from None
    if seconds <= 0:
        raise UserMistake(f"{text} is in the past", where="--deadline", to_do="give a later one")
    return seconds


def _page_path(path: Path) -> Path:
    if path.is_dir():
        raise UserMistake("is a folder", where=f"--html {path}", to_do="name a file, such as plan.html")
    if not path.parent.is_dir():
        raise UserMistake("no such folder", where=f"--html {path.parent}", to_do="make it first")
    return path


def _train(arguments: argparse.Namespace) -> int:
    from farthing.durability.opening import opened, opened_early

    if arguments.retry is not None and arguments.retry < 1:
        raise UserMistake(f"{arguments.retry} attempts", where="--retry", to_do="give 1 or more")
    with contextlib.ExitStack() as stack:  # an attempt is on the bill from here on
        attempt = None if arguments.retry else opened_early(stack, Path(arguments.job), arguments.set)

        from farthing.config.load import load_job
        from farthing.durability.run_folder import is_finished
        from farthing.report.receipt import leave_receipt

        job = load_job(arguments.job, arguments.set)
        folder = Path(job.output_dir)
        if attempt is not None and attempt.folder != folder:
            attempt.ledger.withdraw()
            stack.close()
            attempt = None
        offer = _scaling_offer(arguments, job)
        if is_finished(folder):
            from farthing.train.finished import receipt_of_finished

            if receipt := receipt_of_finished(job):
                console = _console(stderr=arguments.json)
                return _show_end(arguments, console, "finished", FINISHED_ALREADY, receipt, EXIT_FINISHED)
        if arguments.retry is not None:
            from farthing.planner.preflight import look_over

            look_over(job)
            return _train_until_it_ends(arguments, folder)
        if attempt is None:
            attempt = stack.enter_context(opened(folder, job.usd_per_hour))
        attempt.ledger.set_price(job.usd_per_hour)
        outcome = _train_once(arguments, job, offer, attempt)
    if isinstance(outcome, str):
        receipt = leave_receipt(folder)
        return _show_end(arguments, _console(stderr=arguments.json), "limit", outcome, receipt, EXIT_LIMIT)
    console = _console(stderr=arguments.json, goes_on=True)
    return _show_end(arguments, console, outcome.state, outcome.reason, outcome.receipt, outcome.exit_code)


def _train_once(arguments: argparse.Namespace, job: Any, offer: str, attempt: Any) -> Any:
    """The `Outcome` of an attempt that is on the bill; why it was not begun, where a limit has no room for it."""
    from farthing.planner.preflight import look_over
    from farthing.report.terminal import Terminal
    from farthing.train.budget import stopped_before_start

    console = _console(stderr=arguments.json, goes_on=True)
    if reason := stopped_before_start(job, attempt):
        return reason
    look_over(job)
    terminal = Terminal(console, job.train.logging_steps)
    if offer:
        terminal("note", {"text": offer})
    terminal("starting", {"text": "loading torch and transformers"})

    def leave(number: int, frame: Any) -> None:
        with contextlib.suppress(Exception):  # whatever it is, we were asked to leave
            attempt.ledger.end("interrupted")
        _leave_before_the_start(number, frame)

    try:
        with _ready_to_leave(leave):  # until the run itself listens
            with contextlib.nullcontext() if "torch" in sys.modules else attempt.ledger.watched():
                from farthing.train.run import train

            outcome = train(job, terminal, allow_restart=arguments.allow_restart, begun=attempt)
    finally:
        terminal.close()
    return outcome


def _train_until_it_ends(arguments: argparse.Namespace, folder: Path) -> int:
    """Attempts as children; with --json the receipt of the last one is printed."""
    import tempfile

    from farthing.durability.supervisor import Child, Supervisor, begin

    words = ["train", arguments.job, *(word for value in arguments.set for word in ("--set", value))]
    with tempfile.TemporaryFile() as printed:

        def start(number: int) -> Child:
            once = ["--allow-restart"] if arguments.allow_restart and number == 0 else []
            if not arguments.json:
                return begin([*words, *once])
            printed.seek(0)
            printed.truncate()
            return begin([*words, *once, "--json"], stdout=printed)

        supervisor = Supervisor(folder, start, _complain, tries=arguments.retry)
        code = supervisor.run()
        printed.seek(0)
        sys.stdout.write(printed.read().decode())
    return code


def _show_end(
    arguments: argparse.Namespace, console: Any, state: str, reason: str, receipt: dict[str, Any], code: int
) -> int:
    """The receipt, and how it ended."""
    from farthing.report.safe import escape
    from farthing.report.terminal import draw_receipt

    if arguments.json:
        _print_json(receipt)
    else:
        draw_receipt(console, receipt)
        console.print()
    words = {
        "finished": f"[green]finished[/]: {escape(reason)}",
        "limit": f"[yellow]stopped[/] by {escape(reason)}; raise the limit and run the same command to go on",
        "interrupted": f"[yellow]interrupted[/] ({escape(reason)}); run the same command to go on",
    }
    console.print(words[state], highlight=False, soft_wrap=True)
    return code


def _probe(arguments: argparse.Namespace) -> int:
    from farthing.config.load import load_job

    if not 5 <= arguments.seconds <= 3600:
        raise UserMistake(f"{arguments.seconds:g} seconds", where="--seconds", to_do="give 5 to 3600")
    job = load_job(arguments.job, arguments.set)

    from farthing.planner.preflight import look_over
    from farthing.report.terminal import Terminal, draw_probe

    look_over(job)
    console = _console(stderr=arguments.json, goes_on=True)
    terminal = Terminal(console, job.train.logging_steps)
    terminal("starting", {"text": "loading torch and transformers"})
    try:
        with _ready_to_leave(_leave_before_the_start):
            from farthing.train.probe import probe

            found = probe(job, terminal, arguments.seconds)
    finally:
        terminal.close()
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        draw_probe(console, found)
    return EXIT_FINISHED


@contextlib.contextmanager
def _ready_to_leave(leave: Callable[[int, Any], None]) -> Iterator[None]:
    """Within the block each signal that asks to leave calls `leave`."""
    from farthing.durability.preemption import heeded

    before = {number: signal.signal(number, leave) for number in heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_before_the_start(number: int, frame: Any) -> None:
    os.write(2, b"farthing: asked to leave before the run had begun; run the same command to start it\n")
    os._exit(EXIT_INTERRUPTED)


def _scaling_offer(arguments: argparse.Namespace, job: Any) -> str:
    """The linear scaling rule, when the command line changes the global batch but not the learning rate."""
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
        f"the global batch is {job.global_batch_size} instead of {plain.global_batch_size}; the linear scaling rule would "
        f"make the learning rate {scaled:g}: --set train.learning_rate_batch_size={plain.global_batch_size}"
    )


def _report(arguments: argparse.Namespace) -> int:
    from farthing.durability.exported import damage_of
    from farthing.report.receipt import build_receipt, compare

    result = build_receipt(Path(arguments.folder))
    damage = {str(folder): damage_of(Path(folder)) for folder in (arguments.folder, arguments.baseline) if folder}
    for folder, words in damage.items():
        if words:
            _complain(f"{folder}: the exported model is damaged: {words}")
            _write("  to do: run `farthing train` with its job again: it writes the model anew")
    if arguments.baseline:
        result = compare(result, build_receipt(Path(arguments.baseline)))
    else:
        result["model_damage"] = damage[arguments.folder]
    if arguments.json:
        print(json.dumps(result, indent=1))
        return EXIT_FINISHED
    from farthing.report.terminal import draw_comparison, draw_receipt

    (draw_comparison if arguments.baseline else draw_receipt)(_console(), result)
    return EXIT_FINISHED


def _export(arguments: argparse.Namespace) -> int:
    run = Path(arguments.folder)
    if not run.is_dir():
        raise UserMistake("no such run folder", where=str(run), to_do="name the output_dir of a job")
    from farthing.export import export_run

    written = export_run(
        run,
        Path(arguments.output),
        arguments.format,
        arguments.dtype,
        trust_remote_code=arguments.trust_remote_code,
    )
    if arguments.json:
        print(json.dumps(written, indent=1))
    else:
        from farthing.units import say_bytes

        print(f"wrote {printable(written['folder'])} ({written['format']}, {say_bytes(written['bytes'])})")
    return EXIT_FINISHED


def _prices(arguments: argparse.Namespace) -> int:
    from datetime import date

    from farthing.prices.catalog import cache_path, read_catalog, select, sort_offers

    if arguments.action == "update":
        from farthing.prices.feeds import update
        from farthing.report.price_table import draw_update, update_as_json
        from farthing.report.safe import escape

        console = _console(stderr=arguments.json)
        with console.status("asking the price feeds") as status:
            result = update(cache_path(), date.today(), progress=lambda text: status.update(escape(text)))
        if arguments.json:
            print(json.dumps(update_as_json(result), indent=1))
        else:
            draw_update(console, result)
        return EXIT_FINISHED
    if arguments.limit is not None and arguments.limit < 0:
        raise UserMistake(f"{arguments.limit} rows can't be shown", where="--limit", to_do="give 0 (all) or more")
    catalog = read_catalog(arguments.prices, date.today())
    found = select(catalog, arguments.gpu, arguments.provider, arguments.region, arguments.kind)
    if not found:
        raise UserMistake("no offer is like this", where="prices", to_do="leave out --region, --kind or --provider")
    found = sort_offers(found, arguments.sort)
    n_shown = (len(found) if arguments.json else 20) if arguments.limit is None else arguments.limit or len(found)
    if arguments.json:
        from farthing.report.price_table import prices_as_json

        print(json.dumps(prices_as_json(catalog, found[:n_shown], len(found)), indent=1))
        return EXIT_FINISHED
    from farthing.report.price_table import draw_prices

    draw_prices(_console(), catalog, found[:n_shown], len(found))
    return EXIT_FINISHED


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.set and not arguments.job:
        raise UserMistake("there is no job to override", where="--set", to_do="name the job file as well")
    from farthing.doctor import check_before, check_job, check_machine

    faults = check_before(Path(arguments.job), arguments.set) if arguments.job else []
    checks = list(check_machine(Path.cwd(), with_device=not faults)) + faults
    if arguments.job and not faults:
        checks += check_job(Path(arguments.job), arguments.set)
    failed = [check for check in checks if check.state == "failed"]
    if arguments.json:
        print(json.dumps({"ok": not failed, "checks": [check.as_dict() for check in checks]}, indent=1))
    else:
        from farthing.report.safe import escape, escape_lines
        from farthing.units import plural

        console = _console()
        colours = {"ok": "green", "warning": "yellow", "failed": "red"}
        for check in checks:
            console.print(
                f"[{colours[check.state]}]{check.state:8}[/] [bold]{escape(check.name)}[/]: {escape_lines(check.found)}",
                soft_wrap=True,
            )
            if check.to_do and (check.state != "ok"):
                console.print(f"         to do: {escape_lines(check.to_do)}", soft_wrap=True)
        n_warnings = sum(check.state == "warning" for check in checks)
        also = f", {plural(n_warnings, 'warning')}" if n_warnings else ""
        if failed:
            console.print(f"\n[red]{plural(len(failed), 'check')} failed[/]{also}")
        else:
            ready = f"\nnext: farthing train {escape(arguments.job)}" if arguments.job else ""
            console.print(f"\n[green]nothing failed[/]{also}{ready}", soft_wrap=True)
    return EXIT_MISTAKE if failed else EXIT_FINISHED
