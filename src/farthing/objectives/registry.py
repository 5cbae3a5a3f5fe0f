"""The objectives by name: those of this folder, and those of installed packages.

A package brings one by an entry point of the group `farthing.objectives`, whose name is the
objective's and whose object is an `Objective`; a program by `register`. A package is imported when
its objective is asked for.
"""

from __future__ import annotations

from farthing.errors import InputError
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.objectives.classification import CLASSIFICATION
from farthing.objectives.columns import Format
from farthing.objectives.objective import Objective
from farthing.objectives.seq2seq import SEQ2SEQ

ENTRY_POINTS = "farthing.objectives"
_OBJECTIVES: dict[str, Objective] = {}


def register(task: Objective) -> None:
    """Make a task known in this process. Raises `ValueError` where its name is another's."""
    if _OBJECTIVES.setdefault(task.name, task) != task:
        raise ValueError(f"there is another task called {task.name}")


for _each in (CAUSAL_LM, SEQ2SEQ, CLASSIFICATION):
    register(_each)


def objective_names() -> tuple[str, ...]:
    """The names of all that are known so far."""
    return tuple(_OBJECTIVES)


def find_objective(name: str) -> Objective | None:
    """The task of this name; None where there is none. Raises `InputError` for a package whose task
    can't be taken.
    """
    if name not in _OBJECTIVES:
        from importlib.metadata import entry_points

        for point in entry_points(group=ENTRY_POINTS, name=name):
            try:
                task = point.load()
            except Exception as error:
                raise _broken(
                    name, point.value, f"{type(error).__name__}: {str(error)[:200]}"
                ) from error
            if not isinstance(task, Objective) or task.name != name:
                raise _broken(name, point.value, "it is no farthing Objective of that name")
            register(task)
            break
    return _OBJECTIVES.get(name)


def _broken(name: str, place: str, why: str) -> InputError:
    return InputError(
        f"the task `{name}` of an installed package can't be used: {why}",
        where=place,
        to_do="mend it",
    )


def objective_of(name: str) -> Objective:
    """The task of this name. Raises `InputError` for one that is not known."""
    task = find_objective(name)
    if task is None:
        raise InputError(
            f"there is no task `{name}`", where="task", to_do=f"use one of {', '.join(_OBJECTIVES)}"
        )
    return task


def format_of(name: str) -> Format:
    """The form of rows of this name, whichever task reads it."""
    return next(each for task in _OBJECTIVES.values() for each in task.formats if each.name == name)


def standard_columns() -> set[str]:
    """The names of columns that any task reads."""
    return {
        name
        for task in _OBJECTIVES.values()
        for each in task.formats
        for name in (*each.needs, *each.may_have)
    }
