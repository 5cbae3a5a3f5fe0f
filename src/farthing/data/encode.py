"""Texts to token ids and target masks, many at a time and end to end: no step of Python for each
token.

The Rust tokenizer within that of transformers is asked directly, for the ids that `tokenizer(text)`
would give.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farthing.arrays import Bools, Ints
from farthing.data.rows import Example
from farthing.objectives.registry import objective_of
from farthing.storage.files import Json


class Encoded(NamedTuple):
    """Examples end to end: ids and is_target [n_tokens], lengths and was_cut [n_examples]."""

    ids: NDArray[np.int32]
    is_target: NDArray[np.uint8]
    lengths: Ints
    was_cut: Bools
    """Which were longer than the limits."""
    sequences: Ints | None = None
    """[n_examples, k]: tokens of each sequence of an example; None where it is one."""
    words: Ints | None = None
    """[n_targets]: of each target token its word, where words have labels."""

    def joined(self, n_sequences: int) -> Encoded:
        """Sequences as examples of so many each."""
        if n_sequences == 1:
            return self
        lengths = self.lengths.reshape(len(self.lengths) // n_sequences, n_sequences)
        was_cut: Bools = self.was_cut.reshape(lengths.shape).max(1)
        return self._replace(lengths=lengths.sum(1), was_cut=was_cut, sequences=lengths)

    def n_targets(self) -> Ints:
        """Target tokens of each [n_examples]."""
        return sums_of(self.is_target, self.lengths)

    def only(self, kept: Bools) -> Encoded:
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


@dataclass(frozen=True)
class PlainTokenizer:
    """What reading and encoding rows take of a tokenizer of transformers."""

    rust: tuple[Any, Any]
    """The Rust tokenizers of inputs and of targets."""
    bos_token_id: int | None
    eos_token_id: int | None
    special_tokens_map: dict[str, Any]
    chat_template: str | None
    other_templates: tuple[str, ...] = ()
    """Names of its chat templates, where it has several and none is the default."""
    truncation_side: str = "right"
    model_input_names: tuple[str, ...] = ()
    is_exact: bool = True

    @classmethod
    def of(cls, tokenizer: Any, *, is_pair: bool) -> PlainTokenizer:
        """Of a tokenizer with its chat template set."""
        return cls(
            sides_of(tokenizer, is_pair=is_pair),
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            special_tokens_of(tokenizer),
            tokenizer.chat_template,
            tuple(getattr(tokenizer, "other_templates", None) or ()),
            tokenizer.truncation_side,
            tuple(tokenizer.model_input_names),
        )

    def state(self) -> Json:
        """Values for `from_state` of another process."""
        return vars(self) | {"rust": [side.to_str() for side in self.rust]}

    @classmethod
    def from_state(cls, state: Json) -> PlainTokenizer:
        """The same tokenizer again."""
        from tokenizers import Tokenizer

        source, target = map(Tokenizer.from_str, state["rust"])
        return cls(**state | {"rust": (source, target)})

    @property
    def backend_tokenizer(self) -> Any:
        """As transformers calls it."""
        return self.rust[0]


def special_tokens_of(tokenizer: Any) -> dict[str, Any]:
    """Its special tokens by name, as text or lists of texts."""
    return {
        name: [str(each) for each in token] if isinstance(token, list | tuple) else str(token)
        for name, token in tokenizer.special_tokens_map.items()
    }


def sides_of(tokenizer: Any, *, is_pair: bool) -> tuple[Any, Any]:
    """The Rust tokenizers of inputs and of targets that nobody else holds.

    With `is_pair` targets are encoded as `tokenizer(text_target=...)` does, in the tokenizer's
    target language where it has one, else as inputs.
    """
    if isinstance(tokenizer, PlainTokenizer):
        return tokenizer.rust
    own, target = tokenizer, None
    if is_pair and hasattr(tokenizer, "_switch_to_target_mode"):
        own = copy.deepcopy(tokenizer)
        own._switch_to_target_mode()
        target = _copied(own)
        own._switch_to_input_mode()
    source = _copied(own)
    return source, source if target is None else target


def _copied(tokenizer: Any) -> Any:
    """A copy of the Rust tokenizer, without the truncation and padding that others asked for.

    Its offsets begin with the blanks before a word, so that a completion that begins with blanks is
    learned from its first one.
    """
    rust = tokenizer.backend_tokenizer
    copied = type(rust).from_str(
        rust.to_str().replace('"trim_offsets":true', '"trim_offsets":false')
    )
    copied.no_truncation()
    copied.no_padding()
    return copied


def first_tokens(tokenizer: Any) -> list[int]:
    """The beginning that a tokenizer puts before every text: none, or its first token."""
    ids: list[int] = tokenizer.backend_tokenizer.encode_batch([""])[0].ids
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []


class Encoder:
    """Texts to examples. `tokenizer`: of transformers, or the plain values or the plan's form of
    one.

    Where the next token is predicted, the segments are joined and encoded as one text, as
    `tokenizer(text)` would; a token belongs to the segment of its last character, so that one which
    spans prompt and completion is learned, not given.
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
        self.max_length, self._objective = max_length, objective_of(task)
        is_pair = self._objective.is_pair
        self._limits = (max_length, max_target_length) if is_pair else (max_length,)
        self._sides = sides_of(tokenizer, is_pair=is_pair)
        self.bos = first_tokens(tokenizer)
        self.eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def __call__(self, texts: Sequence[Example]) -> Encoded:
        """The examples of `texts`, in order, cut to the limits."""
        if self._objective.reads_answers:
            sequences = [sequence for text in texts for sequence in text.sequences]
            return self._one_text(sequences).joined(self._objective.n_sequences)
        if self._objective.scores_words:
            encodings = self._encode([text.words for text in texts], limit=self.max_length)
            return _of_first_pieces(self._apart([encodings]), encodings)
        sides = []
        for side, limit in enumerate(self._limits):
            parts = [
                tuple([part for part, is_target in text.segments if is_target == side])
                for text in texts
            ]
            strings = ["".join(each) if len(each) < 2 else each for each in parts]
            sides.append(self._encode(strings, limit=limit, side=side))
        return self._apart(sides)

    def _encode(
        self, strings: Sequence[Any], *, limit: int | None = None, side: int = 0
    ) -> list[Any]:
        """What the tokenizer says of texts, of two texts each, or of lists of words; of equal ones
        once.

        With a limit the tokenizer truncates, and puts its special tokens around that.
        """
        rust, is_words = self._sides[side], self._objective.scores_words
        if limit is not None:
            rust.enable_truncation(limit, direction=self.tokenizer.truncation_side)
        # the quick one keeps no map of characters
        run = rust.encode_batch if limit is None or is_words else rust.encode_batch_fast
        distinct = list(dict.fromkeys(strings))
        encodings = run(distinct, add_special_tokens=limit is not None, is_pretokenized=is_words)
        found = dict(zip(distinct, encodings, strict=True))
        return [found[string] for string in strings]

    # ---- one text with targets in it ----

    def _one_text(self, texts: Sequence[Example]) -> Encoded:
        joined = ["".join([part for part, _ in text.segments]) for text in texts]
        rows: list[list[int]] = []
        learned: list[tuple[int, int]] = []
        at = 0
        for text, encoding in zip(texts, self._encode(joined), strict=True):
            row = encoding.ids
            begins = self.bos if text.is_raw and row[:1] != self.bos else []
            is_open = text.is_raw and text.segments[-1][1] and row[-1:] != self.eos
            ends = self.eos if is_open else []
            first = at + len(begins)
            stop = first + len(row)
            for start, end in self._learned(text, encoding):
                learned.append((first + start, first + end))
            learned.append((stop, stop + len(ends)))
            rows.append([*begins, *row, *ends])
            at = stop + len(ends)
        ids, lengths = _end_to_end(rows)
        starts = np.cumsum(lengths) - lengths
        is_target = np.zeros(len(ids), np.uint8)
        for start, end in learned:
            is_target[start:end] = 1
        # nothing comes before the first token, so nothing can predict it
        is_target[starts[lengths > 0]] = 0
        was_cut = lengths > self.max_length
        if was_cut.any():
            is_within = np.arange(len(ids)) - np.repeat(starts, lengths) < self.max_length
            ids, is_target = ids[is_within], is_target[is_within]
            lengths = np.minimum(lengths, self.max_length)
        return Encoded(ids, is_target, lengths, was_cut)

    def _learned(self, text: Example, encoding: Any) -> Iterator[tuple[int, int]]:
        """Spans of tokens that are learned: of each, the first token that has a character of it or
        of what follows.
        """
        at, n_characters = 0, sum(len(part) for part, _ in text.segments)
        for part, is_target in text.segments:
            stop = at + len(part)
            if (is_target or self.train_on_prompt) and part:
                yield _token_at(encoding, at, stop), _token_at(encoding, stop, n_characters)
            at = stop

    # ---- texts that are wholly input or wholly target ----

    def _apart(self, sides: list[list[Any]]) -> Encoded:
        """Of each example its input, then its target, if it has one; of two texts the second is
        marked as a target is, where the tokenizer tells them apart.
        """
        n_sides, n_examples = len(sides), len(sides[0])
        in_order = [side[n] for n in range(n_examples) for side in sides]
        ids, lengths = _end_to_end([each.ids for each in in_order])
        is_target = np.repeat(np.tile(np.arange(n_sides, dtype=np.uint8), n_examples), lengths)
        if n_sides == 1 and "token_type_ids" in self.tokenizer.model_input_names:
            is_target, _ = _end_to_end([each.type_ids for each in in_order], np.uint8)
        # more than the limit where the special tokens are too many
        of_side = lengths.reshape(n_examples, n_sides)
        overflows = np.array([bool(each.overflowing) for each in in_order], bool)
        is_full = (of_side == self._limits) & overflows.reshape(of_side.shape)
        was_cut: Bools = ((of_side > self._limits) | is_full).any(1)
        return Encoded(ids, is_target, of_side.sum(1), was_cut)


def _of_first_pieces(encoded: Encoded, encodings: list[Any]) -> Encoded:
    """The same with the first token of each word as a target."""
    of_each = itertools.chain.from_iterable(each.word_ids for each in encodings)
    word = np.fromiter((-1 if each is None else each for each in of_each), np.int64)
    starts = np.cumsum(encoded.lengths) - encoded.lengths
    before = np.roll(word, 1)
    before[starts[encoded.lengths > 0]] = -1
    is_first = (word >= 0) & (word != before)
    return encoded._replace(is_target=is_first.astype(np.uint8), words=word[is_first])


def _end_to_end(rows: list[list[int]], dtype: Any = np.int32) -> tuple[NDArray[Any], Ints]:
    """(all tokens, the length of each row)."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(itertools.chain.from_iterable(rows), dtype, int(lengths.sum())), lengths


def sums_of(values: NDArray[Any], lengths: Ints) -> Ints:
    """The sum over each example of `values` [n_tokens], which stand end to end; `lengths` [n]."""
    upto, stops = np.concatenate([[0], np.cumsum(values, dtype=np.int64)]), np.cumsum(lengths)
    return upto[stops] - upto[stops - lengths]


def _token_at(encoding: Any, start: int, stop: int) -> int:
    """The first token that holds a character of [start, stop); behind the last where none does."""
    found = map(encoding.char_to_token, range(start, stop))
    return next((token for token in found if token is not None), len(encoding))
