"""A process that is killed at a file operation of its own."""

import builtins
import os
import signal
from collections.abc import Callable

from farthing.run import checkpoint as checkpoint_module

OPERATIONS = ["mkdir", "open", "fsync", "rename", "replace", "rmdir", "unlink", "chmod", "pwrite"]


def killed_at(k: int, operation: Callable[[], None]) -> bool:
    """Run `operation` in a child that is killed at its k-th file operation; whether the kill came
    before the end.

    Counted are `os` calls, `open` for writing, and the library's own file writing, which is cut in
    half.
    """
    pid = os.fork()
    if pid == 0:
        count = 0

        def tick():
            nonlocal count
            count += 1
            if count == k:
                os.kill(os.getpid(), signal.SIGKILL)

        def before(function):
            def counted(*args, **kwargs):
                tick()
                return function(*args, **kwargs)

            return counted

        for name in OPERATIONS:
            setattr(os, name, before(getattr(os, name)))
        real_open, real_save_file = builtins.open, checkpoint_module.save_file

        def counted_open(file, mode="r", *args, **kwargs):
            if any(letter in mode for letter in "wa+"):
                tick()
            return real_open(file, mode, *args, **kwargs)

        def counted_save_file(tensors, path):
            real_save_file(tensors, path)
            if count + 1 == k:
                os.truncate(path, os.path.getsize(path) // 2)
            tick()

        builtins.open = counted_open
        checkpoint_module.save_file = counted_save_file
        code = 1
        try:
            operation()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL)
    return code != 0
