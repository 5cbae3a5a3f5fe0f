"""The families of models: the names and sizes of their weights, and how they can be computed, as tables.

The names and sizes are those that the model classes of transformers 5.17 give (github.com/huggingface/transformers,
src/transformers/models/*/modeling_*.py), the defaults those of its configuration classes; the tests build every family
on the meta device and compare name by name.

Refuses to compute and to import torch: `shapes` reads the tables of sizes, the planner and `model` those at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from farthing.tasks.causal_lm import CAUSAL_LM
from farthing.tasks.classification import CLASSIFICATION
from farthing.tasks.seq2seq import SEQ2SEQ

# A row: name of the weight (* is the number of the layer), what it is part of, its size, and what else is to say.
#   sizes    h->f a linear layer; V*h an embedding table of V rows; h a norm. V vocabulary,
#            h hidden, f feed-forward, q and k all heads of queries and keys, d one head, a number of heads, P positions,
#            T token types, B distance buckets, n labels; 2f, 3h, h2d and qkv are several of them in one layer
#   bias     has one; `bias:key` when the config's key says so
#   tied     has no weight of its own but the embedding's; `tied:key` when the config's key says so
#   if:key   is there only when the key holds
#   of:x     multiplies source (encoder) or target (decoder) tokens only, or one vector of a whole sequence

_GATED = """
    embed_tokens                               embeddings  V*h
    layers.*.self_attn.q_proj                  attention   h->q    {qkv}
    layers.*.self_attn.k_proj                  attention   h->k    {qkv}
    layers.*.self_attn.v_proj                  attention   h->k    {qkv}
    layers.*.self_attn.o_proj                  attention   q->h    {o}
    layers.*.mlp.gate_proj                     mlp         h->f    {mlp}
    layers.*.mlp.up_proj                       mlp         h->f    {mlp}
    layers.*.mlp.down_proj                     mlp         f->h    {mlp}
    layers.*.input_layernorm                   norms       h
    layers.*.post_attention_layernorm          norms       h
    norm                                       norms       h
"""
_QK_NORMS = """
    layers.*.self_attn.q_norm                  norms       d
    layers.*.self_attn.k_norm                  norms       d
"""
_FEEDFORWARD_NORMS = """
    layers.*.pre_feedforward_layernorm         norms       h
    layers.*.post_feedforward_layernorm        norms       h
"""
_LLAMA = _GATED.format(qkv="bias:attention_bias", o="bias:attention_bias", mlp="bias:mlp_bias")
_MISTRAL = _GATED.format(qkv="", o="", mlp="")
_QWEN2 = _GATED.format(qkv="bias", o="", mlp="")
_GEMMA = _GATED.format(qkv="bias:attention_bias", o="bias:attention_bias", mlp="")
_PHI3 = """
    embed_tokens                               embeddings  V*h
    layers.*.self_attn.qkv_proj                attention   h->qkv
    layers.*.self_attn.o_proj                  attention   q->h
    layers.*.mlp.gate_up_proj                  mlp         h->2f
    layers.*.mlp.down_proj                     mlp         f->h
    layers.*.input_layernorm                   norms       h
    layers.*.post_attention_layernorm          norms       h
    norm                                       norms       h
"""
_GPT2 = """
    wte                                        embeddings  V*h
    wpe                                        positions   P*h
    h.*.ln_1                                   norms       h       bias
    h.*.attn.c_attn                            attention   h->3h   bias
    h.*.attn.c_proj                            attention   h->h    bias
    h.*.ln_2                                   norms       h       bias
    h.*.mlp.c_fc                               mlp         h->f    bias
    h.*.mlp.c_proj                             mlp         f->h    bias
    ln_f                                       norms       h       bias
"""
_GPT_BIGCODE = _GPT2.replace("h->3h", "h->h2d")
_GPT_NEOX = """
    embed_in                                   embeddings  V*h
    layers.*.input_layernorm                   norms       h       bias
    layers.*.post_attention_layernorm          norms       h       bias
    layers.*.attention.query_key_value         attention   h->3h   bias:attention_bias
    layers.*.attention.dense                   attention   h->h    bias:attention_bias
    layers.*.mlp.dense_h_to_4h                 mlp         h->f    bias
    layers.*.mlp.dense_4h_to_h                 mlp         f->h    bias
    final_layer_norm                           norms       h       bias
"""
_T5_STACK = """
    {side}.embed_tokens                                            embeddings  V*h   tied
    {side}.block.*.layer.0.SelfAttention.q                         attention   h->q  of:{tokens}
    {side}.block.*.layer.0.SelfAttention.k                         attention   h->q  of:{tokens}
    {side}.block.*.layer.0.SelfAttention.v                         attention   h->q  of:{tokens}
    {side}.block.*.layer.0.SelfAttention.o                         attention   q->h  of:{tokens}
    {side}.block.0.layer.0.SelfAttention.relative_attention_bias   positions   B*a
    {side}.block.*.layer.0.layer_norm                              norms       h
    {side}.block.*.layer.{mlp}.DenseReluDense.wi                   mlp         h->f  of:{tokens} if:plain
    {side}.block.*.layer.{mlp}.DenseReluDense.wi_0                 mlp         h->f  of:{tokens} if:gated
    {side}.block.*.layer.{mlp}.DenseReluDense.wi_1                 mlp         h->f  of:{tokens} if:gated
    {side}.block.*.layer.{mlp}.DenseReluDense.wo                   mlp         f->h  of:{tokens}
    {side}.block.*.layer.{mlp}.layer_norm                          norms       h
    {side}.final_layer_norm                                        norms       h
"""
_T5_CROSS = """
    decoder.block.*.layer.1.EncDecAttention.q                      attention   h->q  of:target
    decoder.block.*.layer.1.EncDecAttention.k                      attention   h->q  of:source
    decoder.block.*.layer.1.EncDecAttention.v                      attention   h->q  of:source
    decoder.block.*.layer.1.EncDecAttention.o                      attention   q->h  of:target
    decoder.block.*.layer.1.layer_norm                             norms       h
"""
_T5 = (
    "shared embeddings V*h"
    + _T5_STACK.format(side="encoder", tokens="source", mlp=1)
    + _T5_STACK.format(side="decoder", tokens="target", mlp=2)
    + _T5_CROSS
)
_BERT = """
    embeddings.word_embeddings                 embeddings  V*h
    embeddings.position_embeddings             positions   P*h
    embeddings.token_type_embeddings           embeddings  T*h
    embeddings.LayerNorm                       norms       h       bias
    encoder.layer.*.attention.self.query       attention   h->h    bias
    encoder.layer.*.attention.self.key         attention   h->h    bias
    encoder.layer.*.attention.self.value       attention   h->h    bias
    encoder.layer.*.attention.output.dense     attention   h->h    bias
    encoder.layer.*.attention.output.LayerNorm norms       h       bias
    encoder.layer.*.intermediate.dense         mlp         h->f    bias
    encoder.layer.*.output.dense               mlp         f->h    bias
    encoder.layer.*.output.LayerNorm           norms       h       bias
"""
_DISTILBERT = """
    embeddings.word_embeddings                 embeddings  V*h
    embeddings.position_embeddings             positions   P*h
    embeddings.LayerNorm                       norms       h       bias
    transformer.layer.*.attention.q_lin        attention   h->h    bias
    transformer.layer.*.attention.k_lin        attention   h->h    bias
    transformer.layer.*.attention.v_lin        attention   h->h    bias
    transformer.layer.*.attention.out_lin      attention   h->h    bias
    transformer.layer.*.sa_layer_norm          norms       h       bias
    transformer.layer.*.ffn.lin1               mlp         h->f    bias
    transformer.layer.*.ffn.lin2               mlp         f->h    bias
    transformer.layer.*.output_layer_norm      norms       h       bias
"""
BODY = "body"
"""No task: neither a head nor a pooler."""
_NEXT, _PAIR, _CLASSES = (task.head for task in (CAUSAL_LM, SEQ2SEQ, CLASSIFICATION))
_LM_HEAD = "lm_head head h->V tied:tie_word_embeddings"
_TWO_LAYERS = "{0}.dense head h->h bias of:sequence\n{0}.out_proj head h->n bias of:sequence"
_BERT_HEAD = "bert.pooler.dense pooler h->h bias of:sequence\nclassifier head h->n bias of:sequence"
_DISTILBERT_HEAD = "pre_classifier head h->h bias of:sequence\nclassifier head h->n bias of:sequence"


def _decoder_heads(prefix: str) -> dict[str, tuple[str, str]]:
    return {_NEXT: (prefix, _LM_HEAD), _CLASSES: (prefix, "score head h->n"), BODY: ("", "")}


def _encoder_heads(prefix: str, head: str) -> dict[str, tuple[str, str]]:
    return {BODY: ("", ""), _CLASSES: (prefix, head)}


class Family(NamedTuple):
    """What models of one `model_type` have in common."""

    body: str
    heads: Mapping[str, tuple[str, str]]  # the usual one first: what body names begin with, the head's rows
    query_and_value: tuple[str, ...]  # the layers that an adapter goes to by default (Hu et al. 2021, section 4.2)
    defaults: Mapping[str, Any]  # of the configuration class, for keys that a config leaves out
    attention: str = "causal"  # causal, bidirectional, or encoder-decoder
    windows: str = ""  # the layers with a sliding window: none, all, late, or periodic
    keys: Mapping[str, str] = {}  # this family's names for the usual keys
    positions_follow_padding: bool = False  # position 0 is the one after the padding index


_QV = ("q_proj", "v_proj")
_BASE: dict[str, Any] = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
_BASE |= {"num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048}
_MISTRAL_SAYS: dict[str, Any] = _BASE | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_MISTRAL_SAYS |= {"sliding_window": 4096}
_QWEN_SAYS: dict[str, Any] = _BASE | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
_QWEN_SAYS |= {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA_SAYS: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
}
_GEMMA_SAYS |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192}
_GEMMA_SAYS |= {"tie_word_embeddings": True}
_GEMMA2_SAYS: dict[str, Any] = _GEMMA_SAYS | {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
_GEMMA2_SAYS |= {"num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096, "window_period": 2}
_GEMMA3_SAYS: dict[str, Any] = _GEMMA2_SAYS | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "window_period": 6,
}
_PHI3_SAYS: dict[str, Any] = _BASE | {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "sliding_window": None,
}
_PHI3_SAYS |= {"max_position_embeddings": 4096}
_GPT2_SAYS: dict[str, Any] = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "intermediate_size": None,
    "num_hidden_layers": 12,
}
_GPT2_SAYS |= {"num_attention_heads": 12, "max_position_embeddings": 1024, "tie_word_embeddings": True}
_BIGCODE_SAYS: dict[str, Any] = _GPT2_SAYS | {"multi_query": True, "num_key_value_heads": 1}
_GPT2_KEYS = {"hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer"}
_GPT2_KEYS |= {"num_attention_heads": "n_head", "max_position_embeddings": "n_positions"}
_NEOX_SAYS: dict[str, Any] = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
}
_NEOX_SAYS |= {"num_attention_heads": 64, "max_position_embeddings": 2048, "attention_bias": True}
_T5_SAYS: dict[str, Any] = {
    "vocab_size": 32128,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "head_dim": 64,
}
_T5_SAYS |= {"num_attention_heads": 8, "num_decoder_layers": None, "relative_attention_num_buckets": 32}
_T5_SAYS |= {"feed_forward_proj": "relu", "tie_word_embeddings": True}
_MT5_SAYS: dict[str, Any] = _T5_SAYS | {"vocab_size": 250112, "intermediate_size": 1024, "num_hidden_layers": 8}
_MT5_SAYS |= {"num_attention_heads": 6, "feed_forward_proj": "gated-gelu"}
_T5_KEYS = {"hidden_size": "d_model", "intermediate_size": "d_ff", "num_hidden_layers": "num_layers"}
_T5_KEYS |= {"num_attention_heads": "num_heads", "head_dim": "d_kv"}
_BERT_SAYS: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
}
_BERT_SAYS |= {"num_attention_heads": 12, "max_position_embeddings": 512, "type_vocab_size": 2, "pad_token_id": 1}
_DISTILBERT_KEYS = {"hidden_size": "dim", "intermediate_size": "hidden_dim", "num_hidden_layers": "n_layers"}
_DISTILBERT_KEYS |= {"num_attention_heads": "n_heads"}

_DECODER = _decoder_heads("model.")
_T5_HEADS = {_PAIR: ("", _LM_HEAD), BODY: ("", "")}
_T5_HEADS |= {_CLASSES: ("transformer.", _TWO_LAYERS.format("classification_head"))}
_ROBERTA = _encoder_heads("roberta.", _TWO_LAYERS.format("classifier"))
_BOTH, _ALL = "encoder-decoder", "bidirectional"

FAMILIES: dict[str, Family] = {
    "llama": Family(_LLAMA, _DECODER, _QV, _BASE),
    "mistral": Family(_MISTRAL, _DECODER, _QV, _MISTRAL_SAYS, windows="all"),
    "qwen2": Family(_QWEN2, _DECODER, _QV, _QWEN_SAYS, windows="late"),
    "qwen3": Family(_GEMMA + _QK_NORMS, _DECODER, _QV, _QWEN_SAYS | {"head_dim": 128}, windows="late"),
    "gemma": Family(_GEMMA, _DECODER, _QV, _GEMMA_SAYS),
    "gemma2": Family(_GEMMA + _FEEDFORWARD_NORMS, _DECODER, _QV, _GEMMA2_SAYS, windows="periodic"),
    "gemma3_text": Family(
        _GEMMA + _FEEDFORWARD_NORMS + _QK_NORMS,
        _DECODER,
        _QV,
        _GEMMA3_SAYS,
        windows="periodic",
        keys={"window_period": "sliding_window_pattern"},
    ),
    "phi3": Family(_PHI3, _DECODER, ("qkv_proj",), _PHI3_SAYS, windows="all"),
    "gpt2": Family(_GPT2, _decoder_heads("transformer."), ("c_attn",), _GPT2_SAYS, keys=_GPT2_KEYS),
    "gpt_bigcode": Family(_GPT_BIGCODE, _decoder_heads("transformer."), ("c_attn",), _BIGCODE_SAYS, keys=_GPT2_KEYS),
    "gpt_neox": Family(_GPT_NEOX, _decoder_heads("gpt_neox."), ("query_key_value",), _NEOX_SAYS),
    "t5": Family(_T5, _T5_HEADS, ("q", "v"), _T5_SAYS, _BOTH, keys=_T5_KEYS),
    "mt5": Family(_T5, _T5_HEADS, ("q", "v"), _MT5_SAYS, _BOTH, keys=_T5_KEYS),
    "bert": Family(_BERT, _encoder_heads("bert.", _BERT_HEAD), ("query", "value"), _BERT_SAYS, _ALL),
    "roberta": Family(
        _BERT, _ROBERTA, ("query", "value"), _BERT_SAYS | {"vocab_size": 50265}, _ALL, positions_follow_padding=True
    ),
    "xlm-roberta": Family(_BERT, _ROBERTA, ("query", "value"), _BERT_SAYS, _ALL, positions_follow_padding=True),
    "distilbert": Family(
        _DISTILBERT,
        _encoder_heads("distilbert.", _DISTILBERT_HEAD),
        ("q_lin", "v_lin"),
        _BERT_SAYS | {"num_hidden_layers": 6},
        _ALL,
        keys=_DISTILBERT_KEYS,
    ),
}

# ---- how they can be computed, by transformers' `model_type` ----

# whose documents can be laid end to end: held against single documents in the tests of attention
DECODERS = frozenset(
    {
        *("arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2"),
        *("gpt_bigcode", "gpt_neox", "granite", "helium", "llama", "ministral", "mistral", "mixtral", "olmo", "olmo2"),
        *("olmo3", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2"),
    }
)
ENCODERS = frozenset({"bert", "camembert", "electra", "roberta", "xlm-roberta"})
FLAT = {_NEXT: DECODERS, _CLASSES: DECODERS | ENCODERS}  # by the head of a task; other tasks are padded
WHY_NOT_FLAT = {
    "bloom": "its scores are biased by the distance of tokens (ALiBi)",
    "mpt": "its scores are biased by the distance of tokens (ALiBi)",
    "falcon": "its attention takes no other implementation",
    "t5": "its scores are biased by the distance of tokens",
    "mt5": "its scores are biased by the distance of tokens",
}

# whose forward pass ends in: hidden states, perhaps scaled, one matrix, perhaps a soft cap; held against the plain path
CAUSAL_FAMILIES = frozenset(
    {
        *(
            "cohere",
            "cohere2",
            "gemma",
            "gemma2",
            "gemma3_text",
            "gpt2",
            "gpt_neox",
            "granite",
            "llama",
            "mistral",
            "phi",
        ),
        *("phi3", "qwen2", "qwen3"),
    }
)
SEQ2SEQ_FAMILIES = frozenset({"t5", "mt5"})
KNOWN_HEADS = {_NEXT: CAUSAL_FAMILIES, _PAIR: SEQ2SEQ_FAMILIES}  # by the head of a task

# by the head of a task, whose result for an example is the same with padding to the right of its input as without: held
# against single examples in the tests; of other families a padded micro-batch has inputs of one length
PADS_SAFELY = {
    _CLASSES: DECODERS
    | ENCODERS
    | frozenset(
        {
            *(
                "albert",
                "bart",
                "biogpt",
                "bloom",
                "ctrl",
                "data2vec-text",
                "deberta",
                "deberta-v2",
                "diffllama",
                "distilbert",
            ),
            *(
                "ernie",
                "esm",
                "eurobert",
                "falcon",
                "flaubert",
                "gpt-sw3",
                "layoutlm",
                "longformer",
                "mbart",
                "megatron-bert",
            ),
            *("minicpm3", "modernbert", "modernbert-decoder", "mpnet", "mpt", "mt5", "mvp", "nemotron", "nomic_bert"),
            *("openai-gpt", "persimmon", "phimoe", "plbart", "rembert", "roberta-prelayernorm", "roformer", "seed_oss"),
            *("squeezebert", "stablelm", "t5", "umt5", "xlm", "xlm-roberta-xl"),
        }
    ),
    _PAIR: frozenset(
        {
            *(
                "bart",
                "bigbird_pegasus",
                "blenderbot",
                "blenderbot-small",
                "led",
                "longt5",
                "m2m_100",
                "marian",
                "mbart",
                "mt5",
            ),
            *("mvp", "pegasus", "pegasus_x", "plbart", "t5", "umt5"),
        }
    ),
}
