"""What every part needs: the mistake, its commonest mend, and the whole number as people write it."""

CONVERT = "convert the file, for example with iconv -f WINDOWS-1252 -t UTF-8"
"""The mend of any text that is not UTF-8."""


class UserError(Exception):
    """A mistake the user can mend. Its text is one sentence: what, where, and the mend. Commands exit with 2."""


class Count(int):
    """A whole number that may be written ``1e6`` or ``1_000_000``."""
