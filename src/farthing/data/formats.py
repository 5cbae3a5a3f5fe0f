"""What the columns mean: rows of any known format become a `Text` that says which parts the model must learn.

A causal-lm or seq2seq row is a list of (text, is_target) segments, a classification row a text and a label. Chats are
rendered by the tokenizer's own template. Refuses to tokenize and to read files.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from farthing.durability.files import parse_json
from farthing.errors import DataError

# format -> (columns it needs, tasks that can use it). The first whose columns are all there wins.
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), ("causal-lm",)),
    "conversations": (("conversations",), ("causal-lm",)),
    "instruction": (("instruction", "output"), ("causal-lm", "seq2seq")),
    "prompt/completion": (("prompt", "completion"), ("causal-lm", "seq2seq")),
    "input/target": (("input", "target"), ("seq2seq", "causal-lm")),
    "text/label": (("text", "label"), ("classification",)),
    "text": (("text",), ("causal-lm",)),
}
ALSO_READ = {
    "messages": ("tools",), "conversations": ("system", "tools"), "instruction": ("input", "system"),
}  # fmt: skip
COLUMNS = {
    "messages", "tools", "conversations", "system", "instruction", "input", "output", "prompt", "completion",
    "target", "text", "label",
}  # fmt: skip
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
    "observation": "tool", "tool": "tool", "function_call": "assistant", "function_response": "tool",
}  # fmt: skip

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


class Unusable(Exception):
    """A row that can't become an example. The message is the reason, in words for its owner."""


@dataclass(frozen=True)
class Text:
    """One example before tokenization.

    `segments`: (text, is_target) in order. `label`: classification only. `is_raw`: no template closes the text, so
    that an end-of-sequence token has to.
    """

    segments: tuple[tuple[str, bool], ...]
    label: str | None = None
    is_raw: bool = True


def recognise(columns: set[str], task: str, renamed: dict[str, str], where: str) -> str:
    """The name of the format these columns are in. Raises `DataError` that says what was found and what would do."""
    for name in renamed.values():
        if name not in columns:
            near = difflib.get_close_matches(name, columns, n=1)
            to_do = f"did you mean `{near[0]}`?  there are: " if near else "there are: "
            raise DataError(
                f"no column `{name}` (named in `data.columns`)", where=where, to_do=to_do + _listed(columns)
            )
    present = (columns - set(renamed.values())) | set(renamed)
    complete = [name for name, (needed, _) in FORMATS.items() if set(needed) <= present]
    for name in complete:
        if task in FORMATS[name][1]:
            return name
    wanted = [" + ".join(needed) for needed, tasks in FORMATS.values() if task in tasks]
    example = (
        "{text: narrative, label: product}" if task == "classification" else "{prompt: question, completion: answer}"
    )
    raise DataError(
        f"the columns ({_listed(columns)}) are of no format for {task}",
        where=where,
        to_do=f"{task} reads {', or '.join(wanted)}; map yours with `data.columns: {example}`",
    )


def used_columns(format_name: str, renamed: dict[str, str]) -> set[str]:
    """The columns of the data, by their own names, that a format reads; all others are ignored."""
    return {renamed.get(name, name) for name in (*FORMATS[format_name][0], *ALSO_READ.get(format_name, ()))}


def converter(
    format_name: str, renamed: dict[str, str], label_map: dict[str, str], tokenizer: Any, task: str
) -> Callable[[dict[str, Any]], Text]:
    """A function from a row to its `Text`. It raises `Unusable` with the reason."""
    render = functools.partial(_render_chat, tokenizer=tokenizer)
    one: Callable[[dict[str, Any]], Text] = {
        "messages": lambda row: render(_messages(row), row.get("tools")),
        "conversations": lambda row: render(_conversations(row), row.get("tools")),
        "instruction": lambda row: _instruction(row, render if task == "causal-lm" else None),
        "prompt/completion": lambda row: _pair(row, "prompt", "completion"),
        "input/target": lambda row: _pair(row, "input", "target"),
        "text/label": lambda row: _labelled(row, label_map),
        "text": lambda row: Text(((_string(row, "text"), True),)),
    }[format_name]

    def convert(row: dict[str, Any]) -> Text:
        if renamed:
            row = {k: v for k, v in row.items() if k not in renamed.values()} | {
                standard: row.get(own) for standard, own in renamed.items()
            }
        text = one(row)
        try:
            for part, _ in text.segments:
                if not part.isascii():
                    part.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, no text can hold it
            raise Unusable(f"not text: half a surrogate pair (\\u{ord(error.object[error.start]):04x})") from error
        return text

    return convert


def _listed(columns: set[str]) -> str:
    return ", ".join(sorted(columns)[:20]) or "none"


def _string(row: dict[str, Any], column: str, *, may_be_empty: bool = False) -> str:
    value = row.get(column)
    if value is None:
        if may_be_empty:
            return ""
        raise Unusable(f"no `{column}`")
    if not isinstance(value, str):
        raise Unusable(f"`{column}` is {_kind(value)}, not text")
    if not may_be_empty and not value.strip():
        raise Unusable(f"`{column}` is empty")
    return value


_KINDS = {
    "dict": "an object", "list": "a list", "int": "a number", "float": "a number", "bool": "true/false",
    "Decimal": "a decimal number", "date": "a date", "datetime": "a date with time", "time": "a time of day",
    "timedelta": "a duration", "bytes": "bytes", "NoneType": "nothing", "Timestamp": "a date with time",
}  # fmt: skip


def _kind(value: Any) -> str:
    return _KINDS.get(type(value).__name__, type(value).__name__)


def _pair(row: dict[str, Any], source: str, target: str) -> Text:
    return Text(((_string(row, source), False), (_string(row, target), True)))


def _labelled(row: dict[str, Any], label_map: dict[str, str]) -> Text:
    label = row.get("label")
    if label is None or label == "":
        raise Unusable("no `label`")
    if not isinstance(label, str | int):
        what = f"{label}, a number with a fraction" if isinstance(label, float) else _kind(label)
        raise Unusable(f"`label` is {what}, not a class (text or a whole number)")
    name = str(label)
    return Text(((_string(row, "text"), False),), label=label_map.get(name, name))


def _instruction(row: dict[str, Any], render: Callable[..., Text] | None) -> Text:
    """Alpaca rows are a chat of one turn, so that the tokenizer's template frames them; seq2seq needs no frame."""
    instruction, more = _string(row, "instruction"), _string(row, "input", may_be_empty=True)
    asked, answer = f"{instruction}\n\n{more}" if more.strip() else instruction, _string(row, "output")
    system = _string(row, "system", may_be_empty=True)
    if render is None:
        return Text(((f"{system}\n\n{asked}" if system else asked, False), (answer, True)))
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return render(([{"role": "system", "content": system}] if system else []) + messages, None)


def _as_list(value: Any, column: str) -> list[Any]:
    if isinstance(value, str):  # CSV, and data sets that store JSON in a string
        try:
            value = parse_json(value)
        except ValueError as error:
            raise Unusable(f"`{column}` is text that is not JSON") from error
    if not isinstance(value, list) or not value:
        raise Unusable(f"`{column}` is {'empty' if value == [] else _kind(value)}, not a list of turns")
    return value


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    messages = []
    for index, message in enumerate(_as_list(row.get("messages"), "messages"), start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Unusable(f"message {index} has no `role`")
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            raise Unusable(f"message {index}: `content` is {_kind(content)}, not text")
        kept = {key: value for key, value in message.items() if value is not None or key == "content"}
        if "tool_calls" in kept:
            kept["tool_calls"] = [_parsed_arguments(call) for call in _as_list(kept["tool_calls"], "tool_calls")]
        messages.append(kept)
    return messages


def _parsed_arguments(call: Any) -> Any:
    """OpenAI stores a call's arguments as JSON text, chat templates expect an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": parse_json(function["arguments"])}}
    except ValueError:
        return call


def _conversations(row: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    system = row.get("system")
    if isinstance(system, str) and system:
        messages.append({"role": "system", "content": system})
    for index, turn in enumerate(_as_list(row.get("conversations"), "conversations"), start=1):
        who, said = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        if who not in _ROLES or not isinstance(said, str):
            raise Unusable(f"turn {index} has no known `from` with a text `value`")
        messages.append({"role": _ROLES[who], "content": said})
    return messages


def _render_chat(messages: list[dict[str, Any]], tools: Any, *, tokenizer: Any) -> Text:
    """Render a chat and find what the assistant says in it.

    A template with generation marks says so itself. Without them the text of an assistant turn is what the render up
    to it adds to the render before it; a template that rewrites earlier turns can't be split that way.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise Unusable("no assistant turn: there is nothing to learn")
    tools = (_as_list(tools, "tools") if tools and tools != "[]" else None) or None
    try:
        if re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", tokenizer.chat_template):
            return _by_marks(messages, tools, tokenizer)
        return _by_prefixes(messages, tools, tokenizer)
    except Unusable:
        raise
    except Exception as error:  # templates are programs: they raise what they like
        raise Unusable(f"the chat template refuses it: {str(error)[:200]}") from error


def _by_marks(messages: list[dict[str, Any]], tools: Any, tokenizer: Any) -> Text:
    if hasattr(tokenizer, "render_with_spans"):  # the planner's, which does without transformers
        rendered, spans = tokenizer.render_with_spans(messages, tools)
    else:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, spans = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    text, segments, at = rendered[0], [], 0
    for start, end in spans[0]:
        segments += [(text[at:start], False), (text[start:end], True)]
        at = end
    segments.append((text[at:], False))
    return Text(tuple((part, is_target) for part, is_target in segments if part), is_raw=False)


def _by_prefixes(messages: list[dict[str, Any]], tools: Any, tokenizer: Any) -> Text:
    def render(n: int, prompt: bool) -> str:
        return str(
            tokenizer.apply_chat_template(messages[:n], tools=tools, tokenize=False, add_generation_prompt=prompt)
        )

    whole, segments, at = render(len(messages), False), [], 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = (render(index, True) if index else ""), render(index + 1, False)
        if not (whole.startswith(before) and whole.startswith(after) and at <= len(before) < len(after)):
            raise Unusable("the chat template rewrites earlier turns; give one with {% generation %} marks")
        segments += [(whole[at : len(before)], False), (whole[len(before) : len(after)], True)]
        at = len(after)
    segments.append((whole[at:], False))
    return Text(tuple((part, is_target) for part, is_target in segments if part), is_raw=False)
