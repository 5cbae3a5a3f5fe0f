"""Bad input through the front door: exit code 2, the place, what to do, no traceback, and nothing
left behind.
"""

import copy
import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import farthing
import farthing.train.run
import farthing.train.saver
from desk import ROWS, Desk, left_behind
from farthing.errors import DiskFullError
from workshop import make_job, opened, read_json, with_gpu

Spoil = Callable[[Desk], None]


# ---- what must be refused ----
# Each spoils the desk; then the words that must be there: the place, and what to do.


def sets(section: str, **keys) -> Spoil:
    return lambda desk: desk.set(section, **keys)


def holds(content: bytes, name: str = "train.jsonl") -> Spoil:
    return lambda desk: desk.bytes(content, name)


def asks(**keys) -> Spoil:
    return lambda desk: desk.values.update(keys)


def folder_without_tokenizer(desk: Desk):
    for path in desk.own_model().glob("tokenizer*"):
        path.unlink()


def folder_without_weights(desk: Desk):
    (desk.own_model() / "model.safetensors").unlink()


def weights_as_a_pickle(desk: Desk):
    folder = desk.own_model()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def damaged_weights(desk: Desk):
    path = desk.own_model() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def missing_shard(desk: Desk):
    folder = desk.own_model()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {
        "model.embed_tokens.weight": "model-00001-of-00002.safetensors",
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": shards})
    )


def config_that_is_no_json(desk: Desk):
    (desk.own_model() / "config.json").write_text("{")


def tokenizer_larger_than_the_model(desk: Desk):
    path = desk.own_model() / "config.json"
    path.write_text(json.dumps({**read_json(path), "vocab_size": 100}))


def qlora_without_bitsandbytes(desk: Desk):
    desk.values["model"] = str(desk.with_weights)
    desk.values["method"] = "qlora"


def template_with_a_mistake(desk: Desk):
    desk.bytes(b"{% for m in messages %}", "chat.jinja")
    desk.rows(
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    )
    desk.set("data", chat_template="chat.jinja")


def columns_of_another_task(desk: Desk):
    desk.classify("llama")
    desk.rows([{"left": "x", "label": "y"}])


def nothing_left_to_hold_out(desk: Desk):
    desk.rows([ROWS[0]] * 8)
    desk.set("data", eval_fraction=0.5)


BAD: list[tuple[Spoil, list[str]]] = [
    (
        sets("data", train="trian.jsonl"),
        ["trian.jsonl: no such file", "did you mean", "train.jsonl?"],
    ),
    (
        holds(b'{"text": "a"}\n{"text": \n{"text": "c"}\n'),
        [
            "train.jsonl:2: invalid JSON at column 10: Expecting value",
            "1 of 3 rows",
            "data.max_bad_rows: 0.34",
        ],
    ),
    (holds(b"\n\n"), ["train.jsonl: no rows", "check how"]),
    (folder_without_tokenizer, ["/model: no tokenizer in the", "model.tokenizer_name_or_path"]),
    (folder_without_weights, ["/model: no weights (*.safetensors)", "model.init: random"]),
    (
        weights_as_a_pickle,
        ["/model: weights only as a pickle (pytorch_model.bin)", "convert them to safetensors"],
    ),
    (damaged_weights, ["/model: can't be loaded for causal-lm", "to do:"]),
    (
        missing_shard,
        ["/model: can't be loaded for causal-lm", "model-00002-of-00002.safetensors", "to do:"],
    ),
    (config_that_is_no_json, ["/model/config.json: config.json is not JSON", "to do:"]),
    (
        tokenizer_larger_than_the_model,
        ["/model: the tokenizer has", "the model embeds 100", "model's own tokenizer"],
    ),
    (
        sets("model", attn_implementation="flash_attention_2"),
        ["lashAttention", "leave model.attn_implementation out"],
    ),
    (sets("model", attn_implementation="fast"), ["fast", "leave model.attn_implementation out"]),
    (
        qlora_without_bitsandbytes,
        ["method: qlora: ", "bitsandbytes", "pip install 'farthing[gpu]'"],
    ),
    (
        sets("train", optim="adamw_8bit"),
        ["adamw_8bit", "bitsandbytes", "pip install 'farthing[gpu]'"],
    ),
    (
        asks(method={"name": "lora", "target_modules": ["q_prj"]}),
        ["method.target_modules: this model has no module", "q_proj"],
    ),
    (sets("where", device="cuda"), ["where.device: no CUDA GPU", "where.device: auto"]),
    (
        sets("where", device="cuda:1"),
        ["job.yaml:{device}: `where.device` can't be 'cuda:1'", "CUDA_VISIBLE_DEVICES"],
    ),
    (holds(b"in the way", "run"), ["/run: the run folder can't be written", "another output_dir"]),
    (holds(b"in the way", "cache"), ["/cache: the token cache can't be written", "set cache_dir"]),
    (
        template_with_a_mistake,
        [
            "train.jsonl:1: the chat template refuses it",
            "to do: correct these rows: none can be used",
        ],
    ),
    (
        columns_of_another_task,
        ["train.jsonl: the columns (label, left)", "{{text: narrative, label: product}}"],
    ),
    (nothing_left_to_hold_out, ["train.jsonl: too few distinct inputs", "data.eval"]),
]


@pytest.mark.parametrize(("spoil", "words"), BAD, ids=[words[0] for _, words in BAD])
def test_bad_input_is_refused_with_its_place_and_what_to_do(desk, run, monkeypatch, spoil, words):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with_gpu(monkeypatch, is_available=False)
    spoil(desk)
    desk.job()
    said = run(code=2)
    assert said.err.startswith("farthing: ")
    assert "Traceback" not in said.out + said.err
    for word in words:
        expected = re.sub(
            r"\{(\w+)\}", lambda match: str(desk.line_of(match[1])), word.replace("{{", "\0")
        )
        assert expected.replace("\0", "{").replace("}}", "}") in said.err, said.err
    assert left_behind(desk.folder / "run") == set()


def test_a_full_disk_is_refused_before_the_first_step(desk, run, monkeypatch):
    full = SimpleNamespace(total=1000, used=0, free=1000)
    monkeypatch.setattr(farthing.train.saver.shutil, "disk_usage", lambda path: full)
    said = run()
    assert said.code == 75, "the same command resumes where there is room"
    assert "1000 B are free" in said.err
    assert "make room" in said.err
    assert left_behind(desk.folder / "run") == set()


def test_a_disk_has_room_for_two_saves_more_than_are_kept(tmp_path, monkeypatch):
    with opened(make_job(tmp_path, optim="sgd", save_total_limit=3)) as attempt:
        n_bytes = 5 * sum(weight.nbytes for weight in attempt.model.parameters())
        for free in (n_bytes, n_bytes - 1):
            room = SimpleNamespace(free=free)
            monkeypatch.setattr(
                farthing.train.saver.shutil, "disk_usage", lambda _, room=room: room
            )
            with pytest.raises(DiskFullError) if free < n_bytes else nullcontext():
                attempt.saver.refuse_small_disk()


def test_one_row_and_a_bad_one_under_the_allowed_share_train(desk, run):
    """Fewer rows than a batch has examples."""
    desk.bytes(b'{"prompt": "one two", "completion": " three"}\n{"prompt": \n')
    desk.set("data", max_bad_rows=0.5)
    said = run("--json", code=0)
    assert json.loads(said.out)["steps"] == 2
    assert "train.jsonl:2" in said.err + said.out
    assert "invalid JSON" in said.err + said.out
    assert (desk.folder / "run/model/config.json").exists()


# ---- a run whose inputs change ----


def other_data(desk: Desk):
    desk.rows([*ROWS[:-1], ROWS[0]])


def rows_in_another_order(desk: Desk):
    desk.rows(ROWS[::-1])


def other_tokenizer(desk: Desk):
    path = desk.folder / "model/tokenizer.json"
    path.write_text(
        path.read_text()
        .replace('"add_prefix_space": false', '"add_prefix_space": true')
        .replace('"add_prefix_space":false', '"add_prefix_space":true')
    )


def other_weights(desk: Desk):
    path = desk.folder / "model/model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def other_template(desk: Desk):
    desk.bytes(b"{% for m in messages %}{{ m.content }}{% endfor %}", "chat.jinja")
    desk.set("data", chat_template="chat.jinja")


MODEL_FILES = ("model/tokenizer.json", "model/model.safetensors")
CHANGES: list[tuple[Spoil, str]] = [
    (other_data, "data.train (content)"),
    (rows_in_another_order, "data.train (content)"),
    (other_tokenizer, "tokenizer (content)"),
    (other_template, "tokenizer (content)"),
    (other_weights, "model (content)"),
    (sets("train", learning_rate=0.002), "train.learning_rate: 0.001 -> 0.002"),
    (sets("train", global_batch_size=8), "train.global_batch_size: 4 -> 8"),
    (sets("data", max_length=48), "tokenization.max_length: 64 -> 48"),
]


def test_a_run_is_not_continued_with_anything_else_and_says_what_changed(desk, run):
    desk.own_model()
    run(code=0)
    files = [desk.folder / name for name in ("train.jsonl", *MODEL_FILES)]
    before, whole = copy.deepcopy(desk.values), {path: path.read_bytes() for path in files}
    weights = (desk.folder / "run/model/model.safetensors").read_bytes()
    for change, named in CHANGES:
        change(desk)
        said = run()
        assert said.code == 2, named
        assert "this folder holds a run of something else" in said.err
        assert named in said.err, said.err
        assert "another output_dir" in said.err
        assert said.err.count(" -> ") == 1, said.err  # that, and nothing more
        desk.values = copy.deepcopy(before)
        for path, content in whole.items():
            path.write_bytes(content)
    assert (desk.folder / "run/model/model.safetensors").read_bytes() == weights
    said = run(code=0)
    assert "finished already" in said.out
