"""Runs in which something goes wrong at a step."""

import pytest

import farthing.train.run
import farthing.train.step
from farthing.config.job import Job
from workshop import train


def fail_at(step: int, monkeypatch: pytest.MonkeyPatch):
    real, calls = farthing.train.step.seed_everything, []

    def seed(*numbers):
        is_of_update = len(numbers) > 2
        if not is_of_update:
            calls.append(numbers)
        if len(calls) == step and not is_of_update:
            raise ZeroDivisionError("of our own")
        real(*numbers)

    monkeypatch.setattr(farthing.train.step, "seed_everything", seed)


def crash(job: Job, step: int):
    """The run ends so, at a step."""
    with pytest.MonkeyPatch.context() as patch:
        fail_at(step, patch)
        with pytest.raises(ZeroDivisionError):
            train(job)
