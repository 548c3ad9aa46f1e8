"""The embeddings that a student starts from: its teacher's, in as many dimensions as it has.

A short run cannot learn what 30,000 tokens mean. The teacher knows, and the student reads the same tokens.
"""

from __future__ import annotations

import numpy as np

from bert.config import ModelConfig
from bert.interchange.names import PROJECTIONS
from bert.training.distillation import Teacher
from bert.training.initialization import Params


def start_from_teacher(params: Params, config: ModelConfig, teacher: Teacher) -> Params:
    """A student's random parameters, with its teacher's embeddings in them if it is not wider.

    A narrower student has their principal components: the table of words is within the smallest squared distance that
    so many dimensions allow, and the positions are turned the same way. Projections to the teacher's width start as
    the way back, so that the student's states are compared in the teacher's directions from the first step.

    Args:
        params: of the student; left unchanged.
        config: the student's sizes.
        teacher: its vocabulary is the student's.
    """
    own, given = params["bert"]["embeddings"], teacher.params["bert"]["embeddings"]
    words = np.asarray(given["word"]["embedding"], np.float32)
    width = own["word"]["embedding"].shape[-1]
    if width > words.shape[-1]:
        return params
    basis = np.eye(width, dtype=np.float32) if width == words.shape[-1] else principal_directions(words, width)
    offsets = {"position": (config.position_offset, teacher.config.position_offset)}
    tables = {
        name: {"embedding": _with_rows(own[name], given[name], basis, *offsets.get(name, (0, 0)))}
        for name in ("word", "position", "segment")
        if name in own and name in given
    }
    started = {**params, "bert": {**params["bert"], "embeddings": {**own, **tables}}}
    if PROJECTIONS in params and config.hidden_size == width:
        started[PROJECTIONS] = {layer: {"kernel": basis.T.copy()} for layer in params[PROJECTIONS]}
    return started


def principal_directions(table: np.ndarray, width: int) -> np.ndarray:
    """[D, width] orthonormal directions that keep most of the rows' squared lengths [N, D]."""
    _, vectors = np.linalg.eigh(table.T.astype(np.float64) @ table)
    return np.ascontiguousarray(vectors[:, ::-1][:, :width], np.float32)


def _with_rows(own: Params, given: Params, basis: np.ndarray, first: int, given_first: int) -> np.ndarray:
    """The student's table with the teacher's rows in place of its own, as far as both have them."""
    table, rows = np.array(own["embedding"]), np.asarray(given["embedding"], np.float32)[given_first:]
    size = min(len(table) - first, len(rows))
    table[first : first + size] = rows[:size] @ basis
    return table
