"""`metrics.prom` of a run folder, as node_exporter's textfile collector reads it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from farthing.train.metrics_file import metrics_file, metrics_text
from workshop import Heard, make_job, metrics_of, rows_of, step_taken, steps_of, train

SAMPLE = re.compile(r'farthing_[a-z_]+(\{([a-z]+="(?:[^"\\\n]|\\.)*",?)+\})? [-+0-9.e]+')


def gauges(text: str) -> dict[str, float]:
    """Samples by name and labels; every line is one, or its type or help."""
    lines = text.split("\n")
    assert lines[-2:] == ["# EOF", ""]
    found = {}
    typed = set()
    for line in lines[:-2]:
        if line.startswith("# TYPE "):
            assert line.endswith(" gauge")
            typed.add(line.split()[2])
        elif not line.startswith("# HELP "):
            assert SAMPLE.fullmatch(line), line
            name, _, value = line.rpartition(" ")
            assert name.partition("{")[0] in typed
            found[name] = float(value)
    return found


def test_the_file_has_the_last_step_and_evaluation(tmp_path):
    rows = rows_of("llama", 24)
    job = make_job(tmp_path, rows=rows, eval_rows=rows[:4], max_steps=5, logging_steps=2)
    train(job)
    found = gauges((tmp_path / "run/metrics.prom").read_text())
    steps = steps_of(job)
    metrics = metrics_of(job)[-1]
    assert found["farthing_step"] == found["farthing_n_steps"] == 5
    assert found["farthing_running"] == 0
    assert found["farthing_loss"] == pytest.approx(steps[-1]["loss"], rel=1e-5)
    assert found['farthing_evaluation{metric="loss"}'] == pytest.approx(metrics["loss"], rel=1e-5)
    assert found["farthing_usd"] > 0
    about = [name for name in found if name.startswith("farthing_run_info")]
    assert 'task="causal-lm"' in about[0]
    assert 'run="run"' in about[0]


def test_the_file_is_kept_up_to_date_meanwhile(tmp_path):
    job = make_job(tmp_path, logging_steps=2)
    Path(job.output_dir).mkdir()
    with metrics_file(Heard(), job) as emit:
        for step in (1, 2, 3):
            emit(replace(step_taken(), step=step))
        found = gauges((tmp_path / "run/metrics.prom").read_text())
        assert (found["farthing_step"], found["farthing_running"]) == (2, 1)


def test_odd_names_are_escaped_and_unknown_figures_left_out(tmp_path):
    job = make_job(tmp_path)
    model = job.model.model_copy(update={"model_name_or_path": 'a"b\\c\nd'})
    job = job.model_copy(update={"model": model})
    event = step_taken(loss=None, usd=0.25)
    found = gauges(metrics_text(job, [event], is_running=True))
    assert "farthing_loss" not in found
    assert (found["farthing_usd"], found["farthing_running"]) == (0.25, 1)
    assert any(r'model="a\"b\\c\nd"' in name for name in found)
