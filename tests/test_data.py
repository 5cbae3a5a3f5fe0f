"""The data layer: readers, formats, masks, the token cache, and which examples make up a step."""

import gzip
import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from command import in_python
from data_files import KINDS, assistant, bad, opened, user, values, write_as
from farthing.addresses import without_secrets
from farthing.data import blocks, parts
from farthing.data.batches import Batches, collate, permutation, split_by_input
from farthing.data.formats import Converter, recognise
from farthing.data.parts import TokenPart, read_part
from farthing.data.read import Row, open_sources
from farthing.data.token_set import (
    TokenRecipe,
    open_token_set,
    set_key,
    tokenizer_sha256,
)
from farthing.data.tokens import tokenize
from farthing.errors import DataError, UnusableRowError
from farthing.storage.files import DamagedFileError
from farthing.tiny import write_jsonl
from web import Pages

ROWS = [
    {"prompt": "one\ntwo", "completion": 'say "hi", ü'},
    {"prompt": "three", "completion": "four"},
]


RECIPE = TokenRecipe("causal-lm", 64)


# ---- readers ----


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, kind):
    source = opened(write_as(kind, tmp_path / f"rows.{kind}", ROWS), tmp_path)
    assert values(source) == ROWS
    assert values(source) == ROWS  # a source can be read again
    assert bad(source) == []


def test_a_row_is_placed_by_the_line_it_begins_on(tmp_path):
    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text('\n{"text": "b"}\n\n{"text": "d"}\n')
    assert [row.line for row in opened(jsonl, tmp_path).rows()] == [2, 4]
    csv_file = write_as("csv", tmp_path / "a.csv", [*ROWS, ROWS[1]])
    assert [row.line for row in opened(csv_file, tmp_path).rows()] == [2, 4, 5]


def test_a_data_set_folder_is_read_through_datasets(tmp_path):
    folder = tmp_path / "set"
    write_jsonl(folder / "train.jsonl", ROWS)
    write_jsonl(folder / "validation.jsonl", ROWS[:1])
    assert values(opened(folder, tmp_path / "cache")) == ROWS
    assert values(opened(folder, tmp_path / "cache", "validation")) == ROWS[:1]
    names = ("train", "validation")
    configs = "".join(f"- {{config_name: {name}, data_files: {name}.jsonl}}\n" for name in names)
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    hashes = {opened(folder, tmp_path, config_name=name).sha256 for name in names}
    assert len(hashes) == 2, "configurations are other data"
    mixed = [{"text": "a", "more": [{"x": 1}, {"y": "b"}]}, {"text": 2, "more": []}]
    for kind, rows in (("csv", [{"text": "None", "label": "01"}]), ("jsonl", mixed)):
        (tmp_path / kind).mkdir()
        write_as(kind, tmp_path / kind / f"train.{kind}", rows)
        assert values(opened(tmp_path / kind, tmp_path)) == rows


def test_a_changed_data_set_folder_is_never_stale_even_with_its_old_times(tmp_path):
    folder = tmp_path / "set"
    file = write_jsonl(folder / "train.jsonl", [{"text": "before"}])
    times = file.stat()
    first = opened(folder, tmp_path / "cache")
    assert values(first) == [{"text": "before"}]
    file.write_text('{"text": "after!"}\n')
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = opened(folder, tmp_path / "cache")
    assert values(second) == [{"text": "after!"}]
    assert first.sha256 != second.sha256


def test_a_data_set_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "set").mkdir()
    with pytest.raises(DataError, match=r"pip install 'farthing\[datasets\]'"):
        opened(tmp_path / "set", tmp_path)


def test_a_data_set_folder_that_cannot_be_read_is_refused_in_words(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": \n')
    with pytest.raises(DataError, match="set"):
        opened(folder, tmp_path / "cache")
    with pytest.raises(DataError, match="train_split"):
        opened(
            write_jsonl(tmp_path / "two/train.jsonl", ROWS).parent,
            tmp_path / "cache",
            "no-such-split",
        )


@pytest.mark.parametrize("with_etag", [True, False])
def test_a_file_on_the_web_is_never_stale(tmp_path, with_etag):
    rows = {"/a.jsonl": b'{"text": "before"}\n', "/a.jsonl?part=other": b'{"text": "other"}\n'}
    web = Pages(rows, with_etag)
    with web.served() as address:
        for _ in range(2):
            assert values(opened(f"{address}/a.jsonl", tmp_path)) == [{"text": "before"}]
        web.says["/a.jsonl"] = b'{"text": "after!"}\n'
        assert values(opened(f"{address}/a.jsonl", tmp_path)) == [{"text": "after!"}]
        assert len(list((tmp_path / "downloads").iterdir())) == 2  # one for each content
        assert values(opened(f"{address}/a.jsonl?part=other", tmp_path)) == [{"text": "other"}]


def test_a_missing_address_is_named_without_its_secrets(tmp_path):
    with Pages().served() as address:
        host = address.removeprefix("http://")
        for path in ("missing.jsonl?sig=hunter2", "missing.csv"):
            with pytest.raises(DataError) as caught:
                opened(f"http://user:hunter2@{host}/{path}", tmp_path)
            assert f"{host}/missing" in str(caught.value)
            assert "hunter2" not in str(caught.value)
            assert "to do: check the address" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("https://user:pa@ss@host/a.jsonl?X-Sig=1#x", "https://host/a.jsonl"),
        ("simplecache::https://user:pass@host/a.jsonl", "simplecache::https://host/a.jsonl"),
        ("s3://bucket/key@2/a.jsonl", "s3://bucket/key@2/a.jsonl"),
        ("/home/me/a@b.jsonl", "/home/me/a@b.jsonl"),
    ],
)
def test_names_are_shown_without_secrets(name, shown):
    assert without_secrets(name) == shown


@pytest.mark.parametrize("scheme", ["sftp", "memory", "hf", "simplecache::https"])
def test_other_schemes_are_refused_with_those_that_work(scheme, tmp_path):
    with pytest.raises(DataError, match=f"no file is read from {scheme}://") as caught:
        opened(f"{scheme}://host/a.jsonl", tmp_path)
    assert "s3://, gs://, az://, https://" in caught.value.to_do


def test_bad_rows_are_named_and_the_good_ones_around_them_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "first"}\r\n'
        b'{"text": \r\n'
        b"\r\n"
        b'{"text": "\xff"}\r\n'
        b"[1, 2]\r\n"
        b'{"text": "a", "text": "b"}\r\n'
        + b'{"text": '
        + b"[" * 100_000
        + b"}\r\n"
        + b'{"text": "nul \\u0000"}\r\n{"text": "last"}'
    )
    source = opened(path, tmp_path)
    assert [(row.line, row.value["text"]) for row in source.rows() if isinstance(row, Row)] == [
        (1, "first"),
        (8, "nul \0"),
        (9, "last"),
    ]
    reasons = dict(bad(source))
    assert sorted(reasons) == [2, 4, 5, 6, 7]
    assert reasons[2].startswith("invalid JSON at column")
    assert reasons[4] == "invalid UTF-8 at byte 10 of the line"
    assert reasons[5] == "not a JSON object"
    assert "`text` appears twice" in reasons[6]


def test_a_row_over_the_limit_is_passed_over_without_holding_it(tmp_path):
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"text": "before"}\n{"text": "')
        for _ in range(12):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n{"text": "after"}\n')
    source = opened(path, tmp_path)
    assert values(source) == [{"text": "before"}, {"text": "after"}]
    assert bad(source) == [(2, "a row of 12.0 MiB; the limit is 9.5 MiB")]


def test_csv_rows_that_do_not_fit_are_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'text,label\r\n"a\r\nb",x\r\nonly one\r\n\xff,y\r\nc,z\r\n"never closed,z\r\nd,z\r\n'
    )
    source = opened(path, tmp_path)
    assert values(source) == [{"text": "a\r\nb", "label": "x"}, {"text": "c", "label": "z"}]
    reasons = dict(bad(source))
    assert reasons[4] == "1 fields, the header has 2"
    assert reasons[5] == "invalid UTF-8; data.encoding names another encoding"
    assert reasons[8].startswith("invalid CSV"), "each line that a quote has swallowed"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"text,text\nx,y\n", "`text` appears twice in the header"),
        ("a.csv", b"\n\n", "no header line"),
        ("a.json", b'[{"text": "a", "text": "b"}]', "`text` appears twice in one object"),
        ("a.csv", b'"te"xt,label\n', "header line is invalid"),
        ("a.json", b'{"text": 1}', "not an array of objects"),
        ("a.json", b'[{"text": 1},]', "a.json:1:"),
        ("a.json", b'{"a": 1}, {"a": 2}', "Extra data"),
        ("a.json", b'["\xff"]', "invalid UTF-8"),
        ("a.json", b"[" * 100_000, "invalid JSON"),
        ("a.parquet", b"PAR1 this is none", "not a readable Parquet file"),
        ("a.jsonl.gz", b"not gzip at all", "can't be read any further"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-12], "a.jsonl.gz:"),
        ("a.xlsx", b"x", "unknown kind of data file"),
        ("a.jsonl", b"", "the file is empty"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused_in_words(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(opened(path, tmp_path).rows())
    assert says in str(caught.value)
    assert "to do:" in str(caught.value)
    assert name in caught.value.where


@pytest.mark.parametrize("target", ["gone.jsonl", "rows.jsonl"])
def test_a_link_to_no_file_is_told_from_a_wrong_name(target, tmp_path):
    (tmp_path / "rows.jsonl").symlink_to(target)
    with pytest.raises(DataError, match=r"a link to .*, and no file is there") as caught:
        opened(tmp_path / "rows.jsonl", tmp_path)
    assert "did you mean" not in str(caught.value)


# ---- formats ----

CHAT = [
    {"role": "system", "content": "Be brief."},
    user("Hi"),
    assistant("Hello."),
    user("Bye"),
    assistant("See you."),
]


def segments(
    row: dict[str, Any], task: str, tokenizer=None, **renamed: str
) -> list[tuple[str, bool]]:
    """What the recognised format makes of a row."""
    name, columns, _ = recognise(set(row), task, renamed, "file")
    return list(Converter(name, columns, {}, tokenizer, task)(row).segments)


@pytest.mark.parametrize(
    ("row", "task", "expected"),
    [
        ({"prompt": "p", "completion": "c", "id": 3}, "causal-lm", [("p", False), ("c", True)]),
        ({"prompt": "p", "completion": "c"}, "seq2seq", [("p", False), ("c", True)]),
        ({"input": "i", "target": "t"}, "causal-lm", [("i", False), ("t", True)]),
        ({"text": "t", "label": "l"}, "causal-lm", [("t", True)]),
        (
            {"instruction": "do", "input": "this", "output": "done"},
            "seq2seq",
            [("do\n\nthis", False), ("done", True)],
        ),
        (
            {"instruction": "do", "output": "done", "system": "s"},
            "seq2seq",
            [("s\n\ndo", False), ("done", True)],
        ),
    ],
)
def test_formats_are_found_by_their_columns(row, task, expected):
    assert segments(row, task) == expected


def test_a_tokenizer_without_template_gets_a_readable_one(tokenizers):
    tokenizer = tokenizers["llama"]
    parts = segments({"messages": CHAT[1:3]}, "causal-lm", tokenizer)
    assert parts == [
        ("### User\nHi\n\n### Assistant\n", False),
        ("Hello.</s>", True),
        ("\n\n", False),
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "`messages` is empty"),
        ({"messages": "not json"}, "is text that is not JSON"),
        ({"messages": [{"content": "x"}]}, "message 1 has no `role`"),
        ({"messages": [user(["x"])]}, "message 1: `content` is a list"),
        ({"messages": CHAT[:2]}, "no assistant turn"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "turn 1 has no known `from`"),
        ({"prompt": "p", "completion": " \n"}, "`completion` is empty"),
        ({"prompt": 5, "completion": "c"}, "`prompt` is a number, not text"),
        ({"prompt": "p", "completion": "\ud83d"}, "half a surrogate pair"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(tokenizers, row, reason):
    with pytest.raises(UnusableRowError, match=reason):
        segments(row, "causal-lm", tokenizers["llama"])


# ---- tokens and masks ----


@pytest.fixture
def tokens_of(tmp_path, tokenizers):
    """Tokenize rows with a tiny tokenizer."""
    n_made = iter(range(1000))

    def making(rows, task="causal-lm", tokenizer=None, **recipe):
        path = write_jsonl(tmp_path / f"rows{next(n_made)}.jsonl", rows)
        family = {"causal-lm": "llama", "seq2seq": "t5", "classification": "bert"}[task]
        recipe = {"max_length": 256, "max_bad_rows": 0.5} | recipe
        return tokenize(
            [opened(path, tmp_path)],
            tokenizer or tokenizers[family],
            TokenRecipe(task=task, **recipe),
            tmp_path / "cache",
        )

    return making


@pytest.mark.parametrize(
    ("prompt", "completion", "shown", "said"),
    [
        (
            "food: French =>",
            " Zizzi. Übergrößen 🙂",
            "food: French =>",
            " Zizzi. Übergrößen 🙂</s>",
        ),
        ("French fo", "od is good", "French", " food is good</s>"),  # a token across both
        ("a", " b</s>", "a", " b</s>"),
    ],
)
def test_the_completion_and_its_end_are_learned(
    tokens_of, tokenizers, prompt, completion, shown, said
):
    tokens = tokens_of([{"prompt": prompt, "completion": completion}])
    ids, is_target = tokens.example(0)
    parts = [tokenizers["llama"].decode(ids[is_target == learned]) for learned in (0, 1)]
    assert parts == [shown, said]


def test_the_prompt_is_learned_only_when_asked_for(tokens_of):
    rows = [
        {"prompt": "one two", "completion": " three"},
        {"prompt": "one two", "completion": " four"},
    ]
    plain, whole = tokens_of(rows), tokens_of(rows, train_on_prompt=True)
    assert (whole.ids == plain.ids).all()
    assert whole.example(0)[1].tolist() == [0] + [1] * (len(whole.example(0)[0]) - 1)
    assert (whole.groups == plain.groups).all()  # equal prompts still stay together
    assert len(set(whole.groups.tolist())) == 1


def test_labels_are_numbered_in_order_of_their_names(tokens_of):
    rows = [{"text": name, "label": name} for name in ("pear", "apple", "fig", "apple")]
    tokens = tokens_of(rows, "classification")
    assert tokens.label_names == ("apple", "fig", "pear")
    assert tokens.labels.tolist() == [2, 0, 1, 0]
    assert tokens.n_targets([0, 1, 2]) == 3
    batch = collate(tokens, [2, 0], "classification", pad_id=0)
    assert batch["labels"].tolist() == [1, 2]
    assert batch["input_ids"].shape[0] == 2


def test_a_label_never_seen_in_training_is_a_bad_row(tokens_of):
    rows = [{"text": "a", "label": "x"}] * 3 + [{"text": "b", "label": "new"}]
    tokens = tokens_of(rows, "classification", label_names=("x", "y"))
    assert tokens.facts["bad_rows"][0][1] == "label 'new' is never seen in training"
    assert tokens.label_names == ("x", "y")
    with pytest.raises(DataError, match="1 of 4 rows can't be used"):
        tokens_of(rows, "classification", label_names=("x", "y"), max_bad_rows=0.1)


@pytest.mark.parametrize("task", ["causal-lm", "seq2seq", "classification"])
def test_long_examples_are_cut_or_left_out_by_choice_and_counted(tokens_of, task):
    long = "one two three four five six " * 20
    form = {
        "causal-lm": lambda text: {"prompt": "a", "completion": text},
        "seq2seq": lambda text: {"input": text, "target": "b"},
        "classification": lambda text: {"text": text, "label": "c"},
    }[task]
    rows = [form("short"), form(long), form("short too")]
    cut_off = tokens_of(rows, task, max_length=16)
    assert (len(cut_off), cut_off.facts["n_too_long"], cut_off.facts["n_skipped_long"]) == (3, 1, 0)
    source = cut_off.example(1)[0]
    assert len(source[:16] if task == "seq2seq" else source) == 16
    skipped = tokens_of(rows, task, max_length=16, too_long="skip")
    assert (len(skipped), skipped.facts["n_too_long"], skipped.facts["n_skipped_long"]) == (2, 1, 1)
    assert [skipped.place(i).rpartition(":")[2] for i in range(2)] == ["1", "3"]
    assert [part.tolist() for part in skipped.example(1)] == [
        part.tolist() for part in cut_off.example(2)
    ]
    with pytest.raises(DataError, match=r"rows\d.jsonl:2: longer than max_length 16"):
        tokens_of(rows, task, max_length=16, too_long="error")


def test_a_prompt_that_fills_the_length_leaves_nothing_to_learn(tokens_of):
    rows = [
        {"prompt": "one two three " * 20, "completion": " x"},
        {"prompt": "a", "completion": " b"},
    ]
    tokens = tokens_of(rows, max_length=16)
    assert (len(tokens), tokens.facts["n_without_target"]) == (1, 1)
    with pytest.raises(DataError, match="every target is masked") as caught:
        tokens_of(rows[:1], max_length=16)
    assert "data.max_length" in caught.value.to_do


def test_several_sources_are_one_set_and_every_example_knows_its_place(tmp_path, tokenizers):
    paths = [
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{name} {i}"} for i in range(2)])
        for name in "ab"
    ]
    sources = open_sources(tuple(map(str, paths)), cache_dir=tmp_path, split="train")
    tokens = tokenize(sources, tokenizers["llama"], RECIPE, tmp_path)
    assert [tokens.place(i).rpartition("/")[2] for i in range(4)] == [
        "a.jsonl:1",
        "a.jsonl:2",
        "b.jsonl:1",
        "b.jsonl:2",
    ]


# ---- the cache ----


class Counting(list[int]):
    """How many rows were tokenized, each time that it was said."""

    def __call__(self, n_rows: int, n_tokens: int, share: float):
        self.append(n_rows)


@pytest.fixture
def source(tmp_path):
    return opened(
        write_jsonl(tmp_path / "a.jsonl", [{"text": f"number {i}"} for i in range(30)]), tmp_path
    )


def test_a_set_is_made_once(source, tmp_path, tokenizers):
    counts = [Counting(), Counting()]
    made, found = (
        tokenize([source], tokenizers["llama"], RECIPE, tmp_path, progress=count)
        for count in counts
    )
    assert [count[-1:] for count in counts] == [[30], []]
    assert made.folder == found.folder
    assert (made.ids == found.ids).all()
    assert (made.folder.parent.stat().st_mode & 0o777, made.folder.stat().st_mode & 0o777) == (
        0o700,
        0o700,
    )


def test_the_use_of_a_tokenizer_does_not_change_its_identity(tokenizers):
    tokenizer = tokenizers["llama"]
    before = tokenizer_sha256(tokenizer)
    tokenizer(["one two three", "four"], truncation=True, max_length=2, padding=True)
    assert tokenizer_sha256(tokenizer) == before


def test_whatever_a_set_follows_from_changes_its_name(source, tmp_path, tiny_folders):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folders["llama"])
    hashes = [tokenizer_sha256(tokenizer)]
    keys = [set_key([source], hashes[0], RECIPE)]
    changes = {
        "task": "seq2seq",
        "max_length": 65,
        "max_target_length": 5,
        "too_long": "skip",
        "train_on_prompt": True,
        "columns": {"text": "x"},
        "label_map": {"a": "b"},
        "max_bad_rows": 0.02,
        "label_names": ("a",),
        "model_classes": ("a", "b"),
        "source_lang": "en",
        "target_lang": "de",
        "date": "2026-01-01",
        "scored": "best",
    }
    assert changes.keys() == TokenRecipe.__dataclass_fields__.keys()
    for name, value in changes.items():
        keys.append(set_key([source], hashes[0], replace(RECIPE, **{name: value})))
    keys.append(set_key([source, source], hashes[0], RECIPE))
    other = write_jsonl(tmp_path / "b.jsonl", [{"text": "number 0"}])
    for each in (other, shutil.copy(tmp_path / "a.jsonl", tmp_path / "a.txt")):
        keys.append(set_key([opened(each, tmp_path)], hashes[0], RECIPE))
    for name, value in {
        "chat_template": "{{ messages }}",
        "truncation_side": "left",
        "eos_token": "<pad>",
    }.items():
        setattr(tokenizer, name, value)
        hashes.append(tokenizer_sha256(tokenizer))
    tokenizer.add_tokens(["<new>"])
    hashes.append(tokenizer_sha256(tokenizer))
    keys += [set_key([source], each, RECIPE) for each in hashes[1:]]
    assert len(set(keys)) == len(keys) == 1 + len(changes) + 3 + 4


@pytest.mark.parametrize(
    "name", ["ids.bin", "targets.bin", "offsets.bin", "groups.bin", "lines.bin", "manifest.json"]
)
def test_a_flipped_byte_is_detected_and_the_set_made_anew(source, tmp_path, tokenizers, name):
    made = tokenize([source], tokenizers["llama"], RECIPE, tmp_path)
    expected = made.ids.copy()
    path = made.folder / name
    raw = bytearray(path.read_bytes())
    at = raw.index(b"sha256") + 12 if name == "manifest.json" else len(raw) // 2
    raw[at] ^= 1
    path.write_bytes(raw)
    if name in ("offsets.bin", "groups.bin", "lines.bin"):
        with pytest.raises(DamagedFileError, match=name):
            open_token_set(made.folder, checks_tokens=False)
    count, said = Counting(), []
    again = tokenize(
        [source], tokenizers["llama"], RECIPE, tmp_path, progress=count, warn=said.append
    )
    assert count[-1] == 30
    assert (again.ids == expected).all()
    assert "are damaged" in said[0]
    assert name in said[0]


def test_a_flipped_bit_of_a_part_is_never_silent(tmp_path):
    """The directory of an archive has bits that drop a column without an error."""
    columns = {"ids": np.arange(40, dtype=np.int32), "lengths": np.array([40])}
    path = tmp_path / "part"
    TokenPart(columns, {"source": 0}).write(path)
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 37):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(OSError, match="a part is damaged"):
            read_part(path)


TOKENIZE = """
import os, signal, sys
from pathlib import Path
from transformers import PreTrainedTokenizerFast
from farthing.data import blocks, parts, tokens
from farthing.data.read import open_sources
from farthing.data.token_set import TokenRecipe

tokens.WORKER_BYTES = 1 << 14
blocks.BLOCK_ROWS, parts.PART_BLOCKS = 64, 4

def told(n_rows, n_tokens, share):
    if n_rows >= 1024:
        os.kill(os.getpid(), signal.SIGKILL)

tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
sources = open_sources((os.path.abspath("a.jsonl"),), cache_dir=Path("cache"), split="train")
tokens.tokenize(sources, tokenizer, TokenRecipe("classification", 64), Path("cache"), progress=told)
"""


def test_a_tokenization_that_is_killed_resumes_and_gives_the_same_bytes(
    tmp_path, tiny_folders, monkeypatch
):
    """Begun by several processes, ended by one."""
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 64)
    monkeypatch.setattr(parts, "PART_BLOCKS", 4)
    rows = [{"text": f"number {i} " * 4, "label": f"c{i % 7}"} for i in range(3_000)]
    rows[2_000] = {"text": "odd", "more": 1, "label": "late"}
    write_jsonl(tmp_path / "a.jsonl", rows)
    folder = str(tiny_folders["llama"])
    killed = in_python(TOKENIZE, folder, cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    drafts = list((tmp_path / "cache/tokens").glob("*.draft-tokens"))
    assert len(drafts) == 1
    of_draft = sorted(drafts[0].glob("part-*"))
    of_draft[-1].write_bytes(of_draft[-1].read_bytes()[:-1000])  # lost with the power
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    recipe = TokenRecipe("classification", 64)
    made, count = [], Counting()
    for cache in ("cache", "another"):
        sources = [opened(tmp_path / "a.jsonl", tmp_path)]
        made.append(tokenize(sources, tokenizer, recipe, tmp_path / cache, progress=count))
        assert [each.name for each in (tmp_path / cache / "tokens").iterdir()] == [
            made[-1].folder.name
        ]
        if cache == "cache":
            assert min(count) >= 768, "but for the damaged part all is kept"
    assert made[0].facts == made[1].facts  # with the sha256 of every column
    assert (len(made[0]), made[0].label_names[-1]) == (3_000, "late")


PEAK = """
import json, sys, threading, time
from pathlib import Path
import numpy as np
from transformers import PreTrainedTokenizerFast
from farthing.data.batches import Batches, rows_of, split_by_input
from farthing.data.read import open_sources
from farthing.data.token_set import TokenRecipe
from farthing.data.tokens import tokenize

def own_kb():  # pages of the token set are the kernel's, which maps as many as it likes
    found = (line.split() for line in open("/proc/self/status"))
    return next(int(words[1]) for words in found if words[0] == "RssAnon:")

def look():
    while True:
        seen.append(own_kb())
        time.sleep(0.002)

seen = []
threading.Thread(target=look, daemon=True).start()
tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
sources = open_sources((sys.argv[2],), cache_dir=Path(sys.argv[3]), split="train")
tokens = tokenize(sources, tokenizer, TokenRecipe("causal-lm", 512), Path(sys.argv[3]))
train, _ = split_by_input(tokens.groups, 0.01, 0, tokens.inputs)
rows_of(tokens, Batches(train, 64, 0).examples_of(0))
print(json.dumps({"peak_kb": max(seen), "n_tokens": len(tokens.ids)}))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tokens(tmp_path, tiny_folders):
    found = []
    for n_rows in (5_000, 150_000):
        path = tmp_path / f"{n_rows}.jsonl"
        with open(path, "w") as file:
            for n in range(n_rows):
                file.write(json.dumps({"text": f"row {n} " + "of some words " * 30}) + "\n")
        words = str(tiny_folders["llama"]), str(path), str(tmp_path)
        done = in_python(PEAK, *words, check=True)
        found.append(json.loads(done.stdout))
    few, many = found
    n_more = many["n_tokens"] - few["n_tokens"]
    assert n_more > 10_000_000
    more_bytes = 1024 * (many["peak_kb"] - few["peak_kb"])
    assert more_bytes < min(64 << 20, 8 * n_more), "columns of examples, not of tokens"


# ---- splits, batches, padding ----


def test_the_split_is_the_one_it_always_was():
    groups = np.arange(12, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    found = [split_by_input(groups, 0.3, seed)[1].tolist() for seed in (1, 2)]
    assert found == [[0, 3, 6, 7], [0, 4, 5, 7]]
    for n, fraction, n_eval in ((5, 0.01, 1), (5, 0.99, 4), (1, 0.5, 0), (0, 0.5, 0)):
        train, held_out = split_by_input(np.arange(n, dtype=np.uint64), fraction, seed=0)
        assert (len(train), len(held_out)) == (n - n_eval, n_eval), "one input can't be split"


def test_the_shuffle_is_the_one_it_always_was():
    assert permutation(10, 42, 0).tolist() == [8, 5, 0, 6, 9, 3, 1, 2, 4, 7]
    assert permutation(10, 42, 1).tolist() == [7, 5, 1, 2, 0, 3, 8, 4, 6, 9]
    assert permutation(10, 7, 0).tolist() == [0, 5, 7, 4, 9, 6, 2, 3, 1, 8]
    assert permutation(1_000_000, 42, 0)[[0, 1, 999_999]].tolist() == [639464, 296556, 495075]
    plain = Batches(np.arange(100, 110), 4, seed=42)
    assert plain.steps_per_epoch == 3
    assert plain.examples_of(2).tolist() == [104, 107]
    assert plain.examples_of(3).tolist() == [107, 105, 101, 102]
    weighted = Batches(np.arange(8), 5, seed=3, weights=np.array([2.5] * 4 + [0.5] * 4))
    steps = [weighted.examples_of(step).tolist() for step in (0, 2, 3)]
    assert steps == [[3, 7, 1, 2, 0], [1, 2], [1, 7, 3, 3, 3]]
    assert weighted.examples_of(0).tolist() == steps[0]
