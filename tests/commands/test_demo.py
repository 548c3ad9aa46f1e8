"""`bert demo`: its arguments are checked before a model is read, and the warning about open hosts."""

from __future__ import annotations

import importlib.util
import socket

import pytest

from bert.commands.demo import AUTH_VARIABLE, check_address, exposure, find_auth, is_local, main, parse_auth
from bert.errors import UserError


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "0"], "command line: --port is 0: set it to a number from 1 to 65535"),
        (["--port", "x"], "argument --port: invalid int value"),
        (["--auth", "me"], "command line: --auth is not USER:PASSWORD: pass a name and a password with a colon"),
        (["--auth", ":secret"], "command line: --auth is not USER:PASSWORD"),
        (["--host", "::1"], "command line: --host ::1 is not an IPv4 address: set one, such as 127.0.0.1"),
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
    assert f"everybody who reaches port 80 of {host} can use the model without a password" in exposure(host, 80)


def test_a_password_may_hold_colons() -> None:
    assert parse_auth("me:a:b") == ("me", "a:b")


def test_a_password_stays_out_of_the_process_list(tmp_path, monkeypatch, capsys) -> None:
    file = tmp_path / "auth"
    file.write_text("me:secret\n")
    monkeypatch.delenv(AUTH_VARIABLE, raising=False)
    assert find_auth(None, None) is None
    assert find_auth(None, str(file)) == ("me", "secret")
    monkeypatch.setenv(AUTH_VARIABLE, "you:se:cret")
    assert find_auth(None, None) == ("you", "se:cret")
    assert not capsys.readouterr().err
    with pytest.raises(UserError, match="both set") as caught:
        find_auth(None, str(file))
    assert "secret" not in str(caught.value)
    monkeypatch.delenv(AUTH_VARIABLE)
    assert find_auth("me:secret", None) == ("me", "secret")
    assert "--auth_file" in (said := capsys.readouterr().err) and "secret" not in said


@pytest.mark.parametrize("content", [b"secret", b"", b":secret", b"me:", b"me:secret\nmore", b"\xff:secret", None])
def test_a_file_without_a_name_and_a_password_is_one_sentence(tmp_path, monkeypatch, content) -> None:
    monkeypatch.delenv(AUTH_VARIABLE, raising=False)
    file = tmp_path / "auth"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match="--auth_file") as caught:
        find_auth(None, str(file))
    assert "secret" not in str(caught.value)
