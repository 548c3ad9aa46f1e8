"""An S3 server (moto's) that logs its requests and answers every tenth one with an error, as a busy store does.

python tests/s3_server.py LOG
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Unreliable:
    """The application with errors, and with the seconds that a request takes in a network."""

    def __init__(self, application: Application, log: str) -> None:
        self.application, self.log = application, log
        self.counter = itertools.count(1)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}\n")
        time.sleep(0.01)
        if next(self.counter) % 10 == 0:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"]
        return self.application(environ, start_response)


def main(log: str) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = make_server(
        "localhost", 0, Unreliable(DomainDispatcherApplication(create_backend_app), log), threaded=True
    )
    print(f"http://localhost:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
