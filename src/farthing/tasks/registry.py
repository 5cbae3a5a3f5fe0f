"""The tasks that there are, by name: those of this folder, and those of installed packages.

A package brings a task by an entry point of the group `farthing.tasks`, whose name is the task's
and whose object is a `Task`; a program by `register`. Only the package of a task that is asked for
is imported.
"""

from __future__ import annotations

from farthing.errors import InputError
from farthing.tasks.causal_lm import CAUSAL_LM
from farthing.tasks.classification import CLASSIFICATION
from farthing.tasks.columns import Format
from farthing.tasks.seq2seq import SEQ2SEQ
from farthing.tasks.task import Task

ENTRY_POINTS = "farthing.tasks"
_TASKS: dict[str, Task] = {}


def register(task: Task) -> None:
    """Make a task known in this process. Raises `ValueError` where its name is another's."""
    if _TASKS.setdefault(task.name, task) != task:
        raise ValueError(f"there is another task called {task.name}")


for _task in (CAUSAL_LM, SEQ2SEQ, CLASSIFICATION):
    register(_task)


def task_names() -> tuple[str, ...]:
    """The names of all that are known so far."""
    return tuple(_TASKS)


def find_task(name: str) -> Task | None:
    """The task of this name; None where there is none. Raises `InputError` for a package whose task
    can't be taken.
    """
    if name not in _TASKS:
        from importlib.metadata import entry_points

        for point in entry_points(group=ENTRY_POINTS, name=name):
            try:
                task = point.load()
            except Exception as error:
                raise _broken(
                    name, point.value, f"{type(error).__name__}: {str(error)[:200]}"
                ) from error
            if not isinstance(task, Task) or task.name != name:
                raise _broken(name, point.value, "it is no farthing Task of that name")
            register(task)
            break
    return _TASKS.get(name)


def _broken(name: str, place: str, why: str) -> InputError:
    return InputError(
        f"the task `{name}` of an installed package can't be used: {why}",
        where=place,
        to_do="mend it",
    )


def task_of(name: str) -> Task:
    """The task of this name. Raises `InputError` for one that is not known."""
    task = find_task(name)
    if task is None:
        raise InputError(
            f"there is no task `{name}`", where="task", to_do=f"use one of {', '.join(_TASKS)}"
        )
    return task


def format_of(name: str) -> Format:
    """The form of rows of this name, whichever task reads it."""
    return next(each for task in _TASKS.values() for each in task.formats if each.name == name)


def standard_columns() -> set[str]:
    """The names of columns that any task reads."""
    return {
        name
        for task in _TASKS.values()
        for each in task.formats
        for name in (*each.needs, *each.may_have)
    }
