"""Checksums of a finished checkpoint: written last, verified before anything is read back.

orbax restores a flipped byte without complaint, so a checkpoint is only believed with its manifest, which
covers itself as well: a byte flipped inside it is as visible as one flipped in the weights.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from bert.files import load_json, pointer_fault, write_atomic

MANIFEST = "MANIFEST.json"
FORMAT = 1


def write_manifest(folder: Path, step: int) -> None:
    """Writes ``folder/MANIFEST.json`` for all files in ``folder``: whole or not at all, and onto the disk."""
    files = {
        name: {"size": path.stat().st_size, "sha256": _sha256(path)} for name, path in sorted(_files(folder).items())
    }
    write_atomic(folder / MANIFEST, _dump({"format": FORMAT, "step": step, "files": files}))


def write_partial_manifest(folder: Path, source: Path) -> None:
    """Writes ``folder/MANIFEST.json`` for a folder that holds some of the files of ``source``, and others.

    Of the files of ``source`` the checksums are those of its manifest: a file that is damaged there is damaged here.

    Raises:
      ValueError: the manifest of ``source`` cannot be used.
    """
    manifest = _read_manifest(source)
    if isinstance(manifest, str):
        raise ValueError(manifest)
    files = {
        name: manifest["files"].get(name) or {"size": path.stat().st_size, "sha256": _sha256(path)}
        for name, path in sorted(_files(folder).items())
    }
    write_atomic(folder / MANIFEST, _dump({"format": FORMAT, "step": manifest["step"], "files": files}))


def verify_manifest(folder: Path) -> list[str]:
    """Compares ``folder`` with its manifest; returns one phrase a problem, none if it is as written."""
    manifest = _read_manifest(folder)
    if isinstance(manifest, str):
        return [manifest]
    problems = []
    try:
        present = _files(folder)
    except OSError as error:
        return [f"it cannot be read ({error.strerror})"]
    if folder.name.isdigit() and int(folder.name) != manifest["step"]:
        problems.append(f"{MANIFEST} belongs to step {manifest['step']}")
    for name, expected in manifest["files"].items():
        if name not in present:
            problems.append(f"{name} is missing")
        elif problem := _compare(present[name], expected):
            problems.append(f"{name} {problem}")
    problems += [f"{name} is not listed in {MANIFEST}" for name in sorted(present.keys() - manifest["files"].keys())]
    return problems


def listed_files(folder: Path) -> set[str] | None:
    """The files that the manifest of a checkpoint lists; None if it cannot be used."""
    manifest = _read_manifest(folder)
    return None if isinstance(manifest, str) else set(manifest["files"])


def _read_manifest(folder: Path) -> dict[str, Any] | str:
    """The manifest of ``folder``, or a phrase on why there is none."""
    try:
        text = (folder / MANIFEST).read_bytes().decode()
        manifest = load_json(text)
        # Byte for byte what _dump writes, its own checksum included: no other text is a manifest of ours.
        if text != _dump({key: manifest[key] for key in ("format", "step", "files")}):
            raise ValueError
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        return f"{MANIFEST} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError):  # ValueError: also bytes that are no UTF-8 or no JSON
        return f"{MANIFEST} is damaged"
    if manifest["format"] != FORMAT:
        return f"{MANIFEST} has format {manifest['format']}, this version reads format {FORMAT}"
    return dict(manifest)


def _compare(path: Path, expected: dict[str, Any]) -> str | None:
    try:
        if pointer_fault(path):
            return "is a pointer of Git LFS and not the file itself (run git lfs pull)"
        size = path.stat().st_size
        if size != expected["size"]:
            return f"has {size} bytes instead of {expected['size']}"
        return None if _sha256(path) == expected["sha256"] else "has a wrong checksum"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _files(folder: Path) -> dict[str, Path]:
    """Files by path inside ``folder``, without hidden ones (.DS_Store, .nfs...), which orbax never writes."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if not path.is_dir() and not path.name.startswith(".") and path != folder / MANIFEST
    }


def _dump(content: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1) + "\n"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
