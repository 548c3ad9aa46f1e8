"""`bert demo`: serves a web page for trying a model."""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bert.commands.cli.arguments import (
    MODEL,
    CommandParser,
    add_adapter_option,
    add_engine_option,
    add_server_options,
    log_to_stderr,
    run_command,
)
from bert.errors import UserError
from bert.remote import readable_path
from bert.serving.guard import is_local

if TYPE_CHECKING:
    from bert.inference.pretrained import Pretrained

DESCRIPTION = """Serves a web page for trying a model, until Ctrl-C. Depending on the model, it fills masks; classifies,
compares or continues texts; marks answers and entities; and draws attention. Each tab is also an API function. Nothing
is loaded from or reported to other hosts. Requires pip install 'bert-jax[demo]'."""

MAX_PORT = 65535

AUTH_VARIABLE = "BERT_DEMO_AUTH"
"""Environment variable with USER:PASSWORD."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command until KeyboardInterrupt."""
    parser = CommandParser("bert demo", DESCRIPTION)
    parser.add_argument("run", type=readable_path, metavar="MODEL", help=MODEL)
    add_adapter_option(parser)
    add_engine_option(parser)
    add_server_options(parser, port=7860)
    parser.add_argument(
        "--auth_file",
        metavar="FILE",
        help="Require the user name and password in this file, USER:PASSWORD (sent without encryption). The "
        f"environment variable {AUTH_VARIABLE} is an alternative.",
    )
    parser.add_argument(
        "--auth", metavar="USER:PASSWORD", help="Like --auth_file, but visible to all users of this machine."
    )
    arguments = parser.parse_arguments(argv)
    auth = find_auth(arguments.auth, arguments.auth_file)
    check_address(arguments.host, arguments.port)

    from bert.demo.page import build, require_gradio, serve

    require_gradio()
    # Gradio calls its own server at the start, which must not go through a proxy.
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "localhost", arguments.host]))
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

    from bert.inference.load import load
    from bert.interchange.hub import is_hub_name

    model = load(arguments.run, log_to_stderr, adapter=arguments.adapter, engine=arguments.engine)
    # Visitors must not see the folders above the model.
    model = model.replace(source=model.source if is_hub_name(model.source) else Path(model.source).name)
    warm_up(model)
    page = build(model)
    try:
        address = serve(page, arguments.host, arguments.port, auth, arguments.allowed_host)
    except OSError:
        raise _port_in_use(arguments.host, arguments.port) from None
    if not is_local(arguments.host) and auth is None:
        log_to_stderr(exposure(arguments.host, arguments.port))
    print(f"{arguments.run} is at {address} (Ctrl-C ends it)", flush=True)
    try:
        while True:
            time.sleep(3600)
    finally:
        page.close(verbose=False)


def find_auth(auth: str | None, file: str | None) -> tuple[str, str] | None:
    """Returns user and password from --auth, --auth_file or the environment; None without any.

    Raises:
        UserError: two of these are set, the file cannot be read, or the name or the password is missing.
    """
    values = {"--auth": auth, "--auth_file": file, AUTH_VARIABLE: os.environ.get(AUTH_VARIABLE) or None}
    sources = [name for name, value in values.items() if value is not None]
    if len(sources) > 1:
        raise UserError(f"{sources[0]} and {sources[1]} are both set: remove one of them")
    if not sources:
        return None
    [source] = sources
    text = values[source] or ""
    if file is not None:
        try:
            text = Path(file).read_text(encoding="utf-8-sig").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise UserError(f"--auth_file {file} cannot be read ({reason}): name a file with USER:PASSWORD") from None
    user_and_password = parse_auth(text, source)
    if source == "--auth":
        log_to_stderr(
            "warning: all users of this machine can read --auth in the list of processes: use --auth_file FILE"
        )
    return user_and_password


def parse_auth(text: str, source: str = "--auth") -> tuple[str, str]:
    """Parses user and password. Raises UserError, without quoting them, if one is missing."""
    user, _, password = text.partition(":")
    if not user or not password or "\n" in text:
        raise UserError(f"command line: {source} is not USER:PASSWORD: pass a name and a password with a colon between")
    return user, password


def exposure(host: str, port: int) -> str:
    """Returns the warning for a page without a password."""
    return (
        f"warning: everybody who reaches port {port} of {host} can use the model without a password or "
        "encryption: set --auth_file FILE, or remove --host"
    )


def check_address(host: str, port: int) -> None:
    """Raises UserError if the server cannot listen on the port of the host."""
    if not 0 < port <= MAX_PORT:
        raise UserError(f"command line: --port is {port}: set it to a number from 1 to {MAX_PORT}")
    if ":" in host:
        raise UserError(f"command line: --host {host} is not an IPv4 address: set one, such as 127.0.0.1")
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
    """Runs the first example of each tab, so that visitors do not wait for the compiler."""
    from bert.demo.abilities import abilities_of

    for ability in abilities_of(model):
        with suppress(UserError):  # a model of very short texts
            ability(*ability.examples[0])
