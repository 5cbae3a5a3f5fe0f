"""What somebody meets who gives farthing a file that is not what it wants: an answer in plain
words, never a crash.
"""

import os
from pathlib import Path

import pytest

from thinned import thinned
from workshop import Heard, make_job, rows_of, train

AXOLOTL = (
    "base_model: a/b\ndatasets: [{path: x.jsonl, type: alpaca}]\nadapter: lora\nsequence_len: 512\n"
)


def odd(path: Path, content: bytes | None) -> Path:
    """A file of these bytes; without any a folder, a link to nowhere or a pipe, by its name."""
    if content is not None:
        path.write_bytes(content)
    elif path.name == "folder":
        path.mkdir()
    elif path.stem == "link":
        path.symlink_to(path.with_name("nowhere"))
    else:
        os.mkfifo(path)
    return path


IMPORT, LOOK = ["import"], ["doctor", "--data"]


@pytest.mark.parametrize(
    ("asked", "name", "content", "words"),
    [
        (IMPORT, "empty.yaml", b"", "the file is empty"),
        (IMPORT, "blank.py", b"\n  \n", "the file is empty"),
        (IMPORT, "noise.yaml", bytes(range(128, 256)) * 8, "not UTF-8 text"),
        (IMPORT, "list.json", b"[]", "not a mapping of settings"),
        (IMPORT, "deep.json", b"[" * 100_000, "nested too deep"),
        (
            IMPORT,
            "data.yaml",
            b"base_model: x\n" + b"k: 1\n" * 220_000,
            "larger than 1 MiB",
        ),
        (IMPORT, "folder", None, "Is a directory"),
        (IMPORT, "link.yaml", None, "No such file"),
        (IMPORT, "pipe.yaml", None, "a pipe or a device"),
        (LOOK, "none.json", b"[]", "there are no rows in it"),
        (LOOK, "folder", None, "a folder"),
        (LOOK, "link.jsonl", None, "nowhere, and no file is there"),
        (LOOK, "pipe.jsonl", None, "a pipe or a device, not a file"),
    ],
)
def test_an_odd_file_is_no_configuration_and_no_data(asked, name, content, words, tmp_path, cli):
    said = cli.err(*asked, odd(tmp_path / name, content))
    assert words in said
    assert "to do:" in said


@pytest.mark.parametrize(
    "source", ["openai", "together", "fireworks", "llama-factory", "trl", "unsloth", "hf-trainer"]
)
def test_settings_of_another_tool_than_the_named_one_are_no_job(source, tmp_path, cli):
    (tmp_path / "ax.yaml").write_text(AXOLOTL)
    said = cli.err("import", tmp_path / "ax.yaml", "--from", source)
    assert "they look like those of axolotl" in said or "no job can be made" in said
    cli("import", tmp_path / "ax.yaml", "--from", "axolotl")


@pytest.mark.parametrize("family", thinned(["llama", "bert"], 9))
def test_inputs_that_are_trained_and_evaluated_on_are_counted(family, tmp_path):
    rows = rows_of(family, 20)
    heard = Heard()
    train(
        make_job(tmp_path, family, rows=rows, eval_rows=rows[-1:] * 2 + rows[:1], max_steps=1),
        heard,
    )
    assert "3 of 3 evaluation examples have an input that is trained on too" in heard.warnings
    assert "eval.jsonl" in heard.warnings
    heard = Heard()
    fresh = [
        {**row, ("text" if family == "bert" else "prompt"): f"never seen {i}"}
        for i, row in enumerate(rows[:3])
    ]
    train(make_job(tmp_path / "b", family, rows=rows, eval_rows=fresh, max_steps=1), heard)
    assert "trained on too" not in heard.warnings
