"""The weights that a student starts from: which of its teacher's fit, and where they go."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.parallel.backends import PmapParallelism
from bert.training.initialization import taken_layers
from bert.training.pretraining.distillation import Teacher
from bert.training.pretraining.initialization import principal_directions, start_from_teacher
from bert.training.pretraining.objectives import build_with_teacher
from tests.tiny_teacher import WIDE, config_of, teacher_of
from tests.tiny_training import CONFIG


def start(config: ModelConfig, teacher: Teacher):
    """Random parameters of a student, what they become, and what is logged."""
    model, _, _ = build_with_teacher(
        dataclasses.replace(config_of(), model=config), teacher, PmapParallelism(jax.devices()[:1])
    )
    params = jax.device_get(model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"])
    said: list[str] = []
    return params, start_from_teacher(params, config, teacher, said.append), said


@pytest.mark.medium
def test_a_student_starts_from_its_teachers_embeddings() -> None:
    teacher = teacher_of(WIDE)
    params, started, said = start(CONFIG, teacher)
    assert said == ["taken from the teacher: the 16 principal components of its embeddings"]
    tables = {name: started["bert"]["embeddings"][name]["embedding"] for name in ("word", "position", "segment")}
    teacher_params = {name: teacher.params["bert"]["embeddings"][name]["embedding"] for name in tables}
    back = started["distillation"]["layer_1"]["kernel"]
    np.testing.assert_allclose(back @ back.T, np.eye(16), atol=1e-6)
    for name, table in tables.items():
        np.testing.assert_allclose(table, teacher_params[name] @ back.T, rtol=1e-5, atol=1e-7, err_msg=name)
    lost = np.sum((tables["word"] @ back - teacher_params["word"]) ** 2)
    values = np.linalg.svd(teacher_params["word"], compute_uv=False)
    np.testing.assert_allclose(lost, np.sum(values[16:] ** 2), rtol=1e-3)  # the least that 16 dimensions can lose
    for name in ("encoder", "predictions"):
        part, own = (tree.get(name, tree["bert"].get(name)) for tree in (started, params))
        jax.tree.map(np.testing.assert_array_equal, part, own)


@pytest.mark.medium
def test_a_student_of_its_teachers_width_has_the_same_embeddings_and_a_wider_one_its_own() -> None:
    teacher = teacher_of(WIDE)
    longer = dataclasses.replace(WIDE, num_hidden_layers=1, max_position_embeddings=40)
    params, started, _ = start(longer, teacher)
    own, teacher_params = started["bert"]["embeddings"], teacher.params["bert"]["embeddings"]
    np.testing.assert_array_equal(own["word"]["embedding"], teacher_params["word"]["embedding"])
    np.testing.assert_array_equal(own["position"]["embedding"][:16], teacher_params["position"]["embedding"])
    random = params["bert"]["embeddings"]["position"]["embedding"]
    np.testing.assert_array_equal(own["position"]["embedding"][16:], random[16:])
    params, started, said = start(WIDE, teacher_of(CONFIG))
    assert started is params and not said


@pytest.mark.medium
def test_a_student_of_its_teachers_shape_starts_from_layers_of_its_teacher_from_the_first_to_the_last() -> None:
    assert taken_layers(6, 12) == [0, 2, 4, 7, 9, 11]  # as in DistilBERT
    assert [taken_layers(number, 6) for number in (1, 2, 3, 6)] == [[0], [0, 5], [0, 2, 5], [0, 1, 2, 3, 4, 5]]
    teacher = teacher_of(WIDE)
    params, started, said = start(dataclasses.replace(WIDE, num_hidden_layers=2), teacher)
    assert said == ["taken from the teacher: embeddings, layers [1, 3] of 3"]
    teacher_params = teacher.params["bert"]
    for layer, source in (("layer_0", "layer_0"), ("layer_1", "layer_2")):
        jax.tree.map(
            np.testing.assert_array_equal, started["bert"]["encoder"][layer], teacher_params["encoder"][source]
        )
    jax.tree.map(
        np.testing.assert_array_equal, started["bert"]["embeddings"]["norm"], teacher_params["embeddings"]["norm"]
    )
    jax.tree.map(np.testing.assert_array_equal, started["predictions"], params["predictions"])


@pytest.mark.medium
@pytest.mark.parametrize(
    "other", [{"num_hidden_layers": 4}, {"intermediate_size": 40}, {"pre_layer_norm": True}], ids=str
)
def test_layers_that_do_not_fit_stay_random(other: dict) -> None:
    params, started, said = start(dataclasses.replace(WIDE, **other), teacher_of(WIDE))
    assert said == ["taken from the teacher: embeddings"]
    jax.tree.map(np.testing.assert_array_equal, started["bert"]["encoder"], params["bert"]["encoder"])


@pytest.mark.medium
def test_a_student_with_shared_layers_starts_from_those_of_its_teacher() -> None:
    shared = dataclasses.replace(WIDE, num_hidden_layers=4, layer_groups=1)
    teacher = teacher_of(shared)
    _, started, said = start(dataclasses.replace(shared, num_hidden_layers=2), teacher)
    assert said == ["taken from the teacher: embeddings, layers [1] of 1"]
    jax.tree.map(np.testing.assert_array_equal, started["bert"]["encoder"], teacher.params["bert"]["encoder"])


@pytest.mark.medium
def test_a_teacher_with_narrow_embeddings_has_its_projections_drawn() -> None:
    """The embeddings fit, the states of 24 features have nothing to do with their principal components."""
    teacher = teacher_of(dataclasses.replace(WIDE, embedding_size=CONFIG.hidden_size))
    params, started, _ = start(CONFIG, teacher)
    own, teacher_params = started["bert"]["embeddings"]["word"], teacher.params["bert"]["embeddings"]["word"]
    np.testing.assert_array_equal(own["embedding"], teacher_params["embedding"])
    jax.tree.map(np.testing.assert_array_equal, started["distillation"], params["distillation"])


@pytest.mark.medium
def test_a_student_with_its_teachers_narrow_embeddings_gets_their_projection() -> None:
    narrow = dataclasses.replace(WIDE, embedding_size=CONFIG.hidden_size)
    teacher = teacher_of(narrow)
    _, started, _ = start(narrow, teacher)
    jax.tree.map(np.testing.assert_array_equal, started["bert"]["embeddings"], teacher.params["bert"]["embeddings"])
    jax.tree.map(np.testing.assert_array_equal, started["bert"]["encoder"], teacher.params["bert"]["encoder"])


@pytest.mark.medium
def test_positions_are_matched_where_one_of_the_models_counts_from_two() -> None:
    teacher = teacher_of(dataclasses.replace(CONFIG, position_offset=2))
    _, started, _ = start(CONFIG, teacher)
    position = started["bert"]["embeddings"]["position"]["embedding"]
    np.testing.assert_array_equal(position, teacher.params["bert"]["embeddings"]["position"]["embedding"][2:])


def test_principal_directions_are_those_of_a_singular_value_decomposition() -> None:
    table = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32) * np.arange(1, 7)
    _, _, right = np.linalg.svd(table, full_matrices=False)
    actual = principal_directions(table, 3)
    np.testing.assert_allclose(np.abs(right[:3] @ actual), np.eye(3), atol=1e-4)  # each up to its sign
