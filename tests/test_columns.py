"""Columns by templates, by a list of them, by choices and by usual names; several sources, each
with its own.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from data_files import assistant, opened, user, values
from farthing.config.load import load_job
from farthing.data.columns import columns_of, renamed
from farthing.data.formats import Converter, recognise, used_columns
from farthing.errors import DataError, JobError, UnusableRowError
from token_sets import with_template

GSM = {"question": "2 + 2?", "chain_of_thought": "Count.", "answer": "4"}


def segments(
    row: dict[str, Any], columns: dict[str, Any], task: str = "causal-lm"
) -> list[tuple[str, bool]]:
    found = recognise(set(row), task, columns, "rows.jsonl")
    return list(Converter(found.format, found.columns, {}, None, task)(row).segments)


def test_the_first_of_several_templates_whose_columns_are_filled_is_taken():
    columns = {"prompt": ["{instruction}\n{input}\n", "{instruction}\n"], "completion": "{output}"}
    row = {"instruction": "Say", "input": "x", "output": "y"}
    assert segments(row, columns)[0] == ("Say\nx\n", False)
    for empty in (" ", math.nan):
        assert segments(row | {"input": empty}, columns)[0] == ("Say\n", False)
    names = columns | {"prompt": ["input", "instruction"]}
    assert segments(row | {"input": " "}, names)[0] == ("Say", False)
    with pytest.raises(UnusableRowError, match=r"`input` is empty.*second template"):
        segments(row | {"input": ""}, columns | {"prompt": "{instruction}{input}"})


@pytest.mark.parametrize(
    ("answer", "text"), [(1, "cold"), ("1", "cold"), ("b", "cold"), ("cold", "cold")]
)
def test_an_index_picks_among_choices(answer, text):
    row = {"question": "Ice is", "choices": ["hot", "cold"], "answer": answer}
    columns = {"prompt": "{question}\n{choices}\n", "completion": "{choices[answer]}"}
    assert segments(row, columns) == [("Ice is\nA. hot\nB. cold\n", False), (text, True)]


def test_an_index_beyond_the_choices_is_a_bad_row_and_labels_of_choices_count():
    row = {
        "question": "Ice is",
        "choices": {"text": ["hot", "cold"], "label": ["1", "2"]},
        "answer": "1",
    }
    columns = {"prompt": "{question}", "completion": "{choices[answer]}"}
    assert segments(row, columns)[1] == ("hot", True)
    with pytest.raises(UnusableRowError, match="none of the 2"):
        segments(row | {"answer": "7"}, columns)


def test_numbers_and_truths_become_text_and_objects_do_not():
    assert renamed({"a": 3, "b": True}, {"text": "{a} {b}"})["text"] == "3 true"
    with pytest.raises(UnusableRowError, match="`a` is neither text nor a number"):
        renamed({"a": {"x": 1}}, {"text": "{a}"})


def test_a_brace_that_is_doubled_is_a_brace():
    assert renamed({"a": "x"}, {"text": "{{{a}}}"})["text"] == "{x}"
    assert columns_of("{{{a}}}") == ("a",)


def test_a_template_with_an_unknown_column_says_which():
    with pytest.raises(DataError, match=r"no column `anser`(?s:.*)did you mean `answer`"):
        recognise(
            set(GSM), "causal-lm", {"prompt": "question", "completion": "{anser}"}, "rows.jsonl"
        )


@pytest.mark.parametrize(
    ("columns", "task", "found"),
    [
        (
            {"Question", "Response", "id"},
            "causal-lm",
            {"prompt": "Question", "completion": "Response"},
        ),
        ({"prompt", "response"}, "causal-lm", {"completion": "response"}),
    ],
)
def test_usual_names_are_read_and_said(columns, task, found):
    understood = recognise(columns, task, {}, "rows.jsonl")
    assert understood.columns == found
    assert all(f"`{own}` as `{standard}`" in understood.notes[0] for standard, own in found.items())


def test_two_columns_that_could_be_meant_are_no_guess():
    with pytest.raises(DataError, match="match no format"):
        recognise({"question", "answer", "response"}, "causal-lm", {}, "rows.jsonl")


# ---- in a job ----

JOB = "task: causal-lm\nmodel: a/b\noutput_dir: out\n"


def job_of(folder: Path, text: str):
    (folder / "job.yaml").write_text(JOB + text)
    for name in ("a.jsonl", "b1.jsonl", "b2.jsonl"):
        (folder / name).write_text(json.dumps({"text": name}) + "\n")
    return load_job(folder / "job.yaml")


def test_each_source_has_its_own_keys_and_globs_keep_them(tmp_path):
    job = job_of(
        tmp_path,
        "data:\n  columns: {text: body}\n  train:\n"
        '  - {path: "b*.jsonl", weight: 2, columns: {text: "{text}!"}}\n  - a.jsonl\n',
    )
    assert [Path(name).name for name in job.data.train] == ["b1.jsonl", "b2.jsonl", "a.jsonl"]
    assert [said.weight for said in job.data.of_train] == [2, 2, 1]
    assert [said.columns for said in job.data.of_train] == [
        {"text": "{text}!"},
        {"text": "{text}!"},
        None,
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: {train: [{path: a.jsonl, wieght: 2}]}", "`wieght` of a source: extra"),
        (
            "data: {train: [{path: a.jsonl, weight: 0}]}",
            "`weight` of a source: input should be greater than 0",
        ),
        ("data: {train: [{weight: 1}]}", "`path` of a source: field required"),
        (
            "data: {train: a.jsonl, eval: [{path: a.jsonl, weight: 2}]}",
            "evaluation takes each example once",
        ),
        ("data: {train: a.jsonl, columns: {text: '{a'}}", "not a template"),
        (
            "data: {train: a.jsonl, columns: {text: '{a!r}'}}",
            "only a column's name may stand in braces",
        ),
        ("data: {train: a.jsonl, columns: {text: no}}", "put (the )?words? in quotes"),
        (
            "data: {train: a.jsonl, label_map: {no: refused, yes: granted}}",
            "put (the )?words? in quotes",
        ),
        (
            "data: {train: [{path: a.jsonl, columns: {txt: a}}]}",
            "of a source: input should be .*text",
        ),
    ],
)
def test_a_wrong_key_of_data_is_explained(tmp_path, text, words):
    with pytest.raises(JobError, match=words):
        job_of(tmp_path, text + "\n")


def test_the_schema_for_editors_knows_sources_with_keys_of_their_own():
    from farthing.config.load import job_schema

    items = job_schema()["$defs"]["DataSection"]["properties"]["train"]["anyOf"][1]["items"][
        "anyOf"
    ]
    assert {"type": "string"} in items
    assert set(items[1]["properties"]) == {"path", "weight", "columns", "split", "name"}


def test_a_part_of_an_object_is_a_column():
    columns = {"input": "{translation.en}", "target": "translation.de"}
    row = {"translation": {"en": "bread", "de": "Brot"}, "id": 1}
    assert segments(row, columns, "seq2seq") == [("bread", False), ("Brot", True)]
    assert used_columns("input/target", columns) >= {"translation"}
    with pytest.raises(UnusableRowError, match=r"`translation\.fr` is empty"):
        renamed(row, {"input": "{translation.fr}"})
    with pytest.raises(DataError, match=r"no column `translatoin\.en`"):
        recognise(
            set(row),
            "seq2seq",
            {"input": "translatoin.en", "target": "translation.de"},
            "rows.jsonl",
        )
    flat = {"translation.en": "bread", "translation": {"en": "other"}}
    assert renamed(flat, {"text": "{translation.en}"}) == {
        "translation": {"en": "other"},
        "text": "bread",
    }


def test_spaces_around_the_names_of_a_csv_file_are_left_out(tmp_path):
    (tmp_path / "rows.csv").write_text("instruction , input, output\nSay it, bread,Bread.\n")
    (row,) = values(opened(tmp_path / "rows.csv", tmp_path))
    assert row == {"instruction": "Say it", "input": " bread", "output": "Bread."}
    found = recognise(
        set(row), "seq2seq", {"prompt": " input", "completion": "{output}"}, "rows.csv"
    )
    assert (
        found.columns["prompt"] == "input"
    )  # a job that names them as the file has them goes on working


WITH_HISTORY = {
    "instruction": "And soup?",
    "input": "",
    "output": "Too.",
    "history": [["What is bread?", "Food."]],
}


def test_earlier_turns_of_an_instruction_are_pairs_of_a_chat():
    chats = Converter("instruction", {}, {}, TEMPLATE, "causal-lm")
    with pytest.raises(UnusableRowError, match="no list of"):
        chats(WITH_HISTORY | {"history": [["What?"]]})
    with pytest.raises(UnusableRowError, match="earlier turns"):
        Converter("instruction", {}, {}, None, "seq2seq")(WITH_HISTORY)


TEMPLATE = with_template(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    other_templates=(),
    all_special_tokens=["</s>"],
)
ASKED = user("Hi?")


@pytest.mark.parametrize(
    ("row", "whole", "learned"),
    [
        (
            {"instruction": "Sum up.", "context": "Bread rose.", "response": "Bread."},
            "<user>Sum up.\n\nBread rose.</s><assistant>Bread.</s>",
            ["Bread.</s>"],
        ),
        (
            {
                "schemaVersion": "x",
                "system": [{"text": "Be brief."}],
                "messages": [
                    user([{"text": "Hi?"}]),
                    assistant([{"text": "Yo."}]),
                ],
            },
            "<system>Be brief.</s><user>Hi?</s><assistant>Yo.</s>",
            ["Yo.</s>"],
        ),
        (
            {
                "prompt": [ASKED, assistant("Yo."), ASKED],
                "completion": '[ {"role": "assistant", "content": "Again."}]',
            },
            "<user>Hi?</s><assistant>Yo.</s><user>Hi?</s><assistant>Again.</s>",
            ["Again.</s>"],
        ),
        (
            WITH_HISTORY,
            "<user>What is bread?</s><assistant>Food.</s><user>And soup?</s><assistant>Too.</s>",
            ["Food.</s>", "Too.</s>"],
        ),
    ],
)
def test_chats_as_other_services_write_them(row, whole, learned):
    found = recognise(set(row), "causal-lm", {}, "rows.jsonl")
    text = Converter(found.format, found.columns, {}, TEMPLATE, "causal-lm")(row)
    assert "".join(part for part, _ in text.segments) == whole
    assert [part for part, is_learned in text.segments if is_learned] == learned


def test_a_table_without_a_header_is_told_to_have_one():
    with pytest.raises(DataError, match="put one before it"):
        recognise({"0", "a sentence"}, "causal-lm", {}, "rows.tsv")
