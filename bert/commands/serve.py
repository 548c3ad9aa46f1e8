"""`bert serve`: serves models over HTTP."""

from __future__ import annotations

import os
import re
from pathlib import Path

from bert.commands.cli.arguments import (
    MODEL,
    CommandParser,
    add_engine_option,
    add_server_options,
    log_to_stderr,
    run_command,
)
from bert.commands.demo import check_address
from bert.errors import UserError
from bert.remote import readable_path
from bert.serving.guard import RequestGuard, hosts_of, is_local

DESCRIPTION = """Serves models over HTTP until SIGTERM or Ctrl-C, which complete the accepted requests. Endpoints:
/v1/embeddings for OpenAI's clients; /embed, /rerank and /predict for clients of text-embeddings-inference; /health;
/metrics for Prometheus; /docs. Concurrent requests are computed in batches. Requires pip install 'bert-jax[serve]'."""

TOKEN_VARIABLE = "BERT_SERVE_TOKEN"
"""Environment variable with a bearer token that requests must carry."""

WARM_LENGTHS = (16, 24, 32, 40, 48, 64, 80, 96, 128)
WARM_ROWS = (1, 2, 4, 8, 16, 32)
"""Numbers of tokens and rows whose programs are compiled at the start."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command until a signal ends it."""
    parser = CommandParser("bert serve", DESCRIPTION)
    parser.add_argument("models", nargs="+", metavar="[NAME=]MODEL", help=f"{MODEL} NAME is its name in requests.")
    add_engine_option(parser)
    add_server_options(parser, port=8080)
    parser.add_argument(
        "--max_queue",
        type=int,
        default=512,
        metavar="N",
        help="Maximum number of waiting requests per model; further ones get 429. (default: 512)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="Requests that wait longer get 503. (default: 60)",
    )
    arguments = parser.parse_arguments(argv)
    check_address(arguments.host, arguments.port)
    for name in ("max_queue", "timeout"):
        if getattr(arguments, name) <= 0:
            raise UserError(f"command line: --{name} is {getattr(arguments, name)}: it must be above 0")
    try:
        import uvicorn

        from bert.serving.app import make_app
    except ImportError as error:
        raise UserError(f"{error.name} is not installed: pip install 'bert-jax[serve]'") from None

    from bert.inference.load import load
    from bert.interchange.hub import is_hub_name

    models = {}
    for name, source in map(_named, arguments.models):
        if name in models:
            raise UserError(f"command line: two models have the name {name}: write NAME=MODEL")
        model = load(source, log_to_stderr, engine=arguments.engine)
        # Error messages must not show the folders above the model.
        shown = {"source": source if is_hub_name(source) else name}
        query_model = None if model.query_model is None else model.query_model.replace(**shown)
        models[name] = model.replace(**shown, query_model=query_model)
        if model.architecture not in ("BertForMultipleChoice", "BertForSequenceToSequence"):
            model_rows = (1,) if arguments.engine == "onnxruntime" else WARM_ROWS
            models[name].warm_up(WARM_LENGTHS, model_rows)
    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is None and not is_local(arguments.host):
        log_to_stderr(
            f"warning: everybody who reaches port {arguments.port} of {arguments.host} can use the models without a "
            f"token: set {TOKEN_VARIABLE}, or remove --host"
        )
    app = make_app(models, max_queue=arguments.max_queue, timeout=arguments.timeout, token=token)
    guard = RequestGuard(app, hosts_of(arguments.host, arguments.allowed_host), not is_local(arguments.host))
    log_to_stderr(f"{', '.join(models)} at http://{arguments.host}:{arguments.port} (Ctrl-C ends it)")
    uvicorn.run(guard, host=arguments.host, port=arguments.port, log_level="warning", access_log=False)
    return 0


def _named(argument: str) -> tuple[str, str]:
    """Splits NAME=MODEL. The name of a model without one is the last part of its path."""
    name, separator, source = argument.partition("=")
    if not separator or re.fullmatch(r"\w[\w.-]*", name) is None or Path(argument).exists():
        name, source = Path(argument).name, argument
    return name, readable_path(source, "model")
