"""A folder with a model -> a repository of the Hugging Face Hub, by the Hub's own client.

The repository is private unless it is asked otherwise, and one that others can read is never taken
for a private one. The token comes from the environment alone. What was sent, with the commit it
became, is noted in the run folder: a push that failed is taken up again by the same command, and
what the Hub has already is not sent twice.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from farthing.errors import FarthingError, InputError
from farthing.run.folder import MODEL, PUBLISHED, keep, kept
from farthing.storage.files import MANIFEST, DamagedFileError, Json, files_below, sha256_of

PREFIX = "hub:"
TOKEN = "HF_TOKEN"
LEFT_OUT = ("manifest.json", ".*", "*.part")
OF_A_MODEL = (
    "config.json model_config.json generation_config.json adapter_config.json"
    " adapter_model.safetensors model.safetensors model.safetensors.index.json model-*.safetensors"
)
"""Files of another model in the repository, which transformers would mix with this one."""


class PublishError(FarthingError):
    """The Hub did not take the model; what was written here is whole, and the same command
    continues.
    """


@dataclass(frozen=True)
class Publication:
    """A folder of this machine, and what it has become on the Hub; `commit` is empty until the Hub
    has taken it.
    """

    to: str
    """`owner/name`, or a name alone for the token's owner."""
    folder: str
    form: str
    content: str
    """Digest of its files; empty until they are written."""
    is_private: bool
    commit: str = ""
    url: str = ""

    def to_json(self) -> Json:
        return asdict(self)


def wanted_at(
    address: str, folder: Path, form: str, *, is_private: bool, where: str
) -> Publication:
    """A folder that shall go to `hub:owner/name` or `owner/name`.

    Raises `InputError` for what is no name, and where there is no token.
    """
    name = address.removeprefix(PREFIX)
    if not re.fullmatch(r"(\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", name, re.ASCII):
        what = f"{address!r} is no repository"
        raise InputError(what, where=where, to_do="e.g. hub:my-team/my-model")
    if not _token():
        raise InputError(
            "there is no token for the Hub",
            where=where,
            to_do=f"set {TOKEN} in the environment, never in the job",
        )
    return Publication(name, str(folder.resolve()), form, "", is_private)


def _token() -> str:
    return os.environ.get(TOKEN, "").strip()


def content_of(folder: Path, run: Path) -> str:
    """A digest of the files of a folder, and of the run's model that they were made of; the card is
    of the receipt, not of the model.
    """
    files = [path for path in files_below(folder) if path.name not in ("README.md", *LEFT_OUT)]
    files.append(run / MODEL / MANIFEST)
    lines = [f"{path.name} {sha256_of(path)}\n" for path in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def publications(run: Path) -> list[Publication]:
    """What of a run was published or is still to be, the oldest first."""
    try:
        return [Publication(**one) for one in (kept(run / PUBLISHED) or {}).get("publications", [])]
    except (DamagedFileError, TypeError):
        return []


def noted(run: Path, folder: Path, form: str) -> Publication | None:
    """The note of a push of this folder, if it is there as it was written; else None."""
    place = (str(folder.resolve()), form)
    found = next((one for one in publications(run) if (one.folder, one.form) == place), None)
    if found is None or not folder.is_dir() or not any(folder.iterdir()):
        return None
    return found if found.content in ("", content_of(folder, run)) else None


def announce(run: Path, note: Publication) -> None:
    """Note that a folder, which may be yet to be written, is to be published, or was. Raises
    `OSError`.
    """
    place, known = (note.folder, note.form), publications(run)
    rows = [asdict(one) for one in known if (one.folder, one.form) != place] + [asdict(note)]
    keep(run / PUBLISHED, {"kind": "farthing publications", "publications": rows})


def publish(run: Path, wanted: Publication) -> Publication:
    """Send a folder to the Hub and note the commit. Raises `PublishError`, `InputError`."""
    from huggingface_hub import HfApi

    note = replace(wanted, content=content_of(Path(wanted.folder), run))
    try:
        api: Any = HfApi(os.environ.get("HF_ENDPOINT"), _token(), library_name="farthing")
        name = api.create_repo(note.to, private=note.is_private, exist_ok=True).repo_id
        if (is_private := api.model_info(name).private) != note.is_private:
            kinds = ("private", "public") if is_private else ("public", "private")
            raise InputError(
                "this repository is {}, but you asked for a {} one; nothing was sent".format(
                    *kinds
                ),
                where=f"{PREFIX}{name}",
                to_do="name another one, or change --public (train.hub_private_repo)",
            )
        announce(run, note)
        done = api.upload_folder(
            repo_id=name,
            folder_path=note.folder,
            commit_message=f"{note.form} model of the run {run.resolve().name}",
            ignore_patterns=list(LEFT_OUT),
            delete_patterns=None if note.form.startswith("gguf") else OF_A_MODEL.split(),
        )
    except FarthingError:
        raise
    except Exception as error:  # of the client: refused, not reached, cut off
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise PublishError(
            f"the Hub has not taken the model ({why.replace(_token(), '...')}); it is whole in"
            f" {note.folder}",
            where=f"{PREFIX}{note.to}",
            to_do="run the same command again: it sends the missing files",
        ) from error
    sent = replace(note, to=name, commit=done.oid, url=str(done.commit_url))
    announce(run, sent)
    return sent
