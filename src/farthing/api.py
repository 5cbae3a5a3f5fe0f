"""farthing from Python: jobs, plans, runs and what comes after them, with values where the command
line prints.

`load_job` and `plan` import no torch. Errors are raised as `FarthingError`, with what, where and
what to do.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from farthing import clock
from farthing.config import load
from farthing.config.job import Job
from farthing.errors import FarthingError, InputError
from farthing.events import Emit, ignore
from farthing.report import receipt_types as report

if TYPE_CHECKING:
    from farthing.report.plan_view import PlanView

__all__ = [
    "FarthingError",
    "Job",
    "Plan",
    "Receipt",
    "evaluate",
    "export_model",
    "fine_tune",
    "generate",
    "history",
    "load_job",
    "plan",
]

_one_at_a_time = threading.RLock()
"""Runs share the generators of random numbers, and transformers loads one model at a time."""
Kind = TypeVar("Kind")
JobLike = str | Path | Mapping[str, Any] | Job
"""A job file, its keys and values, or a job that was loaded."""


def load_job(job: JobLike, overrides: Sequence[str] = ()) -> Job:
    """Read and check a job: a file, or a mapping with the same keys, whose relative names stand in
    the working folder. In a mapping `data`, `data.train` and `data.eval` also take rows: a list of
    mappings, a `datasets.Dataset` or a pandas `DataFrame`.

    `overrides` are `section.key=value`, as `--set` takes them. Raises `JobError` with every problem
    found.
    """
    if isinstance(job, Job):
        if overrides:
            raise InputError(
                "overrides of a job that is loaded", to_do="give them to load_job with the file"
            )
        return job
    several = [overrides] if isinstance(overrides, str) else overrides or ()
    changes = [str(each) for each in several]
    if isinstance(job, Mapping):
        return load.job_of(_on_disk(job), changes)
    return load.load_job(_path(job, "job"), changes)


def _on_disk(job: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a job with plain values: rows are files in its cache."""
    from farthing.data.memory import is_rows, write_rows

    folder = Path(job.get("cache_dir") or "~/.cache/farthing").expanduser() / "rows"

    def plain(value: Any) -> Any:
        if is_rows(value):
            return str(write_rows(value, folder.absolute()))
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, Path):
            return str(value)
        is_plain = value is None or isinstance(value, str | float | date)
        if is_plain or (isinstance(value, int) and abs(value) < 1 << 64):
            return value
        raise InputError(
            f"a value that no job file can hold: a {type(value).__name__}",
            where="the mapping of a job",
            to_do="use text, numbers, true or false, lists and mappings of them",
        )

    try:
        return {str(key): plain(value) for key, value in job.items()}
    except RecursionError as error:
        raise InputError("it holds itself", where="the mapping of a job") from error


def plan(job: JobLike, *, now: datetime | None = None, **asked: Any) -> Plan:
    """Where a job fits, how long it takes and what it costs, on every machine that could run it;
    without torch.

    `asked` are the fields of `farthing.planner.inputs.PlanOptions`, all optional: gpu, provider,
    region (names), kind ("spot", "on-demand"), max_gpus, prices, budget_usd, deadline_s,
    n_examples and mean_tokens (instead of reading the data) ...
    `now` is the day that the age of prices is counted from. Raises `InputError`, `DataError`,
    `ModelError`.
    """
    from farthing.config.preflight import look_over
    from farthing.planner.inputs import PlanOptions, study_job
    from farthing.report.plan_view import plan_view

    known = vars(PlanOptions())
    for name in asked.keys() - known.keys():
        to_do = f"give {', '.join(known)}; set keys of the job, such as where.gpus, in load_job"
        raise InputError("no such option of a plan", where=name, to_do=to_do)
    given = {name: each for name, each in asked.items() if each is not None}
    loaded, wishes = load_job(job), _checked(PlanOptions, given)
    now = None if now is None else _checked(datetime, now, "now")
    look_over(loaded, only_plans=True, with_data=wishes.n_examples is None)
    return Plan(
        plan_view(
            study_job(loaded, wishes, now=now or clock.now().replace(second=0, microsecond=0))
        )
    )


def fine_tune(
    job: JobLike, *, allow_restart: bool = False, on_event: Emit | None = None, quiet: bool = False
) -> Receipt:
    """Start a job, or resume it where it was interrupted, in this process; returns when it ends for
    whatever reason.

    `on_event` gets what happens (the events of `farthing.events`) instead of the terminal, on the
    first of several ranks; `quiet` shows nothing. The receipt says how it ended: "finished",
    "limit" or "interrupted". With limits a second process kills this one 5 s past a limit, should
    it hang.
    """
    from farthing.config.preflight import look_over
    from farthing.report.terminal import Terminal
    from farthing.run.folder import is_finished
    from farthing.run.group import seat_in, sit_down
    from farthing.run.guard import watched_from_beside
    from farthing.run.opening import opened
    from farthing.train.budget import RunLimits, refuse_cap_without_price

    if on_event is not None and not callable(on_event):
        what = f"`on_event` is a {type(on_event).__name__}, which can't be called"
        raise InputError(what, to_do="give a function of one event")
    loaded, begun, seat = load_job(job), None, seat_in(os.environ)
    if seat.by:
        sit_down(seat, os.environ)
    refuse_cap_without_price(loaded)
    folder = Path(loaded.output_dir)
    if not is_finished(folder):
        look_over(loaded)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_one_at_a_time)
        if loaded.limits.is_set and seat.n == 1:
            stack.enter_context(watched_from_beside("farthing.report.last_words", folder))
            begun = stack.enter_context(opened(folder, loaded.usd_per_hour))
            RunLimits(loaded, begun.ledger).tell_guard()
        from farthing.train.run import train as run  # imports torch: the limits hold by now

        emit = on_event if on_event is not None and seat.is_first else ignore
        if on_event is None and not quiet and seat.is_first:
            from rich.console import Console

            from farthing.printable import print_any_character

            print_any_character()
            emit = terminal = Terminal(Console(), loaded.train.logging_steps)
            stack.callback(terminal.close)
        outcome = run(loaded, emit, allow_restart=allow_restart, begun=begun)
    return Receipt(outcome.state, outcome.reason, folder, outcome.receipt)


def evaluate(
    run: str | Path | Receipt,
    data: Any = None,
    *,
    base: bool = False,
    limit: int | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Measure the model of a run on its held-out examples, or on `data`: a file or rows.

    Returns what `farthing eval --json` prints: the metrics under `tuned`, with `base` also those of
    what the run began with and the gains.
    """
    from farthing.after.evaluation import evaluate_run, on_examples
    from farthing.after.held_out import held_out_of
    from farthing.model.load import quiet_libraries

    _must_count(limit=limit)
    quiet_libraries()
    folder = _folder_of(run)
    with tempfile.TemporaryDirectory(prefix="farthing-rows-") as scratch:
        file = _file_of(data, Path(scratch))
        held_out = held_out_of(folder, file, limit, trust_remote_code=trust_remote_code)
        return evaluate_run(folder, on_examples(held_out), with_base=base)


def generate(
    run: str | Path | Receipt,
    data: Any,
    *,
    max_new_tokens: int = 256,
    batch_size: int = 16,
    trust_remote_code: bool = False,
) -> list[dict[str, Any]]:
    """What the model of a run says of `data`: a file, rows, or texts.

    Each row comes back in its place with `prediction` and `score`: an answer and the mean
    log-probability of its tokens, or a class, its probability and those of all as `scores`. A row
    that can't be read has an `error` instead.
    """
    from farthing.after.predict import Predictor
    from farthing.data.memory import rows_of
    from farthing.data.read import KINDS, ending_of
    from farthing.model.load import quiet_libraries

    _must_count(max_new_tokens=max_new_tokens, batch_size=batch_size)
    quiet_libraries()
    predictor = Predictor(
        _folder_of(run),
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        trust_remote_code=trust_remote_code,
    )
    if isinstance(data, str):
        is_named = ending_of(Path(data)) in KINDS and not re.search(r"\s", data)
        data = Path(data) if is_named or os.path.isfile(data) else [data]
    if isinstance(data, Path):
        return list(predictor.file(data))

    def rows() -> Iterator[dict[str, Any]]:
        for number, each in enumerate(rows_of(data), 1):
            if not isinstance(each, str | Mapping):
                what = f"row {number} is a {type(each).__name__}"
                raise InputError(what, where="data", to_do="give texts, or mappings of columns")
            yield predictor.row_of(each) if isinstance(each, str) else dict(each)

    return list(predictor.rows(rows()))


def export_model(
    run: str | Path | Receipt,
    output: str | Path,
    *,
    format: str = "merged",
    dtype: str | None = None,
    bits: str | None = None,
    max_kl: float | None = None,
    force: bool = False,
    data: Any = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Write the model of a run into the new folder `output`, as `farthing export` does: adapter,
    merged, gguf, fp8, w8a16 or w4a16. Returns what was written and how it was judged.
    """
    from farthing.after.quantized import export_as

    if dtype not in (None, "float32", "bfloat16", "float16"):
        to_do = "use float32, bfloat16 or float16"
        raise InputError(f"there is no {dtype!r}", where="dtype", to_do=to_do)
    with tempfile.TemporaryDirectory(prefix="farthing-rows-") as scratch:
        return export_as(
            _folder_of(run),
            _path(output, "output"),
            format,
            dtype=dtype,
            bits=bits,
            max_kl=None if max_kl is None else _checked(float, max_kl, "max_kl"),
            is_forced=force,
            data=_file_of(data, Path(scratch)),
            trust_remote_code=trust_remote_code,
        )


def history(run: str | Path | Receipt) -> list[dict[str, Any]]:
    """The figures of a run in their order: a row for each step (step, loss, grad_norm, lr,
    n_targets, n_tokens), for each skipped one, and for each evaluation (step, metrics, is_best).
    """
    from farthing.run.folder import LOG
    from farthing.storage.logs import read_line

    folder, rows = _folder_of(run), list[dict[str, Any]]()
    if not (folder / LOG).is_file():
        raise InputError("no run has left its log here", where=str(folder), to_do="name a run")
    with open(folder / LOG, "rb") as file:
        for line in file:
            if (row := read_line(line)) is not None:
                row.pop("examples", None)
                rows.append(row)
    return rows


def _checked(kind: type[Kind], values: Any, name: str = "") -> Kind:
    """What was given as a value of its kind. Raises `InputError`."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = next(map(str, first["loc"]), name)
        to_do = first["msg"].removeprefix("Value error, ")
        raise InputError(f"can't be {first['input']!r}"[:200], where=where, to_do=to_do) from None


def _path(given: Any, name: str) -> Path:
    """Raises `InputError` for what is no path."""
    if not isinstance(given, str | Path):
        raise InputError(f"can't be {given!r}"[:200], where=name, to_do="give a path")
    return Path(given)


def _must_count(**counts: int | None) -> None:
    for name, n in counts.items():
        if n is not None and (not isinstance(n, int) or n < 1):
            raise InputError(f"{n!r} is too few", where=name, to_do="use 1 or more")


def _folder_of(run: str | Path | Receipt) -> Path:
    """The folder of a run. Raises `InputError`."""
    folder = run.folder if isinstance(run, Receipt) else _path(run, "run")
    if not folder.is_dir():
        raise InputError(
            "no such run folder", where=str(folder), to_do="name the output_dir of a job"
        )
    return folder


def _file_of(data: Any, scratch: Path) -> Path | None:
    """The file that was named, or one of the rows that were given."""
    from farthing.data.memory import write_rows

    if data is None or isinstance(data, str | Path):
        return None if data is None else Path(data)
    return write_rows(data, scratch)


@dataclass(frozen=True)
class Plan:
    """The answer of a plan. `print(plan)` is what the command shows, a notebook shows the page."""

    view: PlanView
    """Typed values: see docs/explanation/estimates.md."""

    @cached_property
    def _json(self) -> Mapping[str, Any]:
        return self.view.to_json()

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The choice that a plan recommends: name, total_usd, hours, memory; None where nothing can
        do the job.
        """
        return cast("Mapping[str, Any] | None", self._json["best"])

    @property
    def choices(self) -> Sequence[Mapping[str, Any]]:
        """Every machine and recipe that can do the job, in the order of the ranking."""
        return cast("Sequence[Mapping[str, Any]]", self._json["plans"])

    @property
    def rejected(self) -> Sequence[Mapping[str, Any]]:
        """What can't do the job, with the reason and what would let it in."""
        return cast("Sequence[Mapping[str, Any]]", self._json["rejected"])

    def to_json(self) -> dict[str, object]:
        """Plain values, as `farthing plan --json --all`."""
        return dict(self._json)

    def to_html(self) -> str:
        """One self-contained page."""
        from farthing.report.plan_report import plan_page

        return plan_page(self.view)

    def __str__(self) -> str:
        from farthing.report.draw import draw
        from farthing.report.plan_report import brief

        return _drawn(lambda console: draw(console, brief(self.view)))

    def __repr__(self) -> str:
        return f"Plan({self.view.answer!r})"

    def _repr_html_(self) -> str:
        return _framed(self.to_html())


@dataclass(frozen=True)
class Receipt:
    """What a run cost and how it ended. `print(receipt)` is what the command shows."""

    state: str
    """finished, limit or interrupted."""
    reason: str
    folder: Path
    """The run's folder; the model is in `folder / "model"` when it is finished."""
    content: report.RunReceipt
    """Everything that `farthing report` knows, typed."""

    @property
    def usd(self) -> float:
        """What the run has cost up to now, over all its attempts."""
        return self.content.usd

    def to_json(self) -> dict[str, object]:
        """Plain values, as `farthing report --json`."""
        return self.content.to_json()

    def __str__(self) -> str:
        from farthing.report.draw import draw
        from farthing.report.receipt_report import receipt_report

        return _drawn(lambda console: draw(console, receipt_report(self.content)))

    def __repr__(self) -> str:
        return f"Receipt({self.state}: {self.reason}, {self.folder})"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def _drawn(draw: Callable[[Any], None]) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100)
    draw(console)
    return cast("io.StringIO", console.file).getvalue()


def _framed(page: str) -> str:
    """A page within a notebook's: its styles stay its own."""
    return (
        f'<iframe srcdoc="{escape(page, quote=True)}"'
        ' style="width:100%;height:800px;border:0"></iframe>'
    )
