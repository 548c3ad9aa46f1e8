"""Decisions from means: when a run stops early."""

import pytest

from bert.training.means import should_stop_early


@pytest.mark.parametrize(
    ("scores", "patience", "higher", "stops"),
    [
        ([], 2, True, False),
        ([0.5, 0.4], 2, True, False),
        ([0.5, 0.4, 0.5], 2, True, True),
        ([0.5, 0.4, 0.6], 2, True, False),
        ([0.5, 0.6, 0.4], 1, True, True),
        ([0.5, 0.6, 0.7], 2, False, True),
        ([0.5, 0.6, 0.4], 2, False, False),
        ([None, 0.1], 1, True, False),
    ],
)
def test_a_run_stops_once_no_score_improved_for_a_number_of_evaluations(scores, patience, higher, stops) -> None:
    assert should_stop_early(scores, patience, higher=higher) == stops
