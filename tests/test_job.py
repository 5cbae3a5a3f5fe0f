"""The job file: what is read, what is refused, and in which words."""

from pathlib import Path

import pytest
import yaml

import farthing
from farthing.config.job import Job
from farthing.config.load import load_job
from farthing.errors import InputError, JobError

BASE = "task: causal-lm\nmodel: org/name\ndata: train.jsonl\noutput_dir: run\n"


@pytest.fixture
def read(tmp_path):
    """Read a job: the four needed keys and `more`, with overrides."""

    def reading(more="", *overrides, base=BASE):
        path = tmp_path / "job.yaml"
        path.write_text(base + more)
        return load_job(path, list(overrides))

    return reading


def problems_of(read, more: str = "", *overrides: str, base: str = BASE):
    """(where, what, to do) of every problem, where without the folder."""
    with pytest.raises(JobError) as caught:
        read(more, *overrides, base=base)
    return [
        (problem.where.rpartition("/")[2], problem.what, problem.to_do)
        for problem in caught.value.problems
    ]


def one_problem(*job, **base: str):
    (problem,) = problems_of(*job, **base)
    return problem


# ---- what is read ----


def test_three_keys_and_an_output_folder_are_a_job(read, tmp_path):
    job = read()
    assert (job.task, job.model.model_name_or_path, job.method.name) == (
        "causal-lm",
        "org/name",
        "lora",
    )
    assert job.data.train == (str(tmp_path / "train.jsonl"),)
    assert job.output_dir == str(tmp_path / "run")
    assert (job.train.num_train_epochs, job.train.warmup_ratio, job.train.seed) == (3.0, 0.03, 42)
    assert (job.global_batch_size, job.micro_batch_size, job.max_length) == (16, 8, 1024)


def test_the_names_are_those_of_the_hugging_face_training_arguments():
    from transformers import Seq2SeqTrainingArguments

    ours = set(Job.model_fields["train"].annotation.model_fields)
    own_names = {
        "global_batch_size",
        "learning_rate_batch_size",
        "early_stopping_patience",
        "early_stopping_threshold",
        "save_minutes",
        "max_skipped_steps",
        "fit_schedule_to_budget",
        "micro_batch_tokens",
        "probe",
        "warmup_epochs",
        "warmup_ratio",  # a Hugging Face name that its latest versions fold into warmup_steps
    }
    theirs = set(Seq2SeqTrainingArguments.__dataclass_fields__)
    assert ours - own_names <= theirs


@pytest.mark.parametrize(
    ("task", "method", "max_length", "rate"),
    [
        ("causal-lm", "lora", 1024, 2e-4),
        ("seq2seq", "qlora", 512, 2e-4),
        ("classification", "full", 512, 2e-5),
    ],
)
def test_defaults_follow_task_and_method(read, task, method, max_length, rate):
    job = read("", f"task={task}", f"method={method}")
    assert (job.max_length, job.learning_rate) == (max_length, rate)


def test_short_and_long_forms_say_the_same(read):
    long = BASE.replace("model: org/name", "model: {model_name_or_path: org/name}")
    long = (
        long.replace("data: train.jsonl", "data: {train: [train.jsonl]}") + "method: {name: full}\n"
    )
    assert read(base=long) == read("method: full\n")


def test_a_section_of_comments_is_as_good_as_absent(read):
    assert read("limits:\n  # max_usd: $5\nwhere:\ntrain:\n") == read()


def test_numbers_may_be_written_as_people_write_them(read):
    job = read(
        "train: {learning_rate: 1e-4}\nlimits: {max_usd: $5, max_hours: 90min}\nwhere:"
        " {usd_per_hour: '0.36'}\n"
    )
    assert (job.learning_rate, job.limits.max_usd, job.limits.max_hours) == (1e-4, 5.0, 1.5)
    assert job.usd_per_hour == 0.36


def test_electricity_adds_to_the_rent(read):
    job = read("where: {usd_per_hour: 1, power_watts: 500, usd_per_kwh: 0.30}\n")
    assert job.usd_per_hour == pytest.approx(1.15)


def test_a_byte_order_mark_and_windows_line_ends_are_read_over(read, tmp_path):
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert load_job(path) == read()


# ---- overrides ----


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("method=qlora", "method", "name", "qlora"),
        ("method.target_modules=all-linear", "method", "target_modules", ("all-linear",)),
        ("data.columns={text: narrative}", "data", "columns", {"text": "narrative"}),
        ("data.columns.label=product", "data", "columns", {"label": "product"}),
        ("train.early_stopping_patience=", "train", "early_stopping_patience", None),
        ("data.eval=null", "data", "eval", ()),
    ],
)
def test_any_key_can_be_set_from_the_command_line(read, override, section, key, value):
    job = read("train: {early_stopping_patience: 3}\n", "data.eval_fraction=0.1", override)
    assert getattr(getattr(job, section), key) == value


def test_a_set_model_keeps_the_rest_of_its_section(read):
    long = BASE.replace("model: org/name", "model: {model_name_or_path: org/name, init: random}")
    job = read("", "model=other/name", base=long)
    assert (job.model.model_name_or_path, job.model.init) == ("other/name", "random")


@pytest.mark.parametrize("override", ["train.learning_rate", "=3", "train.seed=["])
def test_a_malformed_override_is_shown_as_it_was_given(read, override):
    where, _, to_do = one_problem(read, "", override)
    assert where == f"--set {override}"
    assert "--set train.learning_rate=1e-4" in to_do


def test_a_mistake_in_an_override_names_the_override_not_a_line(read):
    assert one_problem(read, "train: {seed: 1}\n", "train.seed=many")[0] == "--set train.seed"
    where, what, to_do = one_problem(read, "", "train.lerning_rate=1")
    assert (where, what) == ("--set train.lerning_rate", "unknown key `train.lerning_rate`")
    assert to_do == "did you mean `learning_rate`?"
    assert one_problem(read, "", "a.b.c=1")[0] == "--set a.b.c"


# ---- mistakes ----


OF_OTHERS = "{model_name_or_path: org/name, trust_remote_code: true"
LOCAL_MODEL = "{model_name_or_path: ./m, tokenizer_name_or_path: org/tok, trust_remote_code: true}"
UNKNOWN = "unknown key `"


@pytest.mark.parametrize(
    ("change", "line", "what", "to_do"),
    [
        (
            "train:\n  seed: 1\n  lerning_rate: 1.0e-4\n",
            7,
            UNKNOWN,
            "did you mean `learning_rate`?",
        ),
        ("trian: {seed: 1}\n", 5, UNKNOWN, "did you mean `train`?"),
        ("train: {lora_r: 8}\n", 5, UNKNOWN, "it belongs in `method.lora_r`"),
        ("where: {learning_rat: 1}\n", 5, UNKNOWN, "did you mean `train.learning_rate`?"),
        ("limits: {zzz: 1}\n", 5, UNKNOWN, "max_usd, max_hours, max_gpu_hours, deadline"),
        ("train: {learning_rate: fast}\n", 5, "`train.learning_rate`", "a number is wanted"),
        ("train: {max_steps: 2.5}\n", 5, "`train.max_steps`", "a whole number is wanted"),
        ("train: {learning_rate: 0}\n", 5, "`train.learning_rate`", "should be greater than 0"),
        ("where: {usd_per_hour: .nan}\n", 5, "`where.usd_per_hour`", "finite"),
        ("train: {lr_scheduler_type: cosin}\n", 5, "`train.lr_scheduler_type`", "mean `cosine`?"),
        ("train: {report_to: comet}\n", 5, "`train.report_to`", "tensorboard"),
        (
            "train: {gradient_checkpointing: maybe}\n",
            5,
            "`train.gradient_checkpointing`",
            "true or false, or a whole number",
        ),
        ("train: 3\n", 5, "`train`", "it is a section"),
        ("method: {lora_dropout: 1}\n", 5, "`method.lora_dropout`", "less than 1"),
        ("limits: {deadline: tomorrow}\n", 5, "`limits.deadline`", "as in 2027-01-31T18:00"),
        ("cache_dir: 2024-01-01\n", 5, "`cache_dir`", "in quotes"),
        ("train: {seed: true}\n", 5, "`train.seed`", "give a number, not true/false"),
        ("limits: {max_hours: 3 weeks}\n", 5, "`limits.max_hours`", '"3h"'),
        ("data: other.jsonl\n", 5, "`data` appears twice (first on line 3)", "keep one of them"),
        (("run", "''"), 4, "`output_dir` can't be ''", ""),
        (("org/name", "./run/model"), 4, "write its model over", "another output_dir"),
        ("output_store: ./run/copy\n", 5, "would lie in the run folder", "a bucket"),
        (("train.jsonl", "[]"), 3, "`data.train` can't be []", ""),
        (
            ("train.jsonl", "\n  train: a.jsonl\n  columns:\n    txt: body"),
            6,
            "'txt'",
            "did you mean `text`?",
        ),
        (
            "train:\n  metric_for_best_model: rougeL\n",
            6,
            "`rougeL` is not measured for causal-lm",
            "loss, perplexity",
        ),
        (
            (
                "causal-lm\nmodel: org/name\ndata: train.jsonl",
                "seq2seq\nmodel: org/name\ndata: {train: a, train_on_prompt: true}",
            ),
            3,
            "no prompt",
            "",
        ),
        (("org/name", OF_OTHERS + ", revision: abc123}"), 2, "trust_remote_code", "40 hex digits"),
        (("org/name", LOCAL_MODEL), 2, "org/tok", "40 hex digits"),
        (
            "train:\n  seed: 1\n  global_batch_size: 10\n  per_device_train_batch_size: 3\n"
            "  gradient_accumulation_steps: 2\n",
            7,
            "global_batch_size 10 is not per_device_train_batch_size 3 x"
            " gradient_accumulation_steps 2",
            "",
        ),
        (
            "train:\n  seed: 1\n  gradient_accumulation_steps: 2\n",
            7,
            "needs per_device_train_batch_size or global_batch_size",
            "",
        ),
        (
            "train:\n  seed: 1\n  bf16: true\n  fp16: true\n",
            7,
            "bf16 and fp16 exclude each other",
            "",
        ),
        ("train:\n  seed: 1\n  eval_strategy: steps\n", 7, "needs eval_steps", ""),
        (
            "train: {eval_strategy: 'no', eval_steps: 2, early_stopping_patience: 2}\n",
            5,
            "needs evaluations",
            "",
        ),
        ("method: {lora_bias: true, use_dora: true}\n", 5, "no lora_bias with use_dora", ""),
        (
            "method: {lora_bias: true, init_lora_weights: pissa}\n",
            5,
            "no lora_bias with this init_lora_weights",
            "",
        ),
    ],
)
def test_a_mistake_has_its_line_and_says_what_is_wanted(read, change, line, what, to_do):
    base = BASE + change if isinstance(change, str) else BASE.replace(*change)
    where, said, advice = one_problem(read, base=base)
    assert where == f"job.yaml:{line}"
    assert what in said
    assert to_do in said + advice


def test_every_problem_is_reported_at_once_with_its_own_line(read):
    more = (
        "train:\n  sed: 1\n  learning_rate: fast\nlimits:\n  max_usd: lots\nmethod: lroa\ndata: x\n"
    )
    problems = problems_of(read, more)
    assert sorted(where for where, _, _ in problems) == [
        "job.yaml:10",
        "job.yaml:11",
        "job.yaml:6",
        "job.yaml:7",
        "job.yaml:9",
    ]


def test_missing_keys_say_what_to_write(read):
    problems = {what: to_do for _, what, to_do in problems_of(read, base="task: causal-lm\n")}
    assert problems["`model` is missing"] == "add `model:` a Hub name or a folder"
    assert set(problems) == {"`model` is missing", "`data` is missing", "`output_dir` is missing"}


@pytest.mark.parametrize(
    ("text", "line", "to_do"),
    [
        ("task: [causal-lm\nmodel: x\n", ":2", "colons"),
        ("where:\n\tdevice: cpu\n", ":2", "spaces"),
        ("where: " + "[" * 3000 + "]" * 3000 + "\n", ":1", "plainly"),
        *(
            (f"train:\n  max_steps: {value}\n", ":2", "can't be read")
            for value in ("9" * 5_000, "2024-13-45")
        ),
        ("- a list\n", "", "farthing init"),
        ("", "", "farthing init"),
    ],
)
def test_what_is_no_job_is_refused_in_words(read, text, line, to_do):
    where, said, advice = one_problem(read, base=text)
    assert where == f"job.yaml{line}"
    assert to_do in said + advice


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_bytes(b"task: \xff\xfe")
    with pytest.raises(JobError, match="not UTF-8"):
        load_job(path)


def test_a_missing_job_file_gets_the_nearest_name(tmp_path):
    (tmp_path / "job.yaml").write_text(BASE)
    with pytest.raises(JobError, match=r"no such job file\n.*did you mean .*/job\.yaml\?"):
        load_job(tmp_path / "jobs.yaml")


# ---- code of others ----


def test_what_is_near_a_mistake_is_none(read):
    pin = "0123456789abcdef0123456789abcdef01234567"
    for model in (f"org/name, revision: {pin}", "./folder"):
        long = BASE.replace("org/name", f"{{model_name_or_path: {model}, trust_remote_code: true}}")
        assert read(base=long).model.trust_remote_code
    best = read("train: {metric_for_best_model: eval_loss}\n").train.metric_for_best_model
    assert best == "eval_loss"
    assert read("", "data.train_on_prompt=true").data.train_on_prompt


# ---- paths ----


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Where one is."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_paths_in_the_file_are_relative_to_the_file(read, tmp_path, elsewhere):
    job = read("cache_dir: cache\n", base=BASE.replace("org/name", "./model"))
    assert job.model.model_name_or_path == str(tmp_path / "model")
    assert job.data.train == (str(tmp_path / "train.jsonl"),)
    assert (job.output_dir, job.cache_dir) == (str(tmp_path / "run"), str(tmp_path / "cache"))


def test_paths_on_the_command_line_are_relative_to_where_one_is(read, elsewhere):
    job = read(
        "",
        "output_dir=out",
        "model=./m",
        "data={train: a.jsonl, eval: b.csv}",
        "data.chat_template=t.jinja",
    )
    assert (job.output_dir, job.model.model_name_or_path) == (
        str(elsewhere / "out"),
        str(elsewhere / "m"),
    )
    assert (job.data.train, job.data.eval) == (
        (str(elsewhere / "a.jsonl"),),
        (str(elsewhere / "b.csv"),),
    )
    assert job.data.chat_template == str(elsewhere / "t.jinja")


def test_the_home_folder_is_spelled_out(read):
    assert read("cache_dir: ~/c\n").cache_dir == str(Path.home() / "c")
    assert read().cache_dir == str(Path.home() / ".cache/farthing")


@pytest.mark.parametrize(
    "name", ["s3://bucket/a.jsonl", "https://host/a.csv?x=1", "memory://a.jsonl", "org/data-set"]
)
def test_addresses_and_hub_names_stay_as_they_are(read, name):
    assert read(base=BASE.replace("train.jsonl", name)).data.train == (name,)


@pytest.mark.parametrize(
    "name", ["a.tsv", "a.ndjson", "a.txt", "sub/folder/a", "./a", "a.jsonl.gz"]
)
def test_what_looks_like_a_file_is_one(read, tmp_path, name):
    assert read(base=BASE.replace("train.jsonl", name)).data.train == (str(tmp_path / name),)


def test_a_folder_that_exists_is_no_hub_name(read, tmp_path):
    (tmp_path / "org/name").mkdir(parents=True)
    assert read().model.model_name_or_path == str(tmp_path / "org/name")


def test_globs_are_spelled_out_in_order(read, tmp_path):
    for name in ("part-2.jsonl", "part-1.jsonl", "other.jsonl"):
        (tmp_path / name).write_text("{}\n")
    job = read(base=BASE.replace("train.jsonl", "['part-*.jsonl', other.jsonl]"))
    assert [Path(name).name for name in job.data.train] == [
        "part-1.jsonl",
        "part-2.jsonl",
        "other.jsonl",
    ]


# ---- arithmetic ----


@pytest.mark.parametrize(
    ("train", "global_batch", "micro"),
    [
        ("{}", 16, 8),
        ("{global_batch_size: 64}", 64, 8),
        ("{per_device_train_batch_size: 4}", 4, 4),
        ("{per_device_train_batch_size: 4, gradient_accumulation_steps: 8}", 32, 4),
        ("{global_batch_size: 32, gradient_accumulation_steps: 8}", 32, 4),
        ("{global_batch_size: 10, gradient_accumulation_steps: 3}", 10, 4),
        ("{global_batch_size: 4, per_device_train_batch_size: 16}", 4, 4),
        (
            (
                "{global_batch_size: 32, per_device_train_batch_size: 4,"
                " gradient_accumulation_steps: 8}"
            ),
            32,
            4,
        ),
    ],
)
def test_batch_sizes_follow_from_one_another(read, train, global_batch, micro):
    job = read(f"train: {train}\n")
    assert (job.global_batch_size, job.micro_batch_size) == (global_batch, micro)


def test_the_learning_rate_scales_with_the_batch_it_was_tuned_for(read):
    job = read(
        "train: {learning_rate: 1.0e-4, learning_rate_batch_size: 32, global_batch_size: 8}\n"
    )
    assert job.learning_rate == pytest.approx(2.5e-5)


def test_only_settings_that_change_the_result_are_the_runs_identity(read):
    same = [
        "train.per_device_train_batch_size=2",
        "train.save_steps=7",
        "train.logging_steps=1",
        "limits.max_usd=3",
        "where.usd_per_hour=2",
        "train.per_device_eval_batch_size=3",
        "output_dir=x",
        "train.gradient_checkpointing=true",
        "train.torch_compile=true",
        "train.use_liger_kernel=false",
    ]
    other = [
        "train.seed=1",
        "train.learning_rate=1",
        "method.lora_r=3",
        "task=seq2seq",
        "train.max_steps=9",
        "train.eval_strategy='no'",
    ]
    plain = read("train: {global_batch_size: 8}\n").identity()
    for override in same:
        assert read("train: {global_batch_size: 8}\n", override).identity() == plain, override
    for override in other:
        assert read("train: {global_batch_size: 8}\n", override).identity() != plain, override
    unread = read("method: {name: full, lora_r: 3}\n").identity()
    assert unread == read("method: full\n").identity(), "unread"


# ---- the starter, the demo and the schema ----


# ---- at once ----


@pytest.mark.parametrize("value", [object(), 10**5_000], ids=["object", "digits"])
def test_a_mapping_with_what_no_file_holds_is_refused(value):
    with pytest.raises(InputError, match="no job file can hold"):
        farthing.load_job({"train": {"max_steps": value}})


def test_a_mapping_may_hold_paths(tmp_path):
    values = {"task": "causal-lm", "model": "m", "data": tmp_path / "a.jsonl", "output_dir": "r"}
    assert farthing.load_job(values).data.train == (str(tmp_path / "a.jsonl"),)


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (
            {"train": [{"path": "a.jsonl"}, {"path": "b.jsonl", "weight": -1}]},
            "data.train[1].weight",
        ),
        ({"train": {"path": "a.jsonl", "wieght": 2}}, "data.train.wieght"),
        ({"train": "a.jsonl", "columns": {"prompt": [1]}}, "data.columns.prompt"),
        ({"train": "a.jsonl", "separator": "ab"}, "data.separator"),
    ],
)
def test_a_mistake_is_placed_at_its_key(tmp_path, data, place):
    values = {"task": "causal-lm", "model": "m", "data": data, "output_dir": "r"}
    with pytest.raises(JobError) as caught:
        farthing.load_job(values)
    assert [problem.where for problem in caught.value.problems] == [place]
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    with pytest.raises(JobError) as caught:
        farthing.load_job(path)
    line = int(caught.value.problems[0].where.rpartition(":")[2])
    assert path.read_text().splitlines()[line - 1].strip().startswith(place.rpartition(".")[2])


def test_a_setting_of_the_schedule_is_a_number_however_yaml_reads_it(read):
    job = read(
        "train: {lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1e-6}}\n"
    )
    assert job.train.lr_scheduler_kwargs == {"min_lr": 1e-6}


LONG_NAME = f"./{'ü' * 200}"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        *((key, '"a\\0b"', "NUL") for key in ("model", "data")),
        *(
            (key, LONG_NAME, "a name of 400 bytes in a path; file systems take 255")
            for key in ("output_dir", "output_store", "cache_dir")
        ),
        ("model.from_run", "x" * 300, "a name of 300 bytes in a path"),
        ("model.revision", "v 1", "git has no such name"),
        ("output_dir", "~nobody-here/run", "home of an unknown user"),
        *(
            ("data.encoding", name, f"no text encoding is called {name}")
            for name in ("rot13", "base64", "undefined", "no-such")
        ),
        ("limits.deadline", "0001-01-01", "no moment that a clock shows"),
        ("limits.deadline", "20261201", "20261201 is no moment"),
        ("train.max_steps", "2024-13-45", "not valid YAML"),
        ("limits.max_hours", "1:30", "YAML reads 1:30 as 90"),
        ("limits.max_usd", "010", "YAML reads 010 as 8"),
        ("limits.max_usd", "yes", "give a number, not true/false"),
        ("output_store", "file://mnt/runs", "three slashes"),
        ("output_store", "s3:/bucket/runs", "two slashes"),
    ],
)
def test_a_value_that_nothing_can_be_is_a_mistake_at_its_key(read, key, value, words):
    with pytest.raises(JobError, match=f"--set {key}.*{words}"):
        read("", f"{key}={value}")


def test_the_last_day_of_the_calendar_may_be_a_deadline(read):
    assert read("", "limits.deadline=9999-12-30").limits.deadline is not None
