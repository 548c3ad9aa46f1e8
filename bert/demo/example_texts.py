"""Texts to click on, in English; each ability shows those that fit it."""

from __future__ import annotations

TEXTS = (
    ("A gripping story, beautifully filmed.",),
    ("The plot is dull, and the film is far too long.",),
    ("Ada Lovelace met Charles Babbage in London in 1833.",),
    ("The office of Siemens in Munich opened a second lab in Zurich.",),
)

PAIRS = (
    ("A man plays the guitar.", "Someone makes music."),
    ("A man plays the guitar.", "The shares fell by two percent."),
)

QUESTIONS = (
    ("When do I get my money?", "Refunds are paid within five working days. Vouchers are sent at once."),
    ("Who wrote the notes?", "Charles Babbage designed the machine. Ada Lovelace wrote the notes on it in 1843."),
)

CHOICES = (
    ("She opened the umbrella because", "it began to rain.\nthe soup was cold.\nhe could not read."),
    ("He put the milk into", "the fridge.\nthe drawer.\nthe river."),
)

PROMPTS = (("A dog runs across the field.",), ("Once upon a time there was",))


def with_masks(mask: str) -> tuple[tuple[str, ...], ...]:
    """Texts with a mask."""
    return ((f"The capital of France is {mask}.",), (f"She took the {mask} for a walk.",))
