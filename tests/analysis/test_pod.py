"""Steps of a pod on paper, by hand."""

import pytest

from bert.analysis.pod import UTILIZATION, all_reduce_terms, compute_term, num_hosts, step_lines
from bert.parallel.devices import FIGURES

V5E, H100 = FIGURES["v5e"], FIGURES["h100"]


def test_a_slice_is_one_ring() -> None:
    [term] = all_reduce_terms(400e6, 4, V5E)
    assert term.seconds == pytest.approx(2 * 3 / 4 * 400e6 / 200e9)
    assert term.arithmetic == "2 x 3/4 x 400.0 MB = 600.0 MB at 200 GB/s"
    assert all_reduce_terms(400e6, 1, V5E)[0].seconds == 0


def test_hosts_of_gpus_add_parts_that_each_device_has_of_its_host() -> None:
    local, hosts = all_reduce_terms(400e6, 32, H100)
    assert local.seconds == pytest.approx(2 * 7 / 8 * 400e6 / 450e9)
    assert hosts.seconds == pytest.approx(2 * 3 / 4 * 50e6 / 50e9)
    assert all_reduce_terms(400e6, 8, H100)[1].seconds == 0
    assert [num_hosts(count, H100) for count in (1, 8, 9, 64)] == [1, 1, 2, 8]


def test_the_published_run_takes_its_published_hours() -> None:
    """mosaicml/examples: 286.7 million rows of 128 tokens in 11.5 hours of eight A100."""
    tokens = 4096 * 128
    steps = round(286.7e6 * 128 / tokens)
    compute = compute_term(tokens, 546e6, 8, FIGURES["a100"], UTILIZATION)
    assert steps * compute.seconds / 3600 == pytest.approx(11.5, rel=0.03)
    lines = step_lines(compute, [], tokens, steps)
    assert lines[-1].endswith("11.7 h")
    assert "all-reduce" not in "".join(lines)


def test_the_share_is_that_of_both_terms_of_a_step() -> None:
    compute = compute_term(1000, 197e6, 1, V5E, 1.0)
    assert compute.seconds == pytest.approx(1e-3)
    lines = step_lines(compute, all_reduce_terms(400e6, 2, V5E), 1000, None)
    assert "3.000 ms, 66.7% of it all-reduce if none overlaps; 333,333 tokens per second" in lines[-1]
