"""The page is built with Gradio: a function of the API for each tab, and nothing that a template would evaluate."""

from __future__ import annotations

import dataclasses
import re

import pytest

from bert.demo.abilities import abilities_of
from bert.demo.page import _answer_or_error, _frame, build

gradio = pytest.importorskip("gradio", reason="needs the extra demo")


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["mlm", "multilabel", "regression", "choices", "squad", "tagging", "causal"])
def test_each_tab_is_a_function_of_the_api(models, kind: str) -> None:
    described = build(models[kind]).get_api_info()["named_endpoints"]
    abilities = {f"/{ability.name}": ability for ability in abilities_of(models[kind])}
    assert described.keys() == abilities.keys()
    for name, ability in abilities.items():
        assert described[name]["description"] == ability.description
        assert len(described[name]["parameters"]) == len(ability.inputs)
        assert len(described[name]["returns"]) == len(ability.outputs)


def test_parameters_have_the_names_of_the_texts(models) -> None:
    described = build(models["squad"]).get_api_info()["named_endpoints"]["/answer_question"]
    assert [parameter["parameter_name"] for parameter in described["parameters"]] == ["question", "context"]


def test_only_the_queue_takes_requests_and_one_reaches_the_model_at_a_time(models) -> None:
    page = build(models["mlm"])
    assert not page.api_open and not page.analytics_enabled
    called = [function for function in page.fns.values() if function.name == "answer"]
    assert len(called) == 2 * len(abilities_of(models["mlm"])), "a button and its examples"
    assert {(function.concurrency_id, function.concurrency_limit) for function in called} == {("model", 1)}


def test_an_error_is_a_sentence_without_markup(models) -> None:
    fill = _answer_or_error(abilities_of(models["mlm"])[0])
    with pytest.raises(gradio.Error) as caught:
        fill("<script>alert(1)</script>")
    assert caught.value.message.startswith("no [MASK] in '&lt;script&gt;alert(1)&lt;/script&gt;': ")
    assert not caught.value.print_exception


@pytest.mark.medium
def test_the_page_holds_nothing_that_runs_or_that_a_template_evaluates(models) -> None:
    hostile = "</h1><script>alert(1)</script> ${alert(2)} {{value}}"
    model = dataclasses.replace(models["mlm"], source=hostile)
    heading = next(block.value for block in build(model).blocks.values() if isinstance(block, gradio.HTML))
    assert not re.search(r"<script|[${}]", heading)
    frame = _frame(abilities_of(model)[-1](hostile))
    assert frame.startswith('<iframe title="attention" sandbox="allow-scripts" srcdoc="')
    assert not re.search(r"[${}`]|<(?!/?iframe)", frame) and frame.count('"') == 6
