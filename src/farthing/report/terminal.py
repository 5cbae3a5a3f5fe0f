"""What a person sees of a run as it goes. `templates/live.rich` and `live.txt` have the words."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from farthing import events
from farthing.printable import printable
from farthing.report.draw import draw_block
from farthing.report.safe import escape
from farthing.report.words import lines, pairs, say
from farthing.units import plural, say_bytes, say_count, say_seconds

_PLAIN_EVERY_S = 5.0


class Terminal:
    """Events of a run: a live line on a terminal, a line every few seconds in a log."""

    def __init__(
        self, console: Console, logging_steps: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console, self._clock, self._logging_steps = console, clock, logging_steps
        self._work = ""  # what is being read or tokenized
        self._work_began = self._work_due = 0.0
        self._work_from = 0.0, 0
        self._live = Live(console=console, refresh_per_second=8, transient=True)
        self._last_at: float | None = None

    def __call__(self, event: events.Event) -> None:
        name = type(event).__name__
        match event:
            case events.Working() | events.Probed() | events.Evaluating():
                self._alive(say("live.txt", name, event))
            case events.ReadingData():
                total, done = event.total_bytes, say_bytes(event.done_bytes)
                words = f"{done} of {say_bytes(total)}" if total else done
                self._on_the_way(event.what, event.done_bytes / total if total else None, words)
            case events.Tokenizing():
                words = f"{plural(event.n_rows, 'row')}, {say_count(event.n_tokens)} tokens"
                self._on_the_way(f"tokenizing {event.role}", event.share, words, event.n_rows)
            case events.Decided():
                self.close()
                draw_block(self.console, pairs("live.txt", name, event))
            case events.DataRead():
                n_repeated = event.n_examples - event.n_distinct_inputs
                self._say(*lines("live.rich", name, event, n_repeated))
            case events.StepTaken():
                self._step(event)
            case (
                events.Note()
                | events.Warned()
                | events.Restored()
                | events.Evaluated()
                | events.Exported()
            ):
                self._say(*lines("live.rich", name, event))

    def close(self) -> None:
        self._live.stop()

    def _step(self, event: events.StepTaken) -> None:
        # what matters most stands first: a narrow terminal cuts the end
        line, is_last = " · ".join(lines("live.txt", "step", event)), event.step == event.n_steps
        is_due, since = event.step % self._logging_steps == 0 or is_last, self._last_at or 0.0
        has_waited = self._clock() - since >= _PLAIN_EVERY_S
        if self.console.is_terminal:
            self._alive(line)
        elif self._last_at is None or is_last:
            is_due = has_waited = True
        if is_due and has_waited:
            self._say(line)
            self._last_at = self._clock()

    def _say(self, *lines: str) -> None:
        self.close()
        for line in lines:  # a terminal is given whole words, a log whole lines
            self.console.print(line, highlight=False, soft_wrap=not self.console.is_terminal)

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
            n = round(20 * min(1.0, share or 0.0))
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
        if self.console.is_terminal:
            self._live.update(Text(printable(text), overflow="ellipsis", no_wrap=True))
            self._live.start()
