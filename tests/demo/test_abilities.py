"""The page's tabs for each kind of model, their answers, and the texts that they reject."""

from __future__ import annotations

import dataclasses
import json

import pytest

import bert
from bert.demo.abilities import MAX_CHARACTERS, Ability, abilities_of, mark
from bert.inference.attention_maps import _self_attentions

ABILITIES = {
    "classification": ["predict", "attention"],
    "pairs": ["predict", "attention"],
    "regression": ["predict", "attention"],
    "published": ["predict", "attention"],
    "multilabel": ["predict", "attention"],
    "choices": ["choose", "attention"],
    "squad": ["answer_question", "attention"],
    "squad2": ["answer_question", "attention"],
    "tagging": ["tag", "attention"],
    "mlm": ["fill_mask", "similarity", "attention"],
    "encoder": ["similarity", "attention"],
    "causal": ["generate", "attention"],
    "encoder_decoder": ["generate", "attention"],
}


@pytest.fixture
def ability(models):
    def find(kind: str, name: str) -> Ability:
        return next(ability for ability in abilities_of(models[kind]) if ability.name == name)

    return find


@pytest.mark.medium
@pytest.mark.parametrize("kind", ABILITIES)
def test_a_model_has_the_tabs_of_what_it_can_do(models, kind: str) -> None:
    abilities = abilities_of(models[kind])
    assert [ability.name for ability in abilities] == ABILITIES[kind]
    for ability in abilities:
        assert ability.examples and all(len(example) == len(ability.inputs) for example in ability.examples)


def test_a_generator_fills_masks(detected) -> None:
    abilities = abilities_of(bert.load(detected))
    assert [ability.name for ability in abilities] == ["fill_mask", "similarity", "attention"]
    assert len(abilities[0]("ba [MASK]")) == 8


@pytest.mark.medium
def test_masks_are_filled_as_in_python(models, ability) -> None:
    bars = ability("mlm", "fill_mask")("a [MASK] c")
    [expected] = models["mlm"].fill_mask("a [MASK] c", 8)
    assert bars == {one.token: one.probability for one in expected}
    with pytest.raises(bert.UserError, match="text has 2 masks"):
        ability("mlm", "fill_mask")("a [MASK] [MASK]")
    with pytest.raises(bert.UserError, match=r"no \[MASK\] in 'a b'"):
        ability("mlm", "fill_mask")("a b")


@pytest.mark.medium
def test_texts_are_classified_and_scored_as_in_python(models, ability) -> None:
    assert ability("classification", "predict")("a b") == models["classification"].predict("a b").probabilities
    assert ability("pairs", "predict")("a", "b") == models["pairs"].predict([("a", "b")])[0].probabilities
    assert ability("regression", "predict")("a", "b") == models["regression"].predict([("a", "b")])[0].score
    labels, shares = ability("multilabel", "predict")("a b", "")
    expected = models["multilabel"].predict("a b")
    assert (labels, shares) == (", ".join(expected.labels) or "none", expected.probabilities)


@pytest.mark.medium
def test_the_second_text_of_a_published_model_may_be_empty(models, ability) -> None:
    predict, model = ability("published", "predict"), models["published"]
    assert predict("a b", "") == model.predict("a b").probabilities
    assert predict("a b", "c") == model.predict([("a b", "c")])[0].probabilities


@pytest.mark.medium
def test_answers_and_entities_are_marked_in_their_text(models, ability) -> None:
    context = "a b c\nd e"
    answer, parts = ability("squad", "answer_question")("a", context)
    [(text, probability)] = answer.items()
    assert "".join(part for part, _ in parts) == context
    assert [part for part, name in parts if name == "answer"] == [text]
    assert probability == models["squad"].predict([("a", context)])[0].probability
    parts = ability("tagging", "tag")(context)
    assert "".join(part for part, _ in parts) == context
    answers = models["tagging"].predict(context).entities
    assert [(part, name) for part, name in parts if name] == [(entity["text"], entity["type"]) for entity in answers]
    assert answers
    assert mark("ab", []) == [("ab", None)] and mark("ab", [(0, 1, "x")]) == [("a", "x"), ("b", None)]


@pytest.mark.medium
def test_choices_are_lines(models, ability) -> None:
    choose = ability("choices", "choose")
    [expected] = models["choices"].predict([("who", "a b", "c")])
    assert choose("who", " a b\n\nc\nc\n") == dict(zip(["a b", "c"], expected.probabilities, strict=True))
    for lines in ("a", "\n".join("abcdefghijk")):
        with pytest.raises(bert.UserError, match="write two to 10"):
            choose("who", lines)


@pytest.mark.slow
def test_texts_are_compared_and_continued(models, ability) -> None:
    assert ability("mlm", "similarity")("a b", "a b") == pytest.approx(1)
    assert ability("causal", "generate")("the") == models["causal"].generate("the", max_tokens=40)
    assert ability("encoder_decoder", "generate")("a") == models["encoder_decoder"].generate("a")


@pytest.mark.medium
def test_attention_is_the_page_of_the_command(ability) -> None:
    for kind, text in (("mlm", "a b"), ("causal", "the"), ("encoder_decoder", "a")):
        page = ability(kind, "attention")(text)
        assert page.startswith("<!DOCTYPE html>")
        data = json.loads(page.split('id="data">')[1].split("</script>")[0])
        assert (data["columns"] is not None) == (kind == "encoder_decoder")


@pytest.mark.medium
def test_texts_of_other_lengths_compile_nothing(ability) -> None:
    show = ability("mlm", "attention")
    show("a b c")
    compiled = _self_attentions._cache_size()
    show("a b c d e f")
    assert _self_attentions._cache_size() == compiled


@pytest.mark.parametrize("text", ["", " \n", None, "\x00\x1b\x07", "\u200b\ufeff", "\ue000"])
def test_a_text_of_nothing_visible_is_refused(ability, text) -> None:
    for kind, name, texts in (("mlm", "attention", [text]), ("squad", "answer_question", ["who", text])):
        with pytest.raises(bert.UserError, match=r"the (text|context) is empty"):
            ability(kind, name)(*texts)


@pytest.mark.medium
def test_odd_characters_among_others_are_read(ability) -> None:
    for text in ("a\x00 b\x1b", "a \ud83d b", "\u202eab", "日本", "a" * MAX_CHARACTERS):
        parts = ability("tagging", "tag")(text)
        assert "".join(part for part, _ in parts) == text.replace("\ud83d", "?")
        assert ability("classification", "predict")(text)


def test_a_long_text_is_refused_before_it_is_read(ability) -> None:
    with pytest.raises(bert.UserError, match=r"text has 1,000,000 characters.*page reads 20,000"):
        ability("mlm", "fill_mask")("a" * 1_000_000)


def test_attention_is_drawn_over_a_page_of_tokens(models, ability, monkeypatch) -> None:
    monkeypatch.setattr("bert.demo.abilities.MAX_ATTENTION_TOKENS", 10)
    with pytest.raises(bert.UserError, match=r"text has 14 tokens.*shows 10"):
        ability("mlm", "attention")("a " * 12)


def test_a_task_of_another_kind_is_answered_with_the_fields_of_its_answer(models) -> None:
    class Unknown:
        """A user-defined task that is neither a classifier nor a regression."""

        name, input_columns, table_columns = "mine", ("text",), (("text",),)

        def __init__(self, task):
            self.examples_from_inputs, self.features = task.examples_from_inputs, task.features
            self.predict, self.format_predictions = task.predict, task.format_predictions
            self.kind, self.num_labels, self.data_keys = task.kind, task.num_labels, ()
            self.calls, self.answer_type = task.calls, tuple
            self.with_answer_settings = lambda settings: self

    model = dataclasses.replace(models["classification"], task=Unknown(models["classification"].task))
    predict = abilities_of(model)[0]
    assert predict.outputs == (("json", "answer"),)
    assert predict("a b") == models["classification"].predict("a b")._asdict()


@pytest.mark.parametrize(
    ("kind", "sample", "expected"),
    [
        ("classification", ["of the run"], ("of the run",)),
        ("published", ["of the run"], ("of the run", "")),
        ("choices", ["q", "a", "b"], ("q", "a\nb")),
        ("squad", ["who", "she"], ("who", "she")),
    ],
)
def test_the_example_is_an_input_of_the_run(models, tmp_path, kind: str, sample: list[str], expected) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"sample_input": sample}))
    run = dataclasses.replace(models[kind], source=str(tmp_path), step=1)
    first, *_, attention = abilities_of(run)
    assert (first.examples, attention.examples) == ((expected,), ((sample[0],),))
    (tmp_path / "results.json").write_text("{")
    assert abilities_of(run)[0].examples == abilities_of(models[kind])[0].examples
