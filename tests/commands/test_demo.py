"""`bert demo`: its arguments are checked before a model is read, and the warning about open hosts."""

from __future__ import annotations

import importlib.util
import socket

import pytest

from bert.commands.demo import check_address, exposure, is_local, main, parse_auth


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "0"], "command line: --port is 0: set it to a number from 1 to 65535"),
        (["--port", "x"], "argument --port: invalid int value"),
        (["--auth", "me"], "command line: --auth is not USER:PASSWORD: pass a name and a password with a colon"),
        (["--auth", ":secret"], "command line: --auth is not USER:PASSWORD"),
        (["--host", "::1"], "command line: --host ::1 is no IPv4 address: set one, such as 127.0.0.1"),
        (["--host", "192.0.2.1"], "port 7860 of 192.0.2.1 cannot be opened ("),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, words, fails) -> None:
    error = fails(main, "model", *arguments)
    assert words in error and "secret" not in error


def test_a_port_in_use_is_one_sentence(fails) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert fails(main, "model", "--port", str(port)) == (
            f"error: port {port} of 127.0.0.1 is in use: set another --port\n"
        )
    check_address("127.0.0.1", port)


def test_the_missing_extra_is_named_before_a_model_is_read(fails, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gradio" else find(name))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert fails(main, "no/such/model", "--port", str(port)) == (
        "error: bert demo needs gradio, which is not installed: use pip install 'bert-jax[demo]'\n"
    )


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.0.0.2", True), ("localhost", True), ("0.0.0.0", False), ("demo.example", False)],
)
def test_other_hosts_than_this_one_are_open(host, local) -> None:
    assert is_local(host) == local
    assert f"everybody who reaches port 80 of {host} can use the model, without a password" in exposure(host, 80)


def test_a_password_may_hold_colons() -> None:
    assert parse_auth("me:a:b") == ("me", "a:b")
