"""Former module of functions of `bert.tokenizer.wordpiece`, for scripts that import it."""

from bert.tokenizer.wordpiece import WordSteps, count_words

__all__ = ["WordSteps", "count_words"]
