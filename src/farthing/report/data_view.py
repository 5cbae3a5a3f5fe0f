"""What `farthing doctor --data` shows: a file's figures, its oddities, and three examples with what
is learned in colour.
"""

from __future__ import annotations

from farthing.data.formats import RENDERED
from farthing.data.summary import Summary
from farthing.objectives.registry import objective_of
from farthing.report.safe import escape
from farthing.units import plural

MOST_CHARACTERS = 1500  # of an example


def data_lines(found: Summary) -> list[str]:
    """Lines of rich markup."""
    rows = [f"[bold]{escape(found.name)}[/]: {plural(found.n_rows, 'row')}"]
    if found.format:
        columns = ", ".join(
            f"{escape(name)} from {escape(own)}" for name, own in found.columns.items()
        )
        rows.append(
            f"format     {escape(found.format)}, for {found.task}"
            + (f" ({columns})" if columns else "")
        )
    rows += [f"[yellow]guessed[/]    {escape(note)}" for note in found.notes]
    for what, (n, line, to_do) in found.foreign.items():
        rows.append(
            f"[red]not ours[/]   {plural(n, 'row')} (the first: line {line}): {escape(what)};"
            f" {escape(to_do)}"
        )
    if found.n_bad:
        rows.append(
            f"[red]unusable[/]   {plural(found.n_bad, 'row')}: {escape('; '.join(found.bad[:3]))}"
        )
    if found.tokens:
        rows += _tokens(found)
    if found.turns:
        roles = ", ".join(f"{escape(role)} {n:,}" for role, n in found.roles.items())
        rows.append(
            f"turns      {found.turns['mean']:.1f} on average, {found.turns['most']:.0f} at most:"
            f" {roles}"
        )
    if found.n_unlearned_turns:
        rows.append(
            f"[yellow]context[/]    {plural(found.n_unlearned_turns, 'assistant turn')} that the"
            " template rewrites: not learned"
        )
    for what, n in found.odd_roles.items():
        rows.append(f"[yellow]odd[/]        {plural(n, 'chat')}: {escape(what)}")
    rows += [f"[yellow]left out[/]   {escape(what)}" for what in found.left_out]
    if found.format in RENDERED and not found.is_exact and objective_of(found.task).predicts_next:
        rows.append(
            "template   farthing's own; to check the model's template, name a job or --model NAME"
        )
    if found.labels:
        total = sum(found.labels.values())
        labels = ", ".join(
            f"{escape(label)} {n / total:.0%}" for label, n in list(found.labels.items())[:12]
        )
        rows.append(f"labels     {len(found.labels)}: {labels}")
    if found.n_equal_rows or found.n_equal_inputs:
        rows_words, inputs_words = (
            plural(found.n_equal_rows, "row"),
            plural(found.n_equal_inputs, "input"),
        )
        rows.append(f"[yellow]repeats[/]    {rows_words} and {inputs_words} that were there before")
    if found.ignored:
        rows.append(f"[yellow]not read[/]   columns {escape(found.ignored)}")
    for number, example in enumerate(found.examples, start=1):
        rows += ["", f"[dim]example {number}[/] ([green]green is learned[/])", _example(example)]
    return rows


def _tokens(found: Summary) -> list[str]:
    tokens = found.tokens
    source = f"of {plural(found.n_tokenized, 'row')}" + (
        ""
        if found.is_exact
        else ", guessed at 4 characters each: name a job, or --model NAME, for its tokenizer"
    )
    rows = [
        f"tokens     {tokens['all']:,.0f} in all; {tokens['mean']:,.0f} on average, half under"
        f" {tokens['median']:,.0f}, nine in ten under {tokens['nine_in_ten']:,.0f}, the longest"
        f" {tokens['longest']:,.0f} ({source})"
    ]
    if objective_of(found.task).scores_tokens:
        rows.append(f"learned    {tokens['learned_share']:.0%} of the tokens")
    if found.n_too_long:
        rows.append(
            f"[yellow]too long[/]   {plural(found.n_too_long, 'row')} over {found.max_length:,}"
            " tokens (data.max_length)"
        )
    return rows


def _example(example: list[tuple[str, bool]]) -> str:
    shown, left = [], MOST_CHARACTERS
    for text, is_learned in example:
        part = text[: max(0, left)]
        left -= len(text)
        lines = "\n".join([escape(line) for line in part.split("\n")])
        shown.append(f"[{'green' if is_learned else 'dim'}]{lines}[/]" if part else "")
    return "".join(shown) + (" ..." if left < 0 else "")


def as_json(found: Summary) -> dict[str, object]:
    """For programs."""
    return {
        **{key: value for key, value in vars(found).items() if key not in ("bad", "examples")},
        "n_bad": found.n_bad,
        "bad": found.bad,
        "examples": [
            [{"text": text, "is_learned": is_learned} for text, is_learned in each]
            for each in found.examples
        ],
    }
