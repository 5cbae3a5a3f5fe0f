"""Small files that unfold: Parquet, Arrow, gzip, CSV and JSON are read in bounded memory, or
refused in the right words.
"""

import datetime
import decimal
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from data_files import opened, user
from farthing.data import arrow, blocks, read
from farthing.data.chat import default_template
from farthing.data.read import Source, open_sources
from farthing.data.reader import SourceReader
from farthing.data.rows import BadRow, Row
from farthing.data.token_set import TokenRecipe
from farthing.errors import DataError
from farthing.tiny import demo_rows
from peak_memory import PeakMemory
from token_sets import with_template
from web import Pages

MOST_BYTES = 250 << 20


def written(path: Path, columns: dict[str, Any], **options) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **{"compression": "zstd", **options})
    return path


def repeated(text: str, n: int):
    """One text so many times: in a dictionary, as Parquet keeps it."""
    return pyarrow.DictionaryArray.from_arrays(
        pyarrow.array(np.zeros(n, np.int32)), pyarrow.array([text])
    )


def test_many_rows_of_one_long_text_cost_one(tmp_path):
    path = written(
        tmp_path / "a.parquet", {"text": repeated("x" * 4_000_000, 200)}, store_schema=False
    )
    assert path.stat().st_size < 10_000
    with PeakMemory(MOST_BYTES):
        n_seen = sum(
            1
            for row in opened(path, tmp_path).rows()
            if isinstance(row, Row) and len(row.value["text"]) == 4_000_000
        )
    assert n_seen == 200


def test_rows_over_the_limit_are_named_and_the_others_read(tmp_path):
    big = "x" * (10_000_000 + 1)
    chats = [
        [user("a")],
        [user(big)],
        [user("c")],
    ]
    for columns in (
        {"text": ["a", big, "c"]},
        {"messages": chats},
        {"text": pyarrow.array(["a", big, "c"]).dictionary_encode()},
    ):
        rows = list(opened(written(tmp_path / "a.parquet", columns), tmp_path).rows())
        assert [type(row) for row in rows] == [Row, BadRow, Row]
        assert [row.line for row in rows] == [1, 2, 3]
        assert "a row of 9.5 MiB; the limit is 9.5 MiB" in rows[1].reason  # type: ignore[union-attr]


def gzipped(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(gzip.compress(content))


FROM_ELSEWHERE: dict[str, tuple[Callable[[Path], object], str]] = {
    "one text.parquet": (
        lambda path: written(path, {"text": ["x" * 4_000_000]}, store_schema=False),
        "column `text` unfolds from",
    ),
    "a list.parquet": (
        lambda path: written(
            path, {"n": pyarrow.array([np.zeros(2_000_000, np.int8), [1]])}, store_schema=False
        ),
        "column `n.list.element` unfolds from",
    ),
    "rows.parquet": (
        lambda path: written(path, {"text": repeated("a", 2_000_000)}, store_schema=False),
        "the file unfolds from",
    ),
    "rows.jsonl.gz": (gzipped(b'{"text": "a"}\n' * 200_000), "it unpacks from"),
    "line.jsonl.gz": (gzipped(b"x" * (4 << 20)), "it unpacks from"),
}


@pytest.mark.parametrize("name", FROM_ELSEWHERE)
def test_a_fetched_file_that_unfolds_beyond_measure_is_refused_unread(name, tmp_path, monkeypatch):
    make, words = FROM_ELSEWHERE[name]
    make(tmp_path / "file")
    content = (tmp_path / "file").read_bytes()
    assert len(content) < 20_000
    monkeypatch.setattr(arrow, "MOST_UNFOLDED_BYTES", 1 << 20)
    monkeypatch.setattr(read, "MOST_UNPACKED_BYTES", 1 << 20)
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile, "iter_batches", lambda *_, **__: pytest.fail("it was read")
    )

    path = f"/file.{name.partition('.')[2]}"
    with Pages({path: content}).served() as address, pytest.raises(DataError, match=words):
        open_sources((address + path,), cache_dir=tmp_path, split="train")


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_a_bomb_is_refused_by_every_verb(verb, desk, run):
    written(
        desk.folder / "train.parquet",
        {"text": repeated("x" * 11_000_000, 5000)},
        store_schema=False,
    )
    desk.set("data", train="train.parquet")
    with PeakMemory(MOST_BYTES):
        said = run(verb=verb, code=2)
    assert "a row of 10.5 MiB; the limit is 9.5 MiB" in said.out + said.err
    assert "device has no memory" not in said.err


def test_a_folder_is_looked_over_before_datasets_unfolds_it(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(
        datasets, "load_dataset_builder", lambda *_, **__: pytest.fail("it was unfolded")
    )
    for name, make in {
        "a.parquet": lambda path: written(
            path, {"text": repeated("x" * 11_000_000, 50)}, store_schema=False
        ),
        "b.jsonl": lambda path: path.write_text('{"text": "' + "x" * 11_000_000 + '"}\n'),
        "c.csv.gz": lambda path: path.write_bytes(gzip.compress(b"text\n" + b"x" * 11_000_000)),
    }.items():
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        make(folder / name)
        with pytest.raises(DataError, match=r"the limit is 9\.5 MiB") as caught:
            opened(folder, tmp_path)
        assert name in caught.value.where


def test_a_data_set_of_categories_pictures_and_large_rows(tmp_path):
    import datasets

    table = pyarrow.table(
        {
            "text": ["a", "x" * (10_000_000 + 1), "c"],
            "image": [{"bytes": b"no png", "path": None}] * 3,
        }
    )
    data = datasets.Dataset(datasets.table.InMemoryTable(table))
    arrow.write_arrow(data, tmp_path / "set.arrow")
    made = Source("set", "0", "arrow", (tmp_path / "set.arrow",))
    rows = list(made.rows())
    assert [type(row) for row in rows] == [Row, BadRow, Row]
    assert rows[0].value["image"] == {"bytes": b"no png", "path": None}  # type: ignore[union-attr]


# ---- kinds of columns ----


def test_categories_are_texts(desk, run):
    rows = demo_rows(24)
    columns = {
        name: pyarrow.array([row[name] for row in rows]).dictionary_encode() for name in rows[0]
    }
    written(desk.folder / "train.parquet", columns)
    desk.set("data", train="train.parquet")
    run(code=0)


ODD = {
    "decimal": (pyarrow.array([decimal.Decimal("1.5")] * 3), "a decimal number"),
    "date": (pyarrow.array([datetime.date(2026, 1, 1)] * 3), "a date"),
    "time stamp": (pyarrow.array([datetime.datetime(2026, 1, 1)] * 3), "a date with time"),
    "far future": (
        pyarrow.array([10**6 * 86400 * 365] * 3, pyarrow.timestamp("s")),
        "can't be read",
    ),
    "null": (pyarrow.nulls(3), "no `text`"),
    "bytes": (pyarrow.array([b"\xff"] * 3), "bytes"),
    "list": (pyarrow.array([["a"]] * 3), "a list"),
    "struct": (pyarrow.array([{"a": "b"}] * 3), "an object"),
    "map": (
        pyarrow.array([[("a", "b")]] * 3, pyarrow.map_(pyarrow.string(), pyarrow.string())),
        "a list",
    ),
    "fixed list": (pyarrow.array([[1, 2]] * 3, pyarrow.list_(pyarrow.int8(), 2)), "a list"),
    "number": (pyarrow.array([1.5] * 3), "a number"),
}


@pytest.mark.parametrize("name", ODD)
def test_columns_of_other_types_have_their_names(name, desk, run):
    column, words = ODD[name]
    written(desk.folder / "train.parquet", {"text": column})
    desk.set("data", train="train.parquet")
    said = run(code=2)
    assert words in said.err, said.err
    assert "Traceback" not in said.err


def test_other_columns_of_any_type_do_not_matter(tmp_path):
    columns = {"text": pyarrow.array(["a", None, "c"])} | {
        n.replace(" ", "_"): c for n, (c, _) in ODD.items() if n != "far future"
    }
    rows = list(opened(written(tmp_path / "a.parquet", columns), tmp_path).rows())
    assert [row.value["text"] for row in rows if isinstance(row, Row)] == ["a", None, "c"]


def test_labels_of_other_types_are_refused(desk, run):
    desk.classify()
    written(desk.folder / "train.parquet", {"text": ["a", "b"], "label": [b"x", b"y"]})
    desk.set("data", train="train.parquet")
    assert "`label` is bytes, not a class" in run().err


def test_bytes_of_rows_are_about_what_they_are_unfolded():
    words = pyarrow.array(["a" * 100, "b" * 10, None, "a" * 100])
    lists = pyarrow.array([["a" * 50, "b" * 50], [], None, ["c" * 200]])
    chats = pyarrow.array([[{"t": "x" * 300}], None, [], [{"t": "y"}]])
    fixed = pyarrow.array([["a" * 9, "b"]] * 4, pyarrow.list_(pyarrow.string(), 2))
    view = words.cast(pyarrow.string_view())
    table = pyarrow.table(
        {"w": words, "d": words.dictionary_encode(), "l": lists, "c": chats, "f": fixed, "v": view}
    )
    sizes = arrow.bytes_of_rows(table)
    assert sizes[0] == pytest.approx(100 * 3 + 100 + 300 + 10, abs=120)
    assert sizes[1] == pytest.approx(10 * 3 + 10, abs=120)
    assert arrow.bytes_of_rows(table.slice(1, 2)).tolist() == sizes[1:3].tolist(), (
        "a slice is the same rows"
    )


# ---- the other readers ----


def test_a_csv_row_over_the_limit_is_refused_at_its_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('text,label\na,b\n"' + f"{'y' * 999}\n" * 10_200 + '",f\ng,h\n')
    with pytest.raises(DataError, match=r"the limit is 9\.5 MiB") as caught:
        list(opened(path, tmp_path).rows())
    assert caught.value.where.endswith("a.csv:3")


def test_a_large_row_of_a_json_document_is_a_bad_row(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "a"}, {"text": "x" * (10_000_000 + 1)}]))
    assert [type(row) for row in opened(path, tmp_path).rows()] == [Row, BadRow]


def test_memory_that_is_not_enough_is_that_of_this_machine(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}]')

    class Decoder:
        def raw_decode(self, text, at):
            raise MemoryError

    source = opened(path, tmp_path)
    monkeypatch.setattr(blocks, "_DECODER", Decoder())
    with pytest.raises(DataError, match="this machine has not enough memory"):
        list(source.rows())


def test_keys_that_an_object_lacks_are_not_learned_as_null(tmp_path):
    """Arrow gives every object of a column all keys that one of them has: calls of one tool get the
    arguments of another.
    """
    rows = []
    for arguments in ({"city": "Ulm"}, {"a": 1, "b": 2}):
        call = {"type": "function", "function": {"name": "tool", "arguments": arguments}}
        turns = [
            user("go"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        tool = {"name": "tool", "parameters": {key: {"type": "string"} for key in arguments}}
        rows.append({"messages": turns, "tools": [{"type": "function", "function": tool}]})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    tokenizer = with_template(default_template(False))
    reader = SourceReader(opened(path, tmp_path), TokenRecipe("causal-lm", 64), tokenizer)
    found = list(opened(path, tmp_path).rows())
    reader.look(found)
    texts = ["".join(part for part, _ in reader.text(row).segments) for row in found]
    assert not any("null" in text for text in texts)
    assert '"arguments": {"city": "Ulm"}' in texts[0]


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pyarrow.Table.from_arrays(
        [pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"]
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="there are two columns `text`"):
        list(opened(tmp_path / "a.parquet", tmp_path).rows())
