"""Linear models on words, for tagging and question answering."""

from types import SimpleNamespace

from bert.tasks.bag_of_words import best_sentences, best_words, window_tags


def sentences(*texts: str) -> SimpleNamespace:
    """Words and tags of texts in which a tagged word ends with !."""
    words = [text.replace("!", "").split() for text in texts]
    return SimpleNamespace(
        words=words, tags=[["B-X" if "!" in word else "O" for word in text.split()] for text in texts]
    )


def test_a_window_sees_the_neighbours() -> None:
    train = sentences("the cat! sat", "a cat sat", "the dog! ran", "a dog ran")
    dev = sentences("the cow! sat", "a cow sat")
    assert window_tags(train, dev, 1) == dev.tags
    assert window_tags(train, dev, 0) != dev.tags


def question(id: str, context: str, answer: str) -> SimpleNamespace:
    answers = [SimpleNamespace(text=answer, start=context.index(answer))]
    return SimpleNamespace(id=id, question="what?", context=context, answers=answers, answer=answers[0])


def test_the_sentence_with_the_words_of_answers_is_chosen() -> None:
    train = [
        question(str(number), f"add {number}. the sum of {number}.", f"the sum of {number}.") for number in range(9)
    ]
    dev = [question("a", "the sum of all. add all.", "the sum of all.")]
    assert best_sentences(train, dev) == {"a": "the sum of all."}


def test_contexts_of_one_sentence_are_answered_with_it() -> None:
    one = [question("a", "the sum.", "the sum.")]
    assert best_sentences(one, one) == {"a": "the sum."}


def test_the_word_after_those_before_answers_is_chosen() -> None:
    train = [question(str(number), f"sum of n{number} is", f"n{number}") for number in range(9)]
    dev = [question("a", "the sum of many values", "many")]
    assert best_words(train, dev, 1) == {"a": "many"}
    assert best_words([question("a", "one", "one")], dev, 1) == {"a": "the"}
