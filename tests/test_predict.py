"""`farthing predict`: what the model of a run says of many rows, against one row at a time."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from data_files import assistant, user
from farthing.after.predict import Predictor
from farthing.cli import main
from farthing.errors import InputError
from farthing.tiny import write_jsonl
from workshop import read_json, read_rows, rows_of, trained


def run_of(folder: Path, family: str, **keys) -> Path:
    """A run that has learned a few rows."""
    keys = {
        "rows": rows_of(family, 40),
        "max_steps": 30,
        "pretrained": True,
        "learning_rate": 0.003,
        **keys,
    }
    return trained(folder, family, **keys)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A run that tells topics apart."""
    return run_of(tmp_path_factory.mktemp("classifier"), "bert")


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """A run that writes answers."""
    return run_of(tmp_path_factory.mktemp("writer"), "llama", max_steps=2)


def predicted(run: Path, rows: list[dict[str, Any]], *words: str) -> list[dict[str, Any]]:
    """What the verb writes for the rows."""
    data, output = run.parent / "new.jsonl", run.parent / "out.jsonl"
    write_jsonl(data, rows)
    output.unlink(missing_ok=True)
    assert main(["predict", str(run), str(data), "-o", str(output), *words]) == 0
    return read_rows(output)


def test_classes_come_with_their_probabilities(classifier, cli):
    rows = rows_of("bert", 37, seed=1)
    texts = [{"text": row["text"], "number": i} for i, row in enumerate(rows)]
    found = predicted(classifier, texts, "--batch-size", "5")
    model = Predictor(classifier)
    for row, given in zip(found, texts, strict=True):
        alone = model.classify(given["text"])
        assert {name: row[name] for name in given} == given
        assert row["prediction"] == alone["label"]
        assert row["scores"] == pytest.approx(alone["probabilities"], abs=1e-5)
        assert row["score"] == max(row["scores"].values())
    said = cli.json("chat", classifier, "--prompt", texts[0]["text"])["tuned"]
    assert said == model.classify(texts[0]["text"])
    with_labels = predicted(classifier, rows)
    assert [row["prediction"] for row in with_labels] == [row["prediction"] for row in found]
    assert [row["label"] for row in with_labels] == [row["label"] for row in rows]


def test_answers_of_a_batch_are_those_of_one_row_at_a_time(tmp_path):
    run = run_of(tmp_path, "t5", max_steps=2)
    rows = [{**row, "input": row["input"][: 9 * (i + 1)]} for i, row in enumerate(rows_of("t5", 5))]
    found = predicted(run, rows, "--batch-size", "4", "--max-tokens", "6")
    model = Predictor(run, max_new_tokens=6)
    for row, given in zip(found, rows, strict=True):
        alone = "".join(model.stream([user(given["input"])]))
        assert row == given | {name: row[name] for name in ("score", "finish_reason")} | {
            "prediction": alone
        }


@pytest.mark.parametrize("ends_at", [None, 0])
def test_an_answer_is_the_likeliest_tokens_and_its_score_their_mean(ends_at, writer, cli):
    text, log_probs = "name: The Mill; food:", []
    model = Predictor(writer, max_new_tokens=6)
    model.model.generation_config.update(
        stop_strings=["a"], return_dict_in_generate=True, prompt_lookup_num_tokens=2
    )
    given = model.tokenizer(text)["input_ids"]
    ids, end = list(given), {model.tokenizer.eos_token_id}
    for at in range(6):
        with torch.no_grad():
            step = model.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        log_probs.append(float(step.max()))
        ids.append(int(step.argmax()))
        if at == ends_at:  # as a token that the model itself names
            model.model.generation_config.eos_token_id = ids[-1]
            end.add(ids[-1])
        if ids[-1] in end:
            break
    row, other = model.rows([{"prompt": text}, {"prompt": "The"}])  # which goes on
    assert row["score"] == pytest.approx(sum(log_probs) / len(log_probs), abs=1e-4)
    answer = model.tokenizer.decode(ids[len(given) :], skip_special_tokens=True)
    assert row["prediction"] == answer == "".join(model.stream([user(text)]))
    if ends_at is None:
        said = cli.json("chat", writer, "--prompt", text, "--base", "--max-tokens", "6")
        assert (said["prompt"], said["tuned"]["text"]) == (text, answer)
        assert said["base"]["text"] != answer
    assert row["finish_reason"] == ("stop" if ids[-1] in end else "length")
    alone = next(model.rows([{"prompt": "The"}]))
    assert other["prediction"] == alone["prediction"]
    assert other["score"] == pytest.approx(alone["score"], abs=1e-4)


def test_prompts_longer_than_training_are_whole_and_beyond_the_positions_named(writer, classifier):
    model = Predictor(writer, max_new_tokens=48)
    whole, named = model.rows([{"prompt": "bread " * 500}, {"prompt": "bread " * 501}])
    assert "prediction" in whole
    assert "rows:2: " in named["error"]
    assert (model.summary.n_rows, model.summary.n_failed, model.summary.n_cut) == (2, 1, 0)
    model = Predictor(classifier)
    assert all("score" in row for row in model.rows([{"text": "bread " * n} for n in (9, 999)]))
    assert model.summary.n_cut == 1


def test_a_chat_is_asked_as_it_was_in_training(tmp_path):
    turns = [user("Which?"), {"role": "Model", "content": "This one."}]
    run = run_of(tmp_path, "llama", rows=[{"dialog": turns}] * 16, max_steps=2)
    earlier = [user("a"), assistant("b")]
    chats = [turns[:1], [turns[0], {**turns[1], "weight": 0}], [*earlier, turns[0]]]
    model = Predictor(run, max_new_tokens=8)
    for chat, asked in zip(chats, [turns[:1], turns[:1], chats[2]], strict=True):
        (row,), (plain,) = model.rows([{"dialog": chat}]), model.rows([{"messages": asked}])
        assert row["score"] == plain["score"]
        assert row["prediction"] == "".join(model.stream(asked))
    drawn = ["".join(model.stream(turns[:1], 9.0, seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert "".join(model.stream(turns[:1], 1e-6)) == "".join(model.stream(turns[:1]))


def test_the_columns_of_the_job_are_read_and_its_target_is_not_needed(tmp_path):
    rows = [{"narrative": row["text"], "product": row["label"]} for row in rows_of("bert", 24)]
    columns = {"text": "about: {narrative}", "label": "product"}
    run = run_of(tmp_path, "bert", rows=rows, data={"columns": columns}, max_steps=2)
    found = predicted(run, [{"narrative": "the bread"}, {"narrative": ""}])
    model = Predictor(run)
    alone = model.classify("about: the bread")
    with pytest.raises(InputError, match="makes `text` of several columns"):
        model.row_of("the bread")
    assert found[0]["scores"] == pytest.approx(alone["probabilities"], abs=1e-5)
    assert "`narrative` is empty" in found[1]["error"]


def test_rows_that_can_not_be_read_are_named_and_stand_where_they_stood(classifier, capsys):
    found = predicted(classifier, [{"text": "good"}, {"text": 3}, {"text": "also good"}])
    assert ["error" in row for row in found] == [False, True, False]
    assert "new.jsonl:2: `text` is a number, not text" in found[1]["error"]
    assert "1 row without a prediction" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"text": 1}, {"text": None}], "no row can be used"),
        ([{"body_text": "x", "other": "y"}], "match no format"),
        ([{"text": "x", "score": 1}], "has a column `score`"),
    ],
)
def test_a_file_that_can_not_be_answered_is_refused_and_leaves_nothing(
    rows, words, classifier, tmp_path, cli
):
    data, output = write_jsonl(tmp_path / "new.jsonl", rows), tmp_path / "out.jsonl"
    assert words in cli.err("predict", classifier, data, "-o", output)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out.jsonl")]


def test_a_value_that_is_no_number_is_missing_within_a_list_too(classifier, tmp_path, cli):
    data, output = tmp_path / "new.parquet", tmp_path / "out.jsonl"
    measured = [[1.0, float("nan")], [float("inf")]]
    pq.write_table(pa.table({"text": ["good", "bad"], "measured": measured}), data)
    cli("predict", classifier, data, "-o", output)
    rows = [json.loads(line, parse_constant=pytest.fail) for line in output.open()]
    assert [row["measured"] for row in rows] == [[1.0, None], [None]]


def test_rows_of_another_kind_are_refused_by_their_place_and_kind(writer, tmp_path, cli):
    data = write_jsonl(tmp_path / "new.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    said = cli.err("predict", writer, data, "-o", tmp_path / "out.jsonl")
    assert "new.jsonl:1: preference data (columns `chosen`, `rejected`)\n" in said
    assert "without the answers" in said


def test_nothing_is_overwritten(classifier, tmp_path, cli):
    data = write_jsonl(tmp_path / "new.jsonl", [{"text": "x"}])
    assert "exists already" in cli.err("predict", classifier, data, "-o", data)
    assert read_json(data) == {"text": "x"}


def test_memory_that_runs_out_halves_the_batch(classifier, monkeypatch):
    predictor, sizes = Predictor(classifier), []
    forward = predictor.model.forward

    def full(input_ids, **more):
        sizes.append(len(input_ids))
        if len(input_ids) > 3:
            raise torch.OutOfMemoryError("full")
        return forward(input_ids, **more)

    monkeypatch.setattr(predictor.model, "forward", full)
    found = list(predictor.rows({"text": f"row {i}"} for i in range(9)))
    assert all("prediction" in row for row in found)
    assert sizes == [9, 8, 4, 2, 2, 2, 2, 1]
