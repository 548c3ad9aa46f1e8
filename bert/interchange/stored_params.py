"""Parameters of a model that are read on first use. Does not import JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bert.errors import UserError
from bert.model.parameters import Params, params_checksum


@dataclass(frozen=True)
class StoredParams:
    """Parameters that are read on first use.

    Attributes:
        source: name of the model, for messages.
        checksum: `params_checksum` of the parameters.
        read: reads them.
    """

    source: str
    checksum: str
    read: Callable[[], Params]

    def __call__(self) -> Params:
        """Reads the parameters. Raises UserError if they have changed."""
        params = self.read()
        if params_checksum(params) != self.checksum:
            raise UserError(f"the weights of {self.source} have changed since the model was loaded: load it again")
        return params


class ParamsField:
    """Field of a dataclass with parameters. `StoredParams` are replaced by the parameters when they are used."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Params:
        if instance is None:
            raise AttributeError(self._name)  # the field has no default
        params = vars(instance)[self._name]
        if isinstance(params, StoredParams):
            params = vars(instance)[self._name] = params()
        return params

    def __set__(self, instance: Any, params: Params | StoredParams) -> None:
        vars(instance)[self._name] = params
