"""`farthing doctor --data`: what a file is, what of it is odd, and what of three examples is
learned.
"""

import json
from pathlib import Path
from typing import Any

from command import Cli
from farthing.tiny import make_tokenizer


def look(folder: Path, rows: list[Any], cli: Cli, *more: object, code: int = 0) -> tuple[Any, str]:
    file = folder / "rows.jsonl"
    file.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    words = ("doctor", "--data", file, *more)
    return cli.json(*words, code=code), cli.out(*words, code=code)


def chat(*roles: str, **marks) -> dict[str, Any]:
    return {
        "messages": [
            {"role": role, "content": f"{role} {i}", **(marks if role == "assistant" else {})}
            for i, role in enumerate(roles)
        ]
    }


def test_chats_with_their_turns_repeats_and_oddities(tmp_path, cli):
    rows = [
        chat("user", "assistant"),
        chat("user", "assistant"),
        chat("user", "user", "assistant"),
        chat("user", "assistant", "user"),
    ]
    rows += [
        {**chat("user", "narrator", "assistant"), "id": 7},
        chat("user", "assistant", weight=0),
        {"messages": []},
        "{broken",
    ]
    found, said = look(tmp_path, rows, cli)
    assert (found["format"], found["task"], found["n_rows"], found["n_bad"]) == (
        "messages",
        "causal-lm",
        8,
        3,
    )
    assert found["n_equal_rows"] == 1
    assert found["odd_roles"]["role `narrator`"] == 1
    assert found["odd_roles"]["ends without an answer"] == 1
    assert found["odd_roles"]["two turns in a row with the same role"] == 1
    assert (found["turns"]["most"], found["roles"]["assistant"]) == (3, 6)
    assert found["ignored"] == "`id` (in 1 of 7 rows)"
    assert [part["text"].strip() for part in found["examples"][0] if part["is_learned"]] == [
        "assistant 1"
    ]
    assert 0 < found["tokens"]["learned_share"] < 1
    assert not found["is_exact"]
    for words in (
        "every assistant turn is marked",
        "invalid JSON",
        "guessed at 4 characters",
        "green is learned",
    ):
        assert words in said


def test_preferences_are_named_and_the_file_fails(tmp_path, cli):
    rows = [
        {
            "input": {"messages": []},
            "preferred_output": [{"role": "assistant", "content": "a"}],
            "non_preferred_output": [],
        }
    ]
    found, said = look(tmp_path, rows, cli, code=2)
    assert next(iter(found["foreign"].values()))[:2] == [1, 1]
    assert "preference data" in said


def test_labels_are_counted_and_the_task_is_seen(tmp_path, cli):
    rows = [{"review": f"text {i}", "sentiment": i % 3 == 0} for i in range(9)]
    found, said = look(tmp_path, rows, cli)
    assert (found["task"], found["labels"]) == ("classification", {"False": 6, "True": 3})
    assert "`review` as `text`" in said
    assert "67%" in said


def test_a_job_gives_its_tokenizer_its_columns_and_its_limit(tmp_path, cli, tiny_folders):
    job = tmp_path / "job.yaml"
    job.write_text(
        f"task: causal-lm\nmodel: {{model_name_or_path: {tiny_folders['llama']}, init:"
        " random}\noutput_dir: run\ndata: {train: [{path: rows.jsonl, columns: {text: '{a}:"
        " {b}'}}], max_length: 4}\n"
    )
    found, said = look(tmp_path, [{"a": "one two three four five", "b": "six"}], cli, job)
    assert (found["format"], found["is_exact"], found["n_too_long"]) == ("text", True, 1)
    assert found["examples"][0] == [{"text": "one two three four five: six", "is_learned": True}]
    assert "over 4 tokens" in said


def test_control_characters_of_a_file_do_not_steer_the_terminal(tmp_path, cli):
    said = look(tmp_path, [{"text": "red \u001b[31m [bold]not[/]"}], cli)[1]
    assert "\u001b[31m" not in said
    assert "[bold]not[/]" in said


def test_the_template_of_a_model_says_what_it_leaves_out_and_without_one_that_is_not_known(
    tmp_path, cli
):
    make_tokenizer(tmp_path / "model", ["user assistant"])
    (tmp_path / "model/chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    )
    rows = [
        {
            **chat("user", "assistant", name="Ann"),
            "tools": [{"type": "function", "function": {"name": "f"}}],
        }
    ] * 2
    found, said = look(tmp_path, rows, cli, "--model", tmp_path / "model")
    assert found["is_exact"]
    assert "left out   the chat template leaves out `tools` (in 2 chats)" in said
    assert [part["text"] for part in found["examples"][0]][-1].endswith("assistant 1</s>")
    found, said = look(tmp_path, rows, cli)
    assert found["left_out"] == []
    assert "to check the model's template" in said
    unknown = ("--model", "org/not-here")
    said = cli.err("doctor", "--data", tmp_path / "rows.jsonl", *unknown)
    assert "not in the cache of the Hub" in said
    assert "only for a data file" in cli.err("doctor", *unknown)
