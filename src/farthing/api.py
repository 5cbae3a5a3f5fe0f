"""farthing from Python: `load_job`, `plan` and `fine_tune`, with values where the command line
prints.

Torch is imported by `fine_tune` alone. Refuses to print and to exit: what goes wrong is raised as a
`FarthingError`, whose message says what, where and what to do.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any, cast

from farthing import clock
from farthing.config import load
from farthing.config.job import Job
from farthing.errors import FarthingError, InputError
from farthing.events import Emit, ignore
from farthing.report import receipt as report

__all__ = ["FarthingError", "Job", "Plan", "Receipt", "fine_tune", "load_job", "plan"]

JobLike = str | Path | Mapping[str, Any] | Job
"""A job file, its keys and values, or a job that was loaded."""


def load_job(job: JobLike, overrides: Sequence[str] = ()) -> Job:
    """Read and check a job: a file, or a mapping with the same keys, whose relative names stand in
    the working folder.

    `overrides` are `section.key=value`, as `--set` takes them. Raises `JobError` with every problem
    found.
    """
    if isinstance(job, Job):
        if overrides:
            raise InputError(
                "overrides of a job that is loaded", to_do="give them to load_job with the file"
            )
        return job
    if isinstance(job, Mapping):
        import yaml

        text = yaml.safe_dump(dict(job), sort_keys=False, allow_unicode=True)
        return load.parse_job(text, Path.cwd() / "<job>", list(overrides))
    return load.load_job(job, list(overrides))


def plan(job: JobLike, *, now: datetime | None = None, **asked: Any) -> Plan:
    """Where a job fits, how long it takes and what it costs, on every machine that could run it;
    without torch.

    `asked` are the fields of `farthing.planner.inputs.Asked`, all optional: gpu, provider, region
    (names), kind ("spot", "on-demand"), max_gpus, prices, budget_usd, deadline_s, n_examples and
    mean_tokens (instead of reading the data) ...
    `now` is the day that the age of prices is counted from. Raises `InputError`, `DataError`,
    `ModelError`.
    """
    from farthing.config.preflight import look_over
    from farthing.planner.inputs import Asked, study_job
    from farthing.report.plan_view import plan_view

    loaded, wishes = load_job(job), Asked(**asked)
    look_over(loaded, only_plans=True, with_data=wishes.n_examples is None)
    return Plan(
        plan_view(
            study_job(loaded, wishes, now=now or clock.now().replace(second=0, microsecond=0))
        )
    )


def fine_tune(
    job: JobLike, *, allow_restart: bool = False, on_event: Emit | None = None, quiet: bool = False
) -> Receipt:
    """Start a job, or go on with it where it was interrupted, in this process; returns when it ends
    for whatever reason.

    `on_event` gets what happens (the events of `farthing.events`) instead of the terminal; `quiet`
    shows nothing. The receipt says how it ended: "finished", "limit" or "interrupted".
    """
    from farthing.report.terminal import Terminal
    from farthing.train.run import train as run

    loaded = load_job(job)
    if on_event is not None or quiet:
        outcome = run(loaded, on_event or ignore, allow_restart=allow_restart)
        return Receipt(outcome.state, outcome.reason, Path(loaded.output_dir), outcome.receipt)
    from rich.console import Console

    terminal = Terminal(Console(), loaded.train.logging_steps)
    try:
        outcome = run(loaded, terminal, allow_restart=allow_restart)
    finally:
        terminal.close()
    return Receipt(outcome.state, outcome.reason, Path(loaded.output_dir), outcome.receipt)


@dataclass(frozen=True)
class Plan:
    """The answer of a plan. `print(plan)` is what the command shows, a notebook shows the page."""

    view: Mapping[str, Any]
    """Everything that `farthing plan --json` prints: see docs/plan.md."""

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The choice that a plan recommends: name, total_usd, hours, memory; None where nothing can
        do the job.
        """
        return cast("Mapping[str, Any] | None", self.view["best"])

    @property
    def choices(self) -> Sequence[Mapping[str, Any]]:
        """Every machine and recipe that can do the job, in the order of the ranking."""
        return cast("Sequence[Mapping[str, Any]]", self.view["plans"])

    @property
    def rejected(self) -> Sequence[Mapping[str, Any]]:
        """What can't do the job, with the reason and what would let it in."""
        return cast("Sequence[Mapping[str, Any]]", self.view["rejected"])

    def to_json(self) -> dict[str, object]:
        """Plain values, as `farthing plan --json`."""
        return dict(self.view)

    def to_html(self) -> str:
        """One self-contained page."""
        from farthing.report.plan_page import plan_page

        return plan_page(dict(self.view))

    def __str__(self) -> str:
        from farthing.report.plan_brief import draw_brief

        return _drawn(lambda console: draw_brief(console, self.view))

    def __repr__(self) -> str:
        return f"Plan({self.view['answer']!r})"

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
    content: report.Receipt
    """Everything that `farthing report` knows, typed."""

    @property
    def usd(self) -> float:
        """What the run has cost up to now, over all its attempts."""
        return self.content.usd

    def to_json(self) -> dict[str, object]:
        """Plain values, as `farthing report --json`."""
        return self.content.to_json()

    def __str__(self) -> str:
        from farthing.report.receipt_table import draw_receipt

        return _drawn(lambda console: draw_receipt(console, self.content))

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
