"""Checks of shapes and types in calls of the core, by beartype.

jaxtyping's import hook decorates nested functions too, each time that the function around them is called. In a traced
model that takes a third of the time, so checks are generated once for equal signatures.
"""

import inspect
from collections.abc import Callable
from typing import Any

from beartype import beartype

_CHECKED: dict[tuple[object, ...], Callable[..., Any]] = {}


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that jaxtyping calls to check arguments or an output.

    jaxtyping passes functions without a body, so functions of the same name and signature can replace each other.
    """
    signature = inspect.signature(function)
    annotations = tuple((one.name, one.kind, one.annotation) for one in signature.parameters.values())
    key = (function.__module__, function.__qualname__, annotations, signature.return_annotation)
    try:
        if key not in _CHECKED:
            _CHECKED[key] = beartype(function)
        return _CHECKED[key]
    except TypeError:  # an annotation has no hash
        return beartype(function)
