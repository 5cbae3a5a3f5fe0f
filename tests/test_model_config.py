"""Where a config.json is found, and the table of known models against real configurations and
published totals.
"""

import json
import socket

import pytest

from farthing.errors import ModelError
from farthing.models.model_config import (
    cached_snapshot,
    find_config,
    hub_cache,
    known_config,
    known_models,
    nearest_known,
)
from farthing.models.shapes import read_shape
from web import Pages

# parameters as the Hub's pages and the papers have them; encoders with their pooler
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-Instruct-v0.2": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mixtral-8x22B-v0.1": 140_620_634_112,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-0.6B-Base": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-4B-Base": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-8B-Base": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-14B-Base": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-7b": 8_537_680_896,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-pt": 999_885_952,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-3-mini-128k-instruct": 3_821_079_552,
    "microsoft/Phi-3-medium-4k-instruct": 13_960_238_080,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "distilbert/distilgpt2": 81_912_576,
    "EleutherAI/pythia-70m": 70_426_624,
    "EleutherAI/pythia-160m": 162_322_944,
    "EleutherAI/pythia-410m": 405_334_016,
    "EleutherAI/pythia-1b": 1_011_781_632,
    "EleutherAI/pythia-1.4b": 1_414_647_808,
    "EleutherAI/pythia-2.8b": 2_775_208_960,
    "EleutherAI/pythia-6.9b": 6_857_302_016,
    "EleutherAI/pythia-12b": 11_846_072_320,
    "EleutherAI/gpt-neox-20b": 20_554_567_680,
    "google-t5/t5-small": 60_506_624,
    "google-t5/t5-base": 222_903_552,
    "google-t5/t5-large": 737_668_096,
    "google-t5/t5-3b": 2_851_598_336,
    "google-t5/t5-11b": 11_307_321_344,
    "google/flan-t5-small": 76_961_152,
    "google/flan-t5-base": 247_577_856,
    "google/flan-t5-large": 783_150_080,
    "google/flan-t5-xl": 2_849_757_184,
    "google/flan-t5-xxl": 11_135_332_352,
    "google/mt5-small": 300_176_768,
    "google/mt5-base": 582_401_280,
    "google/mt5-large": 1_229_581_312,
    "google/mt5-xl": 3_742_619_648,
    "google-bert/bert-base-uncased": 109_482_240,
    "google-bert/bert-large-uncased": 335_141_888,
    "google-bert/bert-base-cased": 108_310_272,
    "google-bert/bert-large-cased": 333_579_264,
    "google-bert/bert-base-multilingual-cased": 177_853_440,
    "FacebookAI/roberta-base": 124_645_632,
    "FacebookAI/roberta-large": 355_359_744,
    "distilbert/distilroberta-base": 82_118_400,
    "FacebookAI/xlm-roberta-base": 278_043_648,
    "FacebookAI/xlm-roberta-large": 559_890_432,
    "distilbert/distilbert-base-uncased": 66_362_880,
    "distilbert/distilbert-base-cased": 65_190_912,
    "distilbert/distilbert-base-multilingual-cased": 134_734_080,
    "sentence-transformers/all-MiniLM-L6-v2": 22_713_216,
    "microsoft/MiniLM-L12-H384-uncased": 33_360_000,
    "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2": 117_653_760,
}


@pytest.fixture(autouse=True)
def _no_cache_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("name", list(known_models()["models"]))
def test_known_models_have_their_published_size(name):
    config = known_config(name)
    shape = read_shape(config)
    pooler = (
        shape.hidden * (shape.hidden + 1)
        if config["model_type"] in ("bert", "roberta", "xlm-roberta")
        else 0
    )
    assert shape.n_parameters + pooler == PUBLISHED[name]


def test_the_table_is_whole():
    table = known_models()
    assert set(table["models"]) == set(PUBLISHED)
    assert {"source", "date"} <= set(table)
    assert not set(table["same_as"]) & set(table["models"])
    assert set(table["same_as"].values()) <= set(table["models"])


def test_the_table_says_what_real_configurations_say(data_dir):
    table = known_models()
    names = {name.rpartition("/")[2]: name for name in (*table["same_as"], *table["models"])}
    paths = sorted(data_dir.glob("model_configs/*/config.json"))
    assert len(paths) >= 17
    for path in paths:
        real, known = json.loads(path.read_text()), known_config(names[path.parent.name])
        assert {key: real.get(key) for key in known} == known
        for task in (None, "body"):
            assert read_shape(known, task) == read_shape(real, task)


def test_a_local_folder_comes_first(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        find_config(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert find_config(str(tmp_path)) == ({"model_type": "llama"}, f"config.json in {tmp_path}")
    for content in ("[1]", "{", "\xff"):
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(ModelError, match=r"JSON|object|UTF-8"):
            find_config(str(tmp_path))


def test_then_the_cache_of_the_hub():
    commit, older = "a" * 40, "b" * 40
    folder = hub_cache() / "models--openai-community--gpt2"
    for name in (commit, older):
        (folder / "snapshots" / name).mkdir(parents=True)
        (folder / "snapshots" / name / "config.json").write_text(
            json.dumps({"model_type": name[0]})
        )
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    config, words = find_config("openai-community/gpt2")
    assert config == {"model_type": "a"}
    assert "cache" in words
    assert find_config("openai-community/gpt2", older)[0] == {"model_type": "b"}
    assert find_config("openai-community/gpt2", "v9")[0]["model_type"] == "gpt2", (
        "the table, for want of that revision"
    )
    assert cached_snapshot("openai-community/gpt2", "../../../etc") is None
    assert cached_snapshot("../x") is None


@pytest.mark.parametrize(
    ("name", "value", "folder"),
    [
        ("HF_HUB_CACHE", "/c", "/c"),
        ("HF_HOME", "/h", "/h/hub"),
        ("HF_HOME", "~/h", "/me/h/hub"),
        ("XDG_CACHE_HOME", "/x", "/x/huggingface/hub"),
        ("NOTHING", "", "/me/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(name, value, folder, monkeypatch):
    for other in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("HOME", "/me")
    monkeypatch.setenv(name, value)
    assert str(hub_cache()) == folder


def test_then_the_table_with_its_mirrors():
    config, words = find_config("unsloth/Llama-3.2-1B")
    assert config["hidden_size"] == 2048
    assert known_models()["date"] in words
    assert "revision" in find_config("EleutherAI/pythia-70m", "step3000")[1]
    config["hidden_size"] = 1
    assert find_config("unsloth/Llama-3.2-1B")[0]["hidden_size"] == 2048, "a copy, not the table"


def test_names_that_are_not_known():
    wrong, near = "qwen/qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B-Instruct"
    with pytest.raises(ModelError) as caught:
        find_config(wrong)
    assert f"did you mean {near}?" in caught.value.to_do
    for wrong in ("/no/such/folder", "./none", "a/b/c", "a b", "https://x.y/z", ""):
        with pytest.raises(ModelError, match=r"no such folder|no config"):
            find_config(wrong)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("meta-llama/Llama-4-Scout-17B-16E", ""),
        ("somebody/entirely-different", ""),
        ("gpt_2", "gpt2"),
        ("Qwen/Qwen4-8B", ""),
        ("google/gemma-4-2b", ""),
        ("meta-llama/Lama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
        ("mistralai/Mistral-7B-v01", "mistralai/Mistral-7B"),
        ("EleutherAI/gpt-neox20b", "EleutherAI/gpt-neox-20b"),
    ],
)
def test_a_model_of_another_version_is_not_what_was_meant(name, near):
    assert nearest_known(name).startswith(near)
    assert bool(nearest_known(name)) == bool(near)


@pytest.fixture
def hub(monkeypatch):
    """A Hub on this machine that has one model, and one behind a gate; what it was asked."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    pages = Pages(
        {
            "/me/own/resolve/main/config.json": b'{"model_type": "llama"}',
            "/me/own/resolve/refs%2Fpr%2F1/config.json": b"{}",
            "/me/large/resolve/main/config.json": b" " * (2 << 20),
            "/me/ill/resolve/main/config.json": (500, b""),
            "/me/gated/resolve/main/config.json": (401, b""),
        }
    )
    with pages.served():
        monkeypatch.setenv("HF_ENDPOINT", pages.address)
        yield pages.asked


def test_last_the_hub_itself(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert find_config("me/own") == ({"model_type": "llama"}, "config.json of me/own on the Hub")
    assert find_config("me/own", "refs/pr/1")[0] == {}
    assert hub[0] == ("/me/own/resolve/main/config.json", None), "no token over plain http"
    for name, words in (
        ("me/gated", "HF_TOKEN"),
        ("me/none", "revision"),
        ("me/ill", "500"),
        ("me/large", "larger"),
    ):
        with pytest.raises(ModelError, match=words) as caught:
            find_config(name)
        assert "secret" not in str(caught.value)
    n_asked = len(hub)
    find_config("openai-community/gpt2")
    with pytest.raises(ModelError, match="not found"):
        find_config("me/own", ask_hub=False)
    assert len(hub) == n_asked


def test_a_hub_that_is_not_there(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ModelError, match="can't be reached"):
            find_config("me/own")
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc")
    with pytest.raises(ModelError, match="HF_ENDPOINT"):
        find_config("me/own")
