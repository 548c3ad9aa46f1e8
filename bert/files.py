"""Checks of files by their first bytes, atomic file writes, locks of folders, and the user cache directory."""

from __future__ import annotations

import contextlib
import datetime
import errno
import io
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bert.errors import UserError, shorten, without_surrogates

if TYPE_CHECKING:
    import numpy as np


POINTERS = {b"version https://git-lfs": ("Git LFS", "git lfs pull"), b"/annex/objects/": ("git-annex", "git annex get")}
"""First bytes of a file that stands for another one -> the tool that wrote it, and the command that gets the other."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""The escape of half of a surrogate pair in JSON; also finds whole pairs."""

FIRST_BYTES = 256
"""Number of bytes that tell what a file is."""

PACKED = "packed with {}: let its name end in {} or unpack it"
KINDS = {
    b"\x1f\x8b": PACKED.format("gzip", ".gz"),
    b"\x28\xb5\x2f\xfd": PACKED.format("zstd", ".zst"),
    b"\xfd7zXZ\0": PACKED.format("xz", ".xz"),
    **{b"BZh%d1AY&SY" % level: PACKED.format("bzip2", ".bz2") for level in range(1, 10)},
    b"PK\x03\x04": "a ZIP archive, or a workbook of Excel: unpack it, or save the sheet as CSV",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive: unpack it",
    b"Rar!\x1a\x07": "a RAR archive: unpack it",
    b"PAR1\x15": "a Parquet file: let its name end in .parquet where that is read, or convert it to JSONL",
    b"ARROW1\0\0": "an Arrow file: convert it to Parquet or JSONL",
    b"%PDF-": "a PDF file: extract its text",
    b"\xd0\xcf\x11\xe0\xa1\xb1": "an old Office file such as .xls or .doc: save it as CSV or text",
}
"""First bytes of files that are no plain text -> what they are, and the fix."""

OFFICE_PARTS = (b"[Content_Types].xml", b"_rels/", b"docProps/", b"xl/", b"word/", b"mimetype")
"""Names of first members of ZIP archives that Office programs write."""


def pointer_fault(path: Path | str, start: bytes | None = None) -> str | None:
    """A sentence on a file that Git LFS or git-annex left in place of the content; None for any other file.

    Args:
        start: its first bytes; None reads them.
    """
    if start is None:
        try:
            with open(path, "rb") as file:
                start = file.read(FIRST_BYTES)
        except OSError:  # a folder, or a file that its reader reports
            return None
    for pointer, (tool, command) in POINTERS.items():
        if start.startswith(pointer):
            return f"{path} is a pointer of {tool} and not the file itself: run {command} in its folder"
    return None


def require_content(path: Path | str, start: bytes | None = None) -> None:
    """Raises UserError for a pointer of Git LFS or git-annex; arguments as for `pointer_fault`."""
    if fault := pointer_fault(path, start):
        raise UserError(fault)


def require_text(path: Path | str, start: bytes) -> None:
    """Raises UserError for a pointer, or for a file whose first bytes are those of another kind than text."""
    require_content(path, start)
    for magic, kind in KINDS.items():
        if start.startswith(magic):
            if magic == b"PK\x03\x04" and start[30:].startswith(OFFICE_PARTS):
                kind = "an Office file such as .xlsx or .docx: save it as CSV or text"
            raise UserError(f"{path} is {kind}")


def read_json(file: Path) -> Any:
    """The value in a JSON file.

    Raises:
        UserError: the file cannot be read; is a pointer of Git LFS; is not JSON; nests or holds numbers beyond Python's
            limits; or holds half of a surrogate pair, which no tokenizer and no UTF-8 file takes.
    """
    try:
        data = file.read_bytes()
        require_text(file, data)
        text = data.decode("utf-8-sig")
        value = load_json(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(f"{file} holds half of a surrogate pair (\\ud800 to \\udfff): fix that text") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): fix its permissions or copy it again") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON ({error}): fix it or copy it again") from None
    return value


def user_cache_dir() -> Path | None:
    """Where the user's caches lie; None for a user who has no home, as in some containers."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bert-jax"
    except RuntimeError:
        return None


def write_atomic(path: Path, content: bytes | str) -> None:
    """Writes a file so that a crash or a loss of power leaves the old one or the new one, never a part."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def load_json(text: str | bytes) -> Any:
    """Returns what a JSON text holds. All errors are ValueErrors, also for lists that are nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists or objects are nested too deeply") from None


def parse_json(text: str) -> Any:
    """`load_json` for texts of any origin: each half of a surrogate pair becomes ``?``, in keys as well."""
    value = load_json(text)
    try:
        if _SURROGATE.search(text):  # also of whole pairs, which stay
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError(str(error)) from None
    return value


def write_array(path: Path, array: np.ndarray) -> None:
    """`write_atomic` for an array, as ``.npy``."""
    import numpy as np  # not needed by those who write text

    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    write_atomic(path, content.getvalue())


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file.

    Raises:
        OSError: the file cannot be written; the library raises its own error for a full disk.
    """
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path, metadata)
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number) if found else str(error), str(path)) from None


def write_tsv(path: Path, rows: Sequence[Sequence[str]]) -> Path:
    """Writes cells with tabs between them, a line for each row; the folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8", newline="\n")
    return path


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path next to this one that takes its place at the end, or vanishes after an error."""
    temporary = _temporary(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def is_temporary(path: Path) -> bool:
    """Whether the name is one that `atomic_write` or `atomic_directory` gives; a killed process leaves such files."""
    return re.fullmatch(r"\..*\.\d+\.bert-partial", path.name) is not None


def _remove_leftovers(draft: Path) -> None:
    """Removes the folders that earlier processes, which no longer run, made under the name of this draft."""
    for entry in draft.parent.iterdir() if draft.parent.is_dir() else ():
        name, _, process = entry.name.removesuffix(".bert-partial").rpartition(".")
        same = is_temporary(entry) and name == draft.name.removesuffix(f".{os.getpid()}.bert-partial")
        if same and entry.is_dir() and not _is_running(int(process)):
            shutil.rmtree(entry)


def _is_running(process: int) -> bool:
    """Whether this machine has a process of that number."""
    if os.name == "nt":  # signal 0 would end it
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.bert-partial")


@contextlib.contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """A temporary folder whose content is moved to ``out`` at the end; it is removed after an error.

    An empty folder that exists stays the same folder: it may be the working directory, or a mount point. Drafts that
    killed processes of this machine left in it or next to it are removed.

    Raises:
        UserError: ``out`` exists and is not an empty folder, or cannot be written, or is no local path.
    """
    local_path(out)
    if out.exists() and (
        not out.is_dir() or not all(is_temporary(entry) and entry.is_dir() for entry in out.iterdir())
    ):
        raise UserError(f"{out} exists already and is not an empty folder: name another one")
    exists = out.exists()
    draft = _temporary(out / "export") if exists else _temporary(out)
    try:
        _remove_leftovers(draft)
        draft.mkdir(parents=True)
        yield draft
        if exists:
            for leftover in set(out.iterdir()) - {draft}:
                shutil.rmtree(leftover)
            for entry in sorted(draft.iterdir()):
                entry.rename(out / entry.name)
        else:
            os.replace(draft, out)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror or error}): name another folder") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Makes renames inside ``folder`` survive a power cut, except on Windows, which opens no folders."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def path_text(path: object, name: str = "") -> str:
    """A path or URL as a string.

    Raises:
        UserError: it is no string or path, such as bytes, or holds characters that no path has.
    """
    described = f"{name} is {shorten(path)}, which" if name else shorten(path)
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else b""
    if not isinstance(text, str):
        raise UserError(f"{described} is not a path: pass a string or a pathlib.Path")
    if "\0" in text:
        raise UserError(f"{described} holds a null character: remove it")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise UserError(f"{described} holds half of a surrogate pair: remove it") from None
    return text


def require_utf8(path: Path, name: str = "") -> None:
    """Raises UserError for a path that is not UTF-8, which the library of checkpoints does not open."""
    if without_surrogates(str(path)) != str(path):
        described = f"{name} is {path}, which" if name else str(path)
        raise UserError(f"{described} is not UTF-8, as checkpoints need: use another path")


def local_path(path: str | Path, name: str = "") -> str:
    """The path, with the home folder for ``~``.

    Raises:
        UserError: it has a scheme, such as gs://, and would become a local folder, or as of `path_text`.
    """
    path_text(path, name)
    described = f"{name} is {path}, which" if name else str(path)
    # One slash: Path has dropped the other one. Two letters at least: C:/ is a drive.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise UserError(f"{described} is not a local path, and no other can be used there: pass a local path")
    return os.path.expanduser(path)


LOCK = ".lock"
"""File whose lock a run holds. It stays behind and means nothing then: the lock is the kernel's."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of a file system without locks."""


@contextlib.contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Holds the folder for this process, to the end of the block or of the process, however it ends (kill -9 too).

    The lock is flock(2)'s. On a local disk the kernel drops it with the process. On NFS (Linux) it is a lock of the
    server, so it holds between hosts too, and that of a host without power goes once the server has noticed. Lustre has
    to be mounted with ``flock``, or its locks hold within one host only, as on FUSE mounts of object stores. If the
    file system has no locks at all, the run continues without one.

    Raises:
        UserError: another process holds it, or the folder cannot be written.
    """
    try:
        file = open(folder / LOCK, "ab+", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise UserError(f"output_dir {folder} cannot be written ({error.strerror}): pass another one") from None
    with file:
        if _try_lock(file) is False:
            raise UserError(
                f"{folder} is in use by {_holder(file)}: wait until that has ended, or pass another --output_dir"
            )
        with contextlib.suppress(OSError):  # a full disk: only the description of the holder is lost
            file.truncate(0)
            since = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())
        yield


@contextlib.contextmanager
def blocking_lock(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Waits until no other process builds ``folder``, and keeps others waiting meanwhile.

    The lock file is next to the folder, and the lock is as that of `exclusive_lock`; but two processes that write the
    same files at once would spoil them, so a file system without locks is an error.

    Raises:
        UserError: the file system has no locks.
    """
    with open(folder.with_name(folder.name + LOCK), "wb") as file:
        held = _try_lock(file)
        if held is None:
            raise UserError(
                f"the file system of {folder} has no locks, which keep two processes from building the same: pass "
                "another folder with data.cache_dir"
            )
        if not held:
            on_wait()
            from filelock import lock_descriptor

            lock_descriptor(file.fileno())
        yield


def _try_lock(file: IO[bytes]) -> bool | None:
    """Locks an open file: True; False if another process holds the lock, None if the file system has no locks."""
    from filelock import lock_descriptor  # takes 70 ms to import

    try:
        return lock_descriptor(file.fileno(), blocking=False)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None


def _holder(file: IO[bytes]) -> str:
    """The description that the process with the lock has written."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        file.seek(0)
        if text := file.read(300).decode().strip():
            return text
    return "another process"
