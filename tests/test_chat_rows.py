"""Turns as OpenAI and others write them: marks of what is not learned, content in parts,
developers, older function calls.
"""

import json
from typing import Any

import pytest

from data_files import assistant, user
from farthing.data.chat import Renderer, default_template
from farthing.data.foreign import foreign_kind
from farthing.data.formats import Converter, recognise
from farthing.data.shown import Shown
from farthing.errors import UnusableRowError
from token_sets import with_template

PLAIN = (
    "{%- for m in messages %}{{- '<' + m.role + '>' + (m.content or '') + '</s>' }}{%- for call in"
    " m.tool_calls or [] %}{{- call.function.name + (call.function.arguments | tojson) }}{% endfor"
    " %}{%- endfor %}{%- if add_generation_prompt %}{{- '<assistant>' }}{% endif %}"
)
"""A template without generation marks."""
NO_TOOLS = (
    "{%- for m in messages %}{%- if m.role in ('user', 'assistant') %}"
    "{{- '<' + m.role + '>' + (m.content or '') + '</s>' }}{% endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<assistant>' }}{% endif %}"
)
"""A template that knows neither tools nor systems."""
THINKS = PLAIN.replace("'<assistant>'", "'<assistant><think>'")
MARKED_TWICE = default_template(False).replace(
    "{{- eos_token }}", "{% endgeneration %}{% generation %}{{- eos_token }}"
)
WITH_PREAMBLE = (
    "{%- if messages[0].role != 'system' %}<system>You are a bot. Hi.</s>{% endif %}" + PLAIN
)
LISTS_TOOLS = "{% for tool in tools or [] %}{{ tool.name }};{% endfor %}" + PLAIN
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}, "id": "1"}
WITH_TOOLS = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1?", "name": "eve"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": "2", "reasoning_content": "easy"},
    ],
    "tools": [{"type": "function", "function": {"name": "add"}}],
}


def reader(template: str):
    """Reads a row of any format with this template."""
    tokenizer = with_template(template)

    def read(row):
        found = recognise(set(row), "causal-lm", {}, "rows.jsonl")
        return Converter(found.format, found.columns, {}, tokenizer, "causal-lm")(row)

    return read


def read(row: dict[str, Any], template: str = PLAIN):
    return reader(template)(row)


def learned(row: dict[str, Any], template: str = PLAIN) -> str:
    return "|".join(text for text, is_target in read(row, template).segments if is_target)


def whole(row: dict[str, Any], template: str = PLAIN) -> str:
    return "".join(text for text, _ in read(row, template).segments)


def asked(**answer) -> list[dict[str, Any]]:
    return [user("a?"), {"role": "assistant", **answer}]


def talk(**marks) -> list[dict[str, Any]]:
    later = [user("b?"), assistant("B")]
    return asked(content="A", **marks) + later


def sharegpt(*turns: tuple[str, str], **marks) -> dict[str, Any]:
    """A row of turns by (from, value), the last with marks."""
    said = [{"from": who, "value": value} for who, value in turns]
    return {"conversations": [*said[:-1], said[-1] | marks]}


@pytest.mark.parametrize("template", [PLAIN, default_template(False)])
@pytest.mark.parametrize(
    "marks", [{"weight": 0}, {"train": False}, {"training": False}, {"loss": 0}]
)
def test_a_marked_turn_is_context(marks, template):
    plain, marked = {"messages": talk()}, {"messages": talk(**marks)}
    assert learned(plain, template) == "A</s>|B</s>"
    assert learned(marked, template) == "B</s>"
    assert whole(marked, template) == whole(plain, template)
    assert read(marked, template).n_unlearned == 0  # asked for, not a shortcoming of the template


GREETED = {"messages": [assistant("Hi."), *talk()]}


@pytest.mark.parametrize(
    ("row", "template", "expected"),
    [
        (
            {
                "conversations": sharegpt(("human", "a?"), ("gpt", "A"), train=False)[
                    "conversations"
                ]
                + sharegpt(("human", "b?"), ("gpt", "B"))["conversations"]
            },
            PLAIN,
            "B</s>",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a?", "weight": 1},
                    {"role": "assistant", "content": "A", "weight": 1},
                ]
            },
            PLAIN,
            "A</s>",
        ),
        ({"messages": asked(tool_calls=[CALL], weight=0) + talk()[2:]}, NO_TOOLS, "B</s>"),
        *(
            ({"messages": asked(content="A", tool_calls=empty)}, PLAIN, "A</s>")
            for empty in ([], "[]", None)
        ),
        # of what stands before the first answer nothing is learned
        *((GREETED, template, "Hi.</s>|A</s>|B</s>") for template in (PLAIN, WITH_PREAMBLE)),
        (
            GREETED,
            WITH_PREAMBLE.replace("'<assistant>'", "''"),
            "Hi.</s>|<assistant>A</s>|<assistant>B</s>",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "content": "2"},
                    *talk(),
                ]
            },
            WITH_PREAMBLE,
            '</s>add{"a": 1}|A</s>|B</s>',
        ),
    ],
)
def test_answers_are_learned_and_nothing_else(row, template, expected):
    assert learned(row, template) == expected


NO_CALL = "turn 2: a `function_call` is no JSON with `name` and `arguments`"
EMPTY = "message 2: the assistant's turn is empty"


@pytest.mark.parametrize(
    ("row", "template", "words"),
    [
        (
            {"messages": asked(content="<think>x</think>A", weight=0)},
            THINKS,
            "every assistant turn is marked",
        ),
        (
            {"messages": [*talk(), {"role": "assistant", "content": "A", "weight": 0.5}]},
            PLAIN,
            "only 0 and 1",
        ),
        (
            {"messages": [*talk(), {"role": "user", "content": "A", "train": True}]},
            PLAIN,
            "only the assistant's can be",
        ),
        ({"messages": talk(weight=0)}, MARKED_TWICE, "marks more or fewer turns"),
        (WITH_TOOLS, NO_TOOLS, "leaves out `tool_calls`: an empty answer would be learned"),
        ({"instruction": "b?", "output": "B", "history": [["a?", ""]]}, PLAIN, EMPTY),
        (
            {"messages": talk(), "tools": ["add"]},
            LISTS_TOOLS,
            "`tools` holds text that is not JSON",
        ),
        *(
            (
                sharegpt(("human", "a?"), ("function_call", odd), ("gpt", "A")),
                PLAIN,
                NO_CALL,
            )
            for odd in ("add 1", "{}", "[]", '"add"', '{"name": "add"}')
        ),
    ],
)
def test_a_row_that_can_not_be_learned_says_why(row, template, words):
    with pytest.raises(UnusableRowError, match=words):
        read(row, template)


@pytest.mark.parametrize(
    "said",
    [{"content": ""}, {"content": " \n"}, {"content": None}, {}, {"content": "", "name": "bot"}],
)
@pytest.mark.parametrize("template", [PLAIN, default_template(False)])
def test_an_answer_that_says_nothing_is_not_learned_as_an_empty_one(said, template):
    turns = asked(**said) + talk()[2:]
    with pytest.raises(UnusableRowError, match=EMPTY):
        read({"messages": turns}, template)
    turns[1]["weight"] = 0  # as context it may
    assert learned({"messages": turns}, template) == "B</s>"


def test_text_in_parts_is_text_and_pictures_are_not():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b?"}]
    row = {"messages": [user(parts), assistant("A")]}
    assert read(row).segments[0][0] == "<user>ab?</s><assistant>"
    row["messages"][0]["content"] = [*parts, {"type": "image_url", "image_url": {"url": "x"}}]
    preferred = {
        "input": {"messages": talk()[:1]},
        "preferred_output": [talk()[1]],
        "non_preferred_output": [talk()[1]],
    }
    for foreign, name in ((row, "image_url"), (preferred, "preference data (")):
        kind = foreign_kind(foreign, "causal-lm")
        assert name in kind.what


def test_a_developer_is_the_system_where_the_template_knows_none():
    row = {"messages": [{"role": "developer", "content": "Be brief."}, *talk()]}
    assert whole(row).startswith("<system>Be brief.")
    assert whole(row, PLAIN + "{# developer #}").startswith("<developer>")


def test_older_function_calls_are_tool_calls():
    call = {"name": "weather", "arguments": '{"in": "Rome"}'}
    row = {
        "messages": [
            *asked(content=None, function_call=call),
            {"role": "function", "name": "weather", "content": "sunny"},
            assistant("Sunny."),
        ],
        "functions": [{"name": "weather", "parameters": {}}],
    }
    assert 'weather{"in": "Rome"}' in whole(row)
    assert "<tool>sunny</s>" in whole(row)
    assert any('"parameters"' in each for each in read(row).given)


# ---- what a template leaves out ----


def test_what_no_chat_showed_is_said_once_and_what_one_showed_is_not():
    def said(template, *chats):
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
    assert said(default_template(False), WITH_TOOLS) == others
    thinks = PLAIN.replace("(m.content or '')", "(m.reasoning_content or m.content or '')")
    same = {"messages": asked(content="b", reasoning_content="b")}
    assert said(thinks, same) == ["`reasoning_content` of messages"], "it says what is there anyway"
    assert said(thinks, same, WITH_TOOLS) == ["`name` of messages", "`tools`"]
    needs = PLAIN.replace(
        "{%- for m in messages %}",
        "{%- for m in messages %}{% if not m.name %}{{ raise_exception('no name') }}{% endif %}",
        1,
    )
    named = {"messages": [{**turn, "name": "eve"} for turn in asked(content="b")]}
    assert said(needs, named) == [], "a template that can't do without a thing reads it"


def test_whether_a_call_is_shown_does_not_hang_on_the_rows_before():
    """A template that writes calls only where nothing is said beside them."""
    convert = reader(PLAIN.replace("m.tool_calls or []", "([] if m.content else m.tool_calls)"))
    both, alone = (
        {"messages": asked(content=said, tool_calls=[CALL])} for said in ("I sum.", None)
    )
    for row in [*[both] * 150, alone, both]:
        found = "".join(text for text, is_target in convert(row).segments if is_target)
        assert ("add" in found, "sum" in found) == (row is alone, row is both)


def test_tools_as_a_list_of_json_texts_are_objects():
    row = {"messages": talk(), "tools": ['{"name": "add"}', {"name": "sub"}]}
    assert whole(row, LISTS_TOOLS).startswith("add;sub;<user>")


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_a_system_message_stands_once(key):
    def row(first, system):
        turns = [{"role": first, "content": "Be brief."}, *talk()]
        if key == "conversations":
            names = {"user": "human", "assistant": "gpt"}
            turns = [
                {"from": names.get(turn["role"], turn["role"]), "value": turn["content"]}
                for turn in turns
            ]
        return {key: turns, "system": system}

    first = "System" if key == "messages" else "system"
    text = whole(row(first, "Be brief. "))
    assert (text.count("<system>"), text.count("brief")) == (1, 1)
    assert whole(row("user", "Be long.")).startswith("<system>Be long.</s><user>Be brief.")
    other = "begins with another system message than its column `system`"
    for wrong, words in ((row(first, "Be long."), other), (row("user", 7), "`system` is a number")):
        with pytest.raises(UnusableRowError, match=words):
            read(wrong)


def test_exports_of_chatgpt_and_claude_are_chats():
    def node(parent, role, *parts, **more):
        content = {"content_type": "text", "parts": list(parts)}
        return {"parent": parent, "message": {"author": {"role": role}, "content": content, **more}}

    nodes = {"0": {"parent": None, "message": None}, "s": node("0", "system", "")}
    nodes |= {"q": node("s", "user", "1+1?"), "old": node("q", "assistant", "3")}
    nodes |= {
        "a": node("q", "assistant", "2"),
        "call": node("q", "assistant", "x", recipient="bio"),
    }
    row = {"mapping": nodes, "current_node": "a"}
    claude = [{"sender": "human", "text": "1+1?"}, {"sender": "assistant", "text": "2"}]
    assert whole(row) == whole({"chat_messages": claude}) == "<user>1+1?</s><assistant>2</s>"
    nodes["image"] = node("q", "assistant", {"asset_pointer": "x"})
    for last, words in {"image": "as text", "call": "asks a tool", "s": "no turn"}.items():
        with pytest.raises(UnusableRowError, match=words):
            read(row | {"current_node": last})


def test_calls_of_sharegpt_are_written_as_the_template_writes_calls():
    call = '{"name": "add", "arguments": {"a": 1}}'
    for said in (call, f"[{call}]", json.dumps({"name": "add", "arguments": '{"a": 1}'})):
        row = sharegpt(
            ("human", "1+1?"), ("function_call", said), ("observation", "2"), ("gpt", "Two.")
        )
        assert learned(row) == '</s>add{"a": 1}|Two.</s>'
        assert f"{said}</s>" in [part for part, _ in read(row, NO_TOOLS).segments]


def test_turns_that_a_template_does_not_mark_are_counted():
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and m.content %}{%"
        " generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content or '' }}{%"
        " endif %}{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}{% endfor %}"
    )
    called = [*asked(content=None, tool_calls=[CALL]), {"role": "tool", "content": "2"}]
    row = {"messages": [*called, *talk()]}
    assert learned(row, template) == "A</s>|B</s>"
    assert read(row, template).n_unlearned == 1
