"""Turns as OpenAI and others write them: marks of what is not learned, content in parts,
developers, older function calls.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from farthing.data.chat import DEFAULT_CHAT_TEMPLATE, Renderer
from farthing.data.foreign import foreign_kind
from farthing.data.formats import converter
from farthing.data.shown import Shown
from farthing.errors import UnusableRowError
from token_sets import with_words

PLAIN = (
    "{%- for m in messages %}{{- '<' + m.role + '>' + (m.content or '') + '</s>' }}{%- for call in"
    " m.tool_calls or [] %}{{- call.function.name + (call.function.arguments | tojson) }}{% endfor"
    " %}{%- endfor %}{%- if add_generation_prompt %}{{- '<assistant>' }}{% endif %}"
)
"""A template without generation marks."""


def read(row: dict[str, Any], template: str = PLAIN) -> Any:
    tokenizer = SimpleNamespace(
        chat_template=template,
        special_tokens_map={"eos_token": "</s>"},
        backend_tokenizer=with_words("</s>"),
    )
    name = "conversations" if "conversations" in row else "messages"
    return converter(name, {}, {}, tokenizer, "causal-lm")(row)


def learned(row: dict[str, Any], template: str = PLAIN) -> str:
    return "|".join(text for text, is_target in read(row, template).segments if is_target)


def talk(**marks: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "A", **marks},
        {"role": "user", "content": "b?"},
        {"role": "assistant", "content": "B"},
    ]


@pytest.mark.parametrize("template", [PLAIN, DEFAULT_CHAT_TEMPLATE], ids=["prompts", "marks"])
@pytest.mark.parametrize(
    "marks", [{"weight": 0}, {"train": False}, {"training": False}, {"loss": 0}]
)
def test_a_marked_turn_is_context(marks: dict[str, Any], template: str) -> None:
    assert learned({"messages": talk()}, template) == "A</s>|B</s>"
    text = read({"messages": talk(**marks)}, template)
    assert [part for part, is_target in text.segments if is_target] == ["B</s>"]
    whole = "".join(part for part, _ in text.segments)
    assert whole == "".join(part for part, _ in read({"messages": talk()}, template).segments)
    assert text.n_unlearned == 0  # asked for, not a shortcoming of the template


def test_turns_of_sharegpt_are_marked_too() -> None:
    turns = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "A", "train": False}]
    turns += [{"from": "human", "value": "b?"}, {"from": "gpt", "value": "B"}]
    assert learned({"conversations": turns}) == "B</s>"


def test_an_answer_whose_template_opens_it_differently_is_not_learned_where_it_is_marked() -> None:
    thinking = PLAIN.replace("'<assistant>'", "'<assistant><think>'")
    row = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "<think>x</think>A", "weight": 0},
        ]
    }
    with pytest.raises(UnusableRowError, match="every assistant turn is marked"):
        read(row, thinking)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "assistant", "content": "A", "weight": 0.5}, "only 0 and 1"),
        ({"role": "user", "content": "A", "train": True}, "only the assistant's can be"),
    ],
)
def test_other_marks_make_the_row_unusable(message: dict[str, Any], words: str) -> None:
    with pytest.raises(UnusableRowError, match=words):
        read({"messages": [*talk(), message]})


def test_marks_of_users_that_say_nothing_are_nothing() -> None:
    row = {
        "messages": [
            {"role": "user", "content": "a?", "weight": 1},
            {"role": "assistant", "content": "A", "weight": 1},
        ]
    }
    assert learned(row) == "A</s>"


def test_text_in_parts_is_text_and_pictures_are_not() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b?"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "A"}]}
    assert read(row).segments[0][0] == "<user>ab?</s><assistant>"
    row["messages"][0]["content"] = [*parts, {"type": "image_url", "image_url": {"url": "x"}}]
    kind = foreign_kind(row, "causal-lm")
    assert kind is not None
    assert "image_url" in kind.what


def test_a_developer_is_the_system_where_the_template_knows_none() -> None:
    row = {"messages": [{"role": "developer", "content": "Be brief."}, *talk()]}
    assert read(row).segments[0][0].startswith("<system>Be brief.")
    assert read(row, PLAIN + "{# developer #}").segments[0][0].startswith("<developer>")


def test_older_function_calls_are_tool_calls() -> None:
    row = {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "weather", "arguments": '{"in": "Rome"}'},
            },
            {"role": "function", "name": "weather", "content": "sunny"},
            {"role": "assistant", "content": "Sunny."},
        ],
        "functions": [{"name": "weather", "parameters": {}}],
    }
    whole = "".join(part for part, _ in read(row).segments)
    assert 'weather{"in": "Rome"}' in whole
    assert "<tool>sunny</s>" in whole
    assert any('"parameters"' in each for each in read(row).given)


def test_a_template_whose_marks_are_not_one_a_turn_can_leave_none_out() -> None:
    twice = DEFAULT_CHAT_TEMPLATE.replace(
        "{{- eos_token }}", "{% endgeneration %}{% generation %}{{- eos_token }}"
    )
    assert learned({"messages": talk()}, twice)
    with pytest.raises(UnusableRowError, match="marks more or fewer turns"):
        read({"messages": talk(weight=0)}, twice)


def test_preferences_of_openai_are_named() -> None:
    row = {
        "input": {"messages": talk()[:1]},
        "preferred_output": [talk()[1]],
        "non_preferred_output": [talk()[1]],
    }
    kind = foreign_kind(row, "causal-lm")
    assert kind is not None
    assert "preference data (" in kind.what


# ---- what a template leaves out ----

NO_TOOLS = (
    "{%- for m in messages %}{%- if m.role in ('user', 'assistant') %}"
    "{{- '<' + m.role + '>' + (m.content or '') + '</s>' }}{% endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<assistant>' }}{% endif %}"
)
"""A template that knows neither tools nor systems."""
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}, "id": "1"}
WITH_TOOLS: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1?", "name": "eve"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": "2", "reasoning_content": "easy"},
    ],
    "tools": [{"type": "function", "function": {"name": "add"}}],
}


def test_a_call_that_the_template_leaves_out_is_no_empty_answer() -> None:
    with pytest.raises(
        UnusableRowError, match="leaves out `tool_calls`: an empty answer would be learned"
    ):
        read(WITH_TOOLS, NO_TOOLS)
    assert "add" in learned(WITH_TOOLS, PLAIN)


def test_what_no_chat_showed_is_said_once_and_what_one_showed_is_not() -> None:
    def said(template: str, *chats: dict[str, Any]) -> list[str]:
        shown = Shown()
        render = Renderer(template, (("eos_token", "</s>"),), "")
        for chat in chats:
            shown.look(chat["messages"], chat.get("tools"), render)
        return [
            text.removeprefix("the chat template leaves out ").partition(" (in ")[0]
            for text in shown.said()
        ]

    others = ["`name` of messages", "`reasoning_content` of messages"]
    assert said(PLAIN, WITH_TOOLS) == [*others, "`tools`"]
    roles = ["messages of `system`", "messages of `tool`"]
    assert said(NO_TOOLS, WITH_TOOLS) == [*others, *roles, "`tool_calls` of messages", "`tools`"]
    assert said(DEFAULT_CHAT_TEMPLATE, WITH_TOOLS) == others
    thinks = PLAIN.replace("(m.content or '')", "(m.reasoning_content or m.content or '')")
    same = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "b"},
        ]
    }
    assert said(thinks, same) == ["`reasoning_content` of messages"], "it says what is there anyway"
    assert said(thinks, same, WITH_TOOLS) == ["`name` of messages", "`tools`"]


def test_a_template_that_can_not_do_without_a_thing_reads_it() -> None:
    needs = PLAIN.replace(
        "{%- for m in messages %}",
        "{%- for m in messages %}{% if not m.name %}{{ raise_exception('no name') }}{% endif %}",
        1,
    )
    shown = Shown()
    chat = [
        {"role": "user", "content": "a", "name": "eve"},
        {"role": "assistant", "content": "b", "name": "it"},
    ]
    shown.look(chat, None, Renderer(needs, (), ""))
    assert shown.said() == []


def test_whether_a_call_is_shown_does_not_hang_on_the_rows_before() -> None:
    """A template that writes calls only where nothing is said beside them."""
    either = PLAIN.replace("m.tool_calls or []", "([] if m.content else (m.tool_calls or []))")
    tokenizer = SimpleNamespace(
        chat_template=either,
        special_tokens_map={"eos_token": "</s>"},
        backend_tokenizer=with_words("</s>"),
    )
    both, alone = (
        {
            "messages": [
                {"role": "user", "content": "1+1?"},
                {"role": "assistant", "content": said, "tool_calls": [CALL]},
            ]
        }
        for said in ("I sum.", None)
    )
    convert = converter("messages", {}, {}, tokenizer, "causal-lm")
    for row in [*[both] * 150, alone, both]:
        learned = "".join(text for text, is_target in convert(row).segments if is_target)
        assert ("add" in learned, "sum" in learned) == (row is alone, row is both)


def test_a_call_that_is_context_is_no_answer() -> None:
    turns = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "tool_calls": [CALL], "weight": 0},
    ]
    turns += [{"role": "user", "content": "b?"}, {"role": "assistant", "content": "B"}]
    text = read({"messages": turns}, NO_TOOLS)
    assert [part for part, is_target in text.segments if is_target] == ["B</s>"]


SAYS_NOTHING: list[dict[str, Any]] = [
    {"content": ""},
    {"content": " \n"},
    {"content": None},
    {},
    {"content": "", "name": "bot"},
]


@pytest.mark.parametrize(
    "said", SAYS_NOTHING, ids=["empty", "spaces", "null", "no content", "a name alone"]
)
@pytest.mark.parametrize("template", [PLAIN, DEFAULT_CHAT_TEMPLATE], ids=["prompts", "marks"])
def test_an_answer_that_says_nothing_is_not_learned_as_an_empty_one(
    said: dict[str, Any], template: str
) -> None:
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", **said}, *talk()[2:]]
    with pytest.raises(UnusableRowError, match="message 2: the assistant's turn is empty"):
        read({"messages": turns}, template)
    turns[1]["weight"] = 0  # as context it may
    assert [
        text for text, is_target in read({"messages": turns}, template).segments if is_target
    ] == ["B</s>"]


def test_an_answer_of_sharegpt_and_an_earlier_one_of_alpaca_may_not_be_empty_either() -> None:
    with pytest.raises(UnusableRowError, match="message 2: the assistant's turn is empty"):
        read({"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": ""}]})
    tokenizer = SimpleNamespace(
        chat_template=PLAIN,
        special_tokens_map={"eos_token": "</s>"},
        backend_tokenizer=with_words("</s>"),
    )
    row = {"instruction": "b?", "output": "B", "history": [["a?", ""]]}
    with pytest.raises(UnusableRowError, match="message 2: the assistant's turn is empty"):
        converter("instruction", {}, {}, tokenizer, "causal-lm")(row)


WITH_PREAMBLE = (
    "{%- if messages[0].role != 'system' %}<system>You are a bot. Hi.</s>{% endif %}" + PLAIN
)


@pytest.mark.parametrize(
    "template", [PLAIN, WITH_PREAMBLE, WITH_PREAMBLE.replace("'<assistant>'", "''")]
)
def test_of_a_chat_that_begins_with_the_assistant_what_stands_before_it_is_not_learned(
    template: str,
) -> None:
    row = {"messages": [{"role": "assistant", "content": "Hi."}, *talk()]}
    text = read(row, template)
    first = next(part for part, is_target in text.segments if is_target)
    assert first == "Hi.</s>"


def test_a_first_turn_of_the_assistant_may_be_a_call() -> None:
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        *talk(),
    ]
    found = [
        part for part, is_target in read({"messages": turns}, WITH_PREAMBLE).segments if is_target
    ]
    assert found[0] == '</s>add{"a": 1}'


def test_empty_calls_are_none() -> None:
    for empty in ([], "[]", None):
        turns = [
            {"role": "user", "content": "a?"},
            {"role": "assistant", "content": "A", "tool_calls": empty},
        ]
        assert [part for part, is_target in read({"messages": turns}).segments if is_target] == [
            "A</s>"
        ]


def test_tools_as_a_list_of_json_texts_are_objects() -> None:
    template = "{% for tool in tools or [] %}{{ tool.name }};{% endfor %}" + PLAIN
    row = {"messages": talk(), "tools": ['{"name": "add"}', {"name": "sub"}]}
    assert read(row, template).segments[0][0].startswith("add;sub;<user>")
    with pytest.raises(UnusableRowError, match="`tools` holds text that is not JSON"):
        read({"messages": talk(), "tools": ["add"]}, template)


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_a_system_message_stands_once(key: str) -> None:
    def row(first: str, system: Any) -> dict[str, Any]:
        turns = [{"role": first, "content": "Be brief."}, *talk()]
        if key == "conversations":
            names = {"user": "human", "assistant": "gpt"}
            turns = [
                {"from": names.get(turn["role"], turn["role"]), "value": turn["content"]}
                for turn in turns
            ]
        return {key: turns, "system": system}

    first = "System" if key == "messages" else "system"
    text = "".join(part for part, _ in read(row(first, "Be brief. ")).segments)
    assert (text.count("<system>"), text.count("brief")) == (1, 1)
    with pytest.raises(
        UnusableRowError, match="begins with another system message than its column `system`"
    ):
        read(row(first, "Be long."))
    text = "".join(part for part, _ in read(row("user", "Be long.")).segments)
    assert text.startswith("<system>Be long.</s><user>Be brief.")
    with pytest.raises(UnusableRowError, match="`system` is a number"):
        read(row("user", 7))


def test_calls_of_sharegpt_are_written_as_the_template_writes_calls() -> None:
    turns = [
        {"from": "human", "value": "1+1?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
    ]
    turns += [{"from": "observation", "value": "2"}, {"from": "gpt", "value": "Two."}]
    call, answer = (
        part for part, is_target in read({"conversations": turns}).segments if is_target
    )
    assert (call, answer) == ('</s>add{"a": 1}', "Two.</s>")
    for said in (f"[{turns[1]['value']}]", '{"name": "add", "arguments": "{\\"a\\": 1}"}'):
        turns[1]["value"] = said
        assert (
            next(part for part, is_target in read({"conversations": turns}).segments if is_target)
            == call
        )
    assert f"{said}</s>" in [part for part, _ in read({"conversations": turns}, NO_TOOLS).segments]
    for odd in ("add 1", "{}", "[]", '"add"', '{"name": "add"}'):
        turns[1]["value"] = odd
        with pytest.raises(
            UnusableRowError,
            match="turn 2: a `function_call` is no JSON with `name` and `arguments`",
        ):
            read({"conversations": turns})


def test_turns_that_a_template_does_not_mark_are_counted() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and m.content %}{%"
        " generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content or '' }}{%"
        " endif %}{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}{% endfor %}"
    )
    turns = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    text = read({"messages": [*turns, {"role": "tool", "content": "2"}, *talk()]}, template)
    assert [part for part, is_target in text.segments if is_target] == ["A</s>", "B</s>"]
    assert text.n_unlearned == 1
