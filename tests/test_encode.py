"""Ids and target masks: what a plain call of transformers gives row by row, however many rows are
encoded at once.
"""

import copy
import hashlib
import json
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from data_files import opened, real_tokenizer
from farthing.data import blocks
from farthing.data import parts as parts_module
from farthing.data.encode import Encoder
from farthing.data.formats import Example
from farthing.data.read import Source
from farthing.data.rows import Row, RowBlock
from farthing.data.token_set import TokenRecipe
from farthing.data.tokens import tokenize
from farthing.errors import DataError, RunInterruptedError
from farthing.tiny import write_jsonl
from thinned import thinned
from token_sets import encoded_examples

PIECES = [
    "hello",
    " world",
    "don't",
    "1234567",
    "!!!",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    "é",
    "e\u0301",
    "\u212b",
    "ﬁ",
    "日本語",
    "한국어",
    "🙂",
    "👩‍👩‍👧",
    "🇩🇪",
    "α",
    "\u200b",
    "\u00a0",
    "\ufeff",
    "\x00",
    "\x85",
    "Ġ",
    "▁",
    "</s>",
    "<s>",
    "<pad>",
    " <pad>",
    "<wide>",
    "  <wide> ",
]


def odd_texts(n: int) -> list[Example]:
    """Texts of several segments, cut at all the places where tokens may lie across."""
    draw = random.Random(0)

    def part():
        return "".join(draw.choices(PIECES, k=draw.randint(0, 6)))

    texts = []
    for _ in range(n):
        segments = tuple((part(), draw.random() < 0.5) for _ in range(draw.randint(1, 4)))
        texts.append(Example((*segments, (part() + "x", True)), is_raw=draw.random() < 0.7))
    return texts


def row_by_row(
    tokenizer, text: Example, train_on_prompt: bool = False
) -> tuple[list[int], list[int]]:
    """(ids, is_target) of a causal-lm text by one call of transformers and its map of characters."""  # noqa: E501
    joined = "".join(part for part, _ in text.segments)
    encoded = tokenizer(joined, add_special_tokens=False)
    ids = list(encoded["input_ids"])

    def token_at(start, stop):
        found = (encoded.char_to_token(0, at) for at in range(start, stop))
        return next((token for token in found if token is not None), len(ids))

    is_target = [0] * len(ids)
    at = 0
    for part, learned in text.segments:
        if (learned or train_on_prompt) and part:
            for index in range(token_at(at, at + len(part)), token_at(at + len(part), len(joined))):
                is_target[index] = 1
        at += len(part)
    special = tokenizer("")["input_ids"]
    if text.is_raw and special[:1] == [tokenizer.bos_token_id] and ids[:1] != special[:1]:
        ids, is_target = [*special[:1], *ids], [0, *is_target]
    if text.is_raw and text.segments[-1][1] and ids[-1:] != [tokenizer.eos_token_id]:
        ids, is_target = [*ids, tokenizer.eos_token_id], [*is_target, 1]
    return ids, [0, *is_target[1:]]


def untrimmed(tokenizer):
    """The same tokenizer with offsets that have the blanks before a word, for `row_by_row`."""

    def without(state):
        if isinstance(state, dict):
            return {
                key: False if key == "trim_offsets" else without(value)
                for key, value in state.items()
            }
        return [without(each) for each in state] if isinstance(state, list) else state

    twin = copy.deepcopy(tokenizer)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["post_processor"] = without(state["post_processor"])
    twin.backend_tokenizer.post_processor = Tokenizer.from_str(json.dumps(state)).post_processor
    return twin


def change_nothing(rust: Tokenizer):
    pass


def begin_with_bos(rust: Tokenizer):
    """As Llama 3."""
    rust.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]),
        ]
    )


def split_by_an_expression(rust: Tokenizer):
    """As Qwen."""
    rust.normalizer = normalizers.NFC()
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+|\p{L}+|[^\s\p{L}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def swallow_spaces(rust: Tokenizer):
    """A word of its own that takes the white space around it."""
    rust.add_special_tokens([AddedToken("<wide>", lstrip=True, rstrip=True)])


def drop_spaces(rust: Tokenizer):
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def trim_offsets(rust: Tokenizer):
    rust.post_processor = processors.ByteLevel(trim_offsets=True)


def put_a_space_before(rust: Tokenizer):
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def compose_further(rust: Tokenizer):
    rust.normalizer = normalizers.NFKC()


def changed(tiny_folders: dict[str, Path], change, family: str = "llama"):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folders[family])
    change(tokenizer.backend_tokenizer)
    return tokenizer


@pytest.mark.parametrize("train_on_prompt", thinned([False, True], 2))
@pytest.mark.parametrize(
    "change",
    [
        change_nothing,
        begin_with_bos,
        split_by_an_expression,
        swallow_spaces,
        drop_spaces,
        trim_offsets,
        put_a_space_before,
        compose_further,
    ],
)
def test_segments_are_found_as_by_one_call_for_each_row(tiny_folders, change, train_on_prompt):
    tokenizer, texts = changed(tiny_folders, change), odd_texts(200)
    twin = untrimmed(tokenizer)
    expected = [row_by_row(twin, text, train_on_prompt) for text in texts]
    encoded = Encoder(tokenizer, "causal-lm", 1000, 1000, train_on_prompt)(texts)
    found = [(ids.tolist(), is_target.tolist()) for ids, is_target in encoded_examples(encoded)]
    assert found == expected


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 6, 7, 10, 1000])
@pytest.mark.parametrize("side", ["left", "right"])
def test_inputs_and_targets_are_cut_as_transformers_cuts_them(tokenizers, monkeypatch, limit, side):
    tokenizer = tokenizers["t5"]
    monkeypatch.setattr(tokenizer, "truncation_side", side)
    texts = [
        Example((("one two three " * n, False), ("four five " * (5 - n), True)))
        for n in (1, 2, 3, 4, 1)
    ]
    encoded = Encoder(tokenizer, "seq2seq", limit, limit + 1)(texts)
    for text, (ids, is_target), was_cut in zip(
        texts, encoded_examples(encoded), encoded.was_cut, strict=True
    ):
        sides = [
            tokenizer(part, truncation=True, max_length=most)["input_ids"]
            for (part, _), most in zip(text.segments, (limit, limit + 1), strict=True)
        ]
        assert [ids[is_target == 0].tolist(), ids[is_target == 1].tolist()] == sides
        assert was_cut == any(
            len(tokenizer(part)["input_ids"]) > most
            for (part, _), most in zip(text.segments, (limit, limit + 1), strict=True)
        )


def test_the_first_token_of_each_word_is_a_target(tokenizers):
    rows = [("one", "two"), (), ("a",), ("b",), ()]
    texts = [Example(((" ".join(row), False),), words=row) for row in rows]
    encoded = Encoder(tokenizers["llama"], "token-classification", 6, 1)(texts)
    assert encoded.lengths.tolist() == [6, 0, 1, 1, 0]
    assert encoded.is_target.tolist() == [1, 0, 0, 1, 0, 0, 1, 1]
    assert encoded.words.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(("limit", "length", "is_cut"), [(6, 6, False), (5, 5, True)])
def test_a_text_as_long_as_the_limit_is_not_cut(tokenizers, limit, length, is_cut):
    parts = (("one", False), ("two", True)), (("a", True),), (("", True),)
    texts = [Example(segments, is_raw=False) for segments in parts]
    encoded = Encoder(tokenizers["llama"], "causal-lm", limit, 1)(texts)
    assert encoded.lengths.tolist() == [length, 1, 0]
    assert encoded.was_cut.tolist() == [is_cut, False, False]
    assert encoded.is_target.tolist() == [*[0, 0, 0, 1, 1, 1][:length], 0], "no first token"


# ---- sets of many chunks ----


@pytest.fixture
def rows(tmp_path):
    """300 rows, every tenth unusable."""
    rows = [
        {"prompt": f"{n} " * (n % 7 + 1), "completion": "" if n % 10 == 3 else f"then {n}"}
        for n in range(300)
    ]
    return write_jsonl(tmp_path / "rows.jsonl", rows)


@pytest.fixture
def made(rows, tmp_path, tokenizers):
    """Makes the set of the rows in a cache of this name."""
    recipe = TokenRecipe("causal-lm", 24, max_bad_rows=0.5)

    def making(name, **options):
        cache = tmp_path / name
        return tokenize([opened(rows, cache)], tokenizers["llama"], recipe, cache, **options)

    return making


def test_a_set_is_the_same_however_many_rows_are_encoded_at_once(made, monkeypatch):
    whole = made("whole")
    for n_rows, n_characters in ((1, 1 << 18), (1024, 1), (1024, 100)):
        monkeypatch.setattr(blocks, "BLOCK_ROWS", n_rows)
        monkeypatch.setattr(parts_module, "CHUNK_CHARACTERS", n_characters)
        again = made(f"{n_rows} {n_characters}")
        assert again.facts == whole.facts  # with the sha256 of every file
    assert whole.facts["n_bad"] == 30
    assert whole.facts["bad_rows"][0][0].endswith("rows.jsonl:4")


def test_a_stop_leaves_no_thread_and_is_resumed(made, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 10)
    monkeypatch.setattr(parts_module, "PART_BLOCKS", 1)
    n_seen = 0

    def noting(n_rows, n_tokens, share):
        nonlocal n_seen
        n_seen = n_rows

    before = set(threading.enumerate())  # other tests may have left some
    with pytest.raises(RunInterruptedError, match="stopped while tokenizing"):
        made("c", progress=noting, should_stop=lambda: n_seen >= 100)
    assert n_seen == 100
    assert not set(threading.enumerate()) - before
    told = []
    again = made("c", progress=lambda n_rows, *_: told.append(n_rows))
    assert told[0] == 110
    assert again.facts == made("d").facts
    assert [path.name for path in (tmp_path / "c/tokens").iterdir()] == [again.folder.name]


def test_the_first_mistake_is_the_one_that_is_told(tmp_path, tokenizers):
    class CutShort(Source):
        n_bytes = 1

        def blocks(self, reading=None):
            rows = [Row(n + 1, {"text": "long " * (50 if n == 3 else 1)}) for n in range(6)]
            yield RowBlock(np.ones(6, np.int64), lambda picked: [rows[n] for n in picked], 1.0)
            raise DataError("the disk fails")

    source = CutShort("a set", "0", "jsonl")
    with pytest.raises(DataError, match="longer than max_length 12") as caught:
        tokenize(
            [source], tokenizers["llama"], TokenRecipe("causal-lm", 12, too_long="error"), tmp_path
        )
    assert caught.value.where == "a set:4"
    with pytest.raises(DataError, match="the disk fails"):
        tokenize([source], tokenizers["llama"], TokenRecipe("causal-lm", 12), tmp_path)


# ---- real data: what was made before segments were found by counting bytes ----


@pytest.mark.slow
def test_a_set_of_real_data_is_what_it_was(data_dir, tmp_path):
    """Its digest as it was made row by row, by the tokenizer's map of characters alone."""
    with open(data_dir / "p3_open_license_sample.jsonl", encoding="utf-8") as file:
        lines = [line for line, _ in zip(file, range(600), strict=False)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    sources = [opened(path, tmp_path)]
    recipe = TokenRecipe("causal-lm", 512, max_bad_rows=0.5)
    tokens = tokenize(sources, real_tokenizer(data_dir, "gpt2"), recipe, tmp_path)
    columns = (tokens.ids, tokens.targets, tokens.offsets, tokens.lines)
    digest = hashlib.sha256(b"".join(column.tobytes() for column in columns))
    assert digest.hexdigest()[:32] == "624bd708dfe8ee61f2f25af7b7278460"
