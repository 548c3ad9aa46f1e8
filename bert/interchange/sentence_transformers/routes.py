"""The module Router of sentence-transformers (formerly Asym): separate modules for queries and documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, get_args

from bert.errors import UserError, quoted, shorten
from bert.files import read_json, read_json_object
from bert.model.late_interaction import Role

ROUTERS = ("Router", "Asym")
ROUTER_CONFIG = "router_config.json"
"""File of a Router. Older versions name it config.json."""

DOCUMENT: Role = "document"
"""Role of the texts that a folder's main model embeds. Its Router has a route for each role."""

QUERY_FOLDER = "query"
"""Subfolder for the model of queries in a folder that this package writes."""


class Router(NamedTuple):
    """A Router in a folder.

    Attributes:
        file: its configuration.
        modules: (class, path relative to ``file``) of each module of each route.
        default: the route of texts without a role; None if there is none.
    """

    file: Path
    modules: dict[Role, list[tuple[str, str]]]
    default: Role | None


def class_name(qualified: object) -> str:
    """Returns the name of a module's class without its package."""
    return str(qualified).rsplit(".", 1)[-1]


def read_router(folder: Path) -> Router:
    """Reads the Router in a folder.

    Raises:
        UserError: its configuration is damaged, or its routes are not ``query`` and ``document``.
    """
    file = folder / ROUTER_CONFIG
    file = file if file.is_file() else folder / "config.json"
    content = read_json_object(file)
    types, structure, settings = (content.get(key, {}) for key in ("types", "structure", "parameters"))
    if not all(isinstance(part, dict) for part in (types, structure, settings)) or not all(
        isinstance(paths, list) and all(isinstance(path, str) and path in types for path in paths)
        for paths in structure.values()
    ):
        raise UserError(f"{file} has no types and structure of routes: copy it again")
    routes = get_args(Role)
    if set(structure) != set(routes):
        raise UserError(f"{file} has the routes {quoted(structure)}: use a model with {' and '.join(routes)}")
    if settings.get("route_mappings"):
        raise UserError(
            f"{file}: route_mappings is {shorten(settings['route_mappings'])}, which is not supported: use a model "
            "without them"
        )
    default = settings.get("default_route")
    if default is None and settings.get("allow_empty_key", True):
        default = next(iter(structure))
    if default not in (None, *routes):
        raise UserError(f"{file}: default_route is {shorten(default)}: set it to {' or '.join(routes)}, or null")
    modules = {route: [(class_name(types[path]), path) for path in structure[route]] for route in routes}
    return Router(file, modules, default)


def write_router(folder: Path, default: Role | None, shares_encoder: bool) -> None:
    """Replaces the modules of a folder by a Router of its model, for documents, and of the one in `QUERY_FOLDER`.

    Args:
        shares_encoder: whether queries use the encoder of documents, and only their own modules after it.
    """
    listed: dict[Role, list[dict[str, Any]]] = {
        "query": read_json(folder / QUERY_FOLDER / "modules.json"),
        "document": read_json(folder / "modules.json"),
    }
    types: dict[str, str] = {}
    structure: dict[str, list[str]] = {}
    for route, modules in listed.items():
        for number, module in enumerate(modules):
            is_own = route == "query" and not (shares_encoder and number == 0)
            path = "/".join(filter(None, (QUERY_FOLDER if is_own else "", module["path"])))
            types[path] = module["type"]
            structure.setdefault(route, []).append(path)
    if shares_encoder:  # the folder has no encoder, and is not a model by itself
        (folder / QUERY_FOLDER / "modules.json").unlink()
    parameters = {"default_route": default, "allow_empty_key": default is not None}
    router = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"}]
    for name, content in (
        (ROUTER_CONFIG, {"types": types, "structure": structure, "parameters": parameters}),
        ("modules.json", router),
    ):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
