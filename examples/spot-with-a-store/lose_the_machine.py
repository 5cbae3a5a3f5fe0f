"""Start a job, kill it without notice once its store holds a checkpoint, and delete its folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

LOOK_S = 0.2


def main(job: str, run: str) -> None:
    folder = Path(run)
    train = subprocess.Popen(["farthing", "train", job])
    while train.poll() is None and not list(folder.glob("checkpoints/*")):
        time.sleep(LOOK_S)
    while train.poll() is None and not (folder / "metrics.prom").exists():
        time.sleep(LOOK_S)
    if train.poll() is not None:
        sys.exit(f"the run ended by itself with code {train.returncode}")
    train.kill()
    train.wait()
    shutil.rmtree(folder)
    print(f"killed; {run} is gone")


if __name__ == "__main__":
    main(*sys.argv[1:3])
