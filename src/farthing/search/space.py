"""Settings of trials: drawn by Optuna, and put into the job.

A trial's settings follow from the seed, its number and the scores of earlier batches, so that a
search which is begun again draws the same ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

from farthing.config.job import Job, SearchSection, ValueRange
from farthing.config.load import SHORTHAND, parse_job
from farthing.config.preflight import look_over
from farthing.errors import InputError
from farthing.storage.files import Json

Scored = tuple[Json, float | None]
"""Settings, and their score; None: they failed."""
MOST_DRAWS, MOST_JOBS = 20, 100


def n_choices(section: SearchSection) -> int | None:
    """How many settings there are; None where a range has no end of them."""
    n = 1
    for values in section.vary.values():
        if not isinstance(values, ValueRange):
            n *= len(values)
        elif values.step is None and not _is_whole(values):
            return None
        else:
            n *= int((values.high - values.low) / (values.step or 1) + 1e-9) + 1
    return n


def draw(
    section: SearchSection, number: int, before: Sequence[Scored], *, greater_is_better: bool
) -> Json | None:
    """The settings of a trial, none of those `before`; None where all were tried."""
    tried = [settings for settings, _ in before]
    if len(tried) >= (n_choices(section) or len(tried) + 1):
        return None
    optuna = _optuna()
    space = _distributions(optuna, section)
    states = optuna.trial.TrialState
    trials = [
        optuna.trial.create_trial(
            # one that failed is pruned before its first score, which TPE takes for the worst
            state=states.PRUNED if score is None else states.COMPLETE,
            value=score,
            params={
                key: value
                if isinstance(values := section.vary[key], ValueRange)
                else values.index(value)
                for key, value in settings.items()
            },
            distributions=space,
        )
        for settings, score in before
    ]
    direction = "maximize" if greater_is_better else "minimize"
    for attempt in range(MOST_DRAWS):
        kind = section.sampler if attempt < MOST_DRAWS - 1 else "grid"
        sampler = _sampler(optuna, kind, seed_of(section.seed, number, attempt))
        study = optuna.create_study(direction=direction, sampler=sampler)
        study.add_trials(trials)
        drawn, settings = study.ask(space).params, {}
        for key in space:
            values = section.vary[key]
            settings[key] = drawn[key] if isinstance(values, ValueRange) else values[drawn[key]]
        if settings not in tried:
            return settings
    return None


def seed_of(*numbers: int) -> int:
    """One seed of several numbers, the same on every machine."""
    import numpy as np

    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise InputError(
            "optuna is not installed, which draws the settings of a search",
            where="search",
            to_do="pip install 'farthing[search]'",
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _sampler(optuna: Any, kind: str, seed: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Optuna still calls experimental
        if kind == "grid":
            return optuna.samplers.BruteForceSampler(seed=seed)
        if kind == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=5)


def _distributions(optuna: Any, section: SearchSection) -> dict[str, Any]:
    found, known = dict[str, Any](), optuna.distributions
    for key, values in sorted(section.vary.items()):  # whatever the order in the file
        if not isinstance(values, ValueRange):
            found[key] = known.CategoricalDistribution(list(range(len(values))))
        elif _is_whole(values):
            low, high, step = int(values.low), int(values.high), int(values.step or 1)
            found[key] = known.IntDistribution(low, high, log=values.log, step=step)
        else:
            found[key] = known.FloatDistribution(
                values.low, values.high, log=values.log, step=values.step
            )
    return found


def _is_whole(values: ValueRange) -> bool:
    return all(isinstance(each, int) for each in (values.low, values.high, values.step or 1))


def values_with(job: Job, settings: Json) -> dict[str, Any]:
    """The job of a trial as plain values: what the job says, with these settings."""
    values = _plain(job.model_dump(mode="python", exclude_unset=True))
    values.pop("search", None)
    for key, value in settings.items():
        section, _, name = key.partition(".")
        own = values.setdefault(section, {})
        if name:
            own[name] = value
        elif isinstance(value, Mapping):
            values[section] = dict(value)
        else:
            own[SHORTHAND[section]] = value
        if key in ("data", "data.train"):
            values["data"].pop("of_train", None)
    return dict(values)


def job_of(values: Mapping[str, Any], place: str) -> Job:
    """The checked job of a trial; relative names stand beside `place`. Raises `JobError`."""
    import yaml

    return parse_job(yaml.safe_dump(dict(values), sort_keys=False), Path(place))


def refuse_choices(job: Job, place: str) -> None:
    """Raises `InputError` for a choice with which no setting is a job, before any is paid for."""
    keys = {
        key: (values.low, values.high) if isinstance(values, ValueRange) else values
        for key, values in job.search.vary.items()
    }
    for key, choices in keys.items():
        others = {other: values for other, values in keys.items() if other != key}
        for choice in choices:
            why = None
            for values in islice(product(*others.values()), MOST_JOBS):
                settings = {**dict(zip(others, values, strict=True)), key: choice}
                try:
                    found = job_of(values_with(job, settings), place)
                    if key.partition(".")[0] in ("model", "data"):
                        look_over(found, only_plans=True)
                    break
                except InputError as error:
                    why = why or error
            else:
                assert why is not None
                raise InputError(
                    f"no setting with {choice!r} is a job: {str(why).splitlines()[0]}",
                    where=f"search.vary.{key}",
                    to_do="change that choice, or take it out",
                ) from why


def _plain(value: Any) -> Any:
    """Mappings and lists of what YAML knows."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def model_of(settings: Mapping[str, Any]) -> Any:
    """What settings, or what varies, say of the model; None where it is always the same."""
    return settings.get("model", settings.get("model.model_name_or_path"))


def model_key(section: SearchSection) -> str | None:
    """The key under which models are choices; None where they don't vary."""
    keys = ("model", "model.model_name_or_path")
    return next((key for key in keys if isinstance(section.vary.get(key), tuple)), None)


def by_model(section: SearchSection) -> list[SearchSection]:
    """A search for each model that is a choice, in the order given; the search itself where none
    is.
    """
    key = model_key(section)
    if key is None:
        return [section]
    return [
        section.model_copy(update={"vary": {**section.vary, key: (value,)}})
        for value in section.vary[key]
    ]
