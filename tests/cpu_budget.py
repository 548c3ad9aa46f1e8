"""Counts the CPU seconds of each test, and fails a test without a mark that exceeds a limit.

A test's CPU seconds include its fixtures and the child processes that end meanwhile. Elapsed time would fail at random
on a shared machine. The limit is a multiple of the target: machines differ by a factor of three, and the first test of
a file may pay for an import or a compiled program that the others share.
"""

import os
import time
from collections.abc import Generator

import pytest

TARGET = 0.2
"""Maximum CPU seconds that a test without a mark should need."""

LIMIT = 25 * TARGET
MARKS = {"medium", "slow", "real"}
PROPERTY = "cpu_seconds"
_start = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("CPU time")
    group.addoption(
        "--cpu-limit",
        type=float,
        default=LIMIT,
        metavar="SECONDS",
        help=f"CPU seconds after which a test without a mark fails (default {LIMIT:g}, the target is {TARGET:g})",
    )
    group.addoption("--cpu-durations", type=int, metavar="N", help="list the N tests that needed most CPU seconds")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_start] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    seconds = _cpu_seconds() - item.stash[_start]
    if report.when == "teardown":
        report.user_properties.append((PROPERTY, seconds))
    elif report.when == "call" and report.passed and _is_fast(item) and seconds > item.config.getoption("cpu_limit"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} needed {seconds:.1f} CPU seconds: make it smaller or mark it medium"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Lists the tests that needed most, and the sum."""
    if not (count := config.getoption("cpu_durations")):
        return
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    seconds = {
        report.nodeid: value
        for report in reports
        for key, value in getattr(report, "user_properties", ())
        if key == PROPERTY
    }
    terminalreporter.section(f"{sum(seconds.values()):.0f} CPU seconds in {len(seconds)} tests")
    for test in sorted(seconds, key=seconds.__getitem__, reverse=True)[:count]:
        terminalreporter.write_line(f"{seconds[test]:8.2f}  {test}")


def _is_fast(item: pytest.Item) -> bool:
    return MARKS.isdisjoint(mark.name for mark in item.iter_markers())


def _cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of its finished children."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system
