"""What every part of the configuration needs: the mistake, and the whole number as people write it."""


class UserError(Exception):
    """A mistake the user can mend. Its text is one sentence: what, where, and the mend. Commands exit with 2."""


class Count(int):
    """A whole number that may be written ``1e6`` or ``1_000_000``."""
