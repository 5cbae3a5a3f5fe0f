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

_TASK = "Below is an instruction that describes a task"
_MORE = "paired with an input that provides further context"
_REQUEST = "Write a response that appropriately completes the request."
_WITH, _WITHOUT = f"{_TASK}, {_MORE}. {_REQUEST}", f"{_TASK}. {_REQUEST}"
_CHAT_WITH = (
    f"Below is an instruction from a USER that describes a task, {_MORE}. The ASSISTANT writes a"
    " response that concisely and appropriately completes the request.\n\n"
)
_CHAT_WITHOUT = (
    "Below is an instruction from a USER that describes a task. The ASSISTANT writes a response"
    " that appropriately and concisely completes the request.\n\n"
)


def _style(with_input: str, without: str, answer: str = "output") -> Json:
    """Of two prompts the first whose columns are filled; `S` stands for what describes the task."""
    prompts = [with_input.replace("S", _WITH, 1), without.replace("S", _WITHOUT, 1)]
    return {"prompt": prompts, "completion": f"{{{answer}}}"}


def _im(role: str, said: str) -> str:
    return f"<|im_start|>{role}\n{said}<|im_end|>\n"


_ALPACA = _style(
    "S\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    "S\n\n### Instruction:\n{instruction}\n\n### Response:\n",
)
STYLES: dict[str, Json] = {
    **dict.fromkeys(("alpaca", "alpaca_instruct", "alpaca:instruct"), _ALPACA),
    "alpaca:chat": {
        "prompt": [
            f"SYSTEM: {_WITH}\nUSER: {{instruction}}\n{{input}}\nASSISTANT:",
            f"SYSTEM: {_WITHOUT}\nUSER: {{instruction}}\nASSISTANT:",
        ],
        "completion": "{output}",
    },
    "alpaca:chatml": {
        "prompt": [
            _im("system", _WITH)
            + _im("user", "{instruction}\n{input}")
            + "<|im_start|>assistant\n",
            _im("system", _WITHOUT) + _im("user", "{instruction}") + "<|im_start|>assistant\n",
        ],
        "completion": "{output}",
    },
    "alpaca:phi": _style(
        "<|system|>\nS<|end|>\n<|user|>\n{instruction}<|end|>{input}<|assistant|>",
        "<|system|>\nS<|end|>\n<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
    ),
    "alpaca_chat.load_qa": {
        "prompt": [
            f"SYSTEM: {_CHAT_WITH}\nUSER: {{question}}\n{{input}}\nASSISTANT:",
            f"SYSTEM: {_CHAT_WITHOUT}\nUSER: {{question}}\nASSISTANT:",
        ],
        "completion": "{answer}",
    },
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


_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
FRAMES: dict[str, str] = {
    "alpaca": _frame(
        "### Instruction:\n{}\n\n### Response:\n", "{}{eos}\n\n", default_system=f"{_WITHOUT}\n\n"
    ),
    "default": _frame("Human: {}{eos}\nAssistant:", "{}{eos}\n", system="System: {}{eos}\n"),
    "vicuna": _frame("USER: {} ASSISTANT:", "{}{eos}", default_system=_VICUNA),
}
"""LLaMA-Factory's frames for models without a chat template, by name; a turn asked for begins where
the last text ends.
"""

_HEADERS = {
    "chatml": ("<|im_start|>{}\n", "<|im_end|>", "\n"),
    "llama3": ("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", ""),
}
_ASKED = {"icr": "input", "intel": "question", "prompt_pairs": "prompt", "argilla": "instruction"}


def pair_style(name: str, task: str) -> Json | None:
    """Axolotl's formats of preferences such as `chatml.intel`, for `task`; None for others."""
    frame, _, style = name.partition(".")
    asked = "prompt" if (style, task) == ("ultra", "kto") else _ASKED.get(style)
    if frame not in _HEADERS or asked is None or (style == "argilla" and task != "kto"):
        return None
    header, end, gap = _HEADERS[frame]
    user = f"{header.format('user')}{{{asked}}}{end}{gap}{header.format('assistant')}"
    answers = ("completion",) if task == "kto" else ("chosen", "rejected")
    return {
        "prompt": [f"{header.format('system')}{{system}}{end}{gap}{user}", user],
        **{answer: f"{{{answer}}}{end}" for answer in answers},
    }


def chat_columns(field: Any, role: Any, content: Any) -> dict[str, str]:
    """`data.columns` of chats in a column of this name, whose turns have these keys."""
    in_sharegpt = role == "from" or content == "value"
    standard = "conversations" if in_sharegpt else "messages"
    field = str(field or standard)
    return {} if field == standard else {standard: field}


def _own(template: str, fields: Mapping[str, str]) -> str:
    """A format string with a data set's own columns."""
    return re.sub(r"\{(\w+)\}", lambda found: "{" + fields.get(found[1], found[1]) + "}", template)


def columns_of_fields(given: Mapping[str, Any]) -> Json:
    """Axolotl's own formats: fields with a format string each way."""
    known = ("system", "instruction", "input", "output")
    fields = {name: str(given.get(f"field_{name}") or name) for name in known}
    system = str(given.get("system_prompt") or "")
    start = str(given.get("system_format") or "{system}").replace("{system}", system)
    start = start if system else ""
    ways = (given.get("format") or "{instruction} {input} ", given.get("no_input_format"))
    forms = dict.fromkeys((str(ways[0]), str(ways[1] or "{instruction} ")))
    found = [start + _own(each, fields) for each in forms]
    return {
        "prompt": found if len(found) > 1 else found[0],
        "completion": "{" + fields["output"] + "}",
    }


def pair_columns(given: Mapping[str, Any], task: str) -> Json:
    """The same of preferences: a format string for each part."""
    parts = ("prompt", "completion") if task == "kto" else ("prompt", "chosen", "rejected")
    fields = {name: str(given.get(f"field_{name}") or name) for name in (*parts, "system", "label")}
    found: Json = {
        part: _own(str(given.get(f"{part}_format") or f"{{{part}}}"), fields) for part in parts
    }
    return found | ({"label": fields["label"]} if fields["label"] != "label" else {})
