"""What a run reads is settled when it begins: not by the day, the cache, or how rows are rendered
and cut.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_files import opened
from farthing.config.data_lengths import read_lengths
from farthing.config.job import Job
from farthing.data.batches import split_by_input
from farthing.data.light_tokenizer import light_tokenizer
from farthing.data.token_set import TokenRecipe, TokenSet
from farthing.data.tokens import tokenize
from farthing.errors import RunChangedError
from farthing.model.load import ModelChoice, load_tokenizer
from farthing.tiny import write_jsonl
from farthing.train.resolve import resolve
from interrupted import LeavesAt
from workshop import make_job, read_json, train

DATED = (
    "{{ '### Today is ' + strftime_now('%A %d %B %Y') + '\n' }}{% for m in messages %}{{ '### ' +"
    " m['role'] + '\n' + m['content'] + eos_token + '\n' }}{% endfor %}{% if add_generation_prompt"
    " %}{{ '### assistant\n' }}{% endif %}"
)
CHATS = [
    [
        {"role": "user", "content": f"count to {n}"},
        {"role": "assistant", "content": " ".join("1234"[: n % 4 + 1])},
    ]
    for n in range(40)
]
ROWS = [{"messages": chat} for chat in CHATS]


def dated_job(folder: Path, name: str, template: str = DATED, **keys) -> Job:
    """A job with a template that asks for the date."""
    folder.mkdir(exist_ok=True)
    (folder / "template.jinja").write_text(template)
    data = {"chat_template": "template.jinja", "eval_fraction": 0.25, **keys.pop("data", {})}
    return make_job(folder, rows=ROWS, data=data, output_dir=f"./{name}", save_steps=1, **keys)


@pytest.mark.slow
def test_a_plan_sees_the_date_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("FARTHING_TODAY", "2026-05-02")
    job = dated_job(tmp_path, "run")
    assert train(job).exit_code == 0
    monkeypatch.setenv("FARTHING_TODAY", "2026-09-30")  # a longer one: Wednesday, September
    cache = Path(job.cache_dir or "")
    of_run = read_lengths(job, cache_dir=cache)[0]
    assert of_run.source.startswith("token cache")
    fresh = dated_job(tmp_path, "new")
    of_new = read_lengths(fresh, cache_dir=cache)[0]
    assert "rows tokenized" in of_new.source, "another date is another set of tokens"
    assert train(fresh).exit_code == 0
    assert read_lengths(fresh, cache_dir=cache)[0].source.startswith("token cache")
    assert of_new.mean == pytest.approx(read_lengths(fresh, cache_dir=cache)[0].mean, rel=0.05)
    assert of_new.mean > of_run.mean


def test_a_template_without_a_date_has_none_in_its_key(tmp_path, monkeypatch):
    template = DATED.replace("strftime_now('%A %d %B %Y')", "'a day'")
    monkeypatch.setenv("FARTHING_TODAY", "2026-05-02")
    job = dated_job(tmp_path, "run", template)
    key = resolve(job).recipe
    monkeypatch.setenv("FARTHING_TODAY", "2026-05-03")
    assert resolve(job).recipe == key
    assert resolve(job).identity["tokenization.date"] == ""


def test_other_examples_than_a_run_began_with_are_refused(tmp_path, monkeypatch):
    job = dated_job(tmp_path, "run")
    assert train(job, LeavesAt(step=2)).exit_code == 75
    shutil.rmtree(tmp_path / "cache")
    render = "farthing.data.chat.Renderer.marked"
    monkeypatch.setattr(
        render, lambda self, messages, *_: "### " + "".join(each["content"] for each in messages)
    )
    with pytest.raises(RunChangedError, match="other examples"):
        train(job)


# ---- the split ----


def made(folder: Path, rows: list[dict[str, Any]], tokenizer, **recipe) -> TokenSet:
    sources = [opened(write_jsonl(folder / "rows.jsonl", rows), folder)]
    return tokenize(
        sources,
        tokenizer,
        TokenRecipe(**{"task": "causal-lm", "max_length": 512, "max_bad_rows": 0.9} | recipe),
        folder,
    )


def held_out(tokens: TokenSet) -> set[int]:
    """Lines of the evaluation examples."""
    chosen = split_by_input(tokens.groups, 0.3, 7, tokens.inputs)[1]
    return set(tokens.lines[chosen].tolist())


def test_no_row_crosses_the_split_whatever_it_is_rendered_by(tmp_path, tokenizers, monkeypatch):
    """Another template, another day, shorter limits, rows that the template refuses."""
    tokenizer, other = tokenizers["llama"], tokenizers["bert"]
    whole = made(tmp_path, ROWS, tokenizer)
    expected = held_out(whole)
    assert 8 <= len(expected) <= 16
    assert held_out(made(tmp_path, ROWS, other)) == expected
    assert held_out(made(tmp_path, ROWS, tokenizer, train_on_prompt=True)) == expected
    monkeypatch.setattr(tokenizer, "chat_template", DATED)
    for day in ("2026-01-01", "2026-01-02"):
        assert held_out(made(tmp_path, ROWS, tokenizer, date=day)) == expected
    picky = "{% if '3' in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}" + DATED
    monkeypatch.setattr(tokenizer, "chat_template", picky)
    fewer = made(tmp_path, ROWS, tokenizer)
    assert 0 < len(fewer) < len(whole)
    assert held_out(fewer) == expected & set(fewer.lines.tolist())
    longest = int(np.median(fewer.lengths))
    short = made(tmp_path, ROWS, tokenizer, max_length=longest, too_long="skip")
    assert 0 < len(short) < len(fewer)
    assert held_out(short) == expected & set(short.lines.tolist())


@pytest.mark.parametrize("task", ["causal-lm", "seq2seq", "classification"])
def test_rows_of_one_input_stay_together_whatever_is_answered(tmp_path, tokenizers, task):
    form = {
        "causal-lm": lambda n: {"instruction": f"say {n % 10}", "system": "s", "output": f"{n}"},
        "seq2seq": lambda n: {"instruction": f"say {n % 10}", "input": "x", "output": f"{n}"},
        "classification": lambda n: {
            "text": f"text {n % 10}" + " " * (n % 3),
            "label": str(n // 10),
        },
    }[task]
    rows = [form(n) for n in range(30)]
    family = {"causal-lm": "llama", "seq2seq": "t5", "classification": "bert"}[task]
    tokens = made(tmp_path, rows, tokenizers[family], task=task)
    assert len(np.unique(tokens.groups)) == 10
    train_side, eval_side = split_by_input(tokens.groups, 0.3, 7, tokens.inputs)
    assert len(eval_side) == 9
    assert not set(tokens.groups[train_side]) & set(tokens.groups[eval_side])


# ---- the tokenizer that others hold ----


def test_truncation_that_a_folder_asks_for_is_neither_followed_nor_exported(tmp_path, tiny_folders):
    folder = shutil.copytree(tiny_folders["llama"], tmp_path / "cut")
    tokenizer = load_tokenizer(ModelChoice(str(folder)), None)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=5)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    assert light_tokenizer(folder, None).backend_tokenizer.truncation is None, "a plan's"
    again = load_tokenizer(ModelChoice(str(folder)), None)
    again.save_pretrained(tmp_path / "exported")
    saved = read_json(tmp_path / "exported/tokenizer.json")
    assert saved["truncation"] is saved["padding"] is None
    again.backend_tokenizer.enable_truncation(2)
    again.backend_tokenizer.enable_padding(length=40)
    tokens = made(tmp_path, [{"text": "one two three four five six"}], again)
    assert 5 < tokens.lengths[0] < 40
