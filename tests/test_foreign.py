"""Data of other kinds of training is refused by name; what is ignored of the rest is said wherever
a job is looked at.
"""

import json
from typing import Any

import pytest
import yaml

from data_files import assistant, opened, user
from desk import left_behind
from farthing.config.load import load_job
from farthing.data.foreign import foreign_kind
from farthing.data.read import Source
from farthing.data.reader import SourceReader
from farthing.data.rows import Row
from farthing.data.token_set import TokenRecipe
from farthing.data.tokens import tokenize
from farthing.errors import DataError
from farthing.events import DataRead
from farthing.tiny import demo_rows, write_jsonl
from workshop import Heard, read_json, train

USER, GOOD, BAD = (
    user("How much?"),
    assistant("A farthing."),
    assistant("Go away."),
)
TURNS = [{"from": "human", "value": "How much?"}, {"from": "gpt", "value": "A farthing."}]
SEES = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}

PAIR = {"prompt": "a", "completion": "b"}
PREFERENCES = {
    "strings": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "messages and what was rejected": {"messages": [USER, GOOD], "rejected_response": "Go away."},
    "openai": {
        "input": {"messages": [USER]},
        "preferred_output": [GOOD],
        "non_preferred_output": [BAD],
    },
    "two responses": {
        **PAIR,
        "response_0": "b",
        "response_1": "c",
        "better_response_id": 0,
    },
    "an arena": {
        **PAIR,
        "conversation_a": TURNS,
        "conversation_b": TURNS,
        "winner": "a",
    },
}
VERDICTS = {
    "of a csv file": {**PAIR, "label": "False"},
    "a number": {**PAIR, "label": 0},
    "a tag": {"conversations": TURNS, "kto_tag": True},
}
RANKED = {
    "scores beside": {
        **PAIR,
        "responses": ["b", "c"],
        "scores": [1.0, 0.5],
    },
    "scores of many kinds": {
        "instruction": "a",
        "output": "b",
        "completions": [{"overall_score": 4}, {"r": 1}],
    },
    "steps that are judged": {
        **PAIR,
        "completions": ["b", "c"],
        "labels": [True, False],
    },
    "ranks": {**PAIR, "answers": ["b", "c"], "rank": [0, 1]},
}
MEDIA = {
    "a column of pictures": {"messages": [USER, GOOD], "images": ["a.png"]},
    "a place for one": {
        "conversations": [{"from": "human", "value": "What is this?\n<image>"}, TURNS[1]]
    },
    "a place in a message": {"messages": [user("<image>What?"), GOOD]},
    "a place in json": {"messages": json.dumps([user("<video> What?"), GOOD])},
    "parts of openai": {"messages": [user([{"type": "text", "text": "?"}, SEES]), GOOD]},
    "parts without a type": {"messages": [user([{"image": "a.png"}]), GOOD]},
    "pictures of a message": {"messages": [{**USER, "images": ["aGk="]}, GOOD]},
    "a path": {**PAIR, "image_path": "a.png"},
    "special tokens": {"prompt": "<|vision_start|><|image_pad|><|vision_end|>a", "completion": "b"},
}
OURS = {
    "a label of a topic": {**PAIR, "label": "science"},
    "no picture": {"messages": [USER, GOOD], "images": []},
    "no rejected answer": {**PAIR, "chosen": None, "rejected": None},
    "xml": {"prompt": "Mend it:\n<image>\n<url>x</url>\n</image>", "completion": "b"},
    "words on tags": {"messages": [user("What does <image> mean in RSS?"), GOOD]},
    "options of a question": {**PAIR, "choices": ["b", "c"]},
    "a language that is preferred": {**PAIR, "preferred_language": "en"},
    "where it was said": {"text": "a", "video_id": "x1"},
}


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        (PREFERENCES, "preference data"),
        (VERDICTS, "verdict"),
        (RANKED, "ranked"),
        (MEDIA, "images, sound or video"),
    ],
)
def test_rows_of_other_kinds_are_known_by_name(rows, word):
    for name, row in rows.items():
        kind = foreign_kind(row, "causal-lm")
        assert kind is not None, name
        assert word in kind.what, name
        assert kind.why.startswith(("which", "of which")), name
        assert kind.to_do, name


@pytest.mark.parametrize("name", OURS)
def test_rows_that_only_look_like_it_are_ours(name):
    assert foreign_kind(OURS[name], "causal-lm") is None


def test_a_text_with_a_verdict_beside_it_is_only_a_text():
    assert foreign_kind({"text": "a", "label": True}, "causal-lm") is None
    assert foreign_kind({"story": "a", "label": True}, "causal-lm", {"text": "story"}) is None
    assert foreign_kind(PAIR | {"label": True}, "causal-lm", {"text": "completion"})


def test_classes_may_be_called_anything_but_pictures_are_not_read():
    assert foreign_kind({"text": "a", "label": True, "rejected": "no"}, "classification") is None
    kind = foreign_kind({"text": "a", "label": "b", "image": {"bytes": b""}}, "classification")
    assert "image" in kind.what


@pytest.mark.parametrize("where", [0, 1500])
def test_one_row_of_another_kind_anywhere_refuses_the_file_at_its_line(where, tmp_path, tokenizers):
    rows = list(demo_rows(1600))
    rows[where] = rows[where] | {"label": False}
    sources = [opened(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path)]
    with pytest.raises(DataError) as caught:
        tokenize(
            sources, tokenizers["llama"], TokenRecipe("causal-lm", 64, max_bad_rows=1.0), tmp_path
        )
    assert caught.value.where.endswith(f"a.jsonl:{where + 1}")
    assert "answers with a verdict" in caught.value.what


@pytest.mark.parametrize("verb", ["train", "plan", "doctor", "probe"])
def test_a_preference_file_is_refused_by_every_verb(desk, run, verb):
    desk.rows([{"conversations": TURNS, "chosen": TURNS[1], "rejected": TURNS[1]}] * 4)
    desk.set("data", max_bad_rows=1.0)
    said = run(verb=verb, code=2)
    assert "preference data (" in said.out + said.err
    assert "Traceback" not in said.err
    assert left_behind(desk.folder / "run") == set()


def test_what_to_do_about_preferences_works(desk, run):
    rows = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": " no"}
        for row in demo_rows(8)
    ]
    desk.rows(rows)
    advice = run().err.partition("say so: ")[2]
    desk.set("data", columns=yaml.safe_load(advice.partition("data.columns: ")[2]))
    said = run(code=0)
    assert "`chosen` alone is learned, as data.columns says" in said.out
    assert "not used: `rejected`" in said.out
    notes = read_json(desk.folder / "run/receipt.json")["data_notes"]
    assert any("`chosen` alone is learned" in note for note in notes)
    chats = [{"chosen": [USER, GOOD], "rejected": [USER, BAD]}] * 4
    desk.rows(chats)
    desk.set("data", columns={})
    assert "data.columns: {messages: chosen}" in run().err


def test_what_the_job_names_wins_over_a_guess(desk, run):
    desk.rows([{"question": "a", "answer": f"b{i}", "label": i % 2 == 0} for i in range(8)])
    said = run(code=2)
    assert "verdict (column `label` is true)" in said.err
    desk.set("data", columns={"prompt": "question", "completion": "answer"})
    said = run(code=0)
    assert "`answer` alone is learned, as data.columns says" in " ".join(said.out.split())


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "response": "b", "score": 0.5}, "answers with a score"),
        ({"instruction": "a", "output": ["good", "bad"]}, "several answers to a prompt"),
    ],
)
def test_scored_and_several_answers_are_named(desk, run, row, words):
    desk.rows([row] * 8)
    said = run(code=2)
    assert words in said.err


# ---- what nobody reads ----


def test_each_source_has_its_own_ignored_columns(tmp_path, tokenizers):
    both = {
        "a": [{"text": "one", "id": 1}, {"text": "two"}],
        "b": [PAIR | {"text": "three", "n": 2}] * 3,
    }
    sources = [
        opened(write_jsonl(tmp_path / f"{name}.jsonl", rows), tmp_path)
        for name, rows in both.items()
    ]
    made, again = (
        tokenize(sources, tokenizers["llama"], TokenRecipe("causal-lm", 64), tmp_path)
        for _ in range(2)
    )
    assert made.facts["formats"] == ["text", "prompt/completion"]
    assert [note.rpartition("/")[2] for note in made.notes] == [
        "a.jsonl: columns that are not used: `id` (in 1 of 2 rows)",
        "b.jsonl: columns that are not used: `n`, `text`",
    ]
    assert again.notes == made.notes, "a set from the cache says it too"


def reader_of(columns: dict[str, Any], task: str = "causal-lm") -> SourceReader:
    return SourceReader(Source("a", "", "jsonl"), TokenRecipe(task, 64, columns=columns), None)


def test_a_mapped_column_hides_the_one_of_its_standard_name():
    reader = reader_of({"text": "story"})
    reader.look([Row(1, {"text": "a", "story": "b"})])
    assert (reader.ignored, reader.notes) == ({"text": 1}, [])


@pytest.mark.parametrize(
    ("task", "columns"),
    [
        ("token-classification", {"tokens": "words", "tags": "ner"}),
        ("dpo", {"prompt": "q", "chosen": "good", "rejected": "bad"}),
        ("classification", {"label": "topic"}),
        ("causal-lm", {"prompt": "q", "completion": ["good", "bad"]}),
    ],
)
def test_columns_that_the_job_names_are_read_beside_pictures(task, columns):
    row = {"words": ["a"], "ner": ["O"], "q": "a", "good": "b", "bad": "c", "topic": "x"}
    seen = [Row(1, {**row, "text": "a", "image": "a.png"})]
    reader = reader_of(columns, task)
    assert reader.look(seen) == seen
    with pytest.raises(DataError, match="images, sound or video"):
        reader_of({"prompt": "q"}, task).look(seen)


def test_text_beside_pictures_may_be_chosen_and_that_is_said():
    rows = [Row(1, {"text": "a", "image": "a.png"}), Row(2, {"text": "b", "image": None})]
    with pytest.raises(DataError, match="images, sound or video"):
        reader_of({}).look(rows)
    reader = reader_of({"text": "text"})
    reader.look(rows)
    assert reader.notes == [
        "images, sound or video (column `image`): `text` alone is learned, as data.columns says"
    ]


def test_what_is_said_of_data_is_said_once(desk):
    desk.rows([{**row, "source": "web"} for row in demo_rows(24)])
    heard = Heard()
    train(load_job(desk.job()), heard)
    assert [len(event.notes) for event in heard.of(DataRead)] == [1]
