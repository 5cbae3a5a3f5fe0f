"""Text files are documents; files of other encodings and separators are read as what they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from desk import Desk, Said
from farthing.data.light_tokenizer import light_tokenizer
from farthing.data.read import open_sources
from farthing.data.rows import Row
from farthing.errors import DataError

WORDS = "The lamp is bright.\n\nThe second paragraph has\nthree\nlines.\n"


def rows_of(path: Path, folder: Path) -> tuple[list[dict[str, object]], list[str]]:
    said: list[str] = []
    (source,) = open_sources((str(path),), cache_dir=folder, split="train", warn=said.append)
    return [row.value for row in source.rows() if isinstance(row, Row)], said


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(WORDS)
    assert rows_of(tmp_path / "a.txt", tmp_path)[0] == [{"text": WORDS}]


def test_a_folder_of_text_files_is_one_source_of_documents(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    (corpus / "part").mkdir(parents=True)
    for n in range(8):
        (corpus / f"{n}.txt").write_text(f"{n} {WORDS}")
    (corpus / "part" / "9.txt").write_text("nine")
    (corpus / "blank.txt").write_text("\n \n")
    (corpus / "broken.txt").write_bytes(b"\xff\xfe\xfa")
    (source,) = open_sources((str(corpus),), cache_dir=tmp_path, split="train")
    rows = list(source.rows())
    assert [row.value["text"][:1] for row in rows if isinstance(row, Row)] == list("01234567n")
    bad = [row.reason for row in rows if not isinstance(row, Row)]
    assert len(bad) == 1
    assert bad[0].startswith("broken.txt: invalid UTF-8")


@pytest.mark.slow
def test_every_verb_counts_the_same_documents(
    desk: Desk,
    run: Callable[..., Said],
) -> None:
    corpus = desk.folder / "corpus"
    corpus.mkdir()
    for n in range(12):
        (corpus / f"{n}.txt").write_text(f"{n} {WORDS}")
    desk.set("data", train=str(corpus))
    for verb in ("plan", "doctor", "train"):
        said = run(verb=verb)
        assert said.code == 0, said.err
        assert "12 " in said.out
        assert "60 " not in said.out.replace("$", "")[:200]


def test_another_separator_and_encoding_are_read_and_said(tmp_path: Path) -> None:
    lines = ["text;label", *(f"caf\xe9 {n} d\xe9j\xe0;y" for n in range(5))]
    (tmp_path / "a.csv").write_bytes("\n".join(lines).encode("cp1252"))
    rows, said = rows_of(tmp_path / "a.csv", tmp_path)
    assert rows[0] == {"text": "café 0 déjà", "label": "y"}
    assert len(rows) == 5
    assert any("separated by `;`" in text for text in said)
    assert any("read as cp1252" in text for text in said)


def test_a_few_broken_rows_of_utf8_stay_broken(tmp_path: Path) -> None:
    good = '{"text": "café"}\n'.encode()
    (tmp_path / "a.jsonl").write_bytes(good * 9 + b'{"text": "caf\xe9"}\n' * 4)
    (source,) = open_sources((str(tmp_path / "a.jsonl"),), cache_dir=tmp_path, split="train")
    assert sum(isinstance(row, Row) for row in source.rows()) == 9


def test_rows_inside_an_object_are_asked_for_by_their_path(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"data": {"items": [{"a": 1}], "tags": [1, 2]}, "x": 3}')
    (source,) = open_sources((str(tmp_path / "a.json"),), cache_dir=tmp_path, split="train")
    with pytest.raises(DataError) as caught:
        list(source.rows())
    assert "`data.items` (1 items), `data.tags` (2 items)" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("A plain sentence of words. " * 20, 120, 160), ("今天天气很好我们去公园散步" * 20, 230, 300)],
)
def test_tokens_are_guessed_by_script(text: str, low: int, high: int) -> None:
    guess = light_tokenizer(None, None)
    assert not guess.is_exact
    assert low <= len(guess.encode([text], False)[0].ids) <= high
