"""A process of farthing that waits where a test means: as it is about to give a file or a folder
its name.

What a test does to a process that runs on, a machine that others use may do too late, when the run
has ended already.
"""

import os
from pathlib import Path

_SITE = """
import os, sys, time
here, mark = os.path.dirname(__file__), {mark!r}
def hold(event, words):
    if event == "os.rename" and mark in os.fspath(words[1]) and not os.path.exists(here + "/held"):
        open(here + "/held", "w").close()
        while not os.path.exists(here + "/go"):
            time.sleep(0.01)
sys.addaudithook(hold)
"""


class Held:
    """The first process with this `environment` waits before it renames something to a path that
    has `mark` in it.

    Those after it do not. `folder` is for what has to be known to both; `packages` are folders of
    modules besides.
    """

    def __init__(self, folder: Path, mark: str, *packages: Path):
        self._folder = folder
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(_SITE.format(mark=mark))
        paths = [str(folder), *map(str, packages), os.environ.get("PYTHONPATH", "")]
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def is_there(self) -> bool:
        """Whether a process has come so far."""
        return (self._folder / "held").exists()

    def let_go(self):
        """It goes on."""
        (self._folder / "go").touch()
