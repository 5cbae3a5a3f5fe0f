"""`model.new_tokens`: the vocabulary grows, its embeddings are trained and exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import workshop
from farthing.errors import ModelError
from farthing.export.folders import export_run, trained_model
from mishaps import crash
from workshop import Watched, log_of, losses_of, make_job, read_json, train

NEW = ["<mood>", "xqzt"]
BOTH = {"name": "lora", "modules_to_save": ["embed_tokens", "lm_head"]}


def rows_of(n: int) -> list[dict[str, str]]:
    """Prompts and answers with the new tokens in them."""
    return [
        {"prompt": f"<mood> number {i % 5} is", "completion": f" xqzt and {i % 3}"}
        for i in range(n)
    ]


def job_of(folder: Path, method="full", new: list[str] = NEW, family: str = "llama", **keys):
    """A job whose model gets the new tokens."""
    keys = {"max_steps": 4, "rows": rows_of(24), "pretrained": True, **keys}
    return make_job(folder, family, method=method, model={"new_tokens": new}, **keys)


def plain_of(base: Path, seed: int) -> tuple[Any, Any]:
    """(tokenizer, model) as transformers alone makes them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert tokenizer.add_tokens(NEW) == 2
    torch.manual_seed(seed)
    model.resize_token_embeddings(len(tokenizer))
    return tokenizer, model


@pytest.mark.parametrize("method", ["full", BOTH])
def test_the_losses_are_those_of_a_plain_loop(method, tmp_path, monkeypatch):
    job = job_of(tmp_path, method, optim="sgd", max_grad_norm=0, max_steps=1)
    watched = Watched(monkeypatch)
    train(job)
    tokenizer, model = plain_of(tmp_path / "base", job.train.seed)
    embedding = model.get_input_embeddings().weight
    ours = next(t for n, t in watched.before.items() if "embed_tokens" in n)
    assert torch.equal(ours, embedding)
    total, n_targets = 0.0, 0
    for index in log_of(job)[0]["examples"]:
        row = rows_of(24)[index]
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = tokenizer(row["prompt"] + row["completion"])["input_ids"]
        ids = torch.tensor([[*ids, tokenizer.eos_token_id]])
        log_probs = model(ids).logits[0, :-1].log_softmax(-1)
        picked = log_probs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :]
        total, n_targets = total - float(picked.detach().sum()), n_targets + len(picked)
    assert losses_of(job)[0] == pytest.approx(total / n_targets, rel=1e-5)
    rows = torch.arange(len(tokenizer) - 2, len(tokenizer))
    now = next(
        p for n, p in watched.model.named_parameters() if "embed_tokens" in n and p.requires_grad
    )
    assert (now[rows] != embedding[rows]).any(1).all(), "both rows have moved"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", BOTH])
def test_the_trained_rows_are_exported_merged_and_resumed(method, tmp_path):
    job = job_of(tmp_path, method, max_steps=6, save_steps=2)
    train(job)
    run = Path(job.output_dir)
    export_run(run, tmp_path / "merged", "merged")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = tokenizer("<mood> number 1 is xqzt", return_tensors="pt")["input_ids"]
    assert {tokenizer.convert_tokens_to_ids(token) for token in NEW} <= set(ids[0].tolist())
    assert merged.get_input_embeddings().num_embeddings == len(tokenizer)
    tuned = trained_model(run)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, tuned(ids).logits, rtol=1e-4, atol=1e-4)
    again = job_of(tmp_path / "again", method, max_steps=6, save_steps=2)
    crash(again, 5)
    train(again)
    assert losses_of(again) == losses_of(job)


@pytest.mark.parametrize(
    ("method", "new", "words"),
    [
        ("lora", NEW, r"set method.modules_to_save: \[embed_tokens, lm_head\]"),
        ({"name": "lora", "modules_to_save": ["lm_head"]}, NEW, r"`embed_tokens` is not trained"),
        ("full", ["<s>"], r"has a token '<s>' already"),
    ],
)
def test_tokens_that_would_not_be_learned_are_refused(method, new, words, tmp_path):
    with pytest.raises(ModelError, match=words):
        train(job_of(tmp_path, method, new))


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("t5", "full"),
        ("bert", "full"),
        ("bert", {"name": "lora", "modules_to_save": ["word_embeddings"]}),
    ],
)
def test_other_tasks_learn_them_too(family, method, tmp_path, monkeypatch):
    rows = workshop.rows_of(family, 24)
    key = "text" if family == "bert" else "input"
    rows = [{**row, key: f"<mood> {row[key]}"} for row in rows]
    watched = Watched(monkeypatch)
    train(job_of(tmp_path, method, family=family, rows=rows))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run/model")
    row = tokenizer.convert_tokens_to_ids("<mood>")
    words = {
        name: weight
        for name, weight in watched.model.named_parameters()
        if weight.requires_grad and len(weight) == len(tokenizer) and weight.ndim == 2
    }
    assert words
    assert all(
        not torch.equal(weight[row], watched.before[name][row]) for name, weight in words.items()
    )


def test_fresh_weights_have_room_for_them(tmp_path):
    job = job_of(tmp_path, pretrained=False, max_steps=1)
    train(job)
    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(job.output_dir) / "model")
    config = read_json(Path(job.output_dir) / "model/config.json")
    assert config["vocab_size"] == len(tokenizer)
