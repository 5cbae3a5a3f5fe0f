"""Chats held against TRL: the same tokens, and of each answer what its training templates have
learned.

TRL is no dependency: tests/golden/trl_chats.json keeps what it made of short chats.

Three differences are meant. TRL learns the line break that a template writes behind the end of a
turn, and what a prompt has written already; the model stops before the one and is given the other.
It has a template of its own that keeps what was thought in earlier answers, where ours are learned
in chats as the model is given them. And it learns answers without thinking behind a prompt that
opens it, which are refused here.
"""

import re
from pathlib import Path

import pytest

from chat_templates import GEMMA, MARKED, PHI_3, QWEN_3, WORDS
from data_files import assistant, user
from farthing.data.encode import Encoder
from farthing.data.formats import Example
from farthing.model.load import ModelChoice, load_tokenizer
from token_sets import encoded_examples, reader_of_chats
from workshop import read_json

GOLDEN = Path(__file__).parent / "golden/trl_chats.json"
ASKED = [user("What is bread?"), user("And soup?")]
SYSTEM = {"role": "system", "content": "Be brief."}
PLAIN = [
    assistant("Food, of flour."),
    assistant("Food too 🙂"),
]
THOUGHT = [{**turn, "content": f"<think>\nHm.\n</think>\n\n{turn['content']}"} for turn in PLAIN]
CHATS: dict[str, list[dict[str, str]]] = {
    "single": [ASKED[0], PLAIN[0]],
    "multi": [ASKED[0], PLAIN[0], ASKED[1], PLAIN[1]],
    "system": [SYSTEM, ASKED[0], PLAIN[0], ASKED[1], PLAIN[1]],
    "thought": [ASKED[0], THOUGHT[0], ASKED[1], THOUGHT[1]],
}
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] +"
    " '<|end_header_id|>\n\n' }}{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if"
    " add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
COHERE_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{"
    " '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' + m['content'] }}{{"
    " '<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' }}{% else %}{{"
    " '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + m['content'] + '<|END_OF_TURN_TOKEN|>' }}{% endif"
    " %}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' }}{% endif %}"
)
GLM_4 = (
    "[gMASK]<sop>{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}{% if m['role'] =="
    " 'assistant' %}{{ '<think></think>\n' }}{% endif %}{{ m['content'] }}{% endfor %}{% if"
    " add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SHORT_FORMS = {
    "llama3": LLAMA_3,
    "gemma": GEMMA,
    "phi3": PHI_3,
    "qwen3_instruct_2507": CHATML,
    "qwen3": QWEN_3,
    "cohere2": COHERE_2,
    "glm4moe": GLM_4,
}


def ours(tokenizer, chat: list[dict[str, str]]) -> list[tuple[list[int], list[int], Example]]:
    """(ids, mask, text) of every example that a chat becomes; the whole chat is the last."""
    texts = reader_of_chats(tokenizer, on="2025-01-02")({"messages": chat}).of_row
    examples = encoded_examples(Encoder(tokenizer, "causal-lm", 4096, 4096)(texts))
    return [
        (ids.tolist(), mask.tolist(), text)
        for (ids, mask), text in zip(examples, texts, strict=True)
    ]


def learned(tokenizer, ids: list[int], mask: list[int]) -> list[str]:
    """Each stretch of a chat that is learned, as text."""
    stretches = []
    for index, (token, is_learned) in enumerate(zip(ids, mask, strict=True)):
        if is_learned and (index == 0 or not mask[index - 1]):
            stretches.append([])
        if is_learned:
            stretches[-1].append(token)
    return [tokenizer.decode(stretch) for stretch in stretches]


def as_written(answers: list[str]) -> list[str]:
    """What of TRL's answers a model writes itself: without line breaks around them, and the token
    behind Phi-3's last.
    """
    without = [answer.strip().removesuffix("</s>") for answer in answers]
    return [
        (each if each.endswith("\n") else answer).strip()
        for each, answer in zip(without, answers, strict=True)
    ]


@pytest.fixture(scope="module")
def tokenizer(tiny_folders):
    """The small tokenizer with the words of all these templates."""
    found = load_tokenizer(ModelChoice(str(tiny_folders["llama"])), None)
    cohere = re.findall(r"<\|[A-Z_]+\|>", COHERE_2)
    found.add_special_tokens(
        {"additional_special_tokens": [*WORDS, *dict.fromkeys(cohere), "[gMASK]", "<sop>"]}
    )
    return found


KEPT = read_json(GOLDEN) if GOLDEN.exists() else {"chats": []}


@pytest.mark.parametrize("kept", KEPT["chats"])
def test_a_chat_is_learned_as_by_trl(tokenizer, kept):
    tokenizer.chat_template = SHORT_FORMS[kept["family"]]
    chat = CHATS[kept["chat"]]
    examples = ours(tokenizer, chat)
    found = [each for ids, mask, _ in examples for each in learned(tokenizer, ids, mask)]
    assert as_written(found) == as_written(kept["learned"])
    assert [each.rstrip() for each in found] == found
    if kept["family"] != "qwen3" or len(found) == 1:  # one example, and TRL's tokens
        ((ids, _, _),) = examples
        if kept["family"] != "cohere2":  # whose system message is no part of the short form
            assert ids == tokenizer(kept["text"], add_special_tokens=False)["input_ids"]
    else:  # each answer as the model is asked for it, where TRL has a template that shows all of them so  # noqa: E501
        assert [text.n_unlearned for _, _, text in examples] == [0] * len(found)
        for (ids, mask, _), n_turns in zip(examples, (2, 4), strict=True):
            n_before = len(chat) - 4
            prompt = tokenizer.apply_chat_template(
                chat[: n_before + n_turns - 1], tokenize=True, add_generation_prompt=True
            )["input_ids"]
            assert ids[: len(prompt)] == prompt
            assert mask[: len(prompt) + 1] == [0] * len(prompt) + [1]
