"""Files that are whole or not there: drafts, manifests, renames, and logs that survive a torn last
line.

A folder is committed by this protocol: fill a draft beside it, fsync every file, write
`manifest.json` (name, size and sha256 of each file) last and fsync it, rename the draft to its
final name, fsync the parent. A folder without a valid manifest does not exist. Checkpoints and
token caches both stand on it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, TypedDict, get_type_hints

from farthing.errors import DiskFullError, FarthingError, InputError, RunBusyError, RunChangedError

MANIFEST = "manifest.json"
MAX_TEXT_BYTES = 16 << 20
DRAFT = ".draft-"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
"""flock(2) without locks: NFS without its lock daemon, Lustre without `-o flock`."""

FREED_S = 0.5
"""So long after the end of a process its lock may still be there."""

_OWNERS = (0, os.geteuid())
Json = dict[str, Any]
"""An object that others may have written: nothing of it is known before it is checked."""
Warn = Callable[[str], None]


class FileEntry(TypedDict):
    """A file of a committed folder, as its manifest lists it."""

    name: str
    size: int
    sha256: str


class StoredFile(TypedDict):
    """A file of a run as a commit names it, and the object that holds its bytes."""

    path: str
    size: int
    sha256: str
    object: str


class DamagedFileError(Exception):
    """A folder's content is not what its manifest says. The message says in what way."""


def parse_json(text: str | bytes) -> Any:
    """Of a text that others may have written. Raises `ValueError`, also if nested too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def read_json(path: Path) -> Any:
    """`parse_json` of a file. Raises `OSError` too."""
    return parse_json(path.read_text(encoding="utf-8"))


def small_text(path: Path, most_bytes: int = MAX_TEXT_BYTES) -> str:
    """Raises `OSError`, also for a pipe, a device, a larger file and other text than UTF-8."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EINVAL, "a pipe or a device, not a file")
    if status.st_size > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes >> 20} MiB")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"not UTF-8 text (byte {error.start})") from error


def files_below(folder: Path) -> list[Path]:
    """Those within its folders too, in their order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_below(folder))


def open_own(path: Path, mode: str) -> IO[Any]:
    """Text or unbuffered bytes, for its owner alone. No link is followed: `OSError`."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o600)

    is_bytes = "b" in mode
    return open(
        path, mode, 0 if is_bytes else -1, encoding=None if is_bytes else "utf-8", opener=opener
    )


def draft_of(path: Path) -> Path:
    """A new name for what is not whole yet or on its way out; see `sweep_drafts`."""
    return path.with_name(f"{path.name}{DRAFT}{uuid.uuid4().hex[:8]}")


def fsync_path(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path, progress: Callable[[int], object] = lambda done: None) -> str:
    """Hex digest of a file's bytes; `progress(bytes read)` is called about once for 16 MB."""
    digest, done = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while piece := file.read(16 << 20):
            digest.update(piece)
            done += len(piece)
            progress(done)
    return digest.hexdigest()


def make_private(folder: Path) -> Path:
    """Create `folder` if need be, for its owner alone: it may hold data. Raises `OSError`."""
    if folder.is_symlink() and belongs_to_another(folder):
        raise PermissionError(errno.EPERM, "it is a link made by another user")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(OSError):
        folder.chmod(0o700)
    return folder


def belongs_to_another(path: Path) -> bool:
    """Whether a file, folder or link was made by another user than root and whoever runs this."""
    return path.lstat().st_uid not in _OWNERS


def own_folder(folder: Path, warn: Warn) -> Path:
    """`make_private`, or in place of a folder that belongs to another user one beside it, which
    `warn` is told.

    What another user has put there could be anything: data to learn among it. Raises `OSError`.
    """
    if os.path.lexists(folder) and any(map(belongs_to_another, (folder, folder.resolve()))):
        own = folder.with_name(f"{folder.name}-of-{os.geteuid()}")
        if os.path.lexists(own) and (belongs_to_another(own) or own.is_symlink()):
            raise PermissionError(errno.EPERM, f"{own} belongs to another user")
        warn(
            f"{folder} belongs to another user (uid {folder.stat().st_uid}) and is not used;"
            f" {own} is"
        )
        folder = own
    return make_private(folder)


def is_own(folder: Path) -> bool:
    """Whether a folder and its files are one's own (or root's), and nobody else can write."""
    found = [folder.lstat(), *(path.lstat() for path in folder.iterdir())]
    return (
        stat.S_ISDIR(found[0].st_mode)
        and all(stat.S_ISREG(each.st_mode) for each in found[1:])
        and all(each.st_uid in _OWNERS and not each.st_mode & 0o022 for each in found)
    )


def write_json(path: Path, value: Any) -> None:
    write_text(path, _as_text(value))


def write_text(
    path: Path, text: str | Iterable[str], *, is_synced: bool = True, is_private: bool = False
) -> None:
    """Replace a file by a text, or by pieces of one: readers see the old content or the new, never
    a part. What is not synced survives a kill, not the loss of the machine. A private file is
    readable by its owner alone.

    Raises `OSError`.
    """
    draft, opener = draft_of(path), partial(os.open, mode=0o600 if is_private else 0o666)
    try:
        with open(draft, "w", encoding="utf-8", newline="", opener=opener) as file:
            file.writelines([text] if isinstance(text, str) else text)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if is_synced:
        fsync_path(path.parent)


def _as_text(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def seal(manifest: Json) -> str:
    """A manifest as text, with the sha256 of its own content as its last key."""
    text = _as_text({key: value for key, value in manifest.items() if key != "sha256"})
    digest = hashlib.sha256(text.encode()).hexdigest()
    head = text.removesuffix("\n}\n") + "," if text != "{}\n" else "{"
    return f'{head}\n "sha256": "{digest}"\n}}\n'


def unseal(text: str, name: str) -> Json:
    """What `seal` wrote, which is called `name`. Raises `DamagedFileError`."""
    try:
        manifest = parse_json(text)
        is_whole = isinstance(manifest, dict) and text == seal(manifest)
    except (ValueError, RecursionError) as error:  # of numbers that JSON has not, too
        raise DamagedFileError(f"{name} can't be read: {error}") from error
    if not is_whole:
        raise DamagedFileError(f"{name} differs from the file that was written (sha256)")
    return dict(manifest)


def refuse_other(manifest: Json, schema: int, where: str) -> None:
    """Raise `RunChangedError` for what another version of farthing has written."""
    found = manifest.get("schema")
    if found != schema:
        raise RunChangedError(
            f"another version of farthing wrote this (schema {found}, not {schema})",
            where=where,
            to_do="finish the run with that version, or give the job another output_dir and store",
        )


def seal_file(path: Path) -> FileEntry:
    """A file that is on the disk for good, as a manifest lists it. Raises `OSError`."""
    path.chmod(
        stat.S_IMODE(path.stat().st_mode) & ~0o022
    )  # whatever the umask: nobody else may change it
    fsync_path(path)
    return {"name": path.name, "size": path.stat().st_size, "sha256": sha256_of(path)}


def commit_folder(
    final: Path, fill: Callable[[Path], Iterable[FileEntry] | None], facts: Json
) -> Json:
    """Write a folder by the protocol above and return its manifest: `facts` and the list of files.

    `fill(draft)` writes the files, flat, and returns the entries of those that were sealed where
    they were written. On any error the draft is removed and nothing has changed. Raises
    `FileExistsError` when `final` is there already.
    """
    if final.exists():
        raise FileExistsError(f"{final} exists and is never overwritten")
    with _folder_draft(final, mode=0o700) as draft:
        sealed = {entry["name"]: entry for entry in fill(draft) or ()}
        entries = [sealed.get(path.name) or seal_file(path) for path in sorted(draft.iterdir())]
        if lost := sealed.keys() - {entry["name"] for entry in entries}:
            raise FileNotFoundError(
                errno.ENOENT, f"{sorted(lost)[0]} of another rank is not here", str(draft)
            )
        manifest = {**facts, "files": entries}
        write_text(draft / MANIFEST, seal(manifest), is_private=True)
        try:
            os.rename(draft, final)
        except OSError as error:  # onto a folder with files: who has made it meanwhile was quicker
            if error.errno == errno.ENOTEMPTY:
                raise FileExistsError(error.errno, os.strerror(errno.EEXIST), str(final)) from error
            raise
    return read_manifest(final)


@contextlib.contextmanager
def _folder_draft(final: Path, mode: int = 0o777) -> Iterator[Path]:
    """A folder to be filled and renamed to `final`; on any error it is removed."""
    draft = draft_of(final)
    draft.mkdir(parents=True, mode=mode)
    try:
        yield draft
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    fsync_path(final.parent)


def read_manifest(folder: Path) -> Json:
    """The manifest of a committed folder, its form checked. Raises `DamagedFileError`."""
    path = folder / MANIFEST
    if folder.is_symlink() or path.is_symlink():
        raise DamagedFileError("it is a symbolic link")
    try:
        manifest = unseal(small_text(path), MANIFEST)
    except FileNotFoundError as error:
        raise DamagedFileError(f"no {MANIFEST}: it was never committed") from error
    except (ValueError, OSError) as error:
        raise DamagedFileError(f"{MANIFEST} can't be read: {error}") from error
    for entry in entries_of(manifest, FileEntry, MANIFEST):
        if entry["name"] in ("", ".", "..", MANIFEST) or {"/", "\\"} & set(entry["name"]):
            raise DamagedFileError(f"{MANIFEST} names a file outside its folder: {entry['name']!r}")
    return manifest


def entries_of(manifest: Json, kind: type, name: str) -> list[Any]:
    """The files that a manifest called `name` lists, each of a kind. Raises `DamagedFileError`."""
    entries, hints = manifest.get("files"), get_type_hints(kind)
    is_whole = isinstance(entries, list) and all(
        isinstance(entry, dict)
        and all(isinstance(entry.get(key), hint) for key, hint in hints.items())
        and entry["size"] >= 0
        for entry in entries
    )
    if not is_whole:
        raise DamagedFileError(f"{name} does not list its files as farthing writes them")
    return manifest["files"]


def check_file(path: Path, entry: FileEntry | StoredFile, name: str) -> None:
    """Hold a file, called `name`, against its manifest. Raises `DamagedFileError`."""
    if path.is_symlink() or not path.is_file():
        raise DamagedFileError(f"{name} is missing")
    size = path.stat().st_size
    if size != entry["size"]:
        raise DamagedFileError(f"{name} has {size} bytes, {entry['size']} were written")
    try:
        is_whole = sha256_of(path) == entry["sha256"]
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise DamagedFileError(f"{name} can't be read: {error.strerror}") from error
    if not is_whole:
        raise DamagedFileError(f"{name} differs from the file that was written (sha256)")


def verify_folder(folder: Path, besides: Collection[str] = ()) -> Json:
    """Check every file of a committed folder against its manifest, byte for byte, before anything
    is parsed.

    Returns the manifest. Files named in `besides` may change. Raises `DamagedFileError`.
    """
    manifest = read_manifest(folder)
    listed = {entry["name"] for entry in manifest["files"]}
    for entry in manifest["files"]:
        check_file(folder / entry["name"], entry, entry["name"])
    extra = {path.name for path in folder.iterdir()} - listed - {MANIFEST, *besides}
    if extra:
        raise DamagedFileError(f"has files that were added later: {', '.join(sorted(extra)[:5])}")
    return manifest


def discard(folder: Path) -> None:
    """Remove a committed folder: it stops existing in one step, its bytes go afterwards."""
    gone = draft_of(folder)
    os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def sweep_drafts(folder: Path, of: Collection[str] = ("*",)) -> None:
    """Remove what killed writers left behind, all or of certain names."""
    for path in [path for name in of for path in folder.glob(f"{name}{DRAFT}*")]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def install_folder(final: Path, fill: Callable[[Path], None]) -> None:
    """Write a folder for others so that it appears whole, replacing an earlier one. Raises
    `OSError`, also where a library has the system's error in its text alone.
    """
    with _folder_draft(final) as draft:
        try:
            fill(draft)
        except Exception as error:
            code = re.search(r"(?:os error |\[Errno )(\d+)", str(error))
            if code is None or getattr(error, "errno", None) is not None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(final)) from error
        mode = draft.stat().st_mode & 0o777
        for path in draft.rglob("*"):
            path.chmod(mode if path.is_dir() else mode & 0o666)
        for path in (*draft.rglob("*"), draft):
            fsync_path(path)
        if final.exists():
            discard(final)
        os.rename(draft, final)


def set_aside(folder: Path) -> Path:
    """Rename a damaged folder, so that nothing of it is lost; its new name."""
    return folder.rename(_free_name(folder, "bad"))


def keep_aside(path: Path) -> None:
    """Keep what a file holds under another name beside it."""
    if path.exists():
        shutil.copyfile(path, _free_name(path, "damaged"))


def _free_name(path: Path, mark: str) -> Path:
    numbered = (path.with_name(f"{path.name}.{mark}-{number}") for number in itertools.count(1))
    return next(name for name in numbered if not name.exists())


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold `folder` against a second farthing process for as long as the block runs.

    Raises `RunBusyError`, `DiskFullError` where nothing can be written, and `InputError` where no
    file can be locked, or a file in it is a link: what is written there would go elsewhere.
    """
    for path in folder.iterdir():
        if path.is_symlink() and not path.is_dir():
            raise InputError(
                f"`{path.name}` in this folder is a symbolic link",
                where=str(folder),
                to_do="remove it, or choose another output_dir",
            )
    path, until = folder / ".lock", time.monotonic() + FREED_S
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open_own(path, "a+"))
            while not _is_locked(file, waits=time.monotonic() < until):
                time.sleep(0.02)
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        except BlockingIOError as error:
            raise RunBusyError(
                f"another process is training in this folder (pid {path.read_text() or 'unknown'})",
                where=str(folder),
                to_do="wait for it, stop it, or give this job another output_dir",
            ) from error
        except OSError as error:
            if error.errno in _NO_LOCKS:
                raise InputError(
                    f"this file system can't lock files ({error.strerror}): two processes could"
                    " train here at once",
                    where=str(folder),
                    to_do="set output_dir to a local disk; output_store may be a folder here",
                ) from error
            raise cannot_write(folder, error) from error
        yield


def _is_locked(file: IO[str], *, waits: bool) -> bool:
    """The kernel frees the lock of a killed process a moment late. Raises `OSError`."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        if waits:
            return False
        raise


def cannot_write(folder: Path, error: OSError) -> FarthingError:
    is_forbidden = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return (InputError if is_forbidden else DiskFullError)(
        f"the run folder can't be written: {error.strerror or error}",
        where=str(folder),
        to_do=f"{'' if is_forbidden else 'make room there, or '}choose another output_dir",
    )
