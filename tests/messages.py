"""Checks of messages by the keys, numbers and file names in them, whatever their wording."""


def has_all(text: str, *parts: str) -> bool:
    """Returns whether a text has all parts, in this order."""
    start = 0
    for part in parts:
        place = text.find(part, start)
        if place < 0:
            return False
        start = place + len(part)
    return True
