"""Tokenizers as a plan needs them: read from a model's folder, in a tenth of a second where it has
a tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from farthing.data.chat import default_template
from farthing.data.encode import PlainTokenizer, first_tokens
from farthing.errors import DataError
from farthing.models.model_config import refuse_pipes
from farthing.storage.files import Json, read_json

_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_GUESSED = (
    r"[\u1100-\u11ff\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff00-\uffef]"
    r"|[\u0000-\u024f]{1,4}|.{1,2}"
)
"""A token of Chinese, Japanese or Korean is a character, of Latin text four, of others two."""


def light_tokenizer(
    folder: Path | None, chat_template: str | None, new_tokens: Sequence[str] = ()
) -> PlainTokenizer:
    """The tokenizer in a folder; without one a guess from characters. Raises `InputError`."""
    if folder is not None:
        refuse_pipes(folder)
    settings, specials = _settings(folder)
    is_exact = folder is not None and (folder / "tokenizer.json").is_file()
    if folder is not None and is_exact:
        rust = _from_json(folder, new_tokens)
    elif folder is not None and any((folder / name).is_file() for name in _SENTENCEPIECE):
        rust, is_exact = _converted(folder), True
    else:
        rust = _guess()
    templates = _own_templates(folder, settings)
    template = chat_template or templates.get("default")
    tokenizer = PlainTokenizer(
        rust=(rust, rust),
        bos_token_id=rust.token_to_id(specials.get("bos_token", "")),
        eos_token_id=rust.token_to_id(specials.get("eos_token", "")) if is_exact else 0,
        special_tokens_map=specials,
        chat_template=template,
        other_templates=() if template else tuple(templates),
        is_exact=is_exact,
    )
    if template or templates:
        return tokenizer
    return replace(tokenizer, chat_template=default_template(bool(first_tokens(tokenizer))))


def own_template(folder: Path | None) -> str | None:
    """The chat template that is with a tokenizer; none where it has none, or several without a
    default.
    """
    return _own_templates(folder, _settings(folder)[0]).get("default")


def _own_templates(folder: Path | None, settings: Json) -> dict[str, str]:
    """The chat templates that are with a tokenizer, by name: in its settings, and in files that
    come before.
    """
    said = settings.get("chat_template")
    if isinstance(said, list):
        said = {each.get("name"): each.get("template") for each in said}
    found = said if isinstance(said, dict) else {"default": said}
    files: dict[str, Path] = {}
    if folder is not None:
        files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
        if (folder / "chat_template.jinja").is_file():
            files["default"] = folder / "chat_template.jinja"
    found |= {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    return {name: text for name, text in found.items() if isinstance(text, str)}


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
        raise _unreadable(folder, error) from error
    own.no_truncation()
    own.no_padding()
    own.add_tokens(list(new_tokens))
    return own


def _converted(folder: Path) -> Any:
    """The Rust tokenizer that transformers makes of a SentencePiece model."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder).backend_tokenizer
    except Exception as error:  # of the libraries that it needs, and of its own
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: Exception) -> DataError:
    return DataError(
        f"the tokenizer can't be read: {str(error)[:300]}",
        where=str(folder),
        to_do="copy it again; a SentencePiece model needs pip install 'farthing[sentencepiece]'",
    )


def _guess() -> Any:
    """One that cuts text into pieces of a usual length, by its script."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    guess = Tokenizer(WordLevel({"token": 1}, unk_token="token"))
    guess.pre_tokenizer = Split(Regex(_GUESSED), "isolated")
    return guess
