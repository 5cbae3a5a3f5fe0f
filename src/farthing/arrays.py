"""NumPy arrays by what they hold. Whoever takes or gives one says of what shape it is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Arrays = dict[str, NDArray[Any]]
"""Such as a model takes them of a micro-batch, by name."""
