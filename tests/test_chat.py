"""Chats of the families' templates: ids as `apply_chat_template` has them, and of each answer what
the model writes itself.

The templates are short forms of what each family sends to its model.
"""

import importlib.util
import json
import shutil
import sys
from typing import Any

import pytest
from tokenizers import processors

from chat_templates import (
    CHATML,
    DEEPSEEK_3,
    DEEPSEEK_R1,
    GEMMA,
    GEMMA_4,
    LLAMA_2,
    LLAMA_3,
    MARKED,
    MISTRAL,
    PHI_3,
    PHI_4,
    PLAIN,
    QWEN_3,
    TOOLS,
    VICUNA,
    WORDS,
    ZEPHYR,
)
from data_files import assistant, opened, user
from farthing.data.chat import ChatReader, Renderer, default_template
from farthing.data.encode import Encoder
from farthing.data.light_tokenizer import light_tokenizer
from farthing.data.sample import sample_lengths
from farthing.data.token_set import TokenRecipe
from farthing.data.tokens import tokenize
from farthing.errors import DataError, ModelError, UnusableRowError
from farthing.model.load import ModelChoice, load_tokenizer
from farthing.tiny import write_jsonl
from thinned import thinned
from token_sets import encoded_examples, reader_of_chats

CHAT = [
    user(" What is bread? "),
    assistant(" Food, \nof flour."),
    user("And soup?"),
    assistant("Food too 🙂 "),
]
SYSTEM = [{"role": "system", "content": "Be brief."}]
THOUGHT = [*CHAT[:3], assistant("<think>\nHm.\n</think>\n\nFood.")]
FIRST, SECOND = CHAT[1]["content"], CHAT[3]["content"]

# template -> what is learned of the chat: of each answer what the model is to write, and the token
# that ends its turn
FAMILIES: dict[str, tuple[str, list[str]]] = {
    "llama-2": (LLAMA_2, [f" {FIRST.strip()} </s>", f" {SECOND.strip()} </s>"]),
    "llama-3": (LLAMA_3, [f"{FIRST.strip()}<|eot_id|>", f"{SECOND.strip()}<|eot_id|>"]),
    "mistral": (MISTRAL, [f"{FIRST}</s>", f"{SECOND}</s>"]),
    "zephyr": (ZEPHYR, [f"{FIRST}</s>", f"{SECOND}</s>"]),
    "qwen-2.5": (CHATML, [f"{FIRST}<|im_end|>", f"{SECOND}<|im_end|>"]),
    # the first turn is shown without the thinking that a prompt asks for: it is learned in an
    # example of its own
    "qwen-3": (QWEN_3, [f"<think>\n\n</think>\n\n{SECOND}<|im_end|>"]),
    "gemma": (GEMMA, [f"{FIRST.strip()}<end_of_turn>", f"{SECOND.strip()}<end_of_turn>"]),
    "phi-3": (PHI_3, [f"{FIRST}<|end|>", f"{SECOND}<|end|>"]),
    "phi-4": (PHI_4, [f"{FIRST}<|im_end|>", f"{SECOND}<|im_end|>"]),
    "deepseek-v3": (DEEPSEEK_3, [f"{FIRST}</s>", f"{SECOND}</s>"]),
    "vicuna": (VICUNA, [f"{FIRST}</s>", f"{SECOND}</s>"]),
    "plain": (PLAIN, [f"{FIRST}\n\n", f"{SECOND}\n\n"]),
    "marked": (MARKED, [f"{FIRST}<|im_end|>", f"{SECOND}<|im_end|>"]),
}


@pytest.fixture(scope="module")
def made(tiny_folders, tmp_path_factory):
    """A tokenizer with the words of all families, as a template and a first token make it."""

    def make(template, begins=False):
        tokenizer = load_tokenizer(ModelChoice(str(tiny_folders["llama"])), None)
        tokenizer.add_special_tokens({"additional_special_tokens": WORDS})
        if begins:
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", 1)]
            )
        tokenizer.chat_template = template
        return tokenizer

    return make


def chat_ids(tokenizer, messages: list[dict[str, Any]], **options) -> list[int]:
    """What transformers makes of a chat on that day."""
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, date_string="02 Jan 2025", **options
    )
    return encoded["input_ids"]


def read(tokenizer, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """(ids, is_target) of a chat."""
    text = reader_of_chats(tokenizer, on="2025-01-02")({"messages": messages})
    ((ids, is_target),) = encoded_examples(Encoder(tokenizer, "causal-lm", 4096, 4096)([text]))
    return ids.tolist(), is_target.tolist()


def learned_of(tokenizer, ids: list[int], is_target: list[int]) -> str:
    """What of a chat is learned."""
    return str(tokenizer.decode([i for i, target in zip(ids, is_target, strict=True) if target]))


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("system", [[], SYSTEM])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_chat_is_as_its_template_has_it_and_answers_are_learned_with_their_ends(
    made, name, system, begins
):
    if name == "mistral" and system:
        pytest.skip("its template refuses system messages")
    template, expected = FAMILIES[name]
    tokenizer = made(template, begins)
    ids, is_target = read(tokenizer, system + CHAT)
    assert ids == chat_ids(tokenizer, system + CHAT)
    assert learned_of(tokenizer, ids, is_target) == "".join(expected)
    stop = ChatReader.of(tokenizer).stop
    assert bool(stop) is (name != "plain")
    assert stop in expected[-1]
    if "{% generation %}" in template:
        as_peers = tokenizer.apply_chat_template(
            CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert read(tokenizer, CHAT)[1] == as_peers["assistant_masks"]


@pytest.mark.parametrize("name", thinned(["llama-2", "mistral", "zephyr", "qwen-2.5", "plain"], 9))
def test_chats_in_sentencepiece(data_dir, name):
    """Mistral's tokenizer, which adds its first token, and has no words for the ends of ChatML."""
    tokenizer = load_tokenizer(ModelChoice(str(data_dir / "tokenizers/mistral-7b-v0.1")), None)
    tokenizer.chat_template, expected = FAMILIES[name]
    ids, is_target = read(tokenizer, CHAT)
    assert ids == chat_ids(tokenizer, CHAT)
    learned = learned_of(tokenizer, ids, is_target)
    assert "".join(learned.split()) == "".join("".join(expected).split())
    assert not learned.endswith(">\n")


def test_the_end_of_a_turn_is_found_in_a_template_that_must_have_a_system_message(made):
    tokenizer = made(
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + CHATML
    )
    ids, is_target = read(tokenizer, SYSTEM + CHAT)
    assert learned_of(tokenizer, ids, is_target).endswith("<|im_end|>")
    assert is_target[-1] == 0


def test_thinking_that_a_prompt_opens_is_learned_from_there(made):
    tokenizer = made(DEEPSEEK_R1)
    ids, is_target = read(tokenizer, THOUGHT)
    prompt = chat_ids(tokenizer, CHAT[:3], add_generation_prompt=True)
    assert ids[: len(prompt)] == prompt
    assert is_target == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    assert tokenizer.decode(ids[len(prompt) :]) == "Hm.\n</think>\n\nFood.</s>"
    with pytest.raises(
        UnusableRowError,
        match=r"another form than the model would write it \(its prompt ends with '<think>'\)",
    ):
        read(tokenizer, CHAT)


def test_thinking_of_qwen_is_learned_where_the_model_writes_it(made):
    thought = [*CHAT]
    thought[1] = assistant("<think>\nOne.\n</think>\n\nFood.")
    thought[3] = assistant("<think>\nTwo.\n</think>\n\nFood.")
    tokenizer = made(QWEN_3)
    text = reader_of_chats(tokenizer)({"messages": thought})
    assert [part for part, learned in text.segments if learned] == [
        "<think>\nTwo.\n</think>\n\nFood.<|im_end|>"
    ]
    (earlier,) = text.earlier
    assert earlier.given == text.given  # they are never on two sides of a split
    assert text.n_unlearned == 0
    prompt = tokenizer.apply_chat_template(thought[:1], tokenize=False, add_generation_prompt=True)
    assert earlier.segments == (
        (prompt, False),
        ("<think>\nOne.\n</think>\n\nFood.<|im_end|>", True),
        ("\n", False),
    )


def test_an_answer_follows_the_thinking_that_its_prompt_closes_and_a_chat_drops(made):
    """Gemma 4 asks for an answer behind empty thinking, and shows none in the chat."""
    read_chat = reader_of_chats(made(GEMMA_4))
    text = read_chat({"messages": SYSTEM + CHAT})
    asked = "<|turn>model\n<|channel>thought\n<channel|>"
    for each, question, answer in zip(
        text.of_row, ("What is bread?", "And soup?"), (FIRST, SECOND), strict=True
    ):
        prompt, learned = each.segments
        assert prompt[0].endswith(f"{question}<turn|>\n{asked}")
        assert learned == (f"{answer.strip()}<turn|>", True)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    tools = [{"type": "function", "function": {"name": "add"}}]
    called = read_chat({"messages": [CHAT[0], call], "tools": tools})
    assert called.segments[1] == ("<|tool_call>add<turn|>", True)
    thought = assistant("<|channel>thought\nHm.<channel|>Food.")
    with pytest.raises(UnusableRowError, match="drops the thinking of its answer"):
        read_chat({"messages": [CHAT[0], thought]})


def test_answers_to_tools_share_an_example_with_their_question(made):
    """Qwen 3 keeps what was thought since the last question: one example a question, not one an
    answer.
    """
    call = assistant("<think>\nAsk.\n</think>\n\nadd(1, 1)")
    asked = [
        CHAT[0],
        call,
        {"role": "tool", "content": "2"},
        assistant("Two."),
    ]
    text = reader_of_chats(made(QWEN_3))({"messages": [*asked, *asked, CHAT[2]]})
    assert [[part for part, learned in each.segments if learned] for each in text.of_row] == [
        ["<think>\nAsk.\n</think>\n\nadd(1, 1)<|im_end|>", "<think>\n\n</think>\n\nTwo.<|im_end|>"]
    ] * 2
    assert text.n_unlearned == 0


NEMOTRON = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant'"
    " %}{{ m['content'] if '</think>' in m['content'] else '<think></think>' + m['content'] }}{%"
    " else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{% if"
    " add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% if enable_thinking is"
    " defined and not enable_thinking %}{{ '</think>' }}{% else %}{{ '\n' }}{% endif %}{% endif %}"
)


def test_a_template_that_can_ask_without_thinking_has_such_answers_learned(made):
    ids, is_target = read(made(NEMOTRON), CHAT)
    tokenizer = made(NEMOTRON)
    assert learned_of(tokenizer, ids, is_target) == f"{FIRST}<|im_end|>{SECOND}<|im_end|>"
    prompt = chat_ids(tokenizer, CHAT[:3], add_generation_prompt=True, enable_thinking=False)
    assert ids[: len(prompt)] == prompt
    assert is_target[len(prompt)] == 1
    ids, is_target = read(tokenizer, THOUGHT)
    prompt = chat_ids(tokenizer, CHAT[:3], add_generation_prompt=True)
    assert tokenizer.decode(ids[len(prompt) :]) == "Hm.\n</think>\n\nFood.<|im_end|>\n"


def test_a_template_that_ends_no_answer_is_said(made, tmp_path):
    open_end = MARKED.replace(
        "m['content'] + '<|im_end|>' }}{% endgeneration %}", "m['content'] }}{% endgeneration %}"
    )
    for template in (PLAIN, open_end):
        tokenizer = made(template)
        assert not ChatReader.of(tokenizer).stop
        write_jsonl(tmp_path / "chats.jsonl", [{"messages": CHAT}] * 3)
        source = opened(tmp_path / "chats.jsonl", tmp_path)
        found = tokenize([source], tokenizer, TokenRecipe("causal-lm", 512), tmp_path)
        assert "the model does not learn where to stop" in "".join(found.notes)


def test_every_answer_is_an_example_of_the_set_and_of_the_plan(made, tmp_path):
    rows = [
        {"messages": [{**turn, "content": f"{turn['content']} {n}"} for turn in CHAT]}
        for n in range(6)
    ]
    path = write_jsonl(tmp_path / "chats.jsonl", rows)
    sources = [opened(path, tmp_path)]
    tokenizer, recipe = made(QWEN_3), TokenRecipe("causal-lm", 512)
    found = tokenize(sources, tokenizer, recipe, tmp_path)
    assert (found.facts["n_rows"], len(found), found.facts["n_unlearned_turns"]) == (6, 12, 0)
    assert [found.place(index).rpartition(":")[2] for index in range(4)] == ["1", "1", "2", "2"]
    assert "6 earlier answers are learned in examples of their own" in "".join(found.notes)
    write_jsonl(path, [{"messages": CHAT[:3], "responses": [FIRST], "scores": [1]}])
    best = tokenize(sources, tokenizer, TokenRecipe("causal-lm", 512, scored="best"), tmp_path)
    assert (len(best), "earlier answers" in "".join(best.notes)) == (2, False)
    write_jsonl(path, rows)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    planned = sample_lengths(sources, light_tokenizer(tmp_path / "tokenizer", None), recipe)
    assert planned.n_examples == 12
    n_tokens = int(found.lengths.sum())
    assert int(planned.tokens.sum()) == pytest.approx(n_tokens, abs=6)  # means of a row are rounded


def test_calls_of_tools_are_learned_to_the_end_of_the_turn(made):
    function = {"name": "add", "arguments": '{"a": 1}'}  # templates expect an object
    messages = [
        user("1 + 1?"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "content": "2"},
        assistant("Two."),
    ]
    tokenizer, tools = made(TOOLS), [{"type": "function", "function": {"name": "add"}}]
    convert = reader_of_chats(tokenizer)
    text = convert({"messages": messages, "tools": tools})
    assert [part for part, learned in text.segments if learned] == [
        '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "Two.<|im_end|>",
    ]
    assert convert({"messages": json.dumps(messages), "tools": json.dumps(tools)}) == text
    function["arguments"] = {"a": 1}  # type: ignore[assignment]
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert "".join(part for part, _ in text.segments) == whole


def test_the_date_is_the_one_that_is_asked_for(made, monkeypatch):
    tokenizer = made(LLAMA_3)
    assert "Today Date: 02 Jan 2025" in Renderer.of(tokenizer, "2025-01-02")(CHAT, None)
    monkeypatch.setenv("FARTHING_TODAY", "2031-05-06")
    assert "Today Date: 06 May 2031" in Renderer.of(tokenizer)(CHAT, None)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ ['a', 'b'] | random }}", ""),
        ("{{ lipsum() }}", ""),
        ("{{ raise_exception('roles must alternate') }}", ": roles must alternate"),
    ],
)
def test_a_template_that_refuses_or_draws_at_random_is_refused(made, template, reason):
    with pytest.raises(UnusableRowError, match=f"the chat template refuses it{reason}"):
        read(made(template), CHAT)


def test_marks_in_a_text_of_its_own_are_refused(made):
    with pytest.raises(UnusableRowError, match=r"U\+FDD0"):
        read(made(MARKED), [CHAT[0], assistant("\ufdd0all of it\ufdd1")])


def test_farthings_own_template_begins_as_the_tokenizer_does(tiny_folders, tmp_path):
    plain = load_tokenizer(ModelChoice(str(tiny_folders["llama"])), None)
    assert plain.chat_template == default_template(False)
    begins = tmp_path / "begins"
    plain.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    plain.chat_template = None
    plain.save_pretrained(begins)
    tokenizer = load_tokenizer(ModelChoice(str(begins)), None)
    assert (
        tokenizer.chat_template
        == light_tokenizer(begins, None).chat_template
        == default_template(True)
    )
    ids = read(tokenizer, CHAT)[0]
    assert ids == chat_ids(tokenizer, CHAT)
    assert ids[:2].count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_reads_chats_as_training_does(made, tmp_path, name):
    tokenizer = made(FAMILIES[name][0])
    tokenizer.save_pretrained(tmp_path)
    light = light_tokenizer(tmp_path, None)
    assert light.chat_template == tokenizer.chat_template
    ours, plans = (ChatReader.of(each, "2026-01-01")(CHAT, None) for each in (tokenizer, light))
    assert ours == plans


@pytest.mark.parametrize(
    "says",
    ["m['content'] if m['role'] == 'user' else ''", "m['content'] if m['role'] != 'user' else ''"],
)
def test_a_template_that_leaves_out_what_is_said_is_refused(made, says):
    """As those of some models for images do where a content is no list of parts."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (SAYS) + '<|im_end|>\n' }}{%"
        " endfor %}"
    )
    with pytest.raises(UnusableRowError, match="leaves out the messages' text"):
        read(made(template.replace("SAYS", says)), CHAT)


def test_a_sentencepiece_model_without_its_package_says_what_to_install(
    data_dir, tmp_path, monkeypatch
):
    shutil.copy(data_dir / "tokenizers/t5/spiece.model", tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match=r"pip install 'farthing\[sentencepiece\]'"):
        light_tokenizer(tmp_path, None)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "sentencepiece" else found(name, *more),
    )
    with pytest.raises(ModelError, match=r"pip install 'farthing\[sentencepiece\]'"):
        load_tokenizer(ModelChoice(str(tmp_path)), None)
