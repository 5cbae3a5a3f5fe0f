"""What several test files share, and what must be set before the libraries are imported.

No test reaches the network, or a GPU that happens to be there: results are compared to the bit and
to 1e-5 in fp32. FARTHING_GPU=1 leaves the GPU in sight, for tests/test_gpu.py alone. Models this
small are quickest on one thread; more of them on cores that others use are very slow.
"""

import gc
import os
import signal
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["FARTHING_METADATA"] = "http://127.0.0.1:9"  # where nobody listens
os.environ.setdefault(
    "FARTHING_TODAY", "2026-11-22"
)  # prices grow old: `make test` is run on other days too
if os.environ.get("FARTHING_GPU") != "1" and "HOLLOW_NAME" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONDONTWRITEBYTECODE"] = (
    ""  # else each of the many processes here compiles farthing again
)

import pytest

from canaries import secrets as secrets
from command import cli as cli
from desk import desk as desk
from desk import run as run
from farthing.tiny import demo_rows
from small_models import make_model_folder

OF_OTHERS = (
    "FORCE_COLOR",
    "NO_COLOR",
    "COLUMNS",
    "LINES",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "TORCHELASTIC_",
)
"""How wide and how coloured, and which of several processes this is: said to whoever has started
the tests, not to them.
"""


def pytest_configure():
    """Under nohup SIGHUP is ignored, in the background SIGINT; processes that tests begin would
    ignore them too. What is compiled is kept.
    """
    for name in [name for name in os.environ if name.startswith(OF_OTHERS)]:
        del os.environ[name]
    sys.dont_write_bytecode = False
    gc.disable()  # imports and the tests themselves are no garbage
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """What was collected is kept out of garbage collection."""
    global _n_frozen
    _n_frozen = len(sys.modules)
    gc.freeze()
    gc.get_freeze_count = lambda: (
        _n_frozen
    )  # every run asks whether it is above 0; counting all of it takes 0.04 s
    gc.enable()


def pytest_runtest_teardown():
    """Keep imported libraries out of garbage collection, which otherwise walks all of torch in
    every run.
    """
    global _n_frozen
    if len(sys.modules) > _n_frozen + 100:
        _n_frozen = len(sys.modules)
        gc.collect()
        gc.freeze()


_n_frozen = 0


@pytest.fixture(scope="session", autouse=True)
def own_caches(tmp_path_factory):
    """Whoever runs the tests may have prices and models of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        yield


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory):
    """Folders with a tokenizer and a config.json, by family: llama, t5, bert. Nobody writes into
    them.
    """
    texts = [row["prompt"] + row["completion"] for row in demo_rows(100)]
    texts += [
        "### User\nHow are you?\n\n### Assistant\nI am fine, thank you.",
        "Übergrößen, naïve café, 日本語 🙂",
    ]
    root = tmp_path_factory.mktemp("tiny")
    return {
        family: make_model_folder(root / family, texts, family, hidden=32, layers=1)
        for family in ("llama", "t5", "bert")
    }


@pytest.fixture(scope="session")
def with_weights(tiny_folders, tmp_path_factory):
    """A folder like `tiny_folders["llama"]` that also has safetensors weights."""
    import shutil

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("weights") / "model"
    shutil.copytree(tiny_folders["llama"], folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizers(tiny_folders):
    """The tokenizers of `tiny_folders`, with farthing's chat template."""
    from farthing.model.load import ModelChoice, load_tokenizer

    return {
        family: load_tokenizer(ModelChoice(str(folder)), None)
        for family, folder in tiny_folders.items()
    }


@pytest.fixture(scope="session")
def data_dir():
    """The folder of real tokenizers and data that FARTHING_DATA names."""
    if not os.environ.get("FARTHING_DATA"):
        pytest.skip("FARTHING_DATA is not set: no real tokenizers and data here")
    return Path(os.environ["FARTHING_DATA"])
