"""What is wrong with data and model is told at once: all of it, before torch is imported, and the
Hub is asked once.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from command import in_python
from desk import left_behind
from farthing.config.load import load_job
from farthing.config.preflight import look_over
from farthing.errors import DataError, InputError, ModelError, PreflightError
from thinned import thinned
from web import Pages
from workshop import Heard, job_file, make_job, train

HEAVY = ("torch", "transformers", "datasets", "peft")


def in_a_process(folder: Path, *argv: str, **environment: str) -> tuple[int, str, list[str]]:
    """Exit code, words, and which heavy packages the command has imported."""
    code = (
        "import sys\nfrom farthing.cli import main\ncode = main(sys.argv[1:])\nprint('HEAVY',"
        f" *[name for name in {HEAVY!r} if name in sys.modules])\nraise SystemExit(code)"
    )
    done = in_python(code, *argv, cwd=folder, env={**os.environ, **environment})
    out, _, heavy = done.stdout.rpartition("HEAVY")
    return done.returncode, out + done.stderr, heavy.split()


@pytest.mark.parametrize("verb", thinned(["train", "plan", "doctor", "probe"], 9))
def test_what_is_wrong_with_the_job_hides_nothing_of_its_data_and_model(verb, desk):
    desk.rows([{"left": "a", "right": "b"}])
    desk.rows([{"prompt": "a", "chosen": "b", "rejected": "c"}], "eval.jsonl")
    desk.set("data", eval="eval.jsonl")
    desk.values["model"] = "./no-such-model"
    desk.set("train", learning_rat=1e-4, num_train_epochs="many")
    desk.job()
    code, said, heavy = in_a_process(desk.folder, verb, "job.yaml", "--set", "method=lorra")
    assert code == 2
    assert heavy == [], said
    for words in (
        "unknown key `train.learning_rat`",
        "`train.num_train_epochs` can't be 'many'",
        "can't be 'lorra'",
        "train.jsonl: the columns (left, right)",
        "preference data (columns",
        "no such folder for the model",
    ):
        assert words in said, said
    assert said.count("to do: ") == 6, "each once"
    assert "Traceback" not in said
    assert left_behind(desk.folder / "run") == set()


@pytest.mark.parametrize(
    ("rows", "words"),
    thinned(
        [
            (
                [
                    {"question": "is it?", "choices": ["no", "yes"], "answer": i % 2}
                    for i in range(80)
                ],
                (
                    "`completion` is a number, not text",
                    'completion: "{answer}"}',
                    '"{choices[answer]}"',
                ),
            ),
            (
                [{"prompt": "is it?", "completion": True}],
                ("`completion` is true/false, not text", '"{completion}"}'),
            ),
            ([{"prompt": "", "completion": "b"}] * 3, ("line 1: `prompt` is empty",)),
        ],
        9,
    ),
)
def test_values_of_which_none_can_be_used_are_told_before_torch(rows, words, desk):
    desk.rows(rows)
    desk.job()
    code, said, heavy = in_a_process(desk.folder, "train", "job.yaml")
    assert (code, heavy) == (2, []), said
    for each in ("train.jsonl: no row can be used: line 1", *words):
        assert each in said, said


def test_a_row_that_can_be_used_lets_the_others_be_told_later(desk):
    desk.rows([*[{"prompt": "a", "completion": 1}] * 70, {"prompt": "a", "completion": "b"}])
    look_over(load_job(desk.job()))


def test_folders_are_looked_into_and_one_split_may_be_used_twice(desk):
    desk.rows([{"prompt": "a", "completion": "b"}], "set/train.jsonl")
    desk.rows([{"prompt": "a", "completion": "b", "label": False}], "bad/train.jsonl")
    desk.set("data", train="./set", eval="./bad", eval_split="train")
    with pytest.raises(DataError, match="answers with a verdict") as caught:
        look_over(load_job(desk.job()))
    assert caught.value.where == "bad/train.jsonl:1"
    (desk.folder / "bad/README.md").write_text("configs:")
    look_over(load_job(desk.job()))


def test_several_faults_are_there_for_programs_too(desk, run):
    desk.set("data", train="trian.jsonl", eval="evil.jsonl")
    answer = json.loads(run("--json").out)
    assert answer["exit_code"] == 2
    assert [problem["where"] for problem in answer["problems"]] == ["trian.jsonl", "evil.jsonl"]
    assert answer["error"] == "2 things are wrong"
    desk.set("data", eval=[])
    assert json.loads(run("--json").out)["error"] == "no such file"


MODEL, DATA = "/some-org/some-model/resolve/main/config.json", "/api/datasets/some-org/some-data"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that has a model and a data set."""
    pages = Pages({MODEL: b'{"model_type": "llama"}', DATA: b"{}"})
    with pages.served():
        monkeypatch.setenv("HF_ENDPOINT", pages.address)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
        yield pages


def test_the_hub_is_asked_once_for_a_data_set(desk, hub):
    desk.set("data", train="some-org/some-data")
    found = hub.says.pop(DATA)
    job = load_job(desk.job())
    with pytest.raises(DataError, match="neither a local file nor a data set that can be reached"):
        look_over(job)
    assert [path for path, _ in hub.asked] == [DATA]
    hub.says[DATA] = found
    look_over(job)
    look_over(job, only_plans=True)
    assert len(hub.asked) == 2, "a plan does not fetch it"


def test_a_model_that_the_hub_or_its_cache_has_passes(desk, hub, tmp_path, monkeypatch):
    desk.values["model"] = "some-org/some-model"
    job, found = load_job(desk.job()), hub.says[MODEL]
    for status, words in ((404, "no such model"), (401, "does not show it"), (503, "answers 503")):
        hub.says[MODEL] = (status, b"")
        with pytest.raises(ModelError, match=words):
            look_over(job)
    hub.says[MODEL] = found
    look_over(job)
    assert len(hub.asked) == 4
    snapshot = tmp_path / "hub/models--some-org--some-model" / "snapshots/main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    look_over(job)
    assert len(hub.asked) == 4, "the cache has it"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="weights"):
        look_over(job)
    (snapshot / "model.safetensors").write_bytes(b"")
    look_over(job)


def test_a_model_that_is_only_in_the_table_can_be_planned_and_not_trained(desk):
    desk.values["model"] = "openai-community/gpt2"
    job = load_job(desk.job())
    look_over(job, only_plans=True)
    with pytest.raises(ModelError, match="not in the Hugging Face cache"):
        look_over(job)


def test_lengths_that_are_given_need_no_data(desk, run):
    desk.set("data", train="not-here.jsonl")
    run(verb="plan", code=2)
    run("--examples", "100", "--mean-tokens", "50", verb="plan", code=0)


def test_a_template_that_is_not_there_is_one_of_the_faults(desk):
    desk.set("data", train="not-here.jsonl", chat_template="not-here.jinja")
    with pytest.raises(PreflightError) as caught:
        look_over(load_job(desk.job()))
    assert [type(problem) for problem in caught.value.problems] == [DataError, ModelError]
    assert isinstance(caught.value, InputError)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("method={name: lora, target_modules: [no_such]}", "this model has no module `no_such`"),
        ("train.fp16=true", "fp16 on a CPU"),
        ("data.max_length=100000", "positions"),
        ("limits.deadline=2020-01-01T00:00", "the deadline 2020-01-01 00:00 leaves 0.0 s"),
        ("train.load_best_model_at_end=true", "there is no evaluation data"),
        ("task=seq2seq", "can't be loaded for seq2seq"),
        ("data.label_map={a: b}", "no classes"),
        ("data.train=[{path: train.jsonl, split: 'train[:9%]'}]", "a file is no data set"),
        ("model=BERT", "looks ahead"),
        ("output_dir=train.jsonl/run", "can't be made: Not a directory"),
        ("data.max_bad_rows=0.2", "234 of 1,000 rows can't be used"),
        ("data.max_bad_rows=0.3", ""),
    ],
)
def test_doctor_fails_what_a_run_is_refused_for(desk, run, override, says):
    bad = range(300, 1000, 3) if "bad_rows" in override else ()
    answers = ["" if n in bad else "three" for n in range(1000)]
    desk.rows([{"prompt": f"{n} two", "completion": each} for n, each in enumerate(answers)])
    desk.set("where", usd_per_hour=10)
    said = run("--set", override.replace("BERT", str(desk.models["bert"])), verb="doctor")
    assert says in said.out, said.out
    assert (said.code, "failed" in said.out.replace("nothing failed", "")) == (
        (2, True) if says else (0, False)
    )


@pytest.mark.parametrize("store", [None, "./store"])
def test_a_spot_machine_without_a_store_is_warned_of(tmp_path, store):
    where = {"spot": True, "notices": "off"}
    job, heard = make_job(tmp_path, max_steps=1, where=where, output_store=store), Heard()
    train(job, heard)
    is_warned = "takes this run with it: set output_store" in heard.warnings
    assert is_warned == (not store)


def test_doctor_says_that_torch_is_missing(monkeypatch, cli, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    for words in ([], [job_file(tmp_path)]):
        said = cli.out("doctor", *words, code=2)
        assert "torch: can't be imported" in said
        assert "pip install torch" in said
