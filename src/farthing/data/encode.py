"""Texts to token ids and target masks, many at a time and end to end: no step of Python for each
token.

The Rust tokenizer within that of transformers is asked directly, for the ids that `tokenizer(text)`
would give.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from farthing.data.rows import Text
from farthing.objectives.registry import objective_of
from farthing.storage.files import Json


class Encoding(Protocol):
    """What a tokenizer says of one text."""

    @property
    def ids(self) -> list[int]:
        """Its tokens, in a new list."""

    @property
    def overflowing(self) -> Sequence[Any]:
        """What was cut off."""

    def char_to_token(self, char_pos: int, /) -> int | None:
        """The first token that holds a character."""

    def __len__(self) -> int:
        """How many tokens."""


class Encoded(NamedTuple):
    """Examples end to end: ids and is_target [n_tokens], lengths and was_cut [n_examples]."""

    ids: NDArray[np.int32]
    is_target: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    was_cut: NDArray[np.bool_]
    """Which were longer than the limits."""
    sequences: NDArray[np.int64] | None = None
    """[n_examples, k]: tokens of each sequence of an example; None where it is one."""
    words: NDArray[np.int64] | None = None
    """[n_targets]: of each target token its word, where words have labels."""

    def joined(self, n_sequences: int) -> Encoded:
        """Sequences as examples of so many each."""
        if n_sequences == 1:
            return self
        lengths = self.lengths.reshape(-1, n_sequences)
        was_cut: NDArray[np.bool_] = self.was_cut.reshape(-1, n_sequences).max(1)
        return self._replace(lengths=lengths.sum(1), was_cut=was_cut, sequences=lengths)

    def examples(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
        """(ids, is_target) of each."""
        stops = np.cumsum(self.lengths)
        for start, stop in zip(stops - self.lengths, stops, strict=True):
            yield self.ids[start:stop], self.is_target[start:stop]

    def n_targets(self) -> NDArray[np.int64]:
        """Target tokens of each [n_examples]."""
        return sums_of(self.is_target, self.lengths)

    def only(self, kept: NDArray[np.bool_]) -> Encoded:
        """The examples where `kept` [n_examples]."""
        if kept.all():
            return self
        of_token = np.repeat(kept, self.lengths)
        of_target = np.repeat(kept, self.n_targets())
        return Encoded(
            self.ids[of_token],
            self.is_target[of_token],
            self.lengths[kept],
            self.was_cut[kept],
            None if self.sequences is None else self.sequences[kept],
            None if self.words is None else self.words[of_target],
        )


class Asked(NamedTuple):
    """Strings, and what the tokenizer says of each."""

    strings: Sequence[Any]
    """Texts, or words of texts."""
    encodings: list[Encoding]


@dataclass(frozen=True)
class TokenizerState:
    """What tokenizing takes of a transformers tokenizer, in plain values that another process can
    read.
    """

    sides: tuple[str, str]
    """The Rust tokenizers of inputs and of targets."""
    bos_token_id: int | None
    eos_token_id: int | None
    truncation_side: str
    special_tokens_map: dict[str, str | list[str]]
    chat_template: str | None
    other_templates: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Any, *, is_pair: bool) -> TokenizerState:
        """Of a tokenizer with its chat template set."""
        source, target = sides_of(tokenizer, is_pair=is_pair)
        special = {
            name: [str(each) for each in token] if isinstance(token, list | tuple) else str(token)
            for name, token in tokenizer.special_tokens_map.items()
        }
        return cls(
            (source.to_str(), target.to_str()),
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.truncation_side,
            special,
            tokenizer.chat_template,
            tuple(getattr(tokenizer, "other_templates", None) or ()),
        )

    @functools.cached_property
    def rust(self) -> tuple[Any, Any]:
        """Of inputs and of targets."""
        from tokenizers import Tokenizer

        source, target = (Tokenizer.from_str(side) for side in self.sides)
        return source, target

    @property
    def backend_tokenizer(self) -> Any:
        """As transformers calls it."""
        return self.rust[0]


def sides_of(tokenizer: Any, *, is_pair: bool) -> tuple[Any, Any]:
    """The Rust tokenizers of inputs and of targets, copies that nobody else holds; of the planner's
    tokenizer none.

    With `is_pair` targets are encoded as `tokenizer(text_target=...)` does, in the tokenizer's
    target language where it has one, else as inputs.
    """
    if isinstance(tokenizer, TokenizerState):
        return tokenizer.rust
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return None, None
    own, target = tokenizer, None
    if is_pair and hasattr(tokenizer, "_switch_to_target_mode"):
        own = copy.deepcopy(tokenizer)
        own._switch_to_target_mode()
        target = _copied(own)
        own._switch_to_input_mode()
    source = _copied(own)
    return source, source if target is None else target


def _copied(tokenizer: Any) -> Any:
    """A copy of the Rust tokenizer, without the truncation and padding that others asked for."""
    rust = tokenizer.backend_tokenizer
    state = json.loads(rust.to_str())
    _keep_blanks(state.get("post_processor"))
    copied = type(rust).from_str(json.dumps(state))
    copied.no_truncation()
    copied.no_padding()
    return copied


def _keep_blanks(step: Any) -> None:
    """Have offsets begin with the blanks before a word, so that a completion that begins with
    blanks is learned from its first one.
    """
    if isinstance(step, dict):
        if "trim_offsets" in step:
            step["trim_offsets"] = False
        for inner in step.get("processors", ()):
            _keep_blanks(inner)


def first_tokens(tokenizer: Any) -> list[int]:
    """The beginning that a tokenizer puts before every text: none, or its first token."""
    rust = getattr(tokenizer, "backend_tokenizer", None)
    ids = rust.encode("").ids if rust is not None else tokenizer.encode([""], True)[0].ids
    return list(ids[:1]) if ids and ids[0] == tokenizer.bos_token_id else []


class Encoder:
    """Texts to examples, in two steps: `ask` is the tokenizer's and leaves Python to other threads,
    the rest is ours.

    Where the next token is predicted, the segments are joined and encoded as one text, as
    `tokenizer(text)` would; a token belongs to the segment of its last character, so that one which
    spans prompt and completion is learned, not given. Where tokens are the bytes of the text,
    segments are found by counting these; elsewhere by the tokenizer's map of characters, which
    costs it up to a fifth of its time.
    """

    def __init__(
        self,
        tokenizer: Any,
        task: str,
        max_length: int,
        max_target_length: int,
        train_on_prompt: bool = False,
    ) -> None:
        self.tokenizer, self.train_on_prompt = tokenizer, train_on_prompt
        self.max_length, self._is_one_text = max_length, objective_of(task).reads_answers
        self._n_sequences = objective_of(task).n_sequences
        self._has_words = objective_of(task).scores_words
        self._limits = (
            (max_length, max_target_length) if objective_of(task).is_pair else (max_length,)
        )
        self._sides = sides_of(tokenizer, is_pair=objective_of(task).is_pair)
        self.bos = first_tokens(tokenizer)
        self.eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        rust = self._sides[0]
        self._has_words &= rust is not None
        self._sizes = None if rust is None or not self._is_one_text else bytes_of_tokens(rust)

    def __call__(self, texts: Sequence[Text], asked: list[Asked] | None = None) -> Encoded:
        """The examples of `texts`, in order, cut to the limits; `asked` is `ask(texts)`."""
        asked = self.ask(texts) if asked is None else asked
        if self._has_words:
            return _of_first_pieces(self._apart(asked), asked[0])
        if not self._is_one_text:
            return self._apart(asked)
        return self._one_text(self._sequences_of(texts), asked[0]).joined(self._n_sequences)

    def _sequences_of(self, texts: Sequence[Text]) -> Sequence[Text]:
        if self._n_sequences == 1:
            return texts
        return [sequence for text in texts for sequence in text.sequences]

    def ask(self, texts: Sequence[Text]) -> list[Asked]:
        """The tokenizer's part for `texts`: one batch, which it spreads over its threads; of input
        and target one each.
        """
        if self._is_one_text:
            sequences = self._sequences_of(texts)
            joined = ["".join([part for part, _ in text.segments]) for text in sequences]
            return [self._ask(joined, special=False, with_map=self._sizes is None)]
        if self._has_words:
            words = [text.words for text in texts]
            return [self._ask(words, special=True, limit=self.max_length, with_map=True)]
        asked = []
        for side, limit in enumerate(self._limits):
            strings = [
                "".join([part for part, is_target in text.segments if is_target == side])
                for text in texts
            ]
            asked.append(self._ask(strings, special=True, limit=limit, side=side))
        return asked

    def _ask(
        self,
        strings: Sequence[Any],
        *,
        special: bool,
        limit: int | None = None,
        with_map: bool = False,
        side: int = 0,
    ) -> Asked:
        """Equal strings are encoded once. With a limit the tokenizer truncates, and puts its
        special tokens around that.
        """
        distinct = list(dict.fromkeys(strings))
        found = dict(
            zip(distinct, self._encode(distinct, special, limit, with_map, side), strict=True)
        )
        return Asked(strings, [found[string] for string in strings])

    def _encode(
        self, strings: list[Any], special: bool, limit: int | None, with_map: bool, side: int = 0
    ) -> list[Encoding]:
        rust = self._sides[side]
        if rust is None:  # the planner's, which does without transformers
            return list(self.tokenizer.encode(strings, special))
        if limit is not None:
            rust.enable_truncation(limit, direction=self.tokenizer.truncation_side)
        run: Callable[..., list[Encoding]] = (
            rust.encode_batch if with_map else rust.encode_batch_fast
        )
        return run(strings, add_special_tokens=special, is_pretokenized=self._has_words)

    # ---- one text with targets in it ----

    def _one_text(self, texts: Sequence[Text], asked: Asked) -> Encoded:
        rows = [encoding.ids for encoding in asked.encodings]
        has_head, has_tail = np.zeros((2, len(rows)), bool)
        for index, (text, row) in enumerate(zip(texts, rows, strict=True)):
            is_framed = not text.is_raw  # a chat template says itself what a chat begins with
            has_head[index] = bool(self.bos) and row[:1] != self.bos and not is_framed
            if self.eos and text.is_raw and text.segments[-1][1] and row[-1:] != self.eos:
                has_tail[index] = True
                row += self.eos
            if has_head[index]:
                row[:0] = self.bos
        ids, lengths = _end_to_end(rows)
        stops = np.cumsum(lengths)
        starts = stops - lengths
        own = starts + has_head, stops - has_tail  # from where to where the tokens are of the text
        is_target = np.zeros(len(ids), np.uint8)
        if self._sizes is None:
            spans = self._by_map(texts, asked.encodings, range(len(texts)), own)
        else:
            spans = self._by_bytes(texts, asked.strings, _upto(self._sizes[ids]), own)
        for start, stop in spans:
            is_target[start:stop] = 1
        is_target[(stops - 1)[has_tail]] = 1
        is_target[starts[lengths > 0]] = (
            0  # nothing comes before the first token, so nothing can predict it
        )
        was_cut = lengths > self.max_length
        if was_cut.any():
            is_within = np.arange(len(ids)) - np.repeat(starts, lengths) < self.max_length
            ids, is_target, lengths = (
                ids[is_within],
                is_target[is_within],
                np.minimum(lengths, self.max_length),
            )
        return Encoded(ids, is_target, lengths, was_cut)

    def _learned(self, text: Text, size: Callable[[str], int]) -> Iterator[tuple[int, int]]:
        """From where to where `text` is learned, counted by `size`."""
        at = 0
        for part, is_target in text.segments:
            stop = at + size(part)
            if (is_target or self.train_on_prompt) and part:
                yield at, stop
            at = stop

    def _by_map(
        self,
        texts: Sequence[Text],
        encodings: list[Encoding],
        indices: Sequence[int],
        own: tuple[Any, Any],
    ) -> Iterator[tuple[int, int]]:
        """Spans of tokens that are learned: of each, the first token that has a character of it or
        of what follows.
        """
        for index, encoding in zip(indices, encodings, strict=True):
            text, first, end = texts[index], int(own[0][index]), int(own[1][index])
            n_characters = sum(len(part) for part, _ in text.segments)
            for start, stop in self._learned(text, len):
                token, after = (
                    _token_at(encoding, start, stop),
                    _token_at(encoding, stop, n_characters),
                )
                yield (
                    end if token is None else first + token,
                    end if after is None else first + after,
                )

    def _by_bytes(
        self,
        texts: Sequence[Text],
        joined: Sequence[str],
        upto: NDArray[np.int64],
        own: tuple[Any, Any],
    ) -> Iterator[tuple[int, int]]:
        """The same spans from `upto` [n_tokens + 1], the bytes before each token; by the map where
        the bytes don't add up.

        They don't where a token swallows white space beside it, or the tokenizer normalizes.
        """
        firsts, ends = own
        is_whole = upto[ends] - upto[firsts] == np.fromiter(
            map(_n_bytes, joined), np.int64, len(joined)
        )
        is_whole &= np.fromiter(map(_is_normal, joined), bool, len(joined))
        spans = [
            (index, start, stop)
            for index in np.flatnonzero(is_whole).tolist()
            for start, stop in self._learned(texts[index], _n_bytes)
        ]
        which, starts, stops = np.array(spans, np.int64).reshape(-1, 3).T
        edges = upto[firsts[which]] + (starts, stops)
        yield from np.searchsorted(upto[1:], edges, side="right").T.tolist()
        others = np.flatnonzero(~is_whole).tolist()
        if others:
            again = self._ask([joined[index] for index in others], special=False, with_map=True)
            yield from self._by_map(texts, again.encodings, others, own)

    # ---- texts that are wholly input or wholly target ----

    def _apart(self, asked: list[Asked]) -> Encoded:
        """Of each example its input, then its target, if it has one."""
        sides = zip(*(side.encodings for side in asked), strict=True)
        ids, lengths = _end_to_end([each.ids for each in itertools.chain.from_iterable(sides)])
        n_sides, n_examples = len(asked), len(asked[0].encodings)
        is_target = np.repeat(np.tile(np.arange(n_sides, dtype=np.uint8), n_examples), lengths)
        was_cut = [_were_cut(side, limit) for side, limit in zip(asked, self._limits, strict=True)]
        return Encoded(
            ids, is_target, lengths.reshape(-1, n_sides).sum(1), np.logical_or.reduce(was_cut)
        )


def _of_first_pieces(encoded: Encoded, asked: Asked) -> Encoded:
    """The same with the first token of each word as a target."""
    encodings: list[Any] = list(asked.encodings)
    of_each = itertools.chain.from_iterable(each.word_ids for each in encodings)
    word = np.fromiter((-1 if each is None else each for each in of_each), np.int64)
    starts = np.cumsum(encoded.lengths) - encoded.lengths
    before = np.concatenate([[-1], word[:-1]])
    before[starts[encoded.lengths > 0]] = -1
    is_first = (word >= 0) & (word != before)
    return encoded._replace(is_target=is_first.astype(np.uint8), words=word[is_first])


def _were_cut(asked: Asked, limit: int) -> NDArray[np.bool_]:
    """Which were longer than the limit [n]."""
    found = []
    for encoding in asked.encodings:
        n = len(encoding)  # more than the limit where the special tokens alone are too many
        found.append(n > limit or (n == limit and bool(encoding.overflowing)))
    return np.array(found, bool)


def _end_to_end(rows: list[list[int]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """(all tokens, the length of each row)."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths


def _upto(counts: NDArray[Any]) -> NDArray[np.int64]:
    """[n + 1]: the sum of all before each, and of all."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def sums_of(values: NDArray[Any], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum over each example of `values` [n_tokens], which stand end to end; `lengths` [n]."""
    upto, stops = _upto(values), np.cumsum(lengths)
    return upto[stops] - upto[stops - lengths]


def _token_at(encoding: Encoding, start: int, stop: int) -> int | None:
    """The first token that holds a character of [start, stop); None when there is none."""
    for position in range(start, stop):
        token = encoding.char_to_token(position)
        if token is not None:
            return token
    return None


def _n_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _is_normal(text: str) -> bool:
    return text.isascii() or unicodedata.is_normalized("NFC", text)


def bytes_of_tokens(rust: Any) -> NDArray[np.int32] | None:
    """UTF-8 bytes of the text that each token stands for [n_words]; None where tokens are not just
    pieces of the text.

    They are in byte-level BPE (GPT-2 and after) that adds no space and normalizes to NFC at most.
    Offsets are not asked: a tokenizer that trims them says nothing of the blanks before a word.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    def steps(part: Any, within: str) -> list[Json]:
        """The steps that a part of the tokenizer is made of."""
        state: Json = json.loads(part.__getstate__()) if part is not None else {within: []}
        steps: list[Json] = state.get(within, [state])
        return steps

    model, vocabulary = rust.model, rust.get_vocab(with_added_tokens=False)
    before = steps(rust.pre_tokenizer, "pretokenizers")
    is_plain = (
        type(model).__name__ == "BPE"
        and not (
            model.byte_fallback
            or model.continuing_subword_prefix
            or model.end_of_word_suffix
            or model.dropout
        )
        and (
            model.unk_token is None or vocabulary.keys() >= set(ByteLevel.alphabet())
        )  # what is not known is left out
        and all(step["type"] == "NFC" for step in steps(rust.normalizer, "normalizers"))
        and all(step["type"] in ("ByteLevel", "Split", "Digits") for step in before)
        and any(step["type"] == "ByteLevel" for step in before)
        and not any(step.get("add_prefix_space") for step in before)
    )
    if not is_plain:
        return None
    added = rust.get_added_tokens_decoder()
    sizes = np.zeros(1 + max([*vocabulary.values(), *added]), np.int32)
    sizes[np.fromiter(vocabulary.values(), np.int64)] = np.fromiter(map(len, vocabulary), np.int32)
    for index, token in added.items():
        sizes[index] = _n_bytes(token.content)
    return sizes
