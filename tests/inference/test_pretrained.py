"""Models from `bert.load` on arbitrary inputs: one answer per input, in order, or an error message."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bert
from bert.commands.reports import attention_command as attention
from bert.data.batching import bucket_length
from bert.inference.attention_maps import compute_attention_map, make_page
from bert.inference.forward import BUCKETS, BatchedForward
from bert.interchange.writers.hf_files import model_card
from bert.model.heads import HEADS
from bert.model.pretraining import BertForPreTraining
from tests.helpers import thoroughly
from tests.tiny_models import CONFIG, DATA, PIECES, TASKS, model_of

pytestmark = pytest.mark.medium

PAIR = ("ba ko", "ri tu")
FITTING: dict[str, list[Any]] = {
    "classification": ["ba", ("ko",), ["ri"], "", " ", np.str_("tu"), "a \ud83d b", "\0", "ba " * 40],
    "pairs": [PAIR, list(PAIR), ("", ""), ("\udc00", "x"), np.array(PAIR), ("ba " * 40, "ko " * 40)],
    "regression": [PAIR, list(PAIR), ("", "")],
    "published": ["ba", PAIR, ("ko",), ["ri", "tu"], ""],
    "choices": [("who", "ba", "ko"), ("who", ["ba", "ko", "ri"]), ["who", "ba", "\ud83d"]],
    "squad": [PAIR, list(PAIR), ("who \ud800", "ba \ud83d ko"), ("who", "ba ko " * 20)],
    "squad2": [PAIR, list(PAIR), ("who \ud800", "ba \ud83d ko")],
    "tagging": ["ba ko", ("ko",), "", " ", "a \ud83d b", "ba ko " * 20],
}
NOTHING = (
    None,
    3,
    0.5,
    b"ba",
    {},
    {"other": "ba"},
    {"ba"},
    [],
    (),
    [None],
    ["ba", None],
    [["ba"]],
    ["a", "b", 1],
    object(),
)
UNFIT: dict[str, tuple[Any, ...]] = {
    "classification": (PAIR, ["a", "b", "c"]),
    "pairs": ("ba", ("ba",), ("a", "b", "c")),
    "regression": ("ba", ("ba",)),
    "published": (("a", "b", "c"),),
    "choices": ("ba", PAIR, ("who", ["ba"]), ("who", "ba", " "), ("", "ba", "ko"), ("who", "ba", ["ko"])),
    "squad": ("ba", ("ba",), ("", "ba"), ("who", " "), ("a", "b", "c")),
    "squad2": ("ba", ("", "ba"), ("who", "")),
    "tagging": (),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bert.Pretrained]:
    folder = tmp_path_factory.mktemp("models")
    made = {name: model_of(folder, HEADS[task.kind](CONFIG, task.num_labels), task) for name, task in TASKS.items()}
    return {**made, "mlm": model_of(folder, BertForPreTraining(CONFIG), None)}


@pytest.mark.parametrize("name", TASKS)
def test_each_input_has_its_answer_in_order(models, name: str) -> None:
    model, inputs = models[name], FITTING[name]
    answers = model.predict(inputs)
    assert len(answers) == len(inputs)
    alone = [model.predict([value])[0] for value in inputs]
    assert _numbers(alone) == pytest.approx(_numbers(answers), abs=1e-5)
    assert _numbers(model.predict(iter(inputs), batch_size=2)) == pytest.approx(_numbers(answers), abs=1e-5)
    assert model.predict([]) == model.predict(()) == []


def _numbers(answer: Any) -> list[float]:
    """The numbers in an answer, from left to right."""
    if isinstance(answer, dict):
        answer = list(answer.values())
    if isinstance(answer, (list, tuple)):
        return [number for part in answer for number in _numbers(part)]
    return [answer] if isinstance(answer, (int, float)) else []


@pytest.mark.parametrize("name", TASKS)
def test_an_input_of_another_kind_is_one_sentence(models, name: str) -> None:
    good = FITTING[name][0]
    for odd in (*NOTHING, *UNFIT[name]):
        if name == "tagging" and odd in ([], ()):
            continue  # a sentence without words
        with pytest.raises(bert.UserError, match=r"^input 2\b") as caught:
            models[name].predict([good, odd])
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 200
    for inputs in (None, 3, b"ba", {"ba"}, object(), np.array(3)):
        with pytest.raises(bert.UserError, match=r"^the inputs are.*list$"):
            models[name].predict(inputs)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("classification", {"text": "ba ko", "id": 3}),
        ("pairs", {"sentence1": "ba", "sentence2": "ko ri"}),
        ("choices", {"question": "who", "choices": ["ba", "ko"]}),
        ("squad", {"question": "who", "context": "ba ko"}),
        ("tagging", {"words": ["ba", "ko"]}),
    ],
)
def test_an_input_may_have_names(models, name: str, fields: dict[str, Any]) -> None:
    model = models[name]
    given = model.task.input_of_row(fields)
    assert model.predict([fields, given]) == model.predict([given, given])
    assert _numbers(model.predict(fields)) == pytest.approx(_numbers(model.predict([given])[0]))
    assert type(model.predict(fields)) is type(model.predict([given])[0])
    arrays = {key: np.array(value) if isinstance(value, list) else value for key, value in fields.items()}
    assert model.predict(arrays) == model.predict(fields)


@pytest.mark.parametrize("name", TASKS)
def test_a_string_is_one_text(models, name: str) -> None:
    model = models[name]
    if name in ("classification", "published", "tagging"):
        assert _numbers(model.predict("ba ko")) == pytest.approx(_numbers(model.predict(["ba ko"])[0]))
        assert type(model.predict("ba ko")) is type(model.predict(["ba ko"])[0])
    else:
        with pytest.raises(bert.UserError, match=r"^input 1 is 'ba ko', "):
            model.predict("ba ko")


def test_embeddings_of_one_text_and_of_several(models) -> None:
    model = models["mlm"]
    several = model.embed(["ba ko", ("ba", "ko"), ["ba", "ko"], ("ri",), "", "a \ud800 b"])
    assert several.shape == (6, 8)
    assert np.isfinite(several).all()
    np.testing.assert_allclose(several[1], several[2])
    assert model.embed("ba ko").shape == (8,)
    np.testing.assert_allclose(model.embed("ba ko"), several[0], atol=1e-5)
    assert model.encode("ba ko").last_hidden_state.shape[0] == 1
    np.testing.assert_allclose(model.encode("ba ko").embeddings[0], several[0], atol=1e-5)
    np.testing.assert_allclose(model.embed(np.array(["ba ko", "ri"])), several[[0, 3]], atol=1e-5)
    assert model.embed([]).shape == (0, 8)
    assert model.encode(()).last_hidden_state.shape == (0, 0, 8)


@pytest.mark.parametrize("method", ["embed", "encode"])
def test_texts_of_another_kind_are_one_sentence(models, method: str) -> None:
    ask = getattr(models["mlm"], method)
    for odd in (*NOTHING, ("a", "b", "c")):
        with pytest.raises(bert.UserError, match=r"^input 2 is "):
            ask(["ba", odd])
    for inputs in (None, 3, b"ba", {"a": "b"}, {"ba"}):
        with pytest.raises(bert.UserError, match=r"^the inputs are "):
            ask(inputs)


def test_batch_sizes_below_one_are_one_sentence(models) -> None:
    for batch_size in (0, -1, None, 1.5, "2"):
        for ask in (models["tagging"].predict, models["mlm"].embed, models["mlm"].encode):
            with pytest.raises(bert.UserError, match=r"^batch_size is.*1$"):
                ask(["ba"], batch_size=batch_size)
    assert len(models["tagging"].predict(["ba"], batch_size=np.int64(2))) == 1


def test_masks_beyond_the_models_length_are_said_to_be(models) -> None:
    model = models["mlm"]
    assert len(model.fill_mask("ba [MASK] \ud800", top_k=3)[0]) == 3
    assert len(model.fill_mask(("ba [MASK]", "[MASK]"))) == 2
    for text, cut in (("ba " * 40 + "[MASK]", 1), ("[MASK] " + "ba " * 40 + "[MASK] [MASK]", 2)):
        with pytest.raises(bert.UserError, match=rf"^{cut} \[MASK\].*16 tokens") as caught:
            model.fill_mask(text)
        assert len(str(caught.value)) < 200
    with pytest.raises(bert.UserError, match=r"^no \[MASK\] in 'ba") as caught:
        model.fill_mask("ba " * 400)
    assert len(str(caught.value)) < 200
    for text in (None, 3, ["ba [MASK]"], ["ba [MASK]", "ko"], ("[MASK]", "b", "c")):
        with pytest.raises(bert.UserError, match=r" is .*: pass "):
            model.fill_mask(text)
    for top_k in (0, None, -1):
        with pytest.raises(bert.UserError, match=r"^top_k is "):
            model.fill_mask("[MASK]", top_k)


def test_a_text_of_the_shell_that_is_not_utf_8_is_one_sentence(tmp_path: Path, fails) -> None:
    error = fails(attention, str(tmp_path), "ba \udcff", "--output", str(tmp_path / "page.html"))
    assert error == "error: command line: the text is not UTF-8: pass it as UTF-8\n"


def test_a_model_is_shown_as_a_few_lines(models, finetuned: Path) -> None:
    shown = repr(bert.load(finetuned))
    assert str(bert.load(finetuned)) == shown
    lines = shown.splitlines()
    assert lines[0] == "Pretrained"
    assert lines[1].startswith(f"  source: {finetuned}, step ")
    assert lines[2:4] == [
        "  architecture: BertForSequenceClassification",
        "  encoder: 1 layers, hidden size 16, 2 heads, feed-forward size 32, up to 32 tokens",
    ]
    assert lines[-2:] == ["  task: sst2", "  labels: negative, positive"]
    assert len(lines) == 8
    many = dataclasses.replace(models["tagging"], labels=tuple(f"B-{number}" for number in range(150)))
    assert "  labels: B-0, B-1, B-2, B-3, B-4, B-5, B-6, B-7, ... (150 labels)" in repr(many)
    for model in models.values():
        assert len(repr(model)) < 500
        assert f"  parameters: {sum(leaf.size for leaf in jax.tree.leaves(model.params)):,}" in repr(model)
        assert "  vocabulary: 57 tokens" in repr(model)


@pytest.mark.parametrize(("name", "method"), [("classification", "predict"), ("mlm", "embed")])
def test_after_a_warm_up_nothing_compiles(models, name: str, method: str, monkeypatch) -> None:
    longer = dataclasses.replace(CONFIG, max_position_embeddings=32)
    params = jax.tree.map(np.copy, models[name].params)
    position = params["bert"]["embeddings"]["position"]
    position["embedding"] = np.concatenate([position["embedding"]] * 2)
    data = dataclasses.replace(DATA, max_length=32)
    model = dataclasses.replace(models[name], config=longer, params=params, data=data)
    model.warm_up([5, 20, 500], [1, 3])
    forward = model._forward.head if method == "predict" else model._forward.encoder
    compiled = forward._cache_size()
    assert compiled == 3 * 2  # 16, 24 and 32 tokens, 1 and 4 rows
    for count in (1, 3, 4):
        for words in (1, 18, 300):
            getattr(model, method)(["a " * words] * count)
    assert forward._cache_size() == compiled
    model.warm_up(batch_sizes=[64])
    assert forward._cache_size() == compiled + 3
    getattr(model, method)(["a"] * 64, batch_size=64)
    assert forward._cache_size() == compiled + 3


def test_without_lengths_all_are_compiled_and_long_ones_are_filled_up_by_a_third_at_most(models, monkeypatch) -> None:
    """The padding of rows beyond 512 tokens, for models that read thousands."""
    long = dataclasses.replace(CONFIG, max_position_embeddings=8192)
    model = dataclasses.replace(models["mlm"], config=long)
    compiled: list[int] = []
    monkeypatch.setattr(BatchedForward, "warm_up", lambda forward, rows, length: compiled.append(length))
    monkeypatch.setattr(bert.Pretrained, "embed", lambda model, texts, **settings: None)
    model.warm_up()
    assert compiled == [*BUCKETS, 8192]
    assert all(bucket_length(length, BUCKETS, 8192) <= 1.5 * length for length in range(512, 8193))


def test_a_warm_up_of_no_use_is_one_sentence(models) -> None:
    for arguments in (([0],), ([None],), ([16], [0])):
        with pytest.raises(bert.UserError, match=r"^one of (lengths|batch_sizes) is "):
            models["mlm"].warm_up(*arguments)
    with pytest.raises(bert.UserError, match=r"^swag compiles for each"):
        models["choices"].warm_up([16])


ODD = [
    "",
    " ",
    "\0",
    "\ud83d",
    "\udc00",
    "\u202e",
    "\u200b",
    "\u0301",
    "\ufeff",
    "文",
    "[MASK]",
    "[SEP]",
    "a" * 300,
    "a b " * 600,
]
TEXT = st.one_of(
    st.text(st.characters(), max_size=8), st.lists(st.sampled_from([*ODD, "ba ko"]), max_size=3).map("".join)
)
VALUE = st.recursive(
    st.one_of(TEXT, TEXT, TEXT, st.none(), st.booleans(), st.integers(), st.floats()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=5,
)
WORDED = TEXT.flatmap(lambda text: st.sampled_from([text, f"{text} ba", f"ko {text}", f"ba {text}"]))
FEW = [15, pytest.param(500, marks=pytest.mark.slow)]


def inputs_of(name: str) -> st.SearchStrategy[Any]:
    """Lists of up to four inputs that mostly fit a task, and any value."""
    texts = {"choices": st.lists(WORDED, min_size=3, max_size=4), "classification": TEXT, "tagging": TEXT, "mlm": TEXT}
    fitting = texts.get(name, st.tuples(WORDED, WORDED))
    numbers = st.sampled_from(range(40))
    mostly = numbers.flatmap(lambda number: VALUE if number == 39 else fitting)
    return numbers.flatmap(lambda number: VALUE if number == 39 else st.lists(mostly, max_size=4))


@pytest.mark.parametrize("examples", FEW)
@pytest.mark.parametrize("name", [*TASKS, "mlm"])
def test_any_inputs_have_as_many_answers_or_a_sentence(models, name: str, examples: int) -> None:
    ask = models[name].embed if name == "mlm" else models[name].predict

    @thoroughly(examples)
    @given(inputs_of(name))
    def run(inputs: Any) -> None:
        try:
            answers = ask(inputs)
        except bert.UserError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 300
            return
        assert np.isfinite(answers).all() if name == "mlm" else json.dumps(answers, ensure_ascii=False).encode("utf-8")
        assert len(answers) == len(inputs) or isinstance(inputs, str)

    run()


@pytest.mark.parametrize("examples", FEW)
def test_any_text_has_its_masks_filled_or_a_sentence(models, examples: int) -> None:
    @thoroughly(examples)
    @given(st.one_of(TEXT, st.tuples(TEXT, TEXT), VALUE), st.one_of(st.integers(-1, 3), VALUE))
    def run(text: Any, top_k: Any) -> None:
        try:
            answers = models["mlm"].fill_mask(text, top_k)
        except bert.UserError as error:
            assert "\n" not in str(error)
            return
        assert len(answers) == sum(part.count("[MASK]") for part in ([text] if isinstance(text, str) else text))
        assert all(len(answer) == min(top_k, len(PIECES)) for answer in answers)

    run()


@pytest.mark.parametrize("name", [*TASKS, "mlm"])
def test_weights_that_are_not_finite_give_no_answer(models, name: str) -> None:
    model = models[name]
    inputs = FITTING.get(name, [])[:1]
    for value in (np.nan, np.inf):
        broken = dataclasses.replace(model, params=jax.tree.map(lambda leaf: leaf + value, model.params))
        with pytest.raises(bert.UserError, match=r"input \d: .* NaN"):
            broken.embed(["ba", "ko"])
        with pytest.raises(bert.UserError, match=r"input \d: .* NaN"):
            broken.encode("ba")
        with pytest.raises(bert.UserError, match=r"input \d: .* NaN"):
            broken.fill_mask("ba [MASK]") if name == "mlm" else broken.predict(inputs)


def test_the_input_with_a_bad_row_is_named(models) -> None:
    for name, inputs in {
        "classification": ["ba", "ko z", "ko"],
        "tagging": ["ba ko " * 20, "", "ba z"],
        "squad": [("ba", "ko " * 20), ("ba", "ko"), ("z", "ko ba")],
    }.items():
        params = jax.tree.map(np.copy, models[name].params)
        params["bert"]["embeddings"]["word"]["embedding"][PIECES.index("z")] = np.nan
        broken = dataclasses.replace(models[name], params=params)
        assert len(broken.predict(["ba", ""] if name != "squad" else inputs[:1])) > 0, "other inputs have answers"
        number = 2 if name == "classification" else 3
        for batch_size in (1, 32):
            with pytest.raises(bert.UserError, match=f"input {number}: "):
                broken.predict(inputs, batch_size=batch_size)


@pytest.mark.parametrize("count", [3, 300])
def test_embeddings_of_padded_and_packed_rows_are_finite(models, count: int) -> None:
    params = jax.tree.map(np.copy, models["mlm"].params)
    params["bert"]["embeddings"]["word"]["embedding"][PIECES.index("z")] = np.nan
    broken = dataclasses.replace(models["mlm"], params=params)
    texts = ["ba"] * count
    assert np.isfinite(broken.embed(texts)).all()
    texts[2] = "z"
    with pytest.raises(bert.UserError, match="input 3: "):
        broken.embed(texts)
    with pytest.raises(bert.UserError, match="row 1 of the corpus"):
        models["mlm"].search("ba", np.array([[0.0] * 8, [np.nan] * 8], np.float32))


@pytest.mark.parametrize("name", ["classification", "mlm"])
def test_ids_outside_of_the_embedding_give_no_answer(models, name: str) -> None:
    tokenizer = bert.tokenizer.vocabulary.literal_tokenizer(models[name].tokenizer)
    tokenizer.encode_special_tokens = False
    tokenizer.add_tokens(["qu"])
    model = dataclasses.replace(models[name], tokenizer=tokenizer)
    for call in (model.embed, model.encode, *([model.predict] if name == "classification" else [])):
        with pytest.raises(bert.UserError, match=rf"the id {len(PIECES)}, .* {len(PIECES)} rows"):
            call(["ba", "qu"])


@pytest.mark.parametrize("source", ["caf\udce9", "\x1b[31m red\nline", "`a` b"])
def test_hostile_names_stay_text(models, source: str) -> None:
    labels = ("a`\n\nb", "``", "\x1b[31m\ud800\u202e", " ")
    model = dataclasses.replace(models["published"], source=source, labels=labels)
    texts = [
        repr(model),
        model_card(model, "BertForSequenceClassification"),
        make_page(compute_attention_map(model, "ba")),
    ]
    for text in texts:
        text.encode()
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert len(texts[0].split("\n")) == 1 + len(repr(models["published"]).split("\n")), "the line of labels"
    assert r"``a`\n\nb``, ``` `` ```, `\x1b[31m\ud800\u202e`, `   `" in texts[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_gets_one_sentence(models) -> None:
    model = models["classification"]
    model.embed(["ba"])
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python and JAX warn of the fork
        child = os.fork()
    if not child:
        said = []
        for call in (model.embed, model.encode, model.predict, lambda texts: bert.load("no/model")):
            try:
                call(["ba"])
            except bert.UserError as error:
                said.append("forked" in str(error))
        os.write(write, bytes(said))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == bytes([True] * 4)
    os.waitpid(child, 0)
    assert len(model.predict(["ba"])) == 1, "the parent goes on"
