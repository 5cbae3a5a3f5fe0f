"""What a base model brings beside its weights (languages, how it generates, further templates) is
in every exported form.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForSeq2SeqLM

from families import CODES, small, speaking
from farthing.errors import ModelError
from farthing.export.folders import export_run
from workshop import make_folder, make_job, read_json, train

ROWS = [{"input": "the bread", "target": "das Brot"}, {"input": "bread", "target": "Brot"}] * 4


def base_of(folder: Path, family: str, **settings):
    """A pretrained model with a tokenizer that writes languages into texts."""
    tokenizer = speaking(family)
    tokenizer.save_pretrained(folder)
    kind = {"mbart": "mbart", "mbart50": "mbart", "nllb": "m2m_100"}[family]
    model = small(kind, AutoModelForSeq2SeqLM, vocab_size=len(tokenizer))
    for key, value in settings.items():
        setattr(model.generation_config, key, value)
    model.save_pretrained(folder)


def settings_of(folder: Path) -> dict[str, Any]:
    found = read_json(folder / "generation_config.json")
    return {
        key: value
        for key, value in found.items()
        if key not in ("transformers_version", "_from_model_config")
    }


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", CODES)
def test_a_model_of_every_form_answers_in_the_language_it_was_taught(tmp_path, family, method):
    base_of(tmp_path / "base", family, num_beams=2)
    source, target = CODES[family]
    data = {"source_lang": source, "target_lang": target}
    job = make_job(
        tmp_path, "t5", rows=ROWS, pretrained=True, method=method, data=data, max_steps=2
    )
    assert train(job).state == "finished"
    run = tmp_path / "run"
    forms = ["merged"] if method == "full" else ["adapter", "merged"]
    for form in forms:
        export_run(run, tmp_path / form, form)
    code = speaking(family).convert_tokens_to_ids(target)
    begins = (
        {"forced_bos_token_id": code} if family != "mbart" else {"decoder_start_token_id": code}
    )
    for folder in [*(tmp_path / form for form in forms), run / "model"]:
        assert settings_of(folder).items() >= {"num_beams": 2, **begins}.items(), folder
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert (tokenizer.src_lang, tokenizer.tgt_lang) == (source, target)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged")
    written = model.generate(input_ids=torch.tensor([[5, 6, 2]]), max_new_tokens=3)[0].tolist()
    assert code in written[:2]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_how_a_base_generates_is_in_every_form(tmp_path, method):
    """Llama 2's own settings are among those that transformers writes back as they were read, and
    refuses otherwise.
    """
    make_folder(tmp_path / "base", "llama", pretrained=True)
    own = {
        "bos_token_id": 1,
        "eos_token_id": [2, 5],
        "pad_token_id": 0,
        "do_sample": False,
        "temperature": 0.9,
    }
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(own))
    templates = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(tmp_path / "base")
    train(make_job(tmp_path, pretrained=True, method=method, max_steps=2))
    export_run(tmp_path / "run", tmp_path / "merged", "merged")
    for folder in (tmp_path / "run" / "model", tmp_path / "merged"):
        assert settings_of(folder).items() >= own.items()
        assert transformers.AutoTokenizer.from_pretrained(folder).chat_template == templates


def test_settings_that_could_not_be_written_are_refused_before_the_training(tmp_path):
    base_of(tmp_path / "base", "nllb")
    path = tmp_path / "base" / "generation_config.json"
    path.write_text(json.dumps({**read_json(path), "do_sample": False, "temperature": 0.9}))
    data = {"source_lang": "eng_Latn", "target_lang": "deu_Latn"}
    with pytest.raises(
        ModelError, match=r"generation_config.json can't be written with a language"
    ):
        train(make_job(tmp_path, "t5", rows=ROWS, pretrained=True, data=data, max_steps=2))
