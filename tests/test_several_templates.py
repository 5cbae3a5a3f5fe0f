"""A tokenizer with several chat templates: the default is taken, and where none is, nothing is
chosen in silence.
"""

import shutil
from pathlib import Path

import pytest
import transformers

from farthing.data.light_tokenizer import light_tokenizer
from farthing.errors import ModelError
from farthing.model.load import ModelChoice, load_tokenizer
from workshop import Heard, make_folder, make_job, train

OWN = (
    "{% for each in messages %}<{{ each.role }}>{{ each.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"say {n}"},
            {"role": "assistant", "content": f"number {n}"},
        ]
    }
    for n in range(8)
]

AS_PROMPTS = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in CHATS]


def base_with(folder: Path, templates) -> Path:
    """A small model whose tokenizer has these templates."""
    make_folder(folder, "llama", pretrained=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(folder)
    return folder


def job_of(folder: Path, templates, rows=CHATS, **keys):
    base_with(folder / "base", templates)
    return make_job(folder, rows=rows, pretrained=True, max_steps=2, **keys)


@pytest.mark.parametrize(
    ("in_files", "rows"),
    [(True, CHATS), (False, CHATS), (True, AS_PROMPTS)],
)
def test_without_a_default_they_are_named_and_nothing_is_trained(tmp_path, in_files, rows):
    job = job_of(tmp_path, {"tool_use": OWN, "rag": OWN}, rows)
    if not in_files:
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
        shutil.rmtree(tmp_path / "base/additional_chat_templates", ignore_errors=True)
        tokenizer.save_pretrained(tmp_path / "base", save_jinja_files=False)
    for _ in range(2):  # the second time would find tokens that the first had kept
        with pytest.raises(
            ModelError, match=r"several chat templates, and none is the default: rag, tool_use"
        ):
            train(job)
    light = light_tokenizer(tmp_path / "base", None)
    assert light.chat_template is None
    assert set(light.other_templates) == {"rag", "tool_use"}


def test_a_file_chooses_and_the_others_are_kept(tmp_path):
    (tmp_path / "mine.jinja").write_text(OWN)
    job = job_of(
        tmp_path, {"tool_use": "{{ tools }}"}, data={"chat_template": str(tmp_path / "mine.jinja")}
    )
    assert train(job).state == "finished"
    assert light_tokenizer(tmp_path / "run/model", None).chat_template == OWN


def test_texts_that_are_no_chats_need_no_template(tmp_path):
    rows = [{"prompt": f"say {n} ", "completion": f"number {n}"} for n in range(8)]
    job = job_of(tmp_path, {"tool_use": OWN, "rag": OWN}, rows=rows)
    assert train(job).state == "finished"
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "run/model")
    assert exported.chat_template == {"tool_use": OWN, "rag": OWN}


def test_the_default_is_taken(tmp_path):
    base_with(tmp_path, {"default": OWN, "tool_use": "{{ tools }}"})
    assert load_tokenizer(ModelChoice(str(tmp_path)), None).chat_template == OWN
    assert light_tokenizer(tmp_path, None).chat_template == OWN


def test_it_is_said_that_farthings_own_is_used(tmp_path):
    heard = Heard()
    train(job_of(tmp_path, None, AS_PROMPTS), heard)
    assert "the tokenizer has no chat template: farthing's own is used" in str(list(heard))
