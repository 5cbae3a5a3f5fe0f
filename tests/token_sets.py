"""Token sets that tests make of drawn tokens."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

from farthing.data.encode import Encoded
from farthing.data.formats import Converter
from farthing.data.token_set import TokenSet


def token_set(
    texts: list[list[int]], n_inputs: list[int], labels: list[int] | None = None
) -> TokenSet:
    """Examples of these tokens, of which all but the first `n_inputs` are targets."""
    rows = [np.array(text, dtype=np.int32) for text in texts]
    targets = [np.arange(len(row)) >= n for row, n in zip(rows, n_inputs, strict=True)]
    return TokenSet(
        folder=Path(),
        facts={"label_names": ["a", "b", "c"], "sources": []},
        ids=np.concatenate(rows),
        targets=np.concatenate(targets).astype(np.uint8),
        offsets=np.concatenate([[0], np.cumsum([len(row) for row in rows])]),
        lines=np.arange(len(rows)),
        target_lengths=np.array([each.sum() for each in targets]),
        groups=np.arange(len(rows), dtype=np.uint64),
        labels=None if labels is None else np.array(labels, dtype=np.int32),
    )


def with_words(*words: str) -> Tokenizer:
    """A Rust tokenizer that knows these words alone."""
    rust = Tokenizer(models.BPE())
    rust.add_special_tokens(list(words))
    return rust


def with_template(template: str, **more) -> SimpleNamespace:
    """A tokenizer of this chat template."""
    return SimpleNamespace(
        chat_template=template,
        special_tokens_map={"eos_token": "</s>"},
        backend_tokenizer=with_words("</s>"),
        **more,
    )


def reader_of_chats(tokenizer, **how):
    """Reads rows with `messages`."""
    return Converter("messages", {}, {}, tokenizer, "causal-lm", **how)


def encoded_examples(encoded: Encoded) -> list[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
    """(ids, is_target) of each example."""
    stops = np.cumsum(encoded.lengths)[:-1]
    ids, is_target = np.split(encoded.ids, stops), np.split(encoded.is_target, stops)
    return list(zip(ids, is_target, strict=True))
