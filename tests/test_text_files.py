"""Text files are documents; files of other encodings and separators are read as what they are."""

import json
from pathlib import Path

import pytest

from data_files import bad, opened, values
from farthing.data.light_tokenizer import light_tokenizer
from farthing.data.rows import Layout
from farthing.errors import DataError
from workshop import job_file

WORDS = "The lamp is bright.\n\nThe second paragraph has\nthree\nlines.\n"


def rows_of(path: Path, folder: Path) -> tuple[list[dict[str, object]], list[str]]:
    said = []
    source = opened(path, folder, warn=said.append)
    return values(source), said


def test_a_folder_of_text_files_is_one_source_of_documents(tmp_path):
    corpus = tmp_path / "corpus"
    (corpus / "part").mkdir(parents=True)
    for n in range(8):
        (corpus / f"{n}.txt").write_text(f"{n} {WORDS}")
    (corpus / "part/9.txt").write_text("nine")
    (corpus / "blank.txt").write_text("\n \n")
    (corpus / "broken.txt").write_bytes(b"\xff\xfe\xfa")
    source = opened(corpus, tmp_path)
    assert [row["text"][:1] for row in values(source)] == list("01234567n")
    ((_, reason),) = bad(source)
    assert reason.startswith("broken.txt: invalid UTF-8")


def test_another_separator_and_encoding_are_read_and_said(tmp_path):
    lines = ["text;label", *(f"caf\xe9 {n} d\xe9j\xe0;y" for n in range(5))]
    (tmp_path / "a.csv").write_bytes("\n".join(lines).encode("cp1252"))
    rows, said = rows_of(tmp_path / "a.csv", tmp_path)
    assert rows[0] == {"text": "café 0 déjà", "label": "y"}
    assert len(rows) == 5
    assert any("separated by `;`" in text for text in said)
    assert any("read as cp1252" in text for text in said)


def test_a_few_broken_rows_of_utf8_stay_broken(tmp_path):
    good = '{"text": "café"}\n'.encode()
    (tmp_path / "a.jsonl").write_bytes(good * 9 + b'{"text": "caf\xe9"}\n' * 4)
    source = opened(tmp_path / "a.jsonl", tmp_path)
    assert len(values(source)) == 9


def test_rows_inside_an_object_are_asked_for_by_their_path(tmp_path):
    (tmp_path / "a.json").write_text('{"data": {"items": [{"a": 1}], "tags": [1, 2]}, "x": 3}')
    source = opened(tmp_path / "a.json", tmp_path)
    with pytest.raises(DataError) as caught:
        list(source.rows())
    assert "`data.items` (1 items), `data.tags` (2 items)" in str(caught.value)
    chat = {"messages": [{"role": "user"}]}
    (tmp_path / "a.json").write_text(json.dumps(chat))
    assert rows_of(tmp_path / "a.json", tmp_path)[0] == [chat]


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("A plain sentence of words. " * 20, 120, 160), ("今天天气很好我们去公园散步" * 20, 230, 300)],
)
def test_tokens_are_guessed_by_script(text, low, high):
    guess = light_tokenizer(None, None)
    assert not guess.is_exact
    assert low <= len(guess.backend_tokenizer.encode_batch([text])[0].ids) <= high


def test_the_job_says_encoding_separator_field_and_unit(tmp_path):
    def rows(name, content, **layout):
        (tmp_path / name).write_bytes(content)
        return values(opened(tmp_path / name, tmp_path, layout=Layout(**layout)))

    latin = "text,label\ncaf\xe9,\xfcb\n".encode("latin-1")
    assert rows("a.csv", latin, encoding="latin-1") == [{"text": "café", "label": "üb"}]
    tilde = b'text~label\n"a, b"~c\n'
    assert rows("b.csv", tilde, separator="~") == [{"text": "a, b", "label": "c"}]
    nested = b'{"data": {"items": [{"a": 1}], "tags": [1]}}'
    assert rows("c.json", nested, field="data.items") == [{"a": 1}]
    lines = b"one\n\ntwo\r\nthree"
    assert rows("d.txt", lines, text_unit="line") == [{"text": each} for each in WORDS_OF_LINES]
    with pytest.raises(DataError, match="it is not written in utf-16"):
        rows("e.jsonl", b'{"text": "\xff"}', encoding="utf-16")


WORDS_OF_LINES = ("one", "two", "three")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"text": "né"}\n'.encode("utf-16"), "read as utf-16"),
        ("a.csv", "text\nné\n".encode("utf-16"), "read as utf-16"),
        ("a.json", '{"text": "né"}\n{"text": "né"}\n'.encode(), "read as one object a line"),
        ("a.jsonl", '[{"text": "né"},\n {"text": "né"}]'.encode(), "read as a document"),
        ("a.json", '{"version": 1, "rows": [{"text": "né"}]}'.encode(), ""),
    ],
)
def test_a_file_is_read_as_what_it_holds(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    rows, told = rows_of(tmp_path / name, tmp_path)
    assert rows
    assert all(row == {"text": "né"} for row in rows)
    assert [said in each for each in told] == ([True] if said else [])


def test_rows_of_a_large_document_are_read_across_its_pieces(tmp_path):
    rows = [{"text": "é" * (n % 997), "n": n} for n in range(3000)]
    (tmp_path / "a.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1))
    assert rows_of(tmp_path / "a.json", tmp_path)[0] == rows
    broken = json.dumps(rows, ensure_ascii=False, indent=1).replace('"n": 2500', '"n": 25x')
    (tmp_path / "b.json").write_text(broken)
    with pytest.raises(DataError, match=rf"b\.json:{2500 * 4 + 4}:\d+: invalid JSON"):
        rows_of(tmp_path / "b.json", tmp_path)


def test_many_files_are_one_summary(tmp_path, cli):
    path = job_file(tmp_path, max_steps=2, data={"train": "texts/*.txt"})
    (tmp_path / "texts").mkdir()
    for number in range(10, 50):
        (tmp_path / f"texts/{number}.txt").write_text(f"the number is {number}\nand no other\n")
    said = cli.out("doctor", path)
    assert "train data 40 files, " in said
    assert "texts/11.txt" not in said
