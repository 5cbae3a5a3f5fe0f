"""Tokenizers as a plan needs them: read from a model's folder by `tokenizers` or `sentencepiece`,
in a tenth of a second.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from farthing.data.chat import default_template
from farthing.data.encode import Encoding, first_tokens
from farthing.errors import DataError
from farthing.storage.files import Json, read_json


@dataclass(frozen=True)
class _Encoded:
    """The tokens of a text, and at which character each begins."""

    ids: list[int]
    starts: list[int]
    overflowing: tuple[()] = ()

    def char_to_token(self, char_pos: int, /) -> int | None:
        """The token that holds a character."""
        return max(0, bisect_right(self.starts, char_pos) - 1) if self.starts else None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class LightTokenizer:
    """A tokenizer with the few answers that `formats` and `encode.Encoder` ask for."""

    words: str
    """What it is, for people."""
    bos_token_id: int | None
    eos_token_id: int | None
    encode: Callable[[list[str], bool], Sequence[Encoding]]
    special_tokens_map: dict[str, str]
    chat_template: str | None
    is_exact: bool = True
    added_tokens: tuple[str, ...] = ()
    """Words beside those it learned."""
    other_templates: tuple[str, ...] = ()
    """Names of its chat templates, where it has several and none is the default."""


def light_tokenizer(
    folder: Path | None, chat_template: str | None, new_tokens: Sequence[str] = ()
) -> LightTokenizer:
    """The tokenizer in a folder (tokenizer.json, or a SentencePiece model); without one, a token
    for every 4 characters.
    """
    template, others = chat_template or own_template(folder), _own_templates(folder)
    tokenizer = _from_folder(folder, _settings(folder)[1], new_tokens)
    if template is None and others:
        return replace(tokenizer, chat_template=None, other_templates=tuple(others))
    return replace(
        tokenizer, chat_template=template or default_template(bool(first_tokens(tokenizer)))
    )


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


def _from_folder(
    folder: Path | None, specials: dict[str, str], new_tokens: Sequence[str]
) -> LightTokenizer:
    if folder is not None and (folder / "tokenizer.json").is_file():
        return _from_json(folder, specials, new_tokens)
    model = (
        next((folder / name for name in _SENTENCEPIECE if (folder / name).is_file()), None)
        if folder
        else None
    )
    if model is not None:
        return _from_sentencepiece(model, specials)

    def encode(texts: list[str], special: bool) -> Sequence[Encoding]:
        return [_Encoded([1] * len(at), at) for at in map(_guessed_tokens, texts)]

    return LightTokenizer("guessed by script", None, 0, encode, specials, "", is_exact=False)


CHARACTERS_A_TOKEN, CHARACTERS_A_TOKEN_ELSEWHERE = 4, 2
"""Of Latin text, and of other alphabets; a character of Chinese, Japanese or Korean is a token."""
_WIDE = re.compile(
    r"[\u1100-\u11ff\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff00-\uffef]"
)


def _guessed_tokens(text: str) -> list[int]:
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


_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


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


def _from_json(folder: Path, specials: dict[str, str], new_tokens: Sequence[str]) -> LightTokenizer:
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

    def encode(texts: list[str], special: bool) -> Sequence[Encoding]:
        return own.encode_batch(texts, add_special_tokens=special)

    bos, eos = (own.token_to_id(specials.get(name, "")) for name in ("bos_token", "eos_token"))
    added = tuple(token.content for token in own.get_added_tokens_decoder().values())
    return LightTokenizer("tokenizer.json", bos, eos, encode, specials, "", added_tokens=added)


def _from_sentencepiece(path: Path, specials: dict[str, str]) -> LightTokenizer:
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

    def encode(texts: list[str], special: bool) -> Sequence[Encoding]:
        before = [own.bos_id()] if special and not is_t5 and own.bos_id() >= 0 else []
        after = [own.eos_id()] if special and is_t5 else []
        found = []
        for of_text in own.encode(texts):
            at, begins = -1, [0 for _ in before]  # a space is put before the text
            for piece in own.id_to_piece(of_text):
                begins.append(max(0, at))
                at += 1 if piece.startswith("<0x") else len(piece)
            found.append(_Encoded([*before, *of_text, *after], begins))
        return found

    bos, eos = (None if i < 0 else i for i in (own.bos_id(), own.eos_id()))
    names = {
        "bos_token": own.id_to_piece(bos) if bos else "",
        "eos_token": own.id_to_piece(eos) if eos else "",
    }
    specials = names | specials
    return LightTokenizer(
        path.name, bos, eos, encode, specials, "", added_tokens=tuple(specials.values())
    )
