"""The most memory that a block of code holds."""

import re
from pathlib import Path


class PeakMemory:
    """Within the block: by how much the resident memory of this process rises at most; no more than
    `most_bytes`.
    """

    def __init__(self, most_bytes: int):
        self.most_bytes = most_bytes

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._peak()

    def __exit__(self, *error: object):
        assert self._peak() - self._before < self.most_bytes

    def _peak(self) -> int:
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]
