"""Runs in which something goes wrong at a step."""

from __future__ import annotations

import pytest

import farthing.train.run
import farthing.train.step


def fail_at(step: int, error: Exception, monkeypatch: pytest.MonkeyPatch):
    real, calls = farthing.train.step.seed_everything, []

    def seed(*numbers):
        is_of_update = len(numbers) > 2
        if not is_of_update:
            calls.append(numbers)
        if len(calls) == step and not is_of_update:
            raise error
        real(*numbers)

    monkeypatch.setattr(farthing.train.step, "seed_everything", seed)
