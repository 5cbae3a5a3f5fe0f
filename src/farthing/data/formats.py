"""What the columns mean: rows of any known format become an `Example` that says which parts
the model must learn.

A row is a list of (text, is_target) segments, or a text and a label where the task has labels.
Chats are rendered by the tokenizer's own template.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from farthing.data.chat import ChatReader
from farthing.data.chat_rows import (
    are_turns,
    as_context,
    as_list,
    asked_of,
    messages_of,
    tools_of,
    without_marks,
)
from farthing.data.columns import (
    Columns,
    Template,
    columns_of,
    guessed,
    missing,
    own_columns,
    renamed,
)
from farthing.data.preference import FORMS, Turns, Unit
from farthing.data.rows import Example, RowValue
from farthing.data.shown import Shown, leaves_an_answer_empty
from farthing.errors import DataError, ModelError, UnusableRowError
from farthing.objectives.columns import text_of
from farthing.objectives.objective import Labels, Objective
from farthing.objectives.registry import format_of, objective_of

ANSWER = "?"  # stands where a target would
ANSWER_TURN: RowValue = {"role": "assistant", "content": ANSWER}
RENDERED = frozenset({"messages", "conversations", "mapping", "instruction"})
"""Formats written by a chat template, where a model predicts the next token."""


class Understood(NamedTuple):
    """The format of a source, the columns it is read from, and a note on each guess."""

    format: str
    columns: dict[str, Template]
    notes: tuple[str, ...] = ()


def recognise(columns: set[str], task: str, renamed: Columns, where: str) -> Understood:
    """The format these columns are in: by their names, as `renamed` says, or by usual other names
    where it says nothing.

    Raises `DataError` that says what was found and what would do.
    """
    # spaces around the names of a CSV file's columns are no part of them
    named = {
        name: own.strip() if isinstance(own, str) and own not in columns and "{" not in own else own
        for name, own in renamed.items()
    }
    there = f"there are: {_listed(columns)}"
    for name in filter(None, (missing(template, columns) for template in named.values())):
        near = difflib.get_close_matches(name, columns, n=1)
        raise DataError(
            f"no column `{name}` (named in `data.columns`)",
            where=where,
            to_do=f"did you mean `{near[0]}`?  {there}" if near else there,
        )
    read = {name for template in named.values() for name in own_columns(template, columns)}
    present = (columns - read) | set(named)
    formats = objective_of(task).formats
    # columns by their own names come before guesses of any format
    for each in sorted(formats, key=lambda each: not set(each.needs) <= present):
        found = {} if named else guessed(columns, each.needs, each.may_have)
        if found is not None and set(each.needs) <= present | set(found):
            words = ", ".join(f"`{own}` as `{standard}`" for standard, own in found.items())
            note = f"read {words}, by the usual meaning of the name; data.columns says it otherwise"
            return Understood(each.name, {**named, **found}, (note,) if found else ())
    wanted = ", or ".join(" + ".join(each.needs) for each in formats)
    to_do = (
        f"{task} reads {wanted}; say which of yours are meant, such as `data.columns:"
        f" {{{objective_of(task).example_columns}}}`"
    )
    if re.search(r"\.[ct]sv", where):
        to_do += "; if its first line names no columns, put one before it"
    raise DataError(
        f"the columns ({_listed(columns)}) match no format for {task}", where=where, to_do=to_do
    )


def asked_columns(task: str) -> set[str]:
    """The standard columns that hold what is learned of a row, and which one to be answered may
    lack.
    """
    objective = objective_of(task)
    if objective.labels is not None:
        return {each.needs[-1] for each in objective.formats}
    return {"completion", "target", "output"}


def used_columns(format_name: str, renamed: Columns) -> set[str]:
    """The columns of the data, by their own names, that a format reads; all others are ignored."""
    _, needs, may_have = format_of(format_name)
    read = {own for name in (*needs, *may_have) for own in columns_of(renamed.get(name, name))}
    return read | {own.partition(".")[0] for own in read}


@dataclass(frozen=True)
class Converter:
    """Makes a row an `Example`. Raises `UnusableRowError` with the reason.

    `on` is the ISO date that a chat template sees which asks for it; `shown` notes what the
    template leaves out of chats. With `asks` the example's target is `ANSWER`, or its label None,
    whatever the row has.
    """

    format: str
    columns: Columns
    label_map: dict[str, str]
    tokenizer: Any
    task: str
    on: str = ""
    shown: Shown = field(default_factory=Shown)
    asks: bool = False

    def __post_init__(self) -> None:
        if self._objective.predicts_next and self.format in RENDERED:
            _ = self._chats  # a template that can't be used is an error of the job, not of a row

    def __call__(self, row: RowValue) -> Example:
        own = renamed(row, self.columns) if self.columns else row
        text = self._example({**own, **self._answers})
        try:
            for each in (*text.sequences, *text.earlier):
                for part, _ in each.segments:
                    if not part.isascii():
                        part.encode()
        except UnicodeEncodeError as error:
            # JSON can spell half of a surrogate pair, no text can hold it
            raise UnusableRowError(
                f"not text: half a surrogate pair (\\u{ord(error.object[error.start]):04x})"
            ) from error
        return text

    @cached_property
    def _objective(self) -> Objective:
        return objective_of(self.task)

    @cached_property
    def _answers(self) -> RowValue:
        return dict.fromkeys(asked_columns(self.task), ANSWER) if self.asks else {}

    @cached_property
    def _chats(self) -> ChatReader:
        return chat_reader(self.tokenizer, self.on)

    def _example(self, row: RowValue) -> Example:
        is_chat = self._objective.predicts_next
        if self._objective.learns_units:
            return self._unit(row)
        if (labels := self._objective.labels) is not None:
            label = None if self.asks else labels.read(row, self.label_map)
            has_pair = "text_pair" in row and "text_pair" in format_of(self.format).may_have
            pair = text_of(row, "text_pair") if has_pair else ""
            return _labelled(labels.text(row), pair, label, labels)
        if self.format == "text":
            text = text_of(row, "text")
            return Example(((text, True),), given=(text,))
        if self.format == "instruction":
            return self._chat(_of_alpaca(row), tools_of(row)) if is_chat else _asked(row)
        if self.format in RENDERED:
            writes_calls = "tool_calls" in self._chats.render.template
            turns = messages_of(row, self.format, writes_calls=writes_calls)
            return self._chat(_to_answer(turns) if self.asks else turns, tools_of(row))
        source, target = self.format.split("/")
        if is_chat and (are_turns(row.get(source)) or are_turns(row.get(target))):
            # TRL's form: of the turns those of the completion are learned
            learned = [ANSWER_TURN] if self.asks else messages_of(row, target)
            return self._chat(as_context(messages_of(row, source)) + learned, tools_of(row))
        return _pair(text_of(row, source), text_of(row, target))

    def _unit(self, row: RowValue) -> Example:
        unit = FORMS[self.format](row)
        if len(unit.answers) > 1 and unit.answers[0] == unit.answers[1]:
            raise UnusableRowError("both answers are the same: there is nothing to prefer")
        first, *others = [self._answered(unit, answer) for answer in unit.answers]
        value = 0.0 if self._objective.value is None else self._objective.value(row)
        return replace(first, beside=tuple(each.segments for each in others), value=value)

    def _answered(self, unit: Unit, answer: str | Turns) -> Example:
        if isinstance(unit.prompt, str):
            return _pair(unit.prompt, str(answer))
        turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        text = self._chat([*as_context(unit.prompt), *turns], unit.tools)
        if text.earlier:
            raise UnusableRowError("the chat template shows the answer in several forms")
        return replace(text, given=_said(unit.prompt))

    def _chat(self, messages: list[RowValue], tools: Any) -> Example:
        """A chat as text. What its owner gave: all that the assistant does not say, or all where
        only it speaks.
        """
        others = [message for message in messages if message["role"] != "assistant"] or messages
        given, render = _said(others), self._chats.render
        if tools:
            given += (json.dumps(tools, sort_keys=True, default=str),)
        messages, unlearned = without_marks(messages)
        if "developer" not in render.template:
            messages = [
                {**each, "role": "system"} if each["role"] == "developer" else each
                for each in messages
            ]
        try:
            self.shown.look(messages, tools, render)
            if leaves_an_answer_empty(messages, tools, render, unlearned):
                raise UnusableRowError(
                    "the chat template leaves out `tool_calls`: an empty answer would be learned"
                )
            chat = self._chats(messages, tools, unlearned)
        except UnusableRowError as error:
            error.given = given
            raise
        earlier = tuple(replace(each, given=given) for each in chat.earlier)
        return replace(chat, given=given, earlier=earlier)


def chat_reader(tokenizer: Any, on: str) -> ChatReader:
    """What reads chats by the tokenizer's template. Raises `ModelError` where it has none."""
    if tokenizer.chat_template is None:
        names = _listed(set(tokenizer.other_templates))
        raise ModelError(
            f"its tokenizer has several chat templates, and none is the default: {names}",
            where="the chat template",
            to_do=(
                "write the one to learn with to a file, and name that: data.chat_template:"
                " FILE.jinja"
            ),
        )
    return ChatReader.of(tokenizer, on)


def _listed(columns: set[str]) -> str:
    return ", ".join(sorted(columns)[:20]) or "none"


def _pair(given: str, answer: str) -> Example:
    return Example(((given, False), (answer, True)), given=(given,))


def _to_answer(turns: list[RowValue]) -> list[RowValue]:
    """A chat with `ANSWER` in place of the answer that it has, or lacks."""
    return [*(turns[:-1] if turns[-1]["role"] == "assistant" else turns), ANSWER_TURN]


def _labelled(text: Any, pair: str, label: Any, labels: Labels) -> Example:
    if labels.per_word:
        return Example(((" ".join(text), False),), label=label, given=text, words=text)
    given = (text, pair) if pair else (text,)
    return Example(tuple((each, False) for each in given), label=label, given=given)


def _asked(row: RowValue) -> Example:
    """An Alpaca row for seq2seq, which needs no frame. Raises `UnusableRowError`."""
    if _history(row):
        raise UnusableRowError(
            "`history` holds earlier turns of a chat, and this task has none: leave the column out"
        )
    system, asked = text_of(row, "system", may_be_empty=True), asked_of(row)
    return _pair(f"{system}\n\n{asked}" if system else asked, text_of(row, "output"))


def _of_alpaca(row: RowValue) -> list[RowValue]:
    """An Alpaca row as a chat, so that the tokenizer's template frames it.

    Earlier turns are learned as the last one is: LLaMA-Factory's rule.
    """
    system = text_of(row, "system", may_be_empty=True)
    turns = [("system", system)] * bool(system)
    for question, answer in [*_history(row), [asked_of(row), text_of(row, "output")]]:
        turns += [("user", question), ("assistant", answer)]
    return [{"role": role, "content": said} for role, said in turns]


def _history(row: RowValue) -> list[list[str]]:
    """The turns of a column `history`: [[question, answer], ...]. Raises `UnusableRowError`."""
    if row.get("history") in (None, "", [], "[]"):
        return []
    turns = as_list(row["history"], "history")
    for turn in turns:
        if not isinstance(turn, list) or [type(said) for said in turn] != [str, str]:
            raise UnusableRowError("`history` is no list of [question, answer]")
    return turns


def _said(messages: Sequence[RowValue]) -> tuple[str, ...]:
    return tuple(str(message.get("content") or "").strip() for message in messages)


def hash_of_input(given: Sequence[str]) -> int:
    """A hash of `Example.given`, 64 bits; spaces around its parts make no difference, as most
    templates strip them.
    """
    text = "\0".join([part.strip() for part in given]).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
