"""Checks files by their first bytes, writes files atomically, locks folders, and locates the user's cache folder."""

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
"""Maps first bytes of pointer files to the tool that wrote them and the command that downloads the content."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""A JSON escape of a surrogate, alone or in a pair."""

FIRST_BYTES = 256
"""Number of bytes that identify the kind of file."""

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
"""Maps first bytes of files that are not plain text to their kind and the fix."""

OFFICE_PARTS = (b"[Content_Types].xml", b"_rels/", b"docProps/", b"xl/", b"word/", b"mimetype")
"""First member names of Office files, which are ZIP archives."""


def pointer_fault(path: Path | str, start: bytes | None = None) -> str | None:
    """Returns an error message for a Git LFS or git-annex pointer; None for other files.

    Args:
        start: the first bytes of the file; None to read them.
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
    """Raises UserError for a Git LFS or git-annex pointer. Arguments: see `pointer_fault`."""
    if fault := pointer_fault(path, start):
        raise UserError(fault)


def require_text(path: Path | str, start: bytes) -> None:
    """Raises UserError for a pointer, or for a file that is not text, given its first bytes."""
    require_content(path, start)
    for magic, kind in KINDS.items():
        if start.startswith(magic):
            if magic == b"PK\x03\x04" and start[30:].startswith(OFFICE_PARTS):
                kind = "an Office file such as .xlsx or .docx: save it as CSV or text"
            raise UserError(f"{path} is {kind}")


def read_json(file: Path) -> Any:
    """Reads a JSON file.

    Raises:
        UserError: the file cannot be read, is a Git LFS pointer, is not JSON, exceeds Python's limits for nesting or
            numbers, or has a lone surrogate, which tokenizers and UTF-8 cannot represent.
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


def read_json_object(file: Path) -> dict[str, Any]:
    """Reads a JSON file that contains an object. Raises UserError."""
    content = read_json(file)
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a JSON object: copy it again")
    return content


def user_cache_dir() -> Path | None:
    """Returns the user's cache folder; None if the user has no home folder, as in some containers."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bert-jax"
    except RuntimeError:
        return None


def write_atomic(path: Path, content: bytes | str) -> None:
    """Writes a file atomically. After a crash or power loss, either the old or the new file exists."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def load_json(text: str | bytes) -> Any:
    """Parses JSON. All errors are ValueErrors, including too deep nesting."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists or objects are nested too deeply") from None


def parse_json(text: str) -> Any:
    """Parses JSON like `load_json`, and replaces lone surrogates by ``?``, also in keys."""
    value = load_json(text)
    try:
        if _SURROGATE.search(text):  # pairs do not change
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError(str(error)) from None
    return value


def write_array(path: Path, array: np.ndarray) -> None:
    """Writes an array atomically, as ``.npy``."""
    import numpy as np  # not needed for text files

    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    write_atomic(path, content.getvalue())


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file.

    Raises:
        OSError: the file cannot be written. The library would raise its own error for a full disk.
    """
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path, metadata)
    except SafetensorError as error:
        match = re.search(r"os error (\d+)", str(error))
        number = int(match[1]) if match else errno.EIO
        raise OSError(number, os.strerror(number) if match else str(error), str(path)) from None


def write_tsv(path: Path, rows: Sequence[Sequence[str]]) -> Path:
    """Writes rows as tab-separated lines. Creates the folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8", newline="\n")
    return path


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder. It replaces ``path`` on success and is removed after an error."""
    temporary = _temporary(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def is_temporary(path: Path) -> bool:
    """Whether a file is a temporary file of `atomic_write` or `atomic_directory`, which a kill may leave behind."""
    return re.fullmatch(r"\..*\.\d+\.bert-partial", path.name) is not None


def _remove_leftovers(draft: Path) -> None:
    """Removes temporary files for this path that processes left behind, if they no longer run."""
    for entry in draft.parent.iterdir() if draft.parent.is_dir() else ():
        name, _, process = entry.name.removesuffix(".bert-partial").rpartition(".")
        same = is_temporary(entry) and name == draft.name.removesuffix(f".{os.getpid()}.bert-partial")
        if same and entry.is_dir() and not _is_running(int(process)):
            shutil.rmtree(entry)


def _is_running(process: int) -> bool:
    """Whether a process with this id runs on this machine."""
    if os.name == "nt":  # signal 0 would end the process
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
    """Yields a temporary folder. Its content is moved to ``out`` on success, and removed after an error.

    An existing empty folder is kept, because it may be the working directory or a mount point. Temporary folders of
    processes that were killed on this machine are removed, both inside it and in its parent.

    Raises:
        UserError: ``out`` exists and is not an empty folder, cannot be written, or is not a local path.
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
    """Makes renames in ``folder`` survive a power loss, except on Windows, which cannot open folders."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def path_text(path: object, name: str = "") -> str:
    """Converts a path or URL to a string.

    Raises:
        UserError: it is not a string or path, or has characters that are not allowed in paths.
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
    """Raises UserError for a path that is not UTF-8, which Orbax cannot open."""
    if without_surrogates(str(path)) != str(path):
        described = f"{name} is {path}, which" if name else str(path)
        raise UserError(f"{described} is not UTF-8, as checkpoints need: use another path")


def local_path(path: str | Path, name: str = "") -> str:
    """Returns the path with ``~`` expanded.

    Raises:
        UserError: the path has a scheme, such as gs://, which would become a local folder; also see `path_text`.
    """
    path_text(path, name)
    described = f"{name} is {path}, which" if name else str(path)
    # A single slash, because Path drops the second one. At least two letters, because C:/ is a drive.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise UserError(f"{described} is not a local path, and no other can be used there: pass a local path")
    return os.path.expanduser(path)


LOCK = ".lock"
"""Lock file of a run. The file remains after the run and has no meaning: the kernel holds the lock."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Error numbers of file systems without locks."""


@contextlib.contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Locks a folder for this process until the block or the process ends, even after kill -9.

    The lock uses flock(2).

    - On a local disk, the kernel releases it when the process ends.
    - On NFS (Linux), the server holds the lock, so it works across hosts. If a host loses power, the server releases
      its lock after a timeout.
    - Lustre must be mounted with ``flock``. Otherwise locks work only within one host, as on FUSE mounts of object
      stores.
    - Without lock support in the file system, the run continues without a lock.

    Raises:
        UserError: another process holds the lock, or the folder is not writable.
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
        with contextlib.suppress(OSError):  # if the disk is full, only the description of the process is lost
            file.truncate(0)
            since = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())
        yield


def is_locked(folder: Path) -> bool | None:
    """Returns whether a process holds the lock of `exclusive_lock`; None if the file system has no locks."""
    if not (folder / LOCK).is_file():
        return False
    with open(folder / LOCK, "ab") as file:
        acquired = _try_lock(file)
        return None if acquired is None else not acquired


@contextlib.contextmanager
def blocking_lock(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Waits until no other process builds ``folder``, and blocks other processes during the block.

    The lock file is in the parent folder. Unlike with `exclusive_lock`, missing lock support is an error, because two
    processes that write the same files at once would damage them.

    Raises:
        UserError: the file system does not support locks.
    """
    with open(folder.with_name(folder.name + LOCK), "wb") as file:
        held = _try_lock(file)
        if held is None:
            raise UserError(
                f"the file system of {folder} has no locks, which builds by several processes need: pass "
                "another folder with data.cache_dir"
            )
        if not held:
            on_wait()
            from filelock import lock_descriptor

            lock_descriptor(file.fileno())
        yield


def _try_lock(file: IO[bytes]) -> bool | None:
    """Tries to lock an open file. Returns False if another process holds the lock, None if locks are not supported."""
    from filelock import lock_descriptor  # takes 70 ms to import

    try:
        return lock_descriptor(file.fileno(), blocking=False)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None


def _holder(file: IO[bytes]) -> str:
    """Returns the description written by the process that holds the lock."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        file.seek(0)
        if text := file.read(300).decode().strip():
            return text
    return "another process"
