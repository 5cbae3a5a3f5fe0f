"""Kernels that a hollow GPU was asked to launch."""

import ctypes
import json
from collections import Counter
from pathlib import Path


def launched(folder: Path) -> Counter[str]:
    """Kernels by their (mangled) names, and how often this process has launched each so far."""
    path = folder / "kernels.json"
    ctypes.CDLL(None).hollow_write(str(path).encode())
    found: Counter[str] = Counter()
    for name, n in dict(json.loads(path.read_text(), object_pairs_hook=list))["kernels"]:
        found[name] += n  # one name may have several programs
    return found
