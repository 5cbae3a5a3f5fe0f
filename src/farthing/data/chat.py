"""Chats as text, by the tokenizer's own template, and what of it the assistant says.

Templates are rendered by jinja2 in the sandbox that transformers uses, the same for training and for a plan. A template that
asks what day it is gets the run's date, at midnight: what was rendered must not depend on the day it is rendered again.

Refuses templates that draw at random, and to tokenize.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from farthing.clock import today

TEXT_VERSION = 3
"""How rows become texts, tokens and a split. A run goes on with the version that it began with.

1: the split hangs on the rendered text; all that a template writes behind an answer is learned; chats begin with the
tokenizer's first token even where the template has none; seq2seq targets are encoded as inputs are.
2: content in parts and OpenAI's older function calls make a row unusable; a developer's turn keeps its role.
"""

# For a tokenizer without a template of its own: readable headers, generation marks around what the model says.
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

Messages = Sequence[dict[str, Any]]
Segments = tuple[tuple[str, bool], ...]

_START, _STOP = "\ufdd0", "\ufdd1"  # around what a template marks as generated: code points that are no characters
_PROBE = "Qj7wZk"  # an answer whose end is easily found again


class Unusable(Exception):
    """A row that can't become an example. The message is the reason, in words for its owner.

    `given` is what its owner wrote as input, where the row could be read and only the template stands in the way.
    """

    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chat:
    """A rendered chat: (text, is_target) in order, and how many assistant turns are in it as context only."""

    segments: Segments
    n_unlearned: int = 0


def default_template(adds_bos: bool) -> str:
    """farthing's own template; it begins as every text of this tokenizer does."""
    return ("{{- bos_token }}" if adds_bos else "") + DEFAULT_CHAT_TEMPLATE


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
        named = {name: _as_text(token) for name, token in tokenizer.special_tokens_map.items()}
        return cls(tokenizer.chat_template, tuple(named.items()), on)

    def marked(self, messages: Messages, tools: Any, is_prompt: bool = False) -> str:
        """The text of a chat, with marks where the template says that the assistant speaks."""
        # as transformers does: many templates would write "None" for a key that is there without a value
        without_none = [{key: value for key, value in each.items() if value is not None} for each in messages]
        values: dict[str, Any] = {"messages": without_none, "tools": tools, "documents": None}
        values |= {"add_generation_prompt": is_prompt, **dict(self.special_tokens)}
        if self.on:
            values["strftime_now"] = datetime.combine(date.fromisoformat(self.on), datetime.min.time()).strftime
        return str(_compiled(self.template).render(values))

    def __call__(self, messages: Messages, tools: Any, is_prompt: bool = False) -> str:
        """The text of a chat; as a prompt it ends where the assistant begins to speak."""
        return self.marked(messages, tools, is_prompt).replace(_START, "").replace(_STOP, "")


def _as_text(token: Any) -> Any:
    return [str(each) for each in token] if isinstance(token, list | tuple) else str(token)


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    """A chat template as transformers compiles it, without what would draw at random or look at the clock."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %}: what the model says."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 wants it

        def parse(self, parser: Any) -> Any:
            """The block's content between marks."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_START}{caller()}{_STOP}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def as_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    del environment.filters["random"], environment.globals["lipsum"]
    return environment.from_string(source)


# ---- what the assistant says ----


def has_marks(template: str) -> bool:
    """Whether a template says itself what is generated."""
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template) is not None


@dataclass(frozen=True)
class ChatReader:
    """From messages to text with targets: what the assistant says and the token that ends its turn.

    A template with generation marks says so itself. Without them a turn is what stands behind the prompt that asks for
    it. Where the template shows a turn in another form once the chat goes on (reasoning models cut what was thought),
    the model never writes that form: such a turn is context, and not learned.
    """

    render: Renderer
    marks: bool
    ending: tuple[str, str]
    """What a template writes behind an answer: (the end of the turn, which is learned, and what follows it)."""
    version: int = TEXT_VERSION

    @classmethod
    def of(cls, tokenizer: Any, on: str = "", version: int = TEXT_VERSION) -> ChatReader:
        """For a tokenizer with a chat template."""
        render = Renderer.of(tokenizer, on)
        marks = has_marks(render.template)
        return cls(render, marks, ("", "") if marks else _ending(render, _added_tokens(tokenizer)), version)

    def __call__(self, messages: Messages, tools: Any, given: frozenset[int] = frozenset()) -> Chat:
        """The text of a chat; the turns at `given` (from 0) are context whoever speaks. Raises `Unusable`."""
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise Unusable("no assistant turn: there is nothing to learn")
        if given.issuperset(answers):
            raise Unusable("every assistant turn is marked as not to be learned")
        try:
            if self.marks:
                return self._by_marks(messages, tools, given)
            if self.version > 1:
                return self._by_prompts(messages, tools, given)
            return self._by_prefixes(messages, tools, given)
        except Unusable:
            raise
        except Exception as error:  # templates are programs: they raise what they like
            raise Unusable(f"the chat template refuses it: {str(error)[:200]}") from error

    def _by_marks(self, messages: Messages, tools: Any, given: frozenset[int]) -> Chat:
        said = json.dumps([messages, tools], ensure_ascii=False, default=str)
        if _START in said or _STOP in said:
            raise Unusable("it holds U+FDD0 or U+FDD1, which are no characters")
        answers = [index not in given for index, message in enumerate(messages) if message["role"] == "assistant"]
        before, *parts = self.render.marked(messages, tools).split(_START)
        if given and len(parts) != len(answers):
            raise Unusable(
                "the chat template marks more or fewer turns than the assistant has: which one not to learn is not seen"
            )
        segments = [(before, False)]
        for part, is_learned in zip(parts, answers if given else [True] * len(parts), strict=True):
            inside, _, outside = part.partition(_STOP)
            segments += [(inside, is_learned), (outside, False)]
        return Chat(_merged(segments))

    def _by_prompts(self, messages: Messages, tools: Any, given: frozenset[int]) -> Chat:
        whole = self.render(messages, tools)
        segments: list[tuple[str, bool]] = []
        at, n_unlearned = 0, 0
        last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:index], tools, is_prompt=True) if index else ""
            turn = self._without_trailer(self.render(messages[: index + 1], tools))
            if whole.startswith(before) and whole.startswith(turn) and at <= len(before) < len(turn):
                segments += [(whole[at : len(before)], False), (whole[len(before) : len(turn)], index not in given)]
                at = len(turn)
            elif index == last and index not in given and not any(is_learned for _, is_learned in segments):
                return Chat(self._opened(messages, index, before), n_unlearned)
            elif index not in given:
                n_unlearned += 1
        segments.append((whole[at:], False))
        return Chat(_merged(segments), n_unlearned)

    def _by_prefixes(self, messages: Messages, tools: Any, given: frozenset[int]) -> Chat:
        """As runs of version 1 read it: a turn is all that the render up to it adds to the render before it."""
        whole = self.render(messages, tools)
        segments: list[tuple[str, bool]] = []
        at = 0
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:index], tools, is_prompt=True) if index else ""
            after = self.render(messages[: index + 1], tools)
            if not (whole.startswith(before) and whole.startswith(after) and at <= len(before) < len(after)):
                raise Unusable("the chat template rewrites earlier turns; give one with {% generation %} marks")
            segments += [(whole[at : len(before)], False), (whole[len(before) : len(after)], index not in given)]
            at = len(after)
        segments.append((whole[at:], False))
        return Chat(_merged(segments))

    def _without_trailer(self, text: str) -> str:
        """A chat that ends with an answer, up to the end of its turn."""
        end, trailer = self.ending
        if text.endswith(end + trailer):
            return text.removesuffix(trailer)
        # an answer of another form, such as the call of a tool: what ends the turn is the same, or is not known
        stripped = text.rstrip()
        return stripped if trailer and not trailer.strip() and end and stripped.endswith(end.rstrip()) else text

    def _opened(self, messages: Messages, index: int, before: str) -> Segments:
        """A last answer whose prompt says more than the template shows of it: a prompt that opens the thinking.

        The answer goes on from the prompt, as when the model is asked, if it begins with what the prompt opens.
        Raises `Unusable`.
        """
        content = str(messages[index].get("content") or "").lstrip()
        opener = before[before.rstrip().rfind("<") :] if before.rstrip().endswith(">") else ""
        if opener.strip() and index == len(messages) - 1 and content.startswith(opener.strip()):
            answer = content.removeprefix(opener.strip())
            answer = answer.lstrip("\n") if opener.endswith("\n") else answer
            return _merged([(before, False), (answer.rstrip() + self.ending[0], True)])
        asked = f" (its prompt ends with {opener.strip()!r})" if opener.strip() else ""
        raise Unusable(
            f"the chat template shows the answer in another form than the model would write it{asked};"
            " give one with {% generation %} marks"
        )


def _merged(segments: Sequence[tuple[str, bool]]) -> Segments:
    return tuple((part, is_target) for part, is_target in segments if part)


def _added_tokens(tokenizer: Any) -> list[str]:
    """The words that a tokenizer was given beside those it learned, ends of turns among them."""
    rust = getattr(tokenizer, "backend_tokenizer", None)
    if rust is not None:
        return [token.content for token in rust.get_added_tokens_decoder().values()]
    return list(getattr(tokenizer, "added_tokens", ()))


def _ending(render: Renderer, tokens: Sequence[str]) -> tuple[str, str]:
    """What a template writes behind an answer, as in `ChatReader.ending`; nothing where it can't be seen."""
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _PROBE}]
    text = ""
    for messages in (chat, [{"role": "system", "content": "Hello"}, *chat]):  # some must have a system message
        try:
            text = render(messages, None)
            break
        except Exception:  # the rows will say why
            continue
    answer, found, behind = text.rpartition(_PROBE)
    if not found or _PROBE in answer:
        return "", ""
    ends = [behind.index(token) + len(token) for token in tokens if token.strip() and token in behind]
    if ends:
        return behind[: min(ends)], behind[min(ends) :]
    words = behind.rstrip()
    return (words, behind[len(words) :]) if words else (behind, "")
