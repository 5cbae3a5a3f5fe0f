"""A finished run whose job asks for more steps: it resumes where its schedule allows."""

import pytest

from farthing.config.preflight import unusual_settings
from farthing.errors import RunChangedError
from thinned import thinned
from workshop import Heard, are_same, job_file, losses_of, make_job, train, weights_of


@pytest.mark.parametrize(
    "schedule",
    thinned(
        [
            {"lr_scheduler_type": "constant"},
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
            {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
        ],
        9,
    ),
)
def test_a_finished_run_takes_more_steps_and_no_fewer(schedule, tmp_path):
    keys = {"n_rows": 40, **schedule}
    train(make_job(tmp_path / "once", max_steps=8, **keys))
    train(make_job(tmp_path / "twice", max_steps=6, **keys))
    before = weights_of(tmp_path / "twice")
    fewer = train(make_job(tmp_path / "twice", max_steps=4, **keys), heard := Heard())
    assert "has taken 6 steps, and the job asks for 4" in heard.warnings
    assert (fewer.state, fewer.receipt.steps) == ("finished", 6)
    assert are_same(weights_of(tmp_path / "twice"), before)
    job = make_job(tmp_path / "twice", max_steps=8, **keys)
    (tmp_path / "twice/run/job.json").write_text("{")  # what it had asked for is not known
    outcome = train(job)
    assert (outcome.state, outcome.receipt.steps) == ("finished", 8)
    assert outcome.receipt.interruptions == 0, "it had ended"
    assert len(losses_of(job)) == 8
    assert are_same(weights_of(tmp_path / "twice"), weights_of(tmp_path / "once"))
    assert train(job).reason.startswith("the run had finished already")


@pytest.mark.slow
def test_a_schedule_that_knows_its_end_names_the_way_further(tmp_path, cli):
    schedule = {"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.5}
    train(make_job(tmp_path, max_steps=6, **schedule))
    with pytest.raises(RunChangedError) as error:
        train(make_job(tmp_path, max_steps=8, **schedule))
    assert "train.max_steps: 6 -> 8" in str(error.value)
    assert f"farthing train JOB --from {tmp_path / 'run'} --set output_dir=" in str(error.value)
    path = job_file(tmp_path, max_steps=8, **schedule)
    further = f"output_dir={tmp_path / 'further'}"
    words = ("train", path, "--from", tmp_path / "run", "--set", further)
    assert "begun from step 6 of" in " ".join(cli.out(*words).split())
    assert cli.json(*words)["ancestor"]["step"] == 6


def test_settings_that_nobody_uses_are_warned_of(tmp_path, cli):
    for keys, words in (
        ({"learning_rate": 2.0, "method": "lora"}, "1e-5 to 1e-3 is the usual range"),
        ({"warmup_ratio": 0.9}, "train.warmup_ratio 0.9 is unusual"),
        ({"method": {"name": "full", "lora_r": 8}}, "method.lora_r is not used: method is full"),
        ({"data": {"separator": ";"}}, "data.separator is not used: no data is a CSV file"),
        ({"data": {"train_split": "test"}}, "data.train_split is not used: files have no splits"),
        ({"data": {"train": [{"path": "data.jsonl", "split": "a"}]}}, "split and name of /"),
        ({"where": {"power_watts": 300}}, "where.power_watts is not used: "),
    ):
        assert words in "\n".join(unusual_settings(make_job(tmp_path, **keys)))
    assert unusual_settings(make_job(tmp_path, learning_rate=2e-5)) == []
    heard, words = Heard(), "train.learning_rate 20 is unusual"
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    keys = {"n_rows": 8, "data": {"chat_template": "./chat.jinja"}, "learning_rate": 20.0}
    train(make_job(tmp_path, max_steps=1, **keys), heard)
    assert "data.chat_template is not used: no row is a chat" in heard.warnings
    assert f"{words}: 1e-6 to 1e-4" in heard.warnings
    assert words in " ".join(cli.out("doctor", tmp_path / "job.yaml").split())
