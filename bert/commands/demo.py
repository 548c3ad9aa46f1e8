"""`bert demo`: a page in the browser on which a model can be tried."""

from __future__ import annotations

import dataclasses
import errno
import ipaddress
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bert.commands.arguments import MODEL, CommandParser, run_command
from bert.errors import UserError
from bert.urls import readable_path

if TYPE_CHECKING:
    from bert.inference.pretrained import Pretrained

DESCRIPTION = """Serves a page in the browser on which a model can be tried, until Ctrl-C: masks are filled, texts are
classified, compared or continued, answers and entities are marked, and attention is drawn, as far as the model can do
it. Each tab is a function of an API as well. Nothing is loaded from or reported to other hosts. It needs
pip install 'bert-jax[demo]'."""

LAST_PORT = 65535


@run_command
def main(argv: list[str]) -> int:
    """Runs the command, which ends with KeyboardInterrupt."""
    parser = CommandParser("bert demo", DESCRIPTION)
    parser.add_argument("run", type=readable_path, metavar="MODEL", help=MODEL)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="The address to listen on; 0.0.0.0 is every one of this machine. (default: 127.0.0.1, this machine alone)",
    )
    parser.add_argument("--port", type=int, default=7860, metavar="N", help="The port to listen on. (default: 7860)")
    parser.add_argument(
        "--auth", metavar="USER:PASSWORD", help="Ask visitors for this name and password (without encryption)."
    )
    arguments = parser.parse_arguments(argv)
    auth = None if arguments.auth is None else parse_auth(arguments.auth)
    check_address(arguments.host, arguments.port)

    from bert.demo.page import build, require_gradio, serve

    require_gradio()
    # Gradio calls its own server when it starts: not through a proxy.
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "localhost", arguments.host]))
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

    from bert.inference.loading import load
    from bert.interchange.hub import is_hub_name

    model = load(arguments.run, _say)
    # Visitors see the name, and not the folders above it.
    model = dataclasses.replace(model, source=model.source if is_hub_name(model.source) else Path(model.source).name)
    warm_up(model)
    page = build(model)
    try:
        address = serve(page, arguments.host, arguments.port, auth)
    except OSError:
        raise _port_in_use(arguments.host, arguments.port) from None
    if not is_local(arguments.host) and auth is None:
        _say(exposure(arguments.host, arguments.port))
    print(f"{arguments.run} is at {address} (Ctrl-C ends it)", flush=True)
    try:
        while True:
            time.sleep(3600)
    finally:
        page.close(verbose=False)


def parse_auth(text: str) -> tuple[str, str]:
    """The name and the password. Raises UserError if one of them is missing."""
    user, _, password = text.partition(":")
    if not user or not password:
        raise UserError("command line: --auth is not USER:PASSWORD: pass a name and a password with a colon between")
    return user, password


def is_local(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def exposure(host: str, port: int) -> str:
    """The sentence on a page that anybody may use."""
    return (
        f"warning: everybody who reaches port {port} of {host} can use the model, without a password and without "
        "encryption: set --auth USER:PASSWORD, or remove --host"
    )


def check_address(host: str, port: int) -> None:
    """Raises UserError if the port of the host cannot be listened on."""
    if not 0 < port <= LAST_PORT:
        raise UserError(f"command line: --port is {port}: set it to a number from 1 to {LAST_PORT}")
    if ":" in host:
        raise UserError(f"command line: --host {host} is no IPv4 address: set one, such as 127.0.0.1")
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _port_in_use(host, port) from None
        raise UserError(
            f"port {port} of {host} cannot be opened ({error.strerror}): set another --host or --port"
        ) from None


def _port_in_use(host: str, port: int) -> UserError:
    return UserError(f"port {port} of {host} is in use: set another --port")


def warm_up(model: Pretrained) -> None:
    """Compiles what the first visitor would wait for, with the first example of each tab."""
    from bert.demo.abilities import abilities_of

    for ability in abilities_of(model):
        with suppress(UserError):  # a model of very short texts
            ability(*ability.examples[0])


def _say(text: str) -> None:
    print(text, file=sys.stderr)
