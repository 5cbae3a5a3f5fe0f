"""Chats as text, by the tokenizer's own template, and what of it the assistant says.

Templates are rendered by jinja2 in the sandbox that transformers uses, the same for training and
for a plan. A template that asks what day it is gets the run's date, at midnight: what was rendered
must not depend on the day it is rendered again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

from farthing.clock import today
from farthing.data.encode import special_tokens_of
from farthing.data.rows import START, STOP, Example, RowValue, Segments
from farthing.errors import ModelError, UnusableRowError
from farthing.storage.files import small_text

# For a tokenizer without a template of its own: readable headers, generation marks around what the
# model says.
DEFAULT_CHAT_TEMPLATE = (
    "{%- if tools %}### Tools\n{{ tools | tojson }}\n\n{% endif -%}"
    "{%- for message in messages %}"
    "{{- '### ' + message['role'] | capitalize + '\n' }}"
    "{%- if message['role'] == 'assistant' %}{% generation %}"
    "{{- message['content'] or '' }}"
    "{%- if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    "{{- eos_token }}{% endgeneration %}{{ '\n\n' }}"
    "{%- else %}{{ (message['content'] or '') + '\n\n' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '### Assistant\n' }}{% endif %}"
)

Messages = Sequence[RowValue]

_PROBE = "Qj7wZk"  # an answer whose end is easily found again
_QUESTION = "Hb3yTr"
_ASKED = ({"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _PROBE})
_PROBES = (
    _ASKED,
    ({"role": "system", "content": "Hello"}, *_ASKED),
)  # some templates must have a system message
_MORE = ({"role": "user", "content": "And?"}, {"role": "assistant", "content": "So."})


def default_template(adds_bos: bool) -> str:
    """farthing's own template; it begins as every text of this tokenizer does."""
    return ("{{- bos_token }}" if adds_bos else "") + DEFAULT_CHAT_TEMPLATE


def read_template(path: str) -> str:
    """The chat template that a job names. Raises `ModelError`."""
    try:
        return small_text(Path(path))
    except OSError as error:
        raise ModelError(
            f"the chat template can't be read: {error.strerror}",
            where=path,
            to_do="check data.chat_template: a Jinja file",
        ) from error


def asks_for_the_date(template: str | None) -> bool:
    """Whether what a template renders depends on the day."""
    return template is not None and re.search(r"\bstrftime_now\b", template) is not None


@dataclass(frozen=True)
class Renderer:
    """A chat template with the special tokens that it may name, on one date."""

    template: str
    special_tokens: tuple[tuple[str, Any], ...]
    on: str
    """ISO date that the template sees; empty: it asks for none."""

    @classmethod
    def of(cls, tokenizer: Any, on: str = "") -> Renderer:
        """The renderer of a tokenizer's template."""
        if not on and asks_for_the_date(tokenizer.chat_template):
            on = today().isoformat()
        return cls(tokenizer.chat_template, tuple(special_tokens_of(tokenizer).items()), on)

    def marked(self, messages: Messages, tools: Any, is_prompt: bool = False, **flags: bool) -> str:
        """The text of a chat, with marks where the template says that the assistant speaks."""
        # as transformers does: many templates would write "None" for a key that is there without a
        # value
        without_none = [
            {key: value for key, value in each.items() if value is not None} for each in messages
        ]
        values: RowValue = {"messages": without_none, "tools": tools, "documents": None}
        values |= {"add_generation_prompt": is_prompt, **dict(self.special_tokens), **flags}
        if self.on:
            values["strftime_now"] = datetime.combine(
                date.fromisoformat(self.on), datetime.min.time()
            ).strftime
        from farthing.data.chat_template import render  # only chats need jinja2

        return render(self.template, values)

    def __call__(
        self, messages: Messages, tools: Any, is_prompt: bool = False, **flags: bool
    ) -> str:
        """The text of a chat; as a prompt it ends where the assistant begins to speak."""
        return self.marked(messages, tools, is_prompt, **flags).replace(START, "").replace(STOP, "")

    def prompts(self, messages: Messages, tools: Any) -> list[str]:
        """The ways in which a template asks for an answer, its own first: some can ask with
        thinking and without.
        """
        asked = [self(messages, tools, is_prompt=True)]
        for flag in ("enable_thinking", "thinking"):
            if re.search(rf"\b{flag}\b", self.template):
                asked += [
                    self(messages, tools, is_prompt=True, **{flag: value})
                    for value in (False, True)
                ]
        return list(dict.fromkeys(asked))


# ---- what the assistant says ----


def has_marks(template: str) -> bool:
    """Whether a template says itself what is generated."""
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template) is not None


@dataclass(frozen=True)
class TurnEnding:
    """What a template writes behind an answer."""

    end: str = ""
    """The end of the turn, which is learned."""
    trailer: str = ""
    """What follows it at the end of a chat, and is not."""
    opens_next: str = ""
    """Where nothing ends a turn: the token that begins the next one, by which the model stops
    (GLM-4: <|user|>).
    """


@dataclass(frozen=True)
class ChatReader:
    """From messages to text with targets: what the assistant says and the token that ends its turn.

    A template with generation marks shows where a turn is. Without them it is what follows the
    prompt that asks for it. Where the template shows a turn in another form once the chat continues
    (reasoning models cut what was thought), it is learned in a chat of its own that ends with it:
    what the model is given and writes when it is asked.
    """

    render: Renderer
    marks: bool
    ending: TurnEnding
    tokens: tuple[str, ...] = ()
    """Special tokens, which may begin a turn."""
    shows_texts: bool = True
    """Whether the template writes contents; some for images leave out what is not in parts."""

    @classmethod
    def of(cls, tokenizer: Any, on: str = "") -> ChatReader:
        """For a tokenizer with a chat template."""
        render = Renderer.of(tokenizer, on)
        shown = _shown(render, _PROBES)
        shows_texts = shown is None or (_QUESTION in shown and _PROBE in shown)
        tokens = tuple(token for token in _added_tokens(tokenizer) if token.strip())
        if has_marks(render.template):
            return cls(render, True, TurnEnding(), tokens, shows_texts)
        return cls(render, False, _ending(render, tokens), tokens, shows_texts)

    @property
    def stop(self) -> str:
        """The special token that ends what is learned of an answer; empty where there is none, and
        a model learns no end.
        """
        said = self.ending.end + self.ending.opens_next
        if self.marks:
            said = (_shown(self.render, _PROBES) or "").rpartition(_PROBE)[2].partition(STOP)[0]
        found = [token for token in self.tokens if token in said]
        return min(found, key=lambda token: (said.index(token), -len(token)), default="")

    def __call__(
        self, messages: Messages, tools: Any, given: frozenset[int] = frozenset()
    ) -> Example:
        """The text of a chat; the turns at `given` (from 0) are context whoever speaks. Raises
        `UnusableRowError`.

        Earlier examples end with an answer that the whole chat shows in another form than the model
        writes it.
        """
        answers = [
            index for index, message in enumerate(messages) if message["role"] == "assistant"
        ]
        if not answers:
            raise UnusableRowError("no assistant turn: there is nothing to learn")
        if given.issuperset(answers):
            raise UnusableRowError("every assistant turn is marked as not to be learned")
        if not self.shows_texts:
            raise UnusableRowError(
                "the chat template leaves out the messages' text: it is for images, or broken"
            )
        read = self._by_marks if self.marks else self._turn_by_turn
        try:
            return read(messages, tools, given)
        except (UnusableRowError, ModelError):
            raise
        except Exception as error:  # templates are programs: they raise what they like
            raise UnusableRowError(f"the chat template refuses it: {str(error)[:200]}") from error

    def _by_marks(self, messages: Messages, tools: Any, given: frozenset[int]) -> Example:
        said = json.dumps([messages, tools], ensure_ascii=False, default=str)
        if START in said or STOP in said:
            raise UnusableRowError("it holds U+FDD0 or U+FDD1, which are no characters")
        answers = [
            index not in given
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        before, *parts = self.render.marked(messages, tools).split(START)
        if given and len(parts) != len(answers):
            raise UnusableRowError(
                "the chat template marks more or fewer turns than the assistant has: which one not"
                " to learn is not seen"
            )
        segments = [(before, False)]
        for part, is_learned in zip(parts, answers if given else [True] * len(parts), strict=True):
            inside, _, outside = part.partition(STOP)
            segments += [(inside, is_learned), (outside, False)]
        return _text(_merged(segments), max(0, len(answers) - len(parts)))

    def _turn_by_turn(self, messages: Messages, tools: Any, given: frozenset[int]) -> Example:
        """Every answer as the model writes it: in the whole chat, else in one that ends with it."""
        wanted = [
            index
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and index not in given
        ]
        turns = {index: self.render(messages[: index + 1], tools) for index in wanted}
        asked = {index: self.render.prompts(messages[:index], tools) for index in wanted if index}
        if 0 in turns:
            asked[0] = [self._before_first(turns[0], messages, tools)]
        is_end = wanted[-1] == len(messages) - 1
        found: list[Segments] = []
        n_unlearned, why = 0, UnusableRowError("")
        if not is_end:
            segments, wanted = self._learned(self.render(messages, tools), wanted, asked, turns)
            found += [segments] if any(learned for _, learned in segments) else []
        while wanted:
            last = wanted[-1]
            segments, left = self._learned(turns[last], wanted, asked, turns)
            if last in left:
                try:
                    chat, prompt = messages[: last + 1], asked[last][0]
                    dropped = self._dropped(chat, tools, prompt, turns[last])
                    segments, left = dropped or self._opened(chat[-1], prompt), wanted[:-1]
                except UnusableRowError as error:
                    n_unlearned, why, wanted = n_unlearned + 1, error, wanted[:-1]
                    continue
            found.append(segments)
            wanted = left
        if not found:
            raise why
        return _text(found[0], n_unlearned, found[:0:-1])

    def _before_first(self, turn: str, messages: Messages, tools: Any) -> str:
        """What stands before the first turn of a chat where the assistant has it: nothing asked for
        it.

        All up to what a template writes to ask for an answer; where it shows that in another form,
        up to the content of the turn.
        """
        asked = self.render(messages[:1], tools, is_prompt=True)
        said = str(messages[0].get("content") or "").strip()
        opening = asked.removeprefix(turn) if asked.startswith(turn) else ""
        if opening and opening in turn:
            return turn[: turn.index(opening) + len(opening)]
        return turn[: turn.rindex(said)] if said and said in turn else ""

    def _learned(
        self, whole: str, wanted: list[int], asked: dict[int, list[str]], turns: dict[int, str]
    ) -> tuple[Segments, list[int]]:
        """(a chat with those answers learned that it shows as the model writes them, the other ones
        that are wanted).

        `asked`: the prompts for each answer. `turns`: the chat that ends with it.
        """
        segments: list[tuple[str, bool]] = []
        left, at = [], 0
        for index in wanted:
            stop = len(self._without_trailer(turns[index]))
            starts = [
                len(prompt)
                for prompt in asked[index]
                if whole.startswith(prompt) and at <= len(prompt) < stop
            ]
            if not starts or whole[:stop] != turns[index][:stop]:
                left.append(index)
                continue
            learned = whole[starts[0] : stop]
            segments.append((whole[at : starts[0]], False))
            if self.ending.opens_next:
                opened = next((token for token in self.tokens if whole.startswith(token, stop)), "")
                learned += opened or (self.ending.opens_next if stop == len(whole) else "")
                stop += len(opened)
            segments.append((learned, True))
            at = stop
        segments.append((whole[at:], False))
        return _merged(segments), left

    def _without_trailer(self, text: str) -> str:
        """A chat that ends with an answer, up to the end of its turn."""
        end, trailer = self.ending.end, self.ending.trailer
        if text.endswith(end + trailer):
            return text.removesuffix(trailer)
        # an answer of another form, such as the call of a tool: what ends the turn is the same, or
        # is not known
        stripped = text.rstrip()
        is_blank = bool(trailer) and not trailer.strip()
        return stripped if is_blank and end and stripped.endswith(end.rstrip()) else text

    def _dropped(self, messages: Messages, tools: Any, before: str, turn: str) -> Segments | None:
        """A last answer whose prompt ends with what the template drops from the answers of a chat,
        such as thinking that was opened and closed (Gemma 4); None where it drops nothing.

        The answer follows that prompt, as when the model is asked. Raises `UnusableRowError`.
        """

        def shown(content: str) -> str:
            return self.render([*messages[:-1], {"role": "assistant", "content": content}], tools)

        plain = shown(_PROBE)
        shared = plain.partition(_PROBE)[0]
        extra = before[len(shared) :]
        begins = shared != plain and before.startswith(shared) and turn.startswith(shared)
        if not begins or not extra.strip() or shown(extra + _PROBE) != plain:
            return None
        if str(messages[-1].get("content") or "").strip() not in turn:
            raise UnusableRowError(
                "the chat template drops the thinking of its answer; leave the thinking out, or"
                " give a template with {% generation %} marks"
            )
        return _merged([(before, False), (self._without_trailer(turn)[len(shared) :], True)])

    def _opened(self, message: RowValue, before: str) -> Segments:
        """A last answer whose prompt says more than the template shows of it: a prompt that opens
        the thinking.

        The answer continues from the prompt, as when the model is asked, if it begins with what the
        prompt opens. Raises `UnusableRowError`.
        """
        content = str(message.get("content") or "").lstrip()
        opener = before[before.rstrip().rfind("<") :] if before.rstrip().endswith(">") else ""
        tag = opener.strip()
        if tag and content.startswith(tag):
            answer = content.removeprefix(tag)
            answer = answer.lstrip("\n") if opener.endswith("\n") else answer
            end = self.ending.end or self.ending.opens_next
            return _merged([(before, False), (answer.rstrip() + end, True)])
        asked = f" (its prompt ends with {tag!r})" if tag else ""
        raise UnusableRowError(
            "the chat template shows the answer in another form than the model would write"
            f" it{asked}; give one with {{% generation %}} marks"
        )


def _text(segments: Segments, n_unlearned: int, earlier: Sequence[Segments] = ()) -> Example:
    return Example(
        segments,
        is_raw=False,
        n_unlearned=n_unlearned,
        earlier=tuple(_text(each, 0) for each in earlier),
    )


def _merged(segments: Sequence[tuple[str, bool]]) -> Segments:
    return tuple((part, is_target) for part, is_target in segments if part)


def _added_tokens(tokenizer: Any) -> list[str]:
    """The words that a tokenizer was given beside those it learned, ends of turns among them."""
    return [
        token.content for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    ]


def _ending(render: Renderer, tokens: Sequence[str]) -> TurnEnding:
    """What a template writes behind an answer; nothing where it can't be seen."""
    behind = _behind_answer(render, _PROBES)
    within = _behind_answer(render, [[*chat, *_MORE] for chat in _PROBES])
    if behind is None:
        return TurnEnding()
    common = os.path.commonprefix([behind, within or ""])  # noqa: RUF071 - of texts
    is_known = any(token in common for token in tokens)
    begins = [behind.index(token) for token in tokens if token in (common if is_known else behind)]
    if not begins:
        opens_next = next((token for token in tokens if within and within.startswith(token)), "")
        if opens_next and not behind.strip():
            return TurnEnding("", behind, opens_next)
        words = behind.rstrip()
        return TurnEnding(words, behind[len(words) :]) if words else TurnEnding(behind)
    stop = min(behind.index(token) + len(token) for token in tokens if token in behind)
    if is_known:  # a turn may end with several tokens, one right behind the other
        stop, n_before = min(begins), -1
        while stop != n_before:
            n_before = stop
            stop += max(
                (len(token) for token in tokens if common.startswith(token, stop)), default=0
            )
    return TurnEnding(behind[:stop], behind[stop:])


def _shown(render: Renderer, chats: Sequence[Messages]) -> str | None:
    """The first of the chats that a template takes, with marks; None where it takes none."""
    for messages in chats:
        try:
            return render.marked(messages, None)
        except ModelError:
            raise
        except Exception:  # the rows will say why
            continue
    return None


def _behind_answer(render: Renderer, chats: Sequence[Messages]) -> str | None:
    """What stands behind the answer `_PROBE` in the chat that a template takes; None where it is
    not found.
    """
    _, found, behind = (_shown(render, chats) or "").partition(_PROBE)
    return behind if found and _PROBE not in behind else None


def said_of_chats(is_chat: bool, tokenizer: Any, on: str, n_unrolled: int) -> list[str]:
    """What the owner of chats should know of how the template has them learned; nothing where data
    are no chats.
    """
    said = []
    if n_unrolled:
        said.append(
            f"{n_unrolled:,} earlier answers are learned in examples of their own, as the chat"
            " template shows them in another form once the chat continues"
        )
    if is_chat and tokenizer.chat_template.endswith(DEFAULT_CHAT_TEMPLATE):
        said.append(
            "the tokenizer has no chat template: farthing's own is used (### User, ### Assistant);"
            " for another set data.chat_template"
        )
    if is_chat and not ChatReader.of(tokenizer, on).stop:
        said.append(
            "the chat template ends an answer with no special token: the model does not learn where"
            " to stop"
        )
    return said
