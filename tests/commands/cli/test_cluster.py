"""The options that make a process one of several hosts."""

import pytest

from bert.commands.cli.cluster import parse_hosts
from bert.errors import UserError


def test_how_hosts_are_named() -> None:
    assert parse_hosts({"coordinator": "a:1", "num_processes": "4", "process_id": "3"}) == ("a:1", 4, 3)
    assert parse_hosts({"coordinator": "auto"}) == (None, None, None)
    assert parse_hosts({}) is None


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--coordinator=a:1"], "--num_processes, --process_id"),
        (["--process_id=0", "--num_processes=2"], "--coordinator"),
        (["--coordinator=a:1", "--num_processes=2", "--process_id=2"], "from 0 to 1"),
        (["--coordinator=a:1", "--num_processes=two", "--process_id=0"], "--num_processes two"),
        (["--coordinator=a", "--num_processes=2", "--process_id=0"], "--coordinator a .*HOST:PORT"),
    ],
)
def test_invalid_hosts_are_errors_that_name_the_options(words: list[str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        parse_hosts(dict(word.removeprefix("--").split("=") for word in words))
