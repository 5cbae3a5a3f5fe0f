"""What a person sees of a run as it goes, drawn from its events. Computes nothing; tables are in
`receipt_report.py`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from farthing import events
from farthing.printable import printable
from farthing.report.safe import escape
from farthing.units import plural, say_bytes, say_count, say_seconds, say_usd

_PLAIN_EVERY_S = 5.0


class Terminal:
    """Renders the events of a run. On a terminal the last line is alive; in a log, a line every few
    seconds.
    """

    def __init__(
        self, console: Console, logging_steps: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console
        self._clock = clock
        self._work = (  # what is being read or tokenized, since when, and when a log is told of it next  # noqa: E501
            ""
        )
        self._work_began = self._work_due = 0.0
        self._work_from = 0.0, 0
        self._logging_steps = logging_steps
        self._live: Live | None = None
        self._last_at = 0.0
        self._n_said = 0

    def __call__(self, event: events.Event) -> None:
        """One event; of those that concern nobody at a terminal nothing is shown."""
        self._show(event)

    def close(self) -> None:
        """Leave the last line as it is."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    # ---- events ----

    @functools.singledispatchmethod
    def _show(self, event: events.Event) -> None:
        """Shown nowhere, such as that a checkpoint is written."""

    @_show.register
    def _(self, event: events.Note) -> None:
        self._say(escape(event.text))

    @_show.register
    def _(self, event: events.Warned) -> None:
        self._say(f"[yellow]warning:[/] {escape(event.text)}")

    @_show.register
    def _(self, event: events.Working) -> None:
        self._alive(event.on)

    @_show.register
    def _(self, event: events.ReadingData) -> None:
        words = say_bytes(event.done_bytes) + (
            f" of {say_bytes(event.total_bytes)}" if event.total_bytes else ""
        )
        self._on_the_way(
            event.what, event.done_bytes / event.total_bytes if event.total_bytes else None, words
        )

    @_show.register
    def _(self, event: events.Tokenizing) -> None:
        words = f"{plural(event.n_rows, 'row')}, {say_count(event.n_tokens)} tokens"
        self._on_the_way(f"tokenizing {event.role}", event.share, words, event.n_rows)

    @_show.register
    def _(self, event: events.DataRead) -> None:
        words = [
            plural(event.n_examples, "example"),
            f"{say_count(event.n_tokens)} tokens",
            f"{say_count(event.n_targets)} targets",
        ]
        if n_repeated := event.n_examples - event.n_distinct_inputs:
            words.append(f"{n_repeated:,} repeat the input of another example")
        if event.n_too_long:
            words.append(
                f"{event.n_too_long:,} too long,"
                f" {'skipped' if event.n_skipped_long else 'truncated'}"
            )
        if event.n_without_target:
            words.append(f"{event.n_without_target:,} left out: no target token")
        formats = ", ".join(sorted(set(event.formats)))
        self._say(
            f"[bold]{event.role}[/] {escape(', '.join(event.names))} ({formats}):"
            f" {', '.join(words)}"
        )
        for text in event.notes:
            self._show(events.Warned(text))
        if event.n_bad:
            self._show(
                events.Warned(
                    f"{event.n_bad:,} of {plural(event.n_rows, 'row')} can't be used and are left"
                    " out:"
                )
            )
            for place, reason in event.bad_rows[:5]:
                self._say(f"  {escape(place)}: {escape(reason)}")

    @_show.register
    def _(self, event: events.Decided) -> None:
        share = event.n_trainable / max(1, event.n_parameters)
        held_out = (
            f"{event.n_eval_examples:,} for evaluation"
            if event.n_eval_examples
            else "none for evaluation"
        )
        rows = {
            "model": event.model,
            "parameters": (
                f"{event.n_parameters:,}, of them trained {event.n_trainable:,} ({share:.2%})"
            ),
            "data": (
                f"{plural(event.n_examples, 'example')}, {held_out}, up to {event.max_length}"
                " tokens"
            ),
            "steps": (
                f"{event.n_steps:,} of {event.batch}"
                + (f"; {event.fitted}" if event.fitted else "")
            ),
            "learning rate": event.learning_rate,
            "computes on": f"{event.device} in {event.precision}",
            "batches": event.computed,
            "memory": f"{event.memory}; activation checkpointing {event.checkpointing}",
            "checkpoints": event.checkpoints,
            "price": event.price,
            "estimate": event.estimate,
        }
        table = Table.grid(padding=(0, 2))
        for name, value in rows.items():
            table.add_row(f"[dim]{name}[/]", escape(value))
        self.close()
        self.console.print(table)

    @_show.register
    def _(self, event: events.Probed) -> None:
        words = event.settings.in_words()
        self._alive(f"probing: {words}: {say_count(event.tokens_per_s)} useful tok/s")

    @_show.register
    def _(self, event: events.Restored) -> None:
        at = f"step {event.step:,} of {event.n_steps:,} (attempt {event.attempt})"
        self._say(f"[green]resumed[/] at {at}; checkpoint verified")

    @_show.register
    def _(self, event: events.StepTaken) -> None:
        line, is_last = _step_line(event), event.step == event.n_steps
        is_due = event.step % self._logging_steps == 0 or is_last
        has_waited = self._clock() - self._last_at >= _PLAIN_EVERY_S
        if self.console.is_terminal:
            self._alive(line)
        elif self._n_said == 0 or is_last:
            is_due = has_waited = True
        if is_due and has_waited:
            self._say(line)
            self._last_at = self._clock()
            self._n_said += 1

    @_show.register
    def _(self, event: events.Evaluating) -> None:
        self._alive(f"evaluating: {event.n_done:,} of {event.n_examples:,}")

    @_show.register
    def _(self, event: events.Evaluated) -> None:
        numbers = [
            f"{name} {value:.4g}"
            for name, value in event.metrics.items()
            if isinstance(value, float)
        ]
        mark = " [green](best)[/]" if event.is_best else ""
        self._say(f"[bold]evaluation[/] at step {event.step:,}: {', '.join(numbers)}{mark}")

    @_show.register
    def _(self, event: events.Exported) -> None:
        self._say(f"model of step {event.step:,} written to {escape(event.folder)}")

    # ---- drawing ----

    def _say(self, markup: str) -> None:
        self.close()
        # a terminal is given whole words, a log whole lines
        self.console.print(markup, highlight=False, soft_wrap=not self.console.is_terminal)

    def _on_the_way(self, what: str, share: float | None, words: str, n_rows: int = 0) -> None:
        """How far something has got: a bar on a terminal; in a log a line after 5 s, and then ever
        more seldom. Rates are those since the first call, which may resume earlier work.
        """
        now = self._clock()
        if what != self._work:
            self._work, self._work_began, self._work_due = what, now, now + _PLAIN_EVERY_S
            self._work_from = share or 0.0, n_rows
        took_s, (share_before, rows_before) = now - self._work_began, self._work_from
        if n_rows > rows_before and took_s > 0:
            words += f", {say_count((n_rows - rows_before) / took_s)} rows/s"
        percent = "" if share is None else f"{share:.0%}, "
        if self.console.is_terminal:
            n = 0 if share is None else round(20 * min(1.0, share))
            bar = "" if share is None else f" {'█' * n}{'░' * (20 - n)}"
            self._alive(f"{what}{bar} {percent}{words}")
        elif now >= self._work_due:
            to_go = ""
            if share is not None and share_before < share < 1:
                left_s = took_s * (1 - share) / (share - share_before)
                to_go = f", {say_seconds(left_s)} to go"
            self._say(escape(f"{what}: {percent}{words}{to_go}"))
            self._work_due = now + min(60.0, max(2 * _PLAIN_EVERY_S, took_s / 5))

    def _alive(self, text: str) -> None:
        text = printable(text)
        if not self.console.is_terminal:
            return
        if self._live is None:
            self._live = Live(console=self.console, refresh_per_second=8, transient=True)
            self._live.start()
        self._live.update(Text(text, overflow="ellipsis", no_wrap=True))


def _step_line(event: events.StepTaken) -> str:
    """What matters most stands first: a narrow terminal cuts the end."""
    loss = "not a number" if event.loss is None else f"{event.loss:.4f}"
    parts = [f"step {event.step:,}/{event.n_steps:,}", f"loss {loss}"]
    for name in ("rewards/accuracies", "rewards/margins"):
        if name in event.metrics:
            parts.append(f"{name.partition('/')[2]} {event.metrics[name]:.3g}")
    if event.usd > 0:
        parts.append(f"{say_usd(event.usd)} so far")
    if event.s_to_go is not None and event.step < event.n_steps:
        cost = (
            f"{say_usd(event.usd_to_go)} and "
            if event.usd > 0 and event.usd_to_go is not None
            else ""
        )
        parts.append(f"{cost}{say_seconds(event.s_to_go)} to go")
    if event.tokens_per_s and event.padded_tokens_per_s:
        parts.append(
            f"{say_count(event.tokens_per_s)} useful tok/s ({say_count(event.padded_tokens_per_s)}"
            " computed)"
        )
    if event.mfu:
        parts.append(f"MFU {event.mfu:.0%}")
    if event.utilisation_percent is not None:
        parts.append(f"busy {event.utilisation_percent:.0f}%")
    return " · ".join([*parts, f"peak {say_bytes(event.peak_bytes)}", f"epoch {event.epoch:.2f}"])
