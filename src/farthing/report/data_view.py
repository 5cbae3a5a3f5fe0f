"""What `farthing doctor --data` shows: figures, oddities, and examples with what is learned."""

from __future__ import annotations

from farthing.data.formats import RENDERED
from farthing.data.summary import Summary
from farthing.objectives.registry import objective_of
from farthing.report.safe import escape
from farthing.report.words import lines

MOST_CHARACTERS = 1500  # of an example


def data_lines(found: Summary) -> list[str]:
    objective = objective_of(found.task)
    is_guessed = found.format in RENDERED and not found.is_exact and objective.predicts_next
    rows = lines("data.rich", "data", found, is_guessed, objective.scores_tokens)
    for number, example in enumerate(found.examples, start=1):
        rows += ["", f"[dim]example {number}[/] ([green]green is learned[/])", _example(example)]
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
    examples = [
        [{"text": text, "is_learned": is_learned} for text, is_learned in each]
        for each in found.examples
    ]
    return vars(found) | {"examples": examples}
