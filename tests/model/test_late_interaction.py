"""MaxSim, compared with its definition written out."""

import numpy as np
import pytest

from bert.model import late_interaction
from bert.model.late_interaction import EMPTY_SCORE, max_sim
from bert.model.pooling import Pooling


def vectors(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.normal(size=(length, 3)).astype(np.float32) for length in lengths]


def written_out(query: np.ndarray, document: np.ndarray) -> float:
    return sum(max(float(token @ other) for other in document) for token in query)


def test_max_sim_by_hand() -> None:
    query, document = np.array([[1, 0], [0, 1]], np.float32), np.array([[3, 0], [2, -5]], np.float32)
    assert max_sim([query], [document, -document]).tolist() == [[3 + 0, -2 + 5]]
    assert max_sim([query], [document], mean=True).tolist() == [[1.5]]


@pytest.mark.parametrize("tokens", [1, 4, 1000], ids=lambda tokens: f"blocks of {tokens}")
def test_max_sim_is_its_definition(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_interaction, "QUERY_TOKENS", tokens)
    monkeypatch.setattr(late_interaction, "DOCUMENT_TOKENS", 2 * tokens)
    queries, documents = vectors([2, 1, 5, 3]), vectors([4, 1, 9, 2, 6], seed=1)
    expected = [[written_out(query, document) for document in documents] for query in queries]
    np.testing.assert_allclose(max_sim(queries, documents), expected, rtol=1e-5)
    mean = np.array(expected) / [[2], [1], [5], [3]]
    np.testing.assert_allclose(Pooling("tokens", similarity="meanmaxsim").compare(queries, documents), mean, rtol=1e-5)


def test_texts_without_vectors() -> None:
    """An empty text is in the middle and at the end of a block, whose other texts have their own vectors."""
    queries, documents = vectors([2, 0, 3, 0]), vectors([0, 2, 0, 3, 0], seed=1)
    scores = max_sim(queries, documents)
    assert (scores[:, [0, 2, 4]] == EMPTY_SCORE).all()
    assert (scores[[1, 3]][:, [1, 3]] == 0).all()
    for row in (0, 2):
        np.testing.assert_allclose(
            scores[row, [1, 3]], [written_out(queries[row], documents[column]) for column in (1, 3)], rtol=1e-5
        )
    assert max_sim([], documents).shape == (0, 5)
    assert max_sim(queries, []).shape == (4, 0)
    assert np.isfinite(max_sim(queries, documents, mean=True)).all()
    assert (max_sim(vectors([0]), vectors([0])) == EMPTY_SCORE).all()
