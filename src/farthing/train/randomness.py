"""Random generators as functions of the place in a run: what a resume needs of them is nothing."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_everything(seed: int, *place: int) -> None:
    """Every generator as a function of (seed, step), in a step of several slots of the micro-batch
    too: dropout after a resume, and on another rank, is what it would have been."""
    text = "/".join(str(each) for each in (seed, *place))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    # as torch.manual_seed, which also notes a stack trace for each kind of device that is not in
    # use
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
    np.random.seed(number % 2**32)
    random.seed(number)
