"""Arrays of a run on disk: training states as orbax items, and the frozen weights of adapters as safetensors."""

from __future__ import annotations

import contextlib
import errno
import functools
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
from bert.model.parameters import Params, params_checksum
from bert.parallel.sharding import path_str
from bert.runs.checkpoint_directory import TRAINING_STATE
from bert.runs.folder import FROZEN_WEIGHTS

PARAMS = "params"
"""Item with the parameters, the only one that inference reads; `TRAINING_STATE` is the other item."""

Place = Callable[[str, Sequence[int]], jax.sharding.Sharding | None]
"""Path and shape of an array of the state -> its sharding over hosts, or None if each host has the whole array."""


def keep_whole(path: str, shape: Sequence[int]) -> None:
    """Returns None: each host has the whole array."""


def to_items(state: Any) -> dict[str, Any]:
    """Converts a pytree to items of nested dicts of arrays. The files do not depend on the optimizer's classes."""
    tree: dict[str, Any] = {}
    for path, leaf in _leaves(state).items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf if is_part(leaf) else np.asarray(leaf)
    items = {PARAMS: tree.pop(PARAMS, None), TRAINING_STATE: tree}
    return {name: item for name, item in items.items() if item}


def is_part(leaf: Any) -> bool:
    """Returns whether a leaf is an array whose parts are on several hosts (`Parallelism.take_state`)."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def save_items(folder: Path, items: Mapping[str, Any]) -> None:
    """Writes items into a new folder. A failed save may return before all of its writes have ended.

    Raises OSError, or ValueError from tensorstore.
    """
    _save(folder, items, _checkpointer(_alone()))


def save_parts(folder: Path, items: Mapping[str, Any], is_shared: bool) -> None:
    """Writes items with arrays in parts. All hosts call it, and each writes a file for each of its parts.

    Args:
        is_shared: whether all hosts see the same folder. If not, each writes to its own.
    """
    primary = 0 if is_shared else None
    together = ocp.options.MultiprocessingOptions(
        primary_host=primary, active_processes=set(range(jax.process_count()))
    )
    # One host writes all of a replicated part: a share for each of many hosts would be a large number of small files.
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
    """Replaces the text in orbax's marks of a complete save, which is the absolute path of the run.

    Only the presence of a mark counts. Marks are in the manifest and are copied with the run.
    """
    for mark in folder.rglob("commit_success.txt"):
        mark.write_text("The save is complete.\n")


def load_items(folder: Path, names: tuple[str, ...], place: Place) -> dict[str, Any]:
    """Reads the items of these names as nested dicts of NumPy arrays; arrays that ``place`` shards are `jax.Array`."""

    def argument(prefix: str, path: Sequence[Any], array: Any) -> ocp.RestoreArgs:
        sharding = place(prefix + path_str(path), array.shape)
        return ocp.RestoreArgs(np.ndarray) if sharding is None else ocp.ArrayRestoreArgs(sharding=sharding)

    def arguments(name: str) -> ocp.args.PyTreeRestore:
        # Without these arguments, orbax searches for the devices from which the parts were saved.
        tree = ocp.PyTreeCheckpointHandler(multiprocessing_options=_alone()).metadata(folder / name).tree
        prefix = f"{PARAMS}/" if name == PARAMS else ""
        return ocp.args.PyTreeRestore(restore_args=jax.tree_util.tree_map_with_path(partial(argument, prefix), tree))

    with quiet_orbax(), _checkpointer(_alone()) as orbax:
        items = {name: arguments(name) for name in names if (folder / name).is_dir()}
        restored = orbax.restore(folder, args=ocp.args.Composite(**items))
    return {name: restored[name] for name in items}


def restore_into(like: Any, state: Mapping[str, Any], checkpoint: Path) -> Any:
    """Returns the arrays of ``state`` in the structure of ``like``; UserError if names, shapes or dtypes differ."""
    expected, stored = _leaves(like), _leaves(state)
    problems = [f"{'/'.join(path)} is missing" for path in expected if path not in stored]
    problems += [f"{'/'.join(path)} is not expected" for path in stored if path not in expected]
    leaves = []
    for path, leaf in expected.items():
        if path not in stored:
            continue
        array = stored[path]
        if isinstance(leaf, bool | int | float):
            leaves.append(type(leaf)(array.item()) if array.ndim == 0 else None)
            matches, description = array.ndim == 0, f"a {type(leaf).__name__}"
        else:
            leaves.append(array)
            matches = (array.shape, array.dtype) == (tuple(leaf.shape), np.dtype(leaf.dtype))
            description = _describe_array(leaf)
        if not matches:
            problems.append(f"{'/'.join(path)} is {_describe_array(array)} instead of {description}")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise UserError(
            f"checkpoint {checkpoint} does not fit this model and optimizer: {'; '.join(problems[:8])}{more}: "
            "use the configuration that it was saved with, or another output_dir"
        )
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Hides orbax's log messages, and the stack traces of writes that continue after a failed save.

    The errors themselves are raised. If one array cannot be written, orbax closes its event loop. Each array that
    tensorstore is still writing then prints a stack trace to the terminal.
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
    """Returns a hook that drops tensorstore's errors about a closed event loop, and passes on all others.

    It is cached, so that it is never freed: a thread of tensorstore may be calling it when it is replaced.
    """

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            previous(unraisable)

    return hook


def _alone() -> ocp.options.MultiprocessingOptions:
    """Returns options for a process that acts alone; by default, orbax waits for all processes of a distributed run."""
    return ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(),
        active_processes={jax.process_index()},
        barrier_sync_key_prefix=f"process_{jax.process_index()}",
    )


def _checkpointer(processes: ocp.options.MultiprocessingOptions, **options: Any) -> ocp.Checkpointer:
    # Synchronous: the manifest is written after it in the background thread of `Checkpointer`.
    items = {
        name: ocp.PyTreeCheckpointHandler(multiprocessing_options=processes, **options)
        for name in (PARAMS, TRAINING_STATE)
    }
    composite = ocp.CompositeOptions(multiprocessing_options=processes)
    handler = ocp.CompositeCheckpointHandler(composite_options=composite, **items)
    return ocp.Checkpointer(handler, multiprocessing_options=processes)


def _leaves(tree: Any) -> dict[tuple[str, ...], Any]:
    return {
        tuple(jax.tree_util.keystr((key,), simple=True) for key in path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _describe_array(array: Any) -> str:
    return f"{np.dtype(array.dtype).name}[{','.join(map(str, array.shape))}]"


def num_bytes(state: Any) -> int:
    """Returns the size of this host's part of a checkpoint of the state."""
    return _size(to_items(state))


def _size(items: Any) -> int:
    def size(array: Any) -> int:
        if not is_part(array):
            return int(array.nbytes)
        return sum(part.data.nbytes for part in array.addressable_shards if part.replica_id == 0)

    return sum(map(size, jax.tree.leaves(items)))


def _check_space(folder: Path, items: Any) -> None:
    """Raises OSError before anything is written if the disk is too small: orbax would fail slowly and leave files."""
    needed, disk = _size(items), shutil.disk_usage(folder)
    if disk.total and disk.free < needed:  # some network file systems report zeros
        sizes = f"{needed / 1e6:.1f} MB needed, {disk.free / 1e6:.1f} MB free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({sizes})")


def is_io_error(error: Exception) -> bool:
    """Returns whether an error is caused by files, and not by a bug."""
    # tensorstore raises ValueErrors that begin with a status such as PERMISSION_DENIED. They do not always include the
    # error number of the system: an array that does not fit may turn another error into NOT_FOUND.
    return _errno(error) is not None or bool(re.match(r"[A-Z_]{3,}: ", str(error)))


def describe_error(error: Exception) -> str:
    """Describes an error in a few words: the text of tensorstore fills a page."""
    if (code := _errno(error)) is not None:
        text = getattr(error, "strerror", None) or os.strerror(code)
        file = getattr(error, "filename", None)
        return f"{text} ({file})" if file else text
    return first_line(error)


def _errno(error: Exception) -> int | None:
    """Returns the error number of the system, if a file operation failed."""
    if isinstance(error, OSError):
        return error.errno
    # tensorstore's ValueErrors have the number in one of two forms
    match = re.search(r"(?:os_error_code='|OS error )(\d+)", str(error))
    return int(match[1]) if match else None


def write_frozen_weights(run: Path, params: Params) -> None:
    """Writes the weights that a run with adapters does not train into its folder. Raises OSError."""
    flat = traverse_util.flatten_dict(params, sep="/")
    with atomic_write(run / FROZEN_WEIGHTS) as temporary:
        write_safetensors(temporary, flat)
        temporary.chmod((run / "config.yaml").stat().st_mode)  # safetensors creates files that only the owner can read


def read_frozen_weights(run: Path, checksum: str | None) -> Params:
    """Reads the weights that a run with adapters does not train.

    Args:
        checksum: checksum of the parameters that the run started with.

    Raises:
        UserError: the file is missing or damaged, or its checksum differs.
    """
    file = run / FROZEN_WEIGHTS
    try:
        params = traverse_util.unflatten_dict(load_file(file), sep="/")
    except FileNotFoundError:
        raise UserError(f"{file} is missing, but the run's adapters need it: copy it from the original run") from None
    except (OSError, TypeError, AttributeError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({error}): copy it from the original run") from None
    if params_checksum(params) != checksum:
        fault = "does not hold the weights that the run's adapters belong to (lora.checksum in config.yaml)"
        raise UserError(f"{file} {fault}: copy it from the original run")
    return params
