"""The families of models, from `facts/families.json`: names and sizes of their weights, and how
they can be computed.

The names and sizes are those that the model classes of transformers give, the defaults those of its
configuration classes; the tests build every family on the meta device and compare name by name.

A row of a block: name of the weight (* is the number of the layer), what it is part of, its size,
and what else is to say.
  sizes    h->f a linear layer; V*h an embedding table of V rows; h a norm. V vocabulary,
           h hidden, f feed-forward, q and k all heads of queries and keys, d one head, a number of
           heads, P positions,
           T token types, B distance buckets, n labels, e experts,
           s features of an expert for all tokens; 2f, 3h, h2d and qkv are several of them in one
           layer
  bias     has one; `bias:key` when the config's key says so
  tied     has no weight of its own but the embedding's; `tied:key` when the config's key says so
  if:key   is there only when the key holds
  router, experts   multiply, but are no linear layers; experts are one parameter for all of a layer
  raw      is a parameter by itself
  of:x     multiplies source (encoder) or target (decoder) tokens only, or one vector of a whole
  sequence
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.objectives.classification import CLASSIFICATION
from farthing.objectives.seq2seq import SEQ2SEQ
from farthing.objectives.token_classification import TOKEN_CLASSIFICATION


class Family(NamedTuple):
    """What models of one `model_type` have in common."""

    body: str
    heads: Mapping[
        str, tuple[str, str]
    ]  # the usual one first: what body names begin with, the head's rows
    query_and_value: tuple[
        str, ...
    ]  # the layers that an adapter goes to by default (Hu et al. 2021, section 4.2)
    defaults: Mapping[str, Any]  # of the configuration class, for keys that a config leaves out
    attention: str = "causal"  # causal, bidirectional, or encoder-decoder
    windows: str = ""  # the layers with a sliding window: none, all, late, or periodic
    keys: Mapping[str, str] = {}  # this family's names for the usual keys
    positions_follow_padding: bool = False  # position 0 is the one after the padding index


BODY = "body"
"""No task: neither a head nor a pooler."""
_HEADS = {
    "next_token": CAUSAL_LM.head,
    "pair": SEQ2SEQ.head,
    "classes": CLASSIFICATION.head,
    "tags": TOKEN_CLASSIFICATION.head,
    BODY: BODY,
}
_TABLE: Any = json.loads(
    (Path(__file__).parents[1] / "facts" / "families.json").read_text(encoding="utf-8")
)


def _rows(blocks: Iterable[str]) -> str:
    return "\n".join(row for block in blocks for row in _TABLE["blocks"][block])


def _families() -> dict[str, Family]:
    found: dict[str, Family] = {}
    for name, row in _TABLE["families"].items():
        base = found[row.pop("defaults_of")].defaults if "defaults_of" in row else {}
        found[name] = Family(
            _rows(row.pop("body")),
            {
                _HEADS[head]: (before, _rows(blocks))
                for head, (before, *blocks) in row.pop("heads").items()
            },
            tuple(row.pop("query_and_value")),
            {**base, **row.pop("defaults")},
            **row,
        )
    return found


FAMILIES = _families()

# ---- how they can be computed, by transformers' `model_type` ----

# whose documents can be laid end to end: held against single documents in the tests of attention
DECODERS, ENCODERS = frozenset(_TABLE["decoders"]), frozenset(_TABLE["encoders"])
PACKED = {
    _HEADS["next_token"]: DECODERS,
    _HEADS["classes"]: DECODERS | ENCODERS,
    _HEADS["tags"]: DECODERS | ENCODERS,
    _HEADS["pair"]: frozenset(_TABLE["pairs"]),
}
WHY_NOT_PACKED: Mapping[str, str] = _TABLE["why_not_packed"]

# by the head of a task, whose forward pass ends in: hidden states, perhaps scaled, one matrix,
# perhaps a soft cap; held against the plain path
KNOWN_HEADS = {_HEADS[head]: frozenset(names) for head, names in _TABLE["known_heads"].items()}
CAUSAL_FAMILIES, SEQ2SEQ_FAMILIES = KNOWN_HEADS[_HEADS["next_token"]], KNOWN_HEADS[_HEADS["pair"]]

NOT_TRAINED: Mapping[str, str] = _TABLE["not_trained"]
"""Families that are refused, with the reason: an example's result would depend on others."""

POSITIONS_AFTER_PADDING = frozenset(_TABLE["positions_after_padding"])
"""Families whose first token is at the position after the padding index."""


# by the head of a task, whose result for an example is the same with padding to the right of its
# input as without: held against single examples in the tests; of other families a padded
# micro-batch has inputs of one length
PADS_SAFELY = {
    _HEADS["next_token"]: DECODERS | frozenset(_TABLE["pads_safely"]["next_token"]),
    _HEADS["classes"]: DECODERS | ENCODERS | frozenset(_TABLE["pads_safely"]["classes"]),
    _HEADS["tags"]: DECODERS | ENCODERS | frozenset(_TABLE["pads_safely"]["tags"]),
    _HEADS["pair"]: frozenset(_TABLE["pads_safely"]["pair"]),
}

FUSED_BY_LIGER = frozenset(
    {
        *(
            "exaone4",
            "gemma",
            "gemma2",
            "gemma3_text",
            "granite",
            "llama",
            "ministral",
            "mistral",
            "olmo2",
            "olmo3",
        ),
        *("phi3", "qwen2", "qwen3", "smollm3"),
    }
)
"""Whose norms, rotations and gated feed-forwards the trainer computes by Liger's kernels, on GPUs
from Ampere on.
"""
