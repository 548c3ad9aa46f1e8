"""Arrays of a run on disk: training states as orbax items, and the frozen weights of adapters as safetensors."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import safetensors
from flax import traverse_util
from safetensors.numpy import load_file

from bert.errors import UserError, first_line
from bert.files import atomic_write, write_safetensors
from bert.parallel.sharding import path_str
from bert.runs.checkpoint_directory import TRAINING_STATE
from bert.runs.folder import FROZEN_WEIGHTS

PARAMS = "params"
"""Item with the parameters, which inference reads alone; `TRAINING_STATE` is the other one."""

Place = Callable[[str, Sequence[int]], jax.sharding.Sharding | None]
"""Path and shape of an array of the state -> how the hosts have parts of it, or None if each has all of it."""


def keep_whole(path: str, shape: Sequence[int]) -> None:
    """Each host has all of each array."""


def to_items(state: Any) -> dict[str, Any]:
    """A pytree as nested dicts of arrays, with ``params`` separate: optimizer classes leave no trace in the files."""
    tree: dict[str, Any] = {}
    for path, leaf in _leaves(state).items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf if is_part(leaf) else np.asarray(leaf)
    items = {PARAMS: tree.pop(PARAMS, None), TRAINING_STATE: tree}
    return {name: item for name, item in items.items() if item}


def is_part(leaf: Any) -> bool:
    """Whether a leaf is an array of which several hosts have parts (`Parallelism.take_state`)."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def save_items(folder: Path, items: Mapping[str, Any]) -> None:
    """Writes items into a new folder; a failed save ends before its writes do.

    Raises OSError, or the ValueError of tensorstore.
    """
    _save(folder, items, _checkpointer(_alone()))


def save_parts(folder: Path, items: Mapping[str, Any], is_shared: bool) -> None:
    """As `save_items`, for arrays in parts: all hosts call it, and each writes its own parts, a file for each.

    Args:
        is_shared: whether all hosts see the same folder; else each makes one with its own parts.
    """
    primary = 0 if is_shared else None
    together = ocp.options.MultiprocessingOptions(
        primary_host=primary, active_processes=set(range(jax.process_count()))
    )
    # Of a part that several hosts have, one writes all: many hosts would leave a great many small files.
    handler = ocp.type_handlers.ArrayHandler(
        primary_host=primary, use_replica_parallel=False, enable_write_sharding_file=False
    )
    handlers = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler()), (jax.Array, handler)
    )
    _save(folder, items, _checkpointer(together, use_ocdbt=False, use_zarr3=True, type_handler_registry=handlers))


def _save(folder: Path, items: Mapping[str, Any], checkpointer: ocp.Checkpointer) -> None:
    _check_space(folder.parent, items)
    with checkpointer as orbax:
        orbax.save(folder, args=ocp.args.Composite(**{name: ocp.args.PyTreeSave(item) for name, item in items.items()}))


def remove_paths(folder: Path) -> None:
    """Replaces the text of orbax's marks of a complete save, which has the absolute path of the run.

    Only their presence counts. They are in the manifest, and are copied wherever the run is.
    """
    for mark in folder.rglob("commit_success.txt"):
        mark.write_text("The save is complete.\n")


def load_items(folder: Path, names: tuple[str, ...], place: Place) -> dict[str, Any]:
    """The items of these names that a folder has, as nested dicts of NumPy arrays; those that are placed, in parts."""

    def argument(prefix: str, path: Sequence[Any], array: Any) -> ocp.RestoreArgs:
        sharding = place(prefix + path_str(path), array.shape)
        return ocp.RestoreArgs(np.ndarray) if sharding is None else ocp.ArrayRestoreArgs(sharding=sharding)

    def arguments(name: str) -> ocp.args.PyTreeRestore:
        # Without these, orbax looks for the devices that parts were on.
        tree = ocp.PyTreeCheckpointHandler(multiprocessing_options=_alone()).metadata(folder / name).tree
        prefix = f"{PARAMS}/" if name == PARAMS else ""
        return ocp.args.PyTreeRestore(restore_args=jax.tree_util.tree_map_with_path(partial(argument, prefix), tree))

    with quiet_orbax(), _checkpointer(_alone()) as orbax:
        items = {name: arguments(name) for name in names if (folder / name).is_dir()}
        restored = orbax.restore(folder, args=ocp.args.Composite(**items))
    return {name: restored[name] for name in items}


def restore_into(like: Any, state: Mapping[str, Any], checkpoint: Path) -> Any:
    """The arrays of ``state`` in the structure of ``like``; UserError if names, shapes or dtypes differ."""
    expected, stored = _leaves(like), _leaves(state)
    problems = [f"{'/'.join(path)} is missing" for path in expected if path not in stored]
    problems += [f"{'/'.join(path)} has no place" for path in stored if path not in expected]
    leaves = []
    for path, leaf in expected.items():
        if path not in stored:
            continue
        array = stored[path]
        if isinstance(leaf, bool | int | float):
            leaves.append(type(leaf)(array.item()) if array.ndim == 0 else None)
            matches, wanted = array.ndim == 0, f"a {type(leaf).__name__}"
        else:
            leaves.append(array)
            matches = (array.shape, array.dtype) == (tuple(leaf.shape), np.dtype(leaf.dtype))
            wanted = _describe_array(leaf)
        if not matches:
            problems.append(f"{'/'.join(path)} is {_describe_array(array)} instead of {wanted}")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise UserError(
            f"checkpoint {checkpoint} does not fit this model and optimizer: {'; '.join(problems[:8])}{more}: "
            "use the configuration it was saved with, or another output_dir"
        )
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Hides what orbax logs through absl, and the stack traces of writes that outlive a failed save.

    The errors themselves are raised anyway. When one array cannot be written, orbax closes its event loop. Arrays
    still on their way in tensorstore then find it closed, and each prints a stack trace into the terminal.
    """
    logger, previous_hook = logging.getLogger("absl"), sys.unraisablehook
    hook = _hook_before(previous_hook)

    def is_from_others(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    logger.addFilter(is_from_others)
    sys.unraisablehook = hook
    try:
        yield
    finally:
        logger.removeFilter(is_from_others)
        if sys.unraisablehook is hook:
            sys.unraisablehook = previous_hook


@functools.cache
def _hook_before(previous: Callable[[sys.UnraisableHookArgs], Any]) -> Callable[[sys.UnraisableHookArgs], None]:
    """A hook that leaves out what tensorstore says of a closed event loop, and passes the rest on.

    It is cached and so never freed: a thread of tensorstore may be about to call it when it is replaced.
    """

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            previous(unraisable)

    return hook


def _alone() -> ocp.options.MultiprocessingOptions:
    """By default, orbax waits for every process of a distributed run to come along; here one acts alone."""
    return ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(),
        active_processes={jax.process_index()},
        barrier_sync_key_prefix=f"process_{jax.process_index()}",
    )


def _checkpointer(processes: ocp.options.MultiprocessingOptions, **options: Any) -> ocp.Checkpointer:
    # The synchronous one: the manifest has to follow in the same thread, so the thread is `Checkpointer`'s, not
    # orbax's.
    items = {
        name: ocp.PyTreeCheckpointHandler(multiprocessing_options=processes, **options)
        for name in (PARAMS, TRAINING_STATE)
    }
    composite = ocp.CompositeOptions(multiprocessing_options=processes)
    handler = ocp.CompositeCheckpointHandler(composite_options=composite, **items)
    return ocp.Checkpointer(handler, multiprocessing_options=processes)


def _num_bytes_to_write(array: Any) -> int:
    if not is_part(array):
        return int(array.nbytes)
    return sum(part.data.nbytes for part in array.addressable_shards if part.replica_id == 0)


def _leaves(tree: Any) -> dict[tuple[str, ...], Any]:
    return {
        tuple(jax.tree_util.keystr((key,), simple=True) for key in path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _describe_array(array: Any) -> str:
    return f"{np.dtype(array.dtype).name}[{','.join(map(str, array.shape))}]"


def num_bytes(state: Any) -> int:
    """Returns the size of this host's part of a checkpoint of a state."""
    return sum(map(_num_bytes_to_write, jax.tree.leaves(to_items(state))))


def _check_space(folder: Path, items: Any) -> None:
    """Raises OSError before anything is written if it cannot all be written: orbax fails slowly and untidily."""
    needed, disk = sum(map(_num_bytes_to_write, jax.tree.leaves(items))), shutil.disk_usage(folder)
    if disk.total and disk.free < needed:  # some network file systems report zeros
        raise OSError(
            errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({needed / 1e6:.1f} MB needed, {disk.free / 1e6:.1f} MB free)"
        )


def is_io_error(error: Exception) -> bool:
    """Whether an error is one of files, and not a bug."""
    # Every failure inside tensorstore is a ValueError that begins with a status such as PERMISSION_DENIED. One array
    # that does not fit may show as another one that is NOT_FOUND: the system's own number is not always there.
    return _errno(error) is not None or bool(re.match(r"[A-Z_]{3,}: ", str(error)))


def describe_error(error: Exception) -> str:
    """What went wrong in a few words: tensorstore's own text fills a page."""
    if (code := _errno(error)) is not None:
        text = getattr(error, "strerror", None) or os.strerror(code)
        file = getattr(error, "filename", None)
        return f"{text} ({file})" if file else text
    return first_line(error)


def _errno(error: Exception) -> int | None:
    """The system's error code, if a file operation failed."""
    if isinstance(error, OSError):
        return error.errno
    # tensorstore, which writes for orbax, raises ValueError, whose text has the code in one of two forms
    match = re.search(r"(?:os_error_code='|OS error )(\d+)", str(error))
    return int(match[1]) if match else None


Params = dict[str, Any]


def params_checksum(params: Params) -> str:
    """SHA-256 of the names, shapes, types and values of parameters."""
    digest = hashlib.sha256()
    for name, array in sorted(traverse_util.flatten_dict(params, sep="/").items()):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()


def write_frozen_weights(run: Path, params: Params) -> None:
    """Writes the file into a run's folder. Raises OSError."""
    flat = traverse_util.flatten_dict(params, sep="/")
    with atomic_write(run / FROZEN_WEIGHTS) as temporary:
        write_safetensors(temporary, flat)
        temporary.chmod((run / "config.yaml").stat().st_mode)  # the library gives its file to the owner alone


def read_frozen_weights(run: Path, checksum: str | None) -> Params:
    """The parameters in the file.

    Args:
        run: the run's folder.
        checksum: of the parameters that the run began with.

    Raises:
        UserError: the file is missing or damaged, or holds others.
    """
    file = run / FROZEN_WEIGHTS
    try:
        params = traverse_util.unflatten_dict(load_file(file), sep="/")
    except FileNotFoundError:
        raise UserError(
            f"{file} is missing, which the run's adapters belong to: copy it from the original run"
        ) from None
    except (OSError, TypeError, AttributeError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({error}): copy it from the original run") from None
    if params_checksum(params) != checksum:
        raise UserError(
            f"{file} does not hold the weights that the run's adapters belong to (lora.checksum in config.yaml): copy "
            "it from the original run"
        )
    return params
