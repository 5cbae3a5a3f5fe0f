"""Tokenizers as a plan needs them: read from a model's folder by `tokenizers` or `sentencepiece`,
in a tenth of a second.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from farthing.data.chat import default_template
from farthing.data.encode import PlainTokenizer, first_tokens
from farthing.errors import DataError
from farthing.storage.files import Json, read_json

_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


def light_tokenizer(
    folder: Path | None, chat_template: str | None, new_tokens: Sequence[str] = ()
) -> PlainTokenizer:
    """The tokenizer in a folder (tokenizer.json, or a SentencePiece model); without one, a token
    for every 4 characters.
    """
    specials = _settings(folder)[1]
    given: dict[str, Any] = {}
    if folder and (folder / "tokenizer.json").is_file():
        rust = _from_json(folder, new_tokens)
    elif model := next(
        (folder / n for n in _SENTENCEPIECE if folder and (folder / n).is_file()), None
    ):
        rust, own = _from_sentencepiece(model)
        specials = own | specials
    else:
        rust = _Pieces(
            lambda texts, special: [([1] * len(at), at) for at in map(_guessed, texts)], {}
        )
        given = {"is_exact": False, "eos_token_id": 0, "bos_token_id": None}
    names = ("bos_token", "eos_token")
    given = {f"{name}_id": rust.token_to_id(specials.get(name, "")) for name in names} | given
    templates = _own_templates(folder)
    template = chat_template or own_template(folder)
    tokenizer = PlainTokenizer(
        (rust, rust), **given, special_tokens_map=specials, chat_template=template
    )
    if template is None and templates:
        return replace(tokenizer, other_templates=tuple(templates))
    default = default_template(bool(first_tokens(tokenizer)))
    return replace(tokenizer, chat_template=template or default)


def own_template(folder: Path | None) -> str | None:
    """The chat template that is with a tokenizer; none where it has none, or several without a
    default.
    """
    template = _own_templates(folder).get("default")
    return template if isinstance(template, str) else None


def _own_templates(folder: Path | None) -> Json:
    """The chat templates that are with a tokenizer, by name: in its settings, and in files that
    come before.
    """
    said = _settings(folder)[0].get("chat_template")
    if isinstance(said, list):
        said = {each.get("name"): each.get("template") for each in said}
    found: Json = (
        said if isinstance(said, dict) else {"default": said} if isinstance(said, str) else {}
    )
    if folder is None:
        return found
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    return found | {name: path.read_text(encoding="utf-8") for name, path in files.items()}


CHARACTERS_A_TOKEN, CHARACTERS_A_TOKEN_ELSEWHERE = 4, 2
"""Of Latin text, and of other alphabets; a character of Chinese, Japanese or Korean is a token."""
_WIDE = re.compile(
    r"[\u1100-\u11ff\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff00-\uffef]"
)


def _guessed(text: str) -> list[int]:
    """Where the tokens of a text begin, by its script."""
    if text.isascii():
        return list(range(0, len(text), CHARACTERS_A_TOKEN))
    found, left = [], 0.0
    for at, character in enumerate(text):
        if left <= 0:
            found.append(at)
            left += 1.0
        if character < "\u0250":
            left -= 1 / CHARACTERS_A_TOKEN
        elif _WIDE.match(character):
            left -= 1.0
        else:
            left -= 1 / CHARACTERS_A_TOKEN_ELSEWHERE
    return found


def _settings(folder: Path | None) -> tuple[Json, dict[str, str]]:
    """(tokenizer_config.json, special tokens by name)."""
    found: Json = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            read = read_json(folder / name) if folder else {}
            found |= {key: value for key, value in read.items() if value is not None}
        except (OSError, ValueError, AttributeError):
            continue
    specials = {}
    for name, value in found.items():
        value = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(value, str):
            specials[name] = value
    return found, specials


def _from_json(folder: Path, new_tokens: Sequence[str]) -> Any:
    from tokenizers import Tokenizer

    try:
        own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exceptions
        raise DataError(
            f"tokenizer.json can't be read: {error}",
            where=str(folder),
            to_do="it is damaged: copy it again",
        ) from error
    own.no_truncation()
    own.no_padding()
    own.add_tokens(list(new_tokens))
    return own


class _Pieces:
    """What `Encoder` asks of a Rust tokenizer, by (ids, where each begins) of texts."""

    def __init__(
        self,
        pieces_of: Callable[[list[str], bool], list[tuple[list[int], list[int]]]],
        specials: dict[str, int],
    ) -> None:
        self._pieces_of, self._specials = pieces_of, specials

    def encode_batch(
        self, strings: list[Any], add_special_tokens: bool = True, is_pretokenized: bool = False
    ) -> list[Any]:
        """Of texts, or of lists of words."""
        texts = [" ".join(each) for each in strings] if is_pretokenized else strings
        found = []
        for text, (ids, starts) in zip(
            texts, self._pieces_of(texts, add_special_tokens), strict=True
        ):
            found.append(_Encoding(ids, starts, text))
        return found

    encode_batch_fast = encode_batch

    def enable_truncation(self, limit: int, direction: str) -> None:
        """A plan cuts by itself."""

    def token_to_id(self, token: str) -> int | None:
        """Of a special token."""
        return self._specials.get(token)

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        """Special tokens by number."""
        return {n: SimpleNamespace(content=token) for token, n in self._specials.items()}


@dataclass(frozen=True)
class _Encoding:
    """The tokens of a text, and at which character each begins."""

    ids: list[int]
    starts: list[int]
    text: str
    overflowing: tuple[()] = ()

    def char_to_token(self, char_pos: int, /) -> int | None:
        """The token that holds a character."""
        return max(0, bisect_right(self.starts, char_pos) - 1) if self.starts else None

    @property
    def word_ids(self) -> list[int]:
        """The word of each token."""
        return [self.text.count(" ", 0, start + 1) for start in self.starts]

    def __len__(self) -> int:
        return len(self.ids)


def _from_sentencepiece(path: Path) -> tuple[_Pieces, dict[str, str]]:
    """(the tokenizer, its special tokens by name)."""
    try:
        import sentencepiece
    except ImportError as error:
        raise DataError(
            "the tokenizer is a SentencePiece model, and sentencepiece is not installed",
            where=str(path),
            to_do="pip install 'farthing[sentencepiece]'",
        ) from error
    own = sentencepiece.SentencePieceProcessor(model_file=str(path))
    is_t5 = path.name == "spiece.model"
    ids = {"bos_token": own.bos_id(), "eos_token": own.eos_id()}
    specials = {name: own.id_to_piece(number) for name, number in ids.items() if number >= 0}

    def pieces_of(texts: list[str], special: bool) -> list[tuple[list[int], list[int]]]:
        before = [own.bos_id()] if special and not is_t5 and own.bos_id() >= 0 else []
        after = [own.eos_id()] if special and is_t5 else []
        found = []
        for of_text in own.encode(texts):
            at, begins = -1, [0 for _ in before]  # a space is put before the text
            for piece in own.id_to_piece(of_text):
                begins.append(max(0, at))
                at += 1 if piece.startswith("<0x") else len(piece)
            found.append(([*before, *of_text, *after], begins))
        return found

    return _Pieces(pieces_of, {token: ids[name] for name, token in specials.items()}), specials
