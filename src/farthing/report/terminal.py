"""What a person sees in the terminal: the run as it goes, the receipt, a comparison. Draws; computes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from farthing.printable import printable
from farthing.report.safe import escape
from farthing.units import digits_of, plural, say_bytes, say_count, say_seconds, say_usd

_BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN_EVERY_S = 5.0


class Terminal:
    """Renders the events of a run. On a terminal the last line is alive; in a log, a line every few seconds."""

    def __init__(self, console: Console, logging_steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self._clock = clock
        self._work = ""  # what is being read or tokenized, since when, and when a log is told of it next
        self._work_began = self._work_due = 0.0
        self._logging_steps = logging_steps
        self._live: Live | None = None
        self._last_at = 0.0
        self._n_said = 0

    def __call__(self, kind: str, facts: dict[str, Any]) -> None:
        """One event."""
        handler = getattr(self, f"_on_{kind}", None)
        if handler is not None:
            handler(facts)

    def close(self) -> None:
        """Leave the last line as it is."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    # ---- events ----

    def _on_starting(self, facts: dict[str, Any]) -> None:
        self._alive(facts["text"])

    def _on_note(self, facts: dict[str, Any]) -> None:
        self._say(escape(facts["text"]))

    def _on_warning(self, facts: dict[str, Any]) -> None:
        self._say(f"[yellow]warning:[/] {escape(facts['text'])}")

    def _on_tokenizing(self, facts: dict[str, Any]) -> None:
        words = f"{facts['rows']:,} rows, {say_count(facts['tokens'])} tokens"
        self._on_the_way(f"tokenizing {facts['role']}", facts["share"], words)

    def _on_reading(self, facts: dict[str, Any]) -> None:
        done, total = facts["done_bytes"], facts["total_bytes"]
        words = say_bytes(done) + (f" of {say_bytes(total)}" if total else "")
        self._on_the_way(facts["what"], done / total if total else None, words)

    def _on_data(self, facts: dict[str, Any]) -> None:
        formats = ", ".join(sorted(set(facts["formats"])))
        names = ", ".join(source["name"] for source in facts["sources"])
        words = [
            f"{facts['n_examples']:,} examples",
            f"{say_count(facts['n_tokens'])} tokens",
            f"{say_count(facts['n_targets'])} targets",
        ]
        if facts["n_examples"] != facts["n_distinct_inputs"]:
            words.append(f"{facts['n_examples'] - facts['n_distinct_inputs']:,} with an input seen before")
        if facts["n_too_long"]:
            done = "skipped" if facts["n_skipped_long"] else "truncated"
            words.append(f"{facts['n_too_long']:,} too long, {done}")
        if facts["n_without_target"]:
            words.append(f"{facts['n_without_target']:,} left out: no target token")
        self._say(f"[bold]{facts['role']}[/] {escape(names)} ({formats}): {', '.join(words)}")
        for text in facts["notes"]:
            self._on_warning({"text": text})
        if facts["n_bad"]:
            self._say(
                f"[yellow]warning:[/] {facts['n_bad']:,} of {facts['n_rows']:,} rows can't be used and are left out:"
            )
            for place, reason in facts["bad_rows"][:5]:
                self._say(f"  {escape(place)}: {escape(reason)}")

    def _on_decided(self, facts: dict[str, Any]) -> None:
        counts = facts["parameters"]
        share = counts["trainable"] / max(1, counts["total"])
        rows = {
            "model": facts["model"],
            "parameters": f"{counts['total']:,}, of them trained {counts['trainable']:,} ({share:.2%})",
            "data": f"{facts['examples']:,} examples"
            + (f", {facts['eval_examples']:,} for evaluation" if facts["eval_examples"] else ", none for evaluation")
            + f", up to {facts['max_length']} tokens",
            "steps": f"{facts['steps']:,} of {facts['batch']}"
            + (f"; {facts['fitted']}" if facts.get("fitted") else ""),
            "learning rate": facts["learning_rate"],
            "computes on": f"{facts['device']} in {facts['precision']}",
            "computed": facts["computed"],
            "memory": f"{facts['memory']}; activation checkpointing {facts['gradient_checkpointing']}",
            "checkpoints": facts["checkpoints"],
            "price": facts["price"],
            "promised": facts["promised"],
        }
        table = Table.grid(padding=(0, 2))
        for name, value in rows.items():
            table.add_row(f"[dim]{name}[/]", escape(str(value)))
        self._clear()
        self.console.print(table)

    def _on_keeping(self, facts: dict[str, Any]) -> None:
        self._alive(f"computing frozen layers once: {say_count(facts['done'])} of {say_count(facts['total'])} tokens")

    def _on_probed(self, facts: dict[str, Any]) -> None:
        self._alive(f"probing: {setting_in_words(facts)}: {say_count(facts['tokens_per_s'])} useful tok/s")

    def _on_restored(self, facts: dict[str, Any]) -> None:
        self._say(
            f"[green]resumed[/] at step {facts['step']:,} of {facts['n_steps']:,} (attempt {facts['attempt']}); "
            "checkpoint verified"
        )

    def _on_step(self, facts: dict[str, Any]) -> None:
        line = self._step_line(facts)
        due = facts["step"] % self._logging_steps == 0 or facts["step"] == facts["n_steps"]
        if self.console.is_terminal:
            self._alive(line)
            if due and self._clock() - self._last_at >= _PLAIN_EVERY_S:
                self._say(line)
                self._last_at = self._clock()
        elif (
            self._n_said == 0
            or (due and self._clock() - self._last_at >= _PLAIN_EVERY_S)
            or facts["step"] == facts["n_steps"]
        ):
            self._say(line)
            self._last_at = self._clock()
            self._n_said += 1

    def _on_working(self, facts: dict[str, Any]) -> None:
        self._alive(facts["on"])

    def _on_evaluating(self, facts: dict[str, Any]) -> None:
        self._alive(f"evaluating: {facts['done']:,} of {facts['total']:,}")

    def _on_evaluation(self, facts: dict[str, Any]) -> None:
        numbers = [f"{name} {value:.4g}" for name, value in facts["metrics"].items() if isinstance(value, float)]
        mark = " [green](best)[/]" if facts["is_best"] else ""
        self._say(f"[bold]evaluation[/] at step {facts['step']:,}: {', '.join(numbers)}{mark}")

    def _on_exported(self, facts: dict[str, Any]) -> None:
        self._say(f"model of step {facts['step']:,} written to {escape(facts['folder'])}")

    # ---- drawing ----

    @staticmethod
    def _step_line(facts: dict[str, Any]) -> str:
        loss = "not a number" if facts["loss"] is None else f"{facts['loss']:.4f}"
        parts = [f"step {facts['step']:,}/{facts['n_steps']:,}", f"loss {loss}"]  # what matters most stands first
        has_price = facts["usd"] > 0
        if has_price:
            parts.append(f"{say_usd(facts['usd'])} so far")
        if facts["s_to_go"] is not None:
            cost = f"{say_usd(facts['usd_to_go'])} and " if has_price else ""
            parts.append(f"{cost}{say_seconds(facts['s_to_go'])} to go")
        if facts["tokens_per_s"]:
            parts.append(
                f"{say_count(facts['tokens_per_s'])} useful tok/s ({say_count(facts['padded_tokens_per_s'])} computed)"
            )
        if facts["mfu"]:
            parts.append(f"MFU {facts['mfu']:.0%}")
        if facts["utilisation_percent"] is not None:
            parts.append(f"busy {facts['utilisation_percent']:.0f}%")
        parts.append(f"peak {say_bytes(facts['peak_bytes'])}")
        parts.append(f"epoch {facts['epoch']:.2f}")
        return " · ".join(parts)

    def _say(self, markup: str) -> None:
        self._clear()
        # a terminal is given whole words, a log whole lines
        self.console.print(markup, highlight=False, soft_wrap=not self.console.is_terminal)

    def _on_the_way(self, what: str, share: float | None, words: str) -> None:
        """How far something has got: a bar on a terminal; in a log a line after 5 s, and then ever more seldom."""
        now = self._clock()
        if what != self._work:
            self._work, self._work_began, self._work_due = what, now, now + _PLAIN_EVERY_S
        percent = "" if share is None else f"{share:.0%}, "
        if self.console.is_terminal:
            n = 0 if share is None else round(20 * min(1.0, share))
            bar = "" if share is None else f" {'█' * n}{'░' * (20 - n)}"
            self._alive(f"{what}{bar} {percent}{words}")
        elif now >= self._work_due:
            took_s = now - self._work_began
            to_go = f", {say_seconds(took_s / share - took_s)} to go" if share and share < 1 else ""
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

    def _clear(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def setting_in_words(facts: dict[str, Any]) -> str:
    """How micro-batches were computed."""
    words = [f"{facts['most_tokens']:,} tokens at a time"]
    if facts["every_n_layers"]:
        words.append("every layer computed again" if facts["every_n_layers"] == 1 else "every 2nd layer computed again")
    if facts["tile_tokens"]:
        words.append(f"head in tiles of {facts['tile_tokens']:,}")
    return ", ".join(words)


def draw_probe(console: Console, found: dict[str, Any]) -> None:
    """What a probe has tried, the best first."""
    has_price = any(trial["usd_per_million_tokens"] for trial in found["trials"] if trial["fits"])
    table = Table(box=None, padding=(0, 2), show_edge=False)
    table.add_column("setting")
    for name in ("useful tok/s", "useful", "peak", *(["$ a million"] if has_price else [])):
        table.add_column(name, justify="right")
    for number, trial in enumerate(found["trials"]):
        words = escape(setting_in_words(trial))
        speed = f"{trial['tokens_per_s']:,.0f}" if trial["fits"] else "out of memory"
        cells = [f"[bold]{words}[/]" if number == 0 else words, speed, f"{trial['useful_share']:.1%}"]
        cells.append(say_bytes(trial["peak_bytes"]) if trial["peak_bytes"] else "not known")
        if has_price:
            cells.append(say_usd(trial["usd_per_million_tokens"]) if trial["fits"] else "")
        table.add_row(*cells)
    console.print(table)
    words = f"chosen: {setting_in_words(found['setting'])}"
    if found["tokens_per_s"]:
        words += f"; {found['steps']} whole steps went at {found['tokens_per_s']:,.0f} useful tokens/s"
    if found["usd_per_million_tokens"]:
        words += f", {say_usd(found['usd_per_million_tokens'])} a million"
    console.print(
        f"{words}\n`farthing train` uses it from now on, and `farthing plan` goes by what was measured", soft_wrap=True
    )


def draw_receipt(console: Console, receipt: dict[str, Any]) -> None:
    """The receipt on a terminal."""
    known = receipt["usd_is_known"]
    title = {"finished": "finished", "limit": "stopped at a limit", "interrupted": "interrupted, can be continued"}.get(
        receipt["state"], "not finished, can be continued"
    )
    console.print()
    console.print(f"[bold]Receipt[/] {escape(receipt['run'])} ({title})", highlight=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 2), show_edge=False)
    table.add_column("where the time went")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    dollars = digits_of(receipt["usd"])
    if known:
        table.add_column("dollars", justify="right")
    for span in sorted(receipt["spans"], key=lambda span: -span["seconds"]):
        if span["seconds"] >= 0.005:
            cells = [span["what"], f"{span['seconds']:.1f}", f"{span['share']:.1%}", dollars(span["usd"])]
            table.add_row(*cells[: len(table.columns)])
    cells = ["total", f"{receipt['wall_s']:.1f}", f"{1:.1%}", dollars(receipt["usd"])]
    table.add_row(*(f"[bold]{cell}[/]" for cell in cells[: len(table.columns)]))
    console.print(table)
    if ancestor := receipt.get("ancestor"):
        console.print(
            f"begun from step {ancestor['step']} of {escape(ancestor['run'])}, which had cost {say_usd(ancestor['usd'])}:"
            f" {say_usd(receipt['usd_with_ancestor'])} in all",
            soft_wrap=True,
        )
    if not known:
        console.print("[dim]no price was given: set where.usd_per_hour, or power_watts and usd_per_kwh[/]")
    facts = Table.grid(padding=(0, 2))
    loss = "none" if receipt["final_loss"] is None else f"{receipt['final_loss']:.4f}"
    facts.add_row(
        "[dim]trained[/]",
        f"{plural(receipt['steps'], 'step')}, {say_count(receipt['tokens'])} tokens, last loss {loss}",
    )
    if receipt["usd_per_million_tokens"] is not None and known:
        facts.add_row("[dim]a million tokens[/]", say_usd(receipt["usd_per_million_tokens"]))
    curve = [value for _, value in receipt["curves"]["loss"]]
    if len(curve) > 1:
        facts.add_row("[dim]loss[/]", f"{sparkline(curve)}  {curve[0]:.3f} to {curve[-1]:.3f}")
    busy = [value for _, value in receipt["curves"]["utilisation_percent"]]
    if len(busy) > 1:
        facts.add_row("[dim]device busy[/]", f"{sparkline(busy, 0, 100)}  mean {sum(busy) / len(busy):.0f}%")
    if receipt["interruptions"]:
        facts.add_row(
            "[dim]interruptions[/]",
            f"{receipt['interruptions']}; restarting took {_time_and_price(receipt, 'restart')}, "
            f"work done twice {_time_and_price(receipt, 'redone')}",
        )
    if (saves := receipt.get("checkpoints", {})).get("n"):
        every = "" if saves["interval_s"] is None else f", every {say_seconds(saves['interval_s'])} or at a new best"
        facts.add_row(
            "[dim]checkpoints[/]",
            f"{saves['n']}{every}; they held the run up for {say_seconds(saves['held_up_s'])} ({saves['share']:.2%})",
        )
    if told := [notice for notice in receipt.get("notices", []) if notice["is_certain"]]:
        grace = "" if told[-1]["grace_s"] is None else f" of {say_seconds(max(0.0, told[-1]['grace_s']))}"
        facts.add_row(
            "[dim]last notice[/]",
            f"{escape(told[-1]['what'])}; saved and left after {say_seconds(told[-1]['left_after_s'])}{grace}",
        )
    if events := receipt["out_of_memory"]:
        now = events[-1]
        more = f", every {now['every_n_layers']} layers computed again" if now["every_n_layers"] else ""
        facts.add_row(
            "[dim]out of memory[/]",
            f"{plural(len(events), 'time')}; went on with {now['most_tokens']:,} tokens at a time{more}",
        )
    if fit := receipt.get("schedule"):
        facts.add_row(
            "[dim]schedule[/]",
            f"fitted to the budget: {fit['n_steps']:,} of {fit['asked_steps']:,} steps"
            + ("" if fit["settled"] else ", not settled yet"),
        )
    if trust := receipt.get("ledger"):
        lost = (
            f"{_time_and_price({**receipt, **trust}, 'lost')} are known in sum only"
            if trust["lost_s"]
            else "no money is missing"
        )
        facts.add_row("[dim]ledger[/]", f"[yellow]damaged[/], {plural(trust['n_broken_lines'], 'broken line')}; {lost}")
    if receipt["skipped_steps"]:
        facts.add_row(
            "[dim]skipped[/]", f"{plural(receipt['skipped_steps'], 'step')} whose loss or gradient was not a number"
        )
    console.print(facts)
    _draw_promise(console, receipt)
    _draw_metrics(console, receipt)


def draw_comparison(console: Console, comparison: dict[str, Any]) -> None:
    """Two runs side by side."""
    table = Table(box=None, padding=(0, 2), show_edge=False)
    for name in ("", "run", "baseline", "ratio"):
        table.add_column(name, justify="left" if not name else "right")
    for name, row in comparison["rows"].items():
        say = {"wall_s": say_seconds, "peak_bytes": say_bytes}.get(name, _number)
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        if "usd" in name:
            say = _price
        table.add_row(_WORDS.get(name, name.replace("_", " ")), say(row["run"]), say(row["baseline"]), ratio)
    console.print(f"[bold]run[/]       {escape(comparison['run'])}", soft_wrap=True)
    console.print(f"[bold]baseline[/]  {escape(comparison['baseline'])}", soft_wrap=True)
    console.print(table)
    usd, seconds = comparison["saved_usd"], comparison["saved_s"]
    words = []
    if usd is not None:
        share = "" if comparison["saved_share"] is None else f" ({abs(comparison['saved_share']):.0%})"
        words.append(f"costs {say_usd(abs(usd))}{share} {'less' if usd >= 0 else 'more'}")
    if seconds is not None:
        words.append(f"takes {say_seconds(abs(seconds))} {'less' if seconds >= 0 else 'more'}")
    if words:
        console.print(f"against the baseline the run {' and '.join(words)}")
    for note in comparison["notes"]:
        console.print(f"[yellow]note[/] {escape(note)}", highlight=False, soft_wrap=True)


_WORDS = {
    "usd": "cost",
    "wall_s": "time",
    "tokens_per_s": "useful tokens/s",
    "usd_per_million_tokens": "a million tokens",
    "peak_bytes": "peak memory",
    "final_loss": "last training loss",
    "loss": "evaluation loss",
}


def _price(usd: float | None) -> str:
    return "no price" if usd is None else say_usd(usd)


def _time_and_price(receipt: dict[str, Any], what: str) -> str:
    price = f" ({digits_of(receipt['usd'])(receipt[f'{what}_usd'])})" if receipt["usd_is_known"] else ""
    return say_seconds(receipt[f"{what}_s"]) + price


def sparkline(values: list[float], low: float | None = None, high: float | None = None) -> str:
    """One block a value, from `low` to `high`."""
    low, high = min(values) if low is None else low, max(values) if high is None else high
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, max(0, int((value - low) / span * 7.999)))] for value in values)


def _draw_promise(console: Console, receipt: dict[str, Any]) -> None:
    """What the plan said before the start, part by part, and what the first steps said."""
    promised, forecast = receipt["promised"], receipt["forecast"]
    if promised is None and forecast is None:
        return
    dollars = digits_of(receipt["usd"])
    table = Table(box=None, padding=(0, 2), show_edge=False)
    for name in ("promised before the start" if promised else "", "promised", "happened", "ratio"):
        table.add_column(name, justify="right" if name in ("promised", "happened", "ratio") else "left")

    def rows(of: dict[str, Any], words: dict[str, str]) -> None:
        for name, say in (("wall_s", say_seconds), ("usd", dollars), ("peak_bytes", say_bytes)):
            if name in words and (name != "usd" or receipt["usd_is_known"]):
                row(words[name], of[name], say)

    def row(words: str, pair: dict[str, Any], say: Callable[[Any], str]) -> None:
        ratio = "" if pair["ratio"] is None else f"{pair['ratio']:.2f}"
        table.add_row(words, say(pair["promised"]), say(pair["happened"]), ratio)

    if promised:
        rows(promised, {"wall_s": "time"})
        for name, pair in promised["seconds"].items():
            if max(pair["promised"], pair["happened"]) >= 0.005 * promised["wall_s"]["happened"]:
                row(f"  {name}", pair, say_seconds)
        rows(promised, {"usd": "dollars", "peak_bytes": "peak memory"})
    if forecast:
        rows(forecast, {"wall_s": f"time, forecast after step {forecast['made_after_step']}"})
    console.print(table)
    if promised:
        console.print(f"[dim]the promise rests on {escape(promised['calibration'])}[/]", highlight=False)


def _draw_metrics(console: Console, receipt: dict[str, Any]) -> None:
    metrics = receipt["metrics"]
    if not metrics:
        return
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if isinstance(value, float))
    of = f"best, step {receipt['best_step']:,}" if receipt["best_step"] is not None else "last"
    on = plural(metrics.get("n_examples", 0), "example")
    console.print(f"[dim]evaluation[/] ({of}, {on})  {numbers}", highlight=False)
    classes = metrics.get("per_class")
    if classes and len(classes) <= 30:
        table = Table(box=None, padding=(0, 2), show_edge=False)
        for name in ("class", "precision", "recall", "F1", "examples"):
            table.add_column(name, justify="left" if name == "class" else "right")
        for name, row in classes.items():
            table.add_row(
                escape(name), f"{row['precision']:.3f}", f"{row['recall']:.3f}", f"{row['f1']:.3f}", str(row["n"])
            )
        console.print(table)


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.4g}"
