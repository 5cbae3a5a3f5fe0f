"""GGUF files and compressed-tensors folders: refused where they would be another model, judged, and
loaded for real.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

import workshop
from exported import body_of
from exported_families import FAMILIES, make_family
from farthing.errors import FarthingError, InputError
from farthing.export import compressed
from farthing.export.compressed import plan_compressed, write_compressed
from farthing.export.gguf_families import family_of, settings_of
from farthing.export.gguf_file import plan_gguf, read_back, write_gguf
from farthing.export.gguf_tokens import tokenizer_settings
from farthing.export.modelfile import modelfile
from llama_cpp import LlamaCpp, greedy_of
from workshop import make_folder, read_json, read_rows, rows_of

needs_gguf = pytest.mark.skipif(not find_spec("gguf"), reason="pip install 'farthing[gguf]'")
needs_compressed = pytest.mark.skipif(
    not find_spec("compressed_tensors"), reason="pip install 'farthing[export]'"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The run of a small Llama that has learned its rows."""
    folder = tmp_path_factory.mktemp("trained")
    held_out = rows_of("llama", 24, 9)
    return workshop.trained(folder, n_rows=120, eval_rows=held_out, max_steps=10)


def export(run: Path, folder: Path, form: str, *words: str) -> list[object]:
    """The words of `farthing export`."""
    return ["export", run, "--output", folder, "--format", form, *words]


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "activation"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic",
        ),
        ("gemma2", {"query_pre_attn_scalar": 77}, "query_pre_attn_scalar"),
        ("gemma2", {"layer_types": ["full_attention"] * 26}, "layer_types"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_weights"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen3_moe", {}, "qwen3_moe"),
        ("gemma2", {"sliding_window": None}, "layer_types"),
        ("gemma2", {"final_logit_softcapping": None}, "logit_softcapping"),
        ("gemma2", {"num_hidden_layers": 46}, "query_pre_attn_scalar"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "logit_softcapping"),
        ("gpt2", {"add_cross_attention": True}, "scale_attn_weights"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused_by_its_key(family, changes, words):
    config = transformers.AutoConfig.for_model(family, **changes)
    with pytest.raises(Exception, match=r"llama\.cpp does not compute") as refused:
        family_of(config, "causal-lm")
    assert words in str(refused.value)


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "pad_token_id": 0}
SMALL |= {"num_hidden_layers": 2, "num_key_value_heads": 1, "vocab_size": 99}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "rms_norm_eps": 1e-3}
BANDS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BANDS |= {"original_max_position_embeddings": 64, "rope_theta": 5e5, "rope_type": "llama3"}
LONG = {"long_factor": [2.0] * 8, "short_factor": [1.5] * 8, "rope_type": "longrope"}
LONG |= {"original_max_position_embeddings": 64, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("family", "changes", "settings", "factors"),
    [
        ("mistral", {"sliding_window": 16}, {"context_length": 16}, {}),
        ("mistral", {"sliding_window": 256}, {}, {}),
        (
            "llama",
            {"rope_parameters": BANDS},
            {"rope_freq_base": 5e5},
            {"rope_freqs.weight": [1.0, 2.44226] + [8.0] * 6},
        ),
        (
            "gemma2",
            {**GEMMA, "num_hidden_layers": 46},
            {"layer_norm_rms_eps": 1e-3, "sliding_window": 8, "block_count": 46}
            | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            {},
        ),
        (
            "gemma3_text",
            {**GEMMA, "num_hidden_layers": 6},
            {"layer_norm_rms_eps": 1e-3, "sliding_window": 8, "block_count": 6}
            | {"rope_freq_base": 1e6, "rope_freq_base_swa": 1e4},
            {},
        ),
        (
            "phi3",
            {"rope_parameters": LONG, "original_max_position_embeddings": 64},
            {"rope_scaling_orig_ctx_len": 64, "layer_norm_rms_eps": 1e-5}
            | {"rope_scaling_attn_factors": pytest.approx((4 / 3) ** 0.5)},
            {"rope_factors_long.weight": [2.0] * 8, "rope_factors_short.weight": [1.5] * 8},
        ),
    ],
)
def test_llama_cpp_is_told_how_a_family_computes(family, changes, settings, factors):
    changes = {**SMALL, "max_position_embeddings": 256, **changes}
    config = transformers.AutoConfig.for_model(family, **changes)
    found, tensors, _ = settings_of(config, family_of(config, "causal-lm"))
    usual = {"context_length": 256, "embedding_length": 32, "block_count": 2, "head_count": 2}
    usual |= {"feed_forward_length": 64, "head_count_kv": 1, "key_length": 16, "value_length": 16}
    usual |= {"rope_freq_base": 1e4, "rope_dimension_count": 16, "layer_norm_rms_eps": 1e-6}
    assert found == usual | settings
    assert {name: each.tolist() for name, each in tensors.items()} == {
        name: pytest.approx(each, rel=1e-5) for name, each in factors.items()
    }


@needs_gguf
@pytest.mark.parametrize(
    ("family", "bits"), [("llama", "f16"), ("gemma", "q4_0"), ("gpt2", "q8_0")]
)
def test_a_file_holds_the_weights_by_llama_cpp_s_names_and_kinds(
    family, bits, tmp_path, tokenizers
):
    gguf, sizes = __import__("gguf"), {**SMALL, "head_dim": 16, "n_inner": 48, "vocab_size": 2000}
    sizes |= {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}
    config = transformers.AutoConfig.for_model(family, **sizes, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    plan = plan_gguf(config, tokenizers["llama"], "causal-lm", bits, "Phi-3 x", is_chat=False)
    write_gguf(plan, tmp_path, tmp_path / "model.gguf", bits)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    kinds = {each.name: each.tensor_type.name for each in reader.tensors}
    fine = {"f16": "F16", "q4_0": "Q8_0", "q8_0": "Q8_0"}[bits]
    assert kinds["token_embd.weight"] == fine
    assert kinds["blk.0.ffn_down.weight"] == {"q8_0": "F16"}.get(bits, bits.upper())  # 48: no block
    assert kinds["output_norm.weight"] == kinds.get("position_embd.weight", "F32") == "F32"
    value = {name: field.contents() for name, field in reader.fields.items()}
    assert value["general.name"] == "phi 3 x"
    if family != "gpt2":
        scaling = value[f"{family}.rope.scaling.type"], value[f"{family}.rope.scaling.factor"]
        assert scaling == ("linear", 4.0)
    assert (value["general.file_type"], value[f"{family}.vocab_size"]) == (
        {"f16": 1, "q4_0": 2, "q8_0": 7}[bits],
        2000,
    )
    state, data = model.state_dict(), {each.name: each.data for each in reader.tensors}
    assert {*data["output_norm.weight"].tolist()} == {1.0}, "Gemma's are one less"
    if family == "llama":  # llama.cpp turns neighbours, not halves
        keys = state["model.layers.0.self_attn.k_proj.weight"]
        pairs = keys[torch.arange(16).reshape(2, 8).T.flatten()].half()
        assert torch.equal(torch.from_numpy(data["blk.0.attn_k.weight"].copy()), pairs)
    for name, weight in read_back(plan, tmp_path / "model.gguf", tmp_path):
        torch.testing.assert_close(
            weight, state[name], rtol=0, atol=1e-2 if bits == "q4_0" else 5e-4
        )


def bpe_of(pieces: str, merges: list[tuple[str, str]], **how) -> tokenizers.Tokenizer:
    vocab = {piece: index for index, piece in enumerate(pieces.split())}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, **how))
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>"])
    return backend


def said_of(backend: tokenizers.Tokenizer) -> tuple[dict[str, Any], list[str]]:
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    return tokenizer_settings(made, 12, is_chat=True)


def test_pieces_have_their_kinds_and_the_ranks_of_their_merges():
    merges, how = [("a", "b"), ("▁", "ab")], {"unk_token": "<unk>", "byte_fallback": True}
    backend = bpe_of("<unk> <s> <0x41> ▁ a b ab ▁ab zz", merges, **how)
    steps = tokenizers.normalizers
    backend.normalizer = steps.Sequence([steps.Prepend("▁"), steps.Replace(" ", "▁")])
    backend.add_tokens([tokenizers.AddedToken("▁x", normalized=False)])
    found, notes = said_of(backend)
    assert found["token_list"][8:] == ["zz", " x", "[PAD10]", "[PAD11]"]
    assert found["token_types"] == [2, 3, 6, *[1] * 6, 4, 5, 5]
    assert found["token_scores"] == [0, 0, 0, 0, 0, 0, 0, -1, -1e9, 0, 0, 0]
    assert (found["tokenizer_model"], found["add_space_prefix"], notes) == ("llama", True, [])
    assert (found["add_bos_token"], found["add_eos_token"], found["bos_token_id"]) == (1, 0, 1)


def test_bytes_are_split_as_llama_cpp_names_it_and_texts_in_other_forms_are_noted():
    backend = bpe_of("<unk> <s> a b ab", [("a", "b")])
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.normalizer = tokenizers.normalizers.NFC()
    found, notes = said_of(backend)
    assert (found["tokenizer_model"], found["tokenizer_pre"]) == ("gpt2", "gpt-2")
    assert (found["token_merges"], found["add_bos_token"]) == (["a b"], True)
    assert "form NFC" in notes[0]
    backend.normalizer = tokenizers.normalizers.NFKC()
    with pytest.raises(InputError, match="NFKC"):
        said_of(backend)
    backend.normalizer, backend.model.ignore_merges = tokenizers.normalizers.NFC(), True
    with pytest.raises(InputError, match="no name for how it splits"):
        said_of(backend)


@needs_gguf
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "gpt2"],
)
def test_every_weight_of_a_family_has_a_place_or_is_another_weight_too(family, is_tied, tokenizers):
    """In Gemma and Gemma 2 llama.cpp has no output layer of its own."""
    sizes = {**SMALL, "head_dim": 16, "query_pre_attn_scalar": 16, "vocab_size": 2000}
    config = transformers.AutoConfig.for_model(family, tie_word_embeddings=is_tied, **sizes)

    def planned():
        return plan_gguf(config, tokenizers["llama"], "causal-lm", "f32", "x", is_chat=False)

    if not is_tied and family in ("gemma", "gemma2"):
        with pytest.raises(FarthingError, match="has no place for one of the weights"):
            planned()
    else:
        assert planned().config is config


@needs_gguf
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_other_tasks_are_refused_before_a_byte_is_written(family, tmp_path, cli):
    run = workshop.trained(tmp_path, family, max_steps=1)
    before = sorted(os.listdir(tmp_path))
    assert "GGUF is written of models that continue a text" in cli.err(
        *export(run, tmp_path / "out", "gguf")
    )
    assert sorted(os.listdir(tmp_path)) == before


def test_a_template_is_said_in_the_language_of_ollama_or_not_at_all(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(make_folder(tmp_path / "base", "llama"))
    text, notes = modelfile(tokenizer, None, is_chat=False)
    assert 'TEMPLATE """{{ .Prompt }}"""' in text
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content"
        " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{%"
        " endif %}"
    )
    text, notes = modelfile(tokenizer, None)
    assert '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n{{ end }}' in text
    assert text.count("assistant\n") == 2
    assert "<s>" not in text, "llama.cpp puts it there itself"
    assert 'PARAMETER stop "</s>"' in text
    assert not notes
    tokenizer.chat_template = "{{ messages | length }} {{ messages[-1].content }}"
    text, notes = modelfile(tokenizer, None)
    assert "TEMPLATE" not in text
    assert "the Modelfile has none" in notes[0]


@pytest.mark.slow
def test_without_the_package_it_is_said_how_to_get_it(trained, tmp_path, monkeypatch, cli):
    for package, form in (("gguf", "gguf"), ("compressed_tensors.quantization", "fp8")):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        assert "pip install 'farthing[" in cli.err(*export(trained, tmp_path / "out", form))
    assert os.listdir(tmp_path) == []
    cli(*export(trained, tmp_path / "out", "merged", "--bits", "q8_0"), code=2)


@needs_gguf
def test_a_file_of_few_bits_is_refused_above_the_limit_unless_forced(trained, tmp_path, cli):
    four = export(trained, tmp_path / "four", "gguf", "--bits", "q4_0", "--max-kl", "0")
    (tmp_path / "four.draft-of-a-killed-one").mkdir()
    assert "so it was deleted" in cli.err(*four)
    assert os.listdir(tmp_path) == []
    judged = cli.json(*four, "--force")["judged"]
    assert judged["mean_kl"] > 0
    assert set(judged["merged"]) == set(judged["compressed"]) >= {"loss"}


@needs_gguf
def test_bits_of_llama_quantize_need_it(trained, tmp_path, monkeypatch, cli):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not on PATH" in cli.err(*export(trained, tmp_path / "out", "gguf", "--bits", "q4_k_m"))
    tool = tmp_path / "llama-quantize"
    tool.write_text('#!/bin/sh\n[ "$3" = Q4_K_M ] && /bin/cp "$1" "$2"\n')
    tool.chmod(0o755)
    words = ("gguf", "--bits", "q4_k_m", "--max-kl", "0")  # the tool changes nothing
    said = cli.json(*export(trained, tmp_path / "out", *words))
    judged = said["judged"]
    assert (judged["mean_kl"], judged["top1_agreement"], judged["n_examples"]) == (0.0, 1.0, 24)
    assert (said["bits"], said["method"]) == ("q4_k_m", "GGUF q4_k_m")
    assert read_json(tmp_path / "out/export.json")["judged"] == judged
    assert "## Form\n\nGGUF q4_k_m. Against the merged" in (tmp_path / "out/README.md").read_text()
    assert "PARAMETER stop" in (tmp_path / "out/Modelfile").read_text()
    tool.write_text('#!/bin/sh\n/bin/cp "$1" "$2"; echo no such kind >&2; exit 3\n')
    refused = export(trained, tmp_path / "no", "gguf", "--bits", "q4_k_m")
    assert "ended with 3: no such kind" in cli.err(*refused)
    assert sorted(os.listdir(tmp_path / "out")) == [
        "Modelfile",
        "README.md",
        "export.json",
        "model.gguf",
    ]


TINY = SMALL | {"vocab_size": 96, "hidden_size": 64, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}


@needs_compressed
@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("llama", "fp8"),
        ("llama", "w8a16"),
        ("llama", "w4a16"),
        ("gpt_neox", "w8a16"),
        ("mixtral", "fp8"),
        ("qwen3_moe", "w4a16"),
        ("falcon", "fp8"),
    ],
)
def test_a_compressed_folder_has_all_weights_in_plain_transformers(family, form, tmp_path):
    experts = dict.fromkeys(("num_experts", "num_local_experts"), 4)
    experts |= {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = transformers.AutoConfig.for_model(family, **TINY, **experts)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "whole", max_shard_size="60KB")
    (tmp_path / "few").mkdir()
    plan = plan_compressed(config, "causal-lm", form)
    write_compressed(plan, tmp_path / "whole", tmp_path / "few")
    parts = [load_file(path) for path in (tmp_path / "few").glob("*.safetensors")]
    assert read_json(tmp_path / "few/model.safetensors.index.json")["metadata"] == {
        "total_size": sum(tensor.nbytes for part in parts for tensor in part.values())
    }
    few, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "few", output_loading_info=True
    )
    assert not any(found.values()), "weights are missing, or nobody reads them"
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        wanted, got = model(ids).logits, few.eval()(ids).logits.float()
    off = float((got - wanted).norm() / wanted.norm())
    assert off < {"fp8": 0.3, "w8a16": 0.06, "w4a16": 0.5}[form]
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / name).glob("*.safetensors"))
        for name in ("few", "whole")
    ]
    assert sizes[0] < 0.45 * sizes[1]


@needs_compressed
@pytest.mark.parametrize(
    ("form", "hidden", "ffn", "group", "bits"),
    [("fp8", 72, 72, 0, 8), ("w8a16", 64, 64, 64, 8), ("w4a16", 256, 96, 128, 4)],
)
def test_weights_share_scales_in_the_largest_group_of_most_layers(form, hidden, ffn, group, bits):
    sizes = {**TINY, "hidden_size": hidden, "intermediate_size": ffn}
    config = transformers.AutoConfig.for_model("llama", **sizes)
    plan = plan_compressed(config, "causal-lm", form)
    weights = plan.settings.config_groups["group_0"].weights
    assert (plan.group, weights.num_bits, weights.symmetric) == (group, bits, True)
    odd = [f"model.layers.{at}.mlp.down_proj" for at in (0, 1)] if ffn == 96 else []
    assert plan.settings.ignore == ["lm_head", *odd]
    assert ("2 layers whose width" in plan.method, len(plan.layers)) == (bool(odd), 14 - len(odd))


@needs_compressed
@pytest.mark.parametrize(
    ("task", "family", "form", "words"),
    [
        ("seq2seq", "t5", "w4a16", "does not load a t5"),
        ("causal-lm", "falcon", "w8a16", "does not load a falcon"),
        ("causal-lm", "gpt2", "fp8", "none of the layers of a gpt2"),
        ("causal-lm", "llama", "w4a16", "width 72 is no multiple"),
    ],
)
def test_what_transformers_does_not_load_compressed_is_refused_by_its_family(
    task, family, form, words
):
    sizes = TINY | {"hidden_size": 72, "intermediate_size": 72} if family == "llama" else {}
    config = transformers.AutoConfig.for_model(family, **sizes)
    with pytest.raises(InputError, match=words):
        plan_compressed(config, task, form)


@needs_compressed
@pytest.mark.slow
def test_a_folder_that_lacks_weights_is_not_kept(trained, tmp_path, monkeypatch, cli):
    real = compressed.compressed_weight
    monkeypatch.setattr(
        compressed,
        "compressed_weight",
        lambda name, *rest: {} if "layers.0.mlp.up" in name else real(name, *rest),
    )
    assert "it finds no model.layers.0.mlp.up_proj.weight_packed" in cli.err(
        *export(trained, tmp_path / "out", "w8a16")
    )
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    cli(*export(trained, tmp_path / "out", "fp8"))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("name")["input_ids"]


@needs_compressed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form"),
    [("bert", "w4a16"), ("t5", "fp8"), ("llama", "fp8")],
)
def test_a_compressed_run_is_judged(family, form, tmp_path, cli):
    body_of(tmp_path / "base", family)
    keys = {"n_rows": 60, "pretrained": True, "method": "lora", "max_steps": 30}
    cli(*export(workshop.trained(tmp_path, family, **keys), tmp_path / "out", form))
    kept = read_json(tmp_path / "out/export.json")
    assert kept["judged"]["mean_kl"] < 0.1


@needs_gguf
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_answers_as_transformers_does(family, data_dir, tmp_path, cli):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not here: pip install xllamacpp")
    texts = [row["text"] for row in read_rows(data_dir / "complaints_narratives.jsonl")]
    make_family(tmp_path / "base", family, texts[:300])
    rows = read_rows(data_dir / "e2e_nlg_dev_test.jsonl")[:160]
    told = [{"prompt": row["input"], "completion": " " + row["target"]} for row in rows]
    keys = {"pretrained": True, "data": {"eval_fraction": 0.2}, "max_steps": 30}
    run = workshop.trained(tmp_path, rows=told, **keys)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    for bits in ("f32", "bf16"):
        cli(*export(run, tmp_path / bits, "gguf", "--bits", bits))
        engine = LlamaCpp(tmp_path / bits / "model.gguf")
        model = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
        if bits == "bf16":  # what the file holds
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim > 1:
                        parameter.copy_(parameter.bfloat16().float())
        prompt = tokenizer("name : The Mill , food : English , area : riverside")["input_ids"]
        ids, first = greedy_of(model, prompt, 32)
        found, found_first = engine.greedy(prompt, 32)
        # with bf16 it rounds activations too, on processors that multiply so: near ties fall
        n, apart = (32, 2e-3) if bits == "f32" else (4, 5e-3)
        assert found[:n] == ids[:n]
        assert abs(found_first - first) < apart
        if bits == "f32":
            texts = [text.strip() for text in texts if text.strip()][:1000]
            assert [
                i
                for i, text in enumerate(texts)
                if engine.tokenize(text) != tokenizer(text)["input_ids"]
            ] == []
