"""Prompts that data sets are joined by, as `data.columns`: what other tools do by the name of a
format.

The wording of Alpaca is of https://github.com/tatsu-lab/stanford_alpaca (its data were made with
it), the styles are Axolotl's. A list of templates means: the first whose columns are all filled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from farthing.storage.files import Json

_WITH = (
    "Below is an instruction that describes a task, paired with an input that provides further"
    " context. Write a response that appropriately completes the request."
)
_WITHOUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes"
    " the request."
)
_CHAT_WITH = (
    "Below is an instruction from a USER that describes a task, paired with an input that provides"
    " further context. The ASSISTANT writes a response that concisely and appropriately completes"
    " the request.\n\n"
)
_CHAT_WITHOUT = (
    "Below is an instruction from a USER that describes a task. "
    "The ASSISTANT writes a response that appropriately and concisely completes the request.\n\n"
)
ALPACA_PROMPTS = [
    f"{_WITH}\n\n### Instruction:\n{{instruction}}\n\n### Input:\n{{input}}\n\n### Response:\n",
    f"{_WITHOUT}\n\n### Instruction:\n{{instruction}}\n\n### Response:\n",
]


def _chat_style(system: str, question: str) -> list[str]:
    return [
        f"SYSTEM: {_CHAT_WITH}\nUSER: {{{question}}}\n{{input}}\nASSISTANT:",
        f"SYSTEM: {_CHAT_WITHOUT}\nUSER: {{{question}}}\nASSISTANT:",
    ]


ALPACA_STYLES: dict[str, Json] = {
    "alpaca": {"prompt": ALPACA_PROMPTS, "completion": "{output}"},
    "alpaca_instruct": {"prompt": ALPACA_PROMPTS, "completion": "{output}"},
    "alpaca:instruct": {"prompt": ALPACA_PROMPTS, "completion": "{output}"},
    "alpaca:chat": {
        "prompt": [
            f"SYSTEM: {_WITH}\nUSER: {{instruction}}\n{{input}}\nASSISTANT:",
            f"SYSTEM: {_WITHOUT}\nUSER: {{instruction}}\nASSISTANT:",
        ],
        "completion": "{output}",
    },
    "alpaca:chatml": {
        "prompt": [
            (
                f"<|im_start|>system\n{_WITH}<|im_end|>\n<|im_start|>user\n{{instruction}}\n{{input}}<|im_end|>\n"
                "<|im_start|>assistant\n"
            ),
            (
                f"<|im_start|>system\n{_WITHOUT}<|im_end|>\n<|im_start|>user\n{{instruction}}<|im_end|>\n"
                "<|im_start|>assistant\n"
            ),
        ],
        "completion": "{output}",
    },
    "alpaca:phi": {
        "prompt": [
            f"<|system|>\n{_WITH}<|end|>\n<|user|>\n{{instruction}}<|end|>{{input}}<|assistant|>",
            f"<|system|>\n{_WITHOUT}<|end|>\n<|user|>\n{{instruction}}<|end|>\n<|assistant|>\n",
        ],
        "completion": "{output}",
    },
    "alpaca_chat.load_qa": {"prompt": _chat_style("", "question"), "completion": "{answer}"},
}
"""Axolotl's formats by their names."""

CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}{%- if"
    " message['role'] == 'assistant' %}{% generation %}{{- message['content'] + '<|im_end|>' }}{%"
    " endgeneration %}{%- else %}{{- message['content'] + '<|im_end|>' }}{% endif %}{{- '\n' }}{%-"
    " endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, with marks around what the assistant says."""


def _frame(asked: str, answer: str, *, system: str = "{}", default_system: str = "") -> str:
    """A Jinja template from texts with {} for what is said and {eos}; all of the answer's is
    learned, as there.
    """

    def written(form: str, said: str) -> str:
        before, _, after = form.partition("{}")
        behind = " + eos_token + ".join(repr(part) for part in after.split("{eos}"))
        return f"{before!r} + {said} + {behind}"

    content = "message['content']"
    return (
        "{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content']"
        f" %}}{{%- else %}}{{% set system = {default_system!r} %}}{{% endif %}}{{%- if system"
        f" %}}{{{{- {written(system, 'system')} }}}}{{% endif %}}{{%- for message in messages"
        " %}{%- if message['role'] == 'assistant' %}{% generation %}{{-"
        f" {written(answer, content)} }}}}{{% endgeneration %}}{{%- elif message['role'] !="
        f" 'system' %}}{{{{- {written(asked, content)} }}}}{{% endif %}}{{%- endfor %}}"
    )


FRAMES: dict[str, str] = {
    "alpaca": _frame(
        "### Instruction:\n{}\n\n### Response:\n", "{}{eos}\n\n", default_system=f"{_WITHOUT}\n\n"
    ),
    "default": _frame("Human: {}{eos}\nAssistant:", "{}{eos}\n", system="System: {}{eos}\n"),
    "vicuna": _frame(
        "USER: {} ASSISTANT:",
        "{}{eos}",
        default_system=(
            "A chat between a curious user and an artificial intelligence assistant. "
            "The assistant gives helpful, detailed, and polite answers to the user's questions."
        ),
    ),
}
"""LLaMA-Factory's frames for models without a chat template, by name; a turn asked for begins where
the last text ends.
"""


def chat_columns(field: Any, role: Any, content: Any) -> dict[str, str]:
    """`data.columns` of chats in a column of this name, whose turns have these keys."""
    in_sharegpt = role == "from" or content == "value"
    standard = "conversations" if in_sharegpt else "messages"
    field = str(field or ("conversations" if in_sharegpt else "messages"))
    return {} if field == standard else {standard: field}


def style_of_fields(given: Mapping[str, Any]) -> Json:
    """Axolotl's own formats: fields with a format string each way."""
    fields = {
        name: str(given.get(f"field_{name}") or name)
        for name in ("system", "instruction", "input", "output")
    }
    system = str(given.get("system_prompt") or "")
    start = (
        str(given.get("system_format") or "{system}").replace("{system}", system) if system else ""
    )
    with_input = str(given.get("format") or "{instruction} {input} ")
    without = str(given.get("no_input_format") or "{instruction} ")

    def own(template: str) -> str:
        return re.sub(
            r"\{(\w+)\}", lambda match: "{" + fields.get(match[1], match[1]) + "}", template
        )

    templates = [start + own(each) for each in dict.fromkeys((with_input, without))]
    return {
        "prompt": templates if len(templates) > 1 else templates[0],
        "completion": "{" + fields["output"] + "}",
    }
