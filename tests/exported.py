"""What an exported folder holds."""

from pathlib import Path

import torch
import transformers

from workshop import make_folder


def body_of(folder: Path, family: str) -> Path:
    """A pretrained body as it is found on the Hub: without a head for classes that nobody has asked
    for.
    """
    make_folder(folder, family, pretrained=True)
    if family == "bert":
        config = transformers.AutoConfig.from_pretrained(folder)
        torch.manual_seed(0)
        transformers.AutoModel.from_config(config).save_pretrained(folder)
    return folder
