"""A tokenizer as llama.cpp has it: byte-level BPE, or BPE of SentencePiece, with its special
tokens.

What splits a text before it is merged can't be described in a GGUF file, only named: the names are
those that llama.cpp knows (https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp).
A wrong name changes tokens in silence, so what has none is refused.
"""

from __future__ import annotations

import itertools
import json
from typing import Any, NoReturn

from farthing.errors import InputError
from farthing.storage.files import Json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # kinds of a token
NEVER = -1e9  # the score of what no merge makes
SPACE = "▁"

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
SPLITS = {
    ("bytes by words",): ("gpt-2", ""),
    ("digits", "bytes by words"): ("smollm", ""),
    (LLAMA_3, "bytes"): ("smaug-bpe", "llama-bpe"),
    (rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}", "bytes"): ("qwen2", ""),
    (rf"{_WORDS % ('', '')}|\p{{N}}|{_REST_SLASH}", "bytes"): ("", "tekken"),
    (rf"{_WORDS % ((_ENDINGS + '?',) * 2)}|\p{{N}}{{1,3}}|{_REST_SLASH}", "bytes"): ("gpt-4o", ""),
}
"""Steps of a pre-tokenizer -> llama.cpp's name of it, and its name where whole words of the
vocabulary are not merged.
"""


def tokenizer_settings(
    tokenizer: Any, n_rows: int, *, is_chat: bool
) -> tuple[dict[str, object], list[str]]:
    """(settings by the name of the method of `gguf.GGUFWriter`, notices) for a model
    that embeds `n_rows` tokens.

    `is_chat`: it was trained on chats, which begin with a special token, not on texts as they are.

    Raises `InputError` for a tokenizer that llama.cpp does not have.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        _refuse("it has no tokenizer.json")
    said = json.loads(backend.to_str())
    model = said["model"]
    if model["type"] != "BPE":
        _refuse(f"its model is {model['type']}; BPE can be written")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            _refuse(f"its BPE has a {key}")
    tokens, kinds = _tokens(tokenizer, said, n_rows)
    if model.get("byte_fallback"):
        values, notes = _sentence_piece(tokenizer, said, tokens, kinds, is_chat)
    else:
        values, notes = _byte_level(said)
    return values | {"token_list": tokens, "token_types": kinds} | _special(tokenizer), notes


def _refuse(why: str) -> NoReturn:
    raise InputError(
        f"llama.cpp does not have this tokenizer: {why}",
        where="tokenizer.json",
        to_do="use --format merged, fp8, w8a16 or w4a16",
    )


def _tokens(tokenizer: Any, said: Json, n_rows: int) -> tuple[list[str], list[int]]:
    """Every token's text and kind, in the order of the embeddings; rows without a token have a name
    of their own.
    """
    texts = {index: text for text, index in tokenizer.get_vocab().items()}
    added = {entry["id"]: entry["special"] for entry in said["added_tokens"]}
    is_pieces, unknown = bool(said["model"].get("byte_fallback")), said["model"].get("unk_token")
    tokens, kinds = [], []
    for index in range(n_rows):
        text = str(texts.get(index, f"[PAD{index}]"))
        kind = NORMAL if index in texts else UNUSED
        if is_pieces and text == unknown:
            kind = UNKNOWN
        elif index in added:
            kind = CONTROL if added[index] else USER_DEFINED
        elif is_pieces and len(text) == 6 and text.startswith("<0x"):
            kind = BYTE
        if kind == USER_DEFINED and is_pieces:
            text = text.replace(SPACE, " ")
        tokens.append(text)
        kinds.append(kind)
    return tokens, kinds


def _merges(said: Json) -> list[tuple[str, str]]:
    """Pairs in their order; older files have them as texts."""
    pairs = [
        pair.split(" ", 1) if isinstance(pair, str) else pair for pair in said["model"]["merges"]
    ]
    return [(left, right) for left, right in pairs]


def _steps(step: Json | None) -> list[Json]:
    """A sequence of normalizers or pre-tokenizers as a list."""
    if step is None:
        return []
    inner = step.get("normalizers") or step.get("pretokenizers")
    return [each for part in inner for each in _steps(part)] if inner else [step]


def _byte_level(said: Json) -> tuple[dict[str, object], list[str]]:
    signs: list[str] = []
    for step in _steps(said["pre_tokenizer"]):
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False}:
                signs.append("bytes by words" if step.get("use_regex", True) else "bytes")
            case {"type": "Digits", "individual_digits": True}:
                signs.append("digits")
            case {"type": "Split", "behavior": "Isolated", "invert": False}:
                signs.append(str(step["pattern"].get("Regex")))
            case {"type": kind}:
                with_what = " with add_prefix_space" if step.get("add_prefix_space") else ""
                _refuse(f"it splits texts by {kind}{with_what}")
    names = SPLITS.get(tuple(signs), ("", ""))
    name = names[bool(said["model"].get("ignore_merges"))]
    if not name:
        _refuse(f"llama.cpp has no name for how it splits texts: {signs}")
    normal = [step["type"] for step in _steps(said["normalizer"])]
    if normal not in ([], ["NFC"]):
        _refuse(f"it changes texts before it splits them ({', '.join(normal)})")
    note = "llama.cpp does not bring texts into the Unicode form NFC, as the tokenizer does"
    merges = [" ".join(pair) for pair in _merges(said)]
    values: dict[str, object] = {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": name,
        "token_merges": merges,
    }
    return values, [note] * bool(normal)


def _sentence_piece(
    tokenizer: Any, said: Json, tokens: list[str], kinds: list[int], is_chat: bool
) -> tuple[dict[str, object], list[str]]:
    """Pieces have scores in place of merges: the earlier a merge, the higher the score of the piece
    that it makes.
    """
    for step in _steps(said["normalizer"]):
        match step:
            case {"type": "Prepend"} | {
                "type": "Replace",
                "pattern": {"String": " "},
                "content": "▁",
            }:
                pass
            case _:
                _refuse(f"it changes texts before it splits them ({step['type']})")
    for step in _steps(said["pre_tokenizer"]):
        match step:
            case {"type": "Metaspace"} | {"type": "Split", "pattern": {"String": " "}}:
                pass
            case _:
                _refuse(f"it splits texts by {step['type']}")
    ranks: dict[str, list[int]] = {}
    for rank, (left, right) in enumerate(_merges(said)):
        ranks.setdefault(left + right, []).append(rank)
    if any(after[0] < before[-1] for before, after in itertools.pairwise(ranks.values())):
        _refuse("its merges follow no order of pieces")

    def score(text: str, kind: int) -> float:
        if text in ranks:
            return -float(ranks[text][0])
        return 0.0 if len(text) == 1 or kind != NORMAL else NEVER

    begins, notes = _begins_with_space(tokenizer, ""), []
    if begins and not _begins_with_space(tokenizer, tokenizer.eos_token or ""):
        begins = not is_chat
        notes.append(
            "llama.cpp puts a space before texts that follow a special token, as the tokenizer"
            " does not"
            if begins
            else "llama.cpp puts no space before a text outside a chat, as the tokenizer does"
        )
    if begins and tokenizer(" a")["input_ids"] == tokenizer("a")["input_ids"]:
        notes.append("llama.cpp keeps the space that a text begins with, the tokenizer does not")
    return {
        "tokenizer_model": "llama",
        "tokenizer_pre": "default",
        "token_scores": [score(*each) for each in zip(tokens, kinds, strict=True)],
        "add_space_prefix": begins,
    }, notes


def _begins_with_space(tokenizer: Any, before: str) -> bool:
    """Whether a word that follows `before` gets a space."""
    ids = tokenizer(f"{before}a", add_special_tokens=False)["input_ids"]
    pieces = tokenizer.convert_ids_to_tokens(ids)[1 if before else 0 :]
    return bool(pieces) and str(pieces[0]).startswith(SPACE)


def _special(tokenizer: Any) -> dict[str, object]:
    """Ids of special tokens, whether texts begin and end with one, and the templates."""
    plain, whole = (tokenizer("a", add_special_tokens=each)["input_ids"] for each in (False, True))
    values: dict[str, object] = {
        "add_bos_token": whole[0] == tokenizer.bos_token_id and whole[: len(plain)] != plain,
        "add_eos_token": whole[-1] == tokenizer.eos_token_id and whole[-len(plain) :] != plain,
    }
    if len(whole) - len(plain) != sum(map(bool, values.values())):
        _refuse("it puts other tokens around a text than the first and the last")
    for name in ("bos", "eos", "unk", "sep", "pad"):
        if (index := getattr(tokenizer, f"{name}_token_id", None)) is not None:
            values[f"{name}_token_id"] = int(index)
    template, others = tokenizer.chat_template, getattr(tokenizer, "other_templates", None) or {}
    if isinstance(template, str):
        named = {"default": template} | {n: t for n, t in others.items() if n != "default"}
        several = [{"name": name, "template": text} for name, text in named.items()]
        values["chat_template"] = several if len(several) > 1 else template
    return values
