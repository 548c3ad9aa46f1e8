"""`bert attention`: the weights are the model's, the page holds them and nothing that could run, the picture is one."""

from __future__ import annotations

import base64
import dataclasses
import html
import html.parser
import json
import re
import shutil
import subprocess
import zlib
from importlib import resources
from pathlib import Path

import jax
import numpy as np
import pytest
from matplotlib.image import imread
from tokenizers import Tokenizer, decoders, models

import bert
from bert.commands.reports import attention_command as main
from bert.inference.attention_maps import (
    AttentionMap,
    AttentionTokens,
    compute_attention_map,
    write_html,
    write_png,
)
from bert.inference.generate import Continuation
from bert.inference.pretrained import Pretrained
from bert.model.attention import dot_product_attention
from bert.model.heads import BertForSequenceClassification
from bert.tokenizer.byte_level import TRAINED_SPECIAL_TOKENS
from tests import tiny_models

HOSTILE = ["[CLS]", "</script><script>alert(1)</script>", "<!--", '"&amp;', "$x_$", "{{title}}", "\u2028", "[SEP]"]


@pytest.fixture(scope="module")
def hostile() -> AttentionMap:
    length = len(HOSTILE)
    weights = np.random.default_rng(0).dirichlet(np.full(length, 0.3), size=(3, 2, length)).astype(np.float32)
    weights[0, 0] = 1 / length
    segments = np.array([0] * 5 + [1] * 3)
    special = np.array([token in ("[CLS]", "[SEP]") for token in HOSTILE])
    tokens = AttentionTokens(HOSTILE, segments, special)
    return AttentionMap("runs/<b>&amp;", tokens, tokens, weights)


@pytest.fixture(scope="module")
def alignment() -> AttentionMap:
    """Three target tokens over five source tokens; the last layer's heads look at source tokens 2, 3 and 4.

    The second head looks at them more than the first.
    """
    names = {"rows": ["a", "</script>", "[SEP]"], "columns": ["[CLS]", "ein", "<b>", "haus", "[SEP]"]}
    sides = {
        side: AttentionTokens(tokens, np.zeros(len(tokens), int), np.array([token[0] == "[" for token in tokens]))
        for side, tokens in names.items()
    }
    weights = np.full((2, 2, 3, 5), 0.2, np.float32)
    weights[1] = np.stack([0.1 + 0.5 * np.eye(3, 5, 1), 0.05 + 0.75 * np.eye(3, 5, 1)])
    return AttentionMap("runs/x", **sides, weights=weights)


class Page(html.parser.HTMLParser):
    """The elements of a page, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.title = ""
        self.open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.elements.append((tag, dict(attributes)))
        self.open = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.open = ""

    def handle_data(self, text: str) -> None:
        if self.open == "script":
            self.scripts[-1] += text
        if self.open == "title":
            self.title += text


def unpacked(text: str, kind: type) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), kind)


def test_the_page_has_every_weight_and_runs_no_token(hostile, tmp_path) -> None:
    write_html(hostile, tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert [attributes.get("id") for tag, attributes in page.elements if tag == "script"] == ["data", None]
    data = json.loads(page.scripts[0])
    assert data["rows"]["tokens"] == HOSTILE and data["columns"] is None
    assert data["rows"]["segments"] == hostile.rows.segments.tolist()
    layers, heads, length, _ = hostile.weights.shape
    shares = unpacked(data["weights"], np.uint8).reshape(layers, heads, length, length) / 255
    largest = unpacked(data["largest"], "<u2").reshape(layers, heads, length, 1) / 65535
    np.testing.assert_allclose(shares * largest, hostile.weights, atol=0.003)
    np.testing.assert_allclose((shares * largest)[0, 0], 1 / length, rtol=1e-3)
    assert page.title.startswith("attention of runs/<b>&amp;")


def test_the_page_of_an_alignment_has_both_texts(alignment, tmp_path) -> None:
    write_html(alignment, tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    data = json.loads(page.scripts[0])
    assert data["rows"]["tokens"] == alignment.rows.tokens
    assert data["columns"]["tokens"] == alignment.columns.tokens
    shares = unpacked(data["weights"], np.uint8).reshape(2, 2, 3, 5) / 255
    largest = unpacked(data["largest"], "<u2").reshape(2, 2, 3, 1) / 65535
    np.testing.assert_allclose(shares * largest, alignment.weights, atol=0.003)


def test_the_page_loads_nothing(hostile, tmp_path) -> None:
    write_html(hostile, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not [tag for tag, attributes in page.elements if tag == "link" or {"src", "href"} & set(attributes)]
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|innerHTML", text)
    [policy] = [item["content"] for tag, item in page.elements if item.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert {"layer", "head", "direction", "matrix", "lines"} <= {item.get("id") for _, item in page.elements}


@pytest.mark.medium
@pytest.mark.parametrize("length", [8, 300])
def test_the_picture(hostile, tmp_path, length) -> None:
    if length > 8:
        weights = np.full((2, 2, length, length), 1 / length, np.float32)
        tokens = AttentionTokens(["a"] * length, np.zeros(length, int), np.zeros(length, bool), num_truncated=5)
        hostile = AttentionMap("runs/$x_$", tokens, tokens, weights)
    write_png(hostile, tmp_path / "all.png")
    picture = imread(tmp_path / "all.png")
    layers, heads = hostile.weights.shape[:2]
    assert picture.shape[0] > 100 * layers and picture.shape[1] > 100 * heads
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 20


def test_the_weights_are_the_models(pretrained) -> None:
    model = bert.load(pretrained)
    found = compute_attention_map(model, ("ba ko ri.", "tu ne"))
    layers, heads, length, _ = found.weights.shape
    assert (layers, heads) == (model.config.num_hidden_layers, model.config.num_attention_heads)
    tokens = found.rows.tokens
    assert not found.is_cross
    assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]"
    assert found.rows.special.sum() == 3
    assert found.rows.segments[tokens.index("[SEP]") + 1] == 1
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-5)
    # The first layer's by hand, from the parameters alone.
    params = jax.tree.map(np.asarray, model.params["bert"])
    tables = params["embeddings"]
    ids = np.array([model.tokenizer.token_to_id(token) for token in tokens])
    x = tables["word"]["embedding"][ids] + tables["position"]["embedding"][:length]
    x = x + tables["segment"]["embedding"][found.rows.segments]
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + model.config.layer_norm_eps)
    x = x * tables["norm"]["scale"] + tables["norm"]["bias"]
    layer = params["encoder"]["layer_0"]["attention"]
    query, key = (
        (x @ layer[name]["kernel"] + layer[name]["bias"]).reshape(1, length, heads, -1) for name in ("query", "key")
    )
    _, weights = dot_product_attention(query, key, key)
    np.testing.assert_allclose(found.weights[0], weights[0], atol=1e-5)


@pytest.mark.medium
def test_a_classifier_shows_the_attention_of_its_global_token(tmp_path) -> None:
    config = dataclasses.replace(tiny_models.CONFIG, attention_window=1, global_attention_sep_id=3)
    model = tiny_models.model_of(
        tmp_path, BertForSequenceClassification(config, 2), tiny_models.TASKS["classification"]
    )
    weights = compute_attention_map(model, "a b c d").weights
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    length = weights.shape[-1]
    near = np.abs(np.arange(length)[:, None] - np.arange(length)) <= 1
    near[0] = near[:, 0] = True
    np.testing.assert_array_equal(weights[0] > 0, near[None].repeat(2, 0))


@pytest.fixture(scope="module")
def encoder_decoder(tmp_path_factory) -> Pretrained:
    return tiny_models.encoder_decoder(tmp_path_factory.mktemp("vocabulary"))


@pytest.mark.medium
def test_an_alignment_has_the_weights_with_which_a_token_is_predicted(encoder_decoder) -> None:
    model = encoder_decoder
    found = compute_attention_map(model, "c a b", "w [SEP] y")  # a special token's name in a target is prose
    assert found.columns.tokens == ["[CLS]", "c", "a", "b", "[SEP]"]
    assert found.rows.tokens == ["w", *["[UNK]"] * 3, "y", "[SEP]"]
    assert found.weights.shape == (2, 2, 6, 5) and found.is_cross
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-5)
    source, target = np.array([[2, 7, 5, 6, 3]]), np.array([[2, 5, 1, 1, 1, 7]])
    module = bert.BertForSequenceToSequence(model.config)
    expected = module.apply({"params": model.params}, source, target, method=module.cross_attentions)
    np.testing.assert_allclose(found.weights, np.concatenate(expected), atol=1e-6)
    assert not compute_attention_map(model, "c a b").is_cross, "the encoder's own"


@pytest.mark.medium
def test_a_generated_target_is_shown_as_it_was_written(encoder_decoder) -> None:
    ended = compute_attention_map(encoder_decoder, "c", Continuation("y w", 0.0, (7, 5), True))
    cut = compute_attention_map(encoder_decoder, "c", Continuation("y w", 0.0, (7, 5), False))
    assert (ended.rows.tokens, cut.rows.tokens) == (["y", "w", "[SEP]"], ["y", "w"])
    np.testing.assert_allclose(ended.weights[:, :, :2], cut.weights, atol=1e-6)


@pytest.mark.medium
def test_both_sides_are_cut_where_the_position_table_ends(encoder_decoder) -> None:
    found = compute_attention_map(encoder_decoder, "a b c d e f", "w x y z w x y")
    assert [len(side) for side in found.sides.values()] == [6, 6]
    assert [side.num_truncated for side in found.sides.values()] == [2, 2]
    assert found.rows.tokens[-1] == "x" and found.columns.tokens[-1] == "[SEP]"


def test_targets_that_cannot_be_shown_are_refused(encoder_decoder, pretrained) -> None:
    for text, target, message in (
        ("a", " ", "the target is empty: pass at least one word"),
        (("a", "b"), "w", "the source is a pair of texts, and made reads one: pass one text"),
        ("a", 3, "the target is a text: pass a string"),
    ):
        with pytest.raises(bert.UserError, match=message):
            compute_attention_map(encoder_decoder, text, target)
    with pytest.raises(bert.UserError, match=r"has no decoder \(BertForPreTraining\): leave out the target"):
        compute_attention_map(bert.load(pretrained), "ba", "ko")


def test_byte_level_tokens_are_read_as_text() -> None:
    tokens = [*TRAINED_SPECIAL_TOKENS, "Ġthe", "caf", "Ã©"]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    assert AttentionTokens.from_ids(tokenizer, np.array([0, 5, 6, 7, 2])).tokens == ["<s>", "␣the", "caf", "é", "</s>"]


@pytest.mark.medium
def test_the_command(pretrained, tmp_path, capsys) -> None:
    for name in ("a.html", "a.png"):
        output = tmp_path / name
        assert main([str(pretrained), "ba ko", "ri tu", "--output", str(output)]) == 0
        assert output.stat().st_size > 5000
        assert f"{output}: 1 layers x 2 heads over " in capsys.readouterr().out
    assert main([str(pretrained), "ba ko " * 40, "--output", str(tmp_path / "long.png")]) == 0
    assert "tokens beyond the model's 32 are cut" in capsys.readouterr().err


def test_the_command_shows_an_alignment(encoder_decoder, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("bert.inference.load.load", lambda source, log, **adapter: encoder_decoder)
    output = tmp_path / "page.html"
    assert main(["made", "c a", "--target", "w x", "--output", str(output)]) == 0
    assert "2 layers x 2 heads over 3 target tokens and 4 source tokens" in capsys.readouterr().out
    assert json.loads(Page(output.read_text()).scripts[0])["rows"]["tokens"] == ["w", "x", "[SEP]"]


def test_mistakes_are_one_sentence(pretrained, tmp_path, fails) -> None:
    run, page = str(pretrained), str(tmp_path / "page.html")
    assert "neither .html nor .png" in fails(main, run, "ba", "--output", str(tmp_path / "page.pdf"))
    assert "is not a folder" in fails(main, run, "ba", "--output", str(tmp_path / "absent" / "page.html"))
    assert "the text is empty" in fails(main, run, " ", "--output", page)
    assert "has no decoder (BertForPreTraining): leave out" in fails(main, run, "ba", "--target", "x", "--output", page)
    assert "does not exist" in fails(main, str(tmp_path / "run"), "ba", "--output", page)
    Path(page).write_text("mine")
    assert "exists already" in fails(main, run, "ba", "--output", page)
    assert Path(page).read_text() == "mine"


def test_the_page_and_the_types_are_shipped() -> None:
    assert resources.files("bert").joinpath("py.typed").is_file()
    assert resources.files("bert.inference").joinpath("attention_page.html").is_file()


@pytest.mark.medium
def test_the_picture_of_an_alignment_is_as_wide_as_the_source(alignment, tmp_path) -> None:
    shapes = []
    for width in (5, 20):
        tokens = AttentionTokens(["a"] * width, np.zeros(width, int), np.zeros(width, bool))
        weights = np.full((1, 2, 3, width), 1 / width, np.float32)
        write_png(AttentionMap("x", alignment.rows, tokens, weights), tmp_path / f"{width}.png")
        shapes.append(imread(tmp_path / f"{width}.png").shape)
    assert shapes[1][1] > 1.2 * shapes[0][1] and shapes[1][0] == shapes[0][0]


def shown_by_chromium(page: Path, script: str = "") -> str:
    """The document after the page has drawn itself, and after ``script``."""
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", f"<script>setTimeout(() => {{ {script} }}, 1000)</script></body>"))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", "--dump-dom",
               f"--user-data-dir={page.parent / 'profile'}", page.as_uri()]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


def told(shown: str) -> str:
    return html.unescape(re.search(r"<output[^>]*>(.*?)</output>", shown, re.S)[1])


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_both_texts_of_an_alignment_can_be_pointed_at(alignment, tmp_path) -> None:
    write_html(alignment, tmp_path / "page.html")
    assert told(shown_by_chromium(tmp_path / "page.html")).startswith("a (1) looks at:  [CLS] 20%")
    point = "get('layer').value = 1; redraw(); document.querySelector('#text button:nth-child(4)').onmouseenter();"
    shown = shown_by_chromium(tmp_path / "page.html", point)
    assert told(shown) == "at haus (4) look:  [SEP] 60%,  a 9.9%,  </script> 9.9%"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_lines_are_as_thick_as_the_weights_of_one_head_or_all(alignment, tmp_path) -> None:
    write_html(alignment, tmp_path / "page.html")
    choose = "get('layer').value = 1; get('head').value = {}; redraw();"
    for head, heads in (("0", [0]), ("1", [1]), ("MEAN", [0, 1])):
        shown = shown_by_chromium(tmp_path / "page.html", choose.format(head))
        widths = np.array([float(width) for width in re.findall(r'<line [^>]*stroke-width="([\d.]+)"', shown)])
        np.testing.assert_allclose(widths, 5 * alignment.weights[1, heads].ravel(), atol=0.02)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_page_shows_a_token_before_the_first_hover_and_names_rows_and_columns(hostile, tmp_path) -> None:
    write_html(hostile, tmp_path / "page.html")
    shown = shown_by_chromium(tmp_path / "page.html")
    assert told(shown).startswith(f"{HOSTILE[1]} (2) looks at:  ")
    for side in ("rows", "columns"):
        names = re.search(rf'<div id="{side}"[^>]*>(.*?)</div>', shown, re.S)[1]
        assert [html.unescape(name) for name in re.findall(r"<span[^>]*>(.*?)</span>", names, re.S)] == [
            name if len(name) <= 14 else f"{name[:13]}…" for name in HOSTILE
        ]
    assert len(re.findall(r'class="(?:strong )?from', shown)) >= 2, "the token, and its row"
