"""Former name of `bert.remote`, for scripts that import it."""

from bert.remote import ObjectStore

__all__ = ["ObjectStore"]
