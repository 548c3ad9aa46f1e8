"""The page in a headless Chromium, as wide as a desk's screen and as a phone's: typed, clicked, looked at."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bert.demo.page import build, serve
from bert.inference.attention_maps import compute_attention_map, write_html
from tests.demo.serving import free_port

pytest.importorskip("gradio", reason="needs the extra demo")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")

CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]

WIDTHS = {"desktop": 1280, "phone": 390}
HOSTILE = ("<script>alert(1)</script>", "${alert(2)}", "<img src=x onerror=alert(3)>", "{{value}}")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def served(model: Any) -> Iterator[str]:
    page = build(model)
    yield serve(page, "127.0.0.1", free_port())
    page.close(verbose=False)


@contextmanager
def opened(chromium: Any, address: str, width: int) -> Iterator[Any]:
    """A tab of the browser; at its end there was no error, no dialog, no request to another host, no scrolling."""
    page, wrong = chromium.new_page(viewport={"width": width, "height": 844}), []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: None if request.url.startswith(address) else wrong.append(request.url))
    page.goto(address)
    yield page
    for frame in page.frames:
        wide, visible = frame.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert wide <= visible, f"{frame.url} scrolls sideways: {wide} of {visible}"
    assert not wrong
    page.close()


def ask(page: Any, tab: str, *texts: str) -> Any:
    """The open tab after its texts were typed and its button was clicked."""
    page.get_by_role("tab", name=tab).click()
    panel = page.locator("[role=tabpanel]:visible")
    for box, text in zip(panel.locator("textarea:enabled").all(), texts, strict=False):
        box.fill(text)
    panel.get_by_role("button", name="Run").click()
    return panel


def keep(page: Any, folder: Path, name: str) -> None:
    page.screenshot(path=folder / f"{name}.png", full_page=True)
    assert (folder / f"{name}.png").stat().st_size > 5000


@pytest.mark.parametrize("width", WIDTHS)
def test_a_mask_is_filled_with_bars(models, chromium, tmp_path, width: str) -> None:
    [expected] = models["mlm"].fill_mask("a [MASK] c", 8)
    with served(models["mlm"]) as address, opened(chromium, address, WIDTHS[width]) as page:
        panel = ask(page, "Fill a mask", "a [MASK] c")
        panel.locator(".bar").first.wait_for()
        assert panel.locator(".bar").count() == 8
        assert expected[0].token in panel.locator("[data-testid=label-output-value]").inner_text()
        widths = [bar.bounding_box()["width"] for bar in panel.locator(".bar").all()]
        assert widths == sorted(widths, reverse=True) and widths[0] > widths[-1]
        keep(page, tmp_path, "bars")
        ask(page, "Fill a mask", "a b c")
        message = page.get_by_test_id("toast-text")
        message.wait_for()
        assert message.inner_text() == "no [MASK] in 'a b c': put one where a word is to be predicted"


@pytest.mark.parametrize("width", WIDTHS)
def test_an_example_is_answered_when_it_is_clicked(models, chromium, tmp_path, width: str) -> None:
    with served(models["squad"]) as address, opened(chromium, address, WIDTHS[width]) as page:
        page.locator("[role=tabpanel]:visible").get_by_text("When do I get my money?").click()
        marked = page.locator(".token.highlighted .text").first
        marked.wait_for()
        assert marked.inner_text().strip()
        keep(page, tmp_path, "example")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_attention_of_a_text_is_drawn_in_its_frame(models, chromium, tmp_path, width: str) -> None:
    with served(models["encoder"]) as address, opened(chromium, address, WIDTHS[width]) as page:
        ask(page, "Attention", "a b <c")
        frame = page.frame_locator("iframe")
        frame.locator("output").filter(has_text="a (2) looks at:").wait_for()
        assert frame.locator("#text button").all_inner_texts() == ["[CLS]", "a", "b", "[UNK]", "c", "[SEP]"]
        keep(page, tmp_path, "attention")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_that_the_attention_command_writes(models, chromium, tmp_path, width: str) -> None:
    page = tmp_path / "page.html"
    write_html(compute_attention_map(models["mlm"], ("a b c d e", "x y z " * 5)), page)
    with opened(chromium, page.as_uri(), WIDTHS[width]) as opened_page:
        opened_page.get_by_role("button", name="c", exact=True).click()
        assert opened_page.locator("#told").inner_text().startswith("c (4) looks at:")
        keep(opened_page, tmp_path, "command")


def test_texts_labels_and_names_are_never_run(models, chromium) -> None:
    task = dataclasses.replace(models["tagging"].task, labels=("O", f"B-{HOSTILE[0]}", f"B-{HOSTILE[2]}"))
    tagger = dataclasses.replace(models["tagging"], task=task, labels=task.labels, source=" ".join(HOSTILE))
    labels = dataclasses.replace(models["multilabel"].task, labels=HOSTILE[:3], label_names=HOSTILE[:3])
    classifier = dataclasses.replace(models["multilabel"], task=labels, labels=HOSTILE[:3])
    for model, tab in ((tagger, "Find entities"), (classifier, "Classify")):
        with served(model) as address, opened(chromium, address, 1280) as page:
            for text in HOSTILE:
                panel = ask(page, tab, f"a {text} b")
                panel.get_by_text(HOSTILE[0]).or_(panel.get_by_text(HOSTILE[2])).first.wait_for()
                page.wait_for_timeout(300)
            ask(page, "Attention", " ".join(HOSTILE))
            page.frame_locator("iframe").locator("output").filter(has_text="looks at:").wait_for()
            ask(page, "Attention", "")
            page.get_by_test_id("toast-text").wait_for()


def test_what_an_error_shows_of_a_text_is_text(models, chromium) -> None:
    with served(models["mlm"]) as address, opened(chromium, address, 1280) as page:
        ask(page, "Fill a mask", HOSTILE[2])
        message = page.get_by_test_id("toast-text")
        message.wait_for()
        assert message.inner_text().startswith(f"no [MASK] in '{HOSTILE[2]}': ")


def test_a_visitor_signs_in_where_a_password_is_asked(models, chromium) -> None:
    page = build(models["encoder"])
    address = serve(page, "127.0.0.1", free_port(), ("me", "a:b"))
    with chromium.new_page() as visit:
        visit.goto(address)
        assert visit.get_by_role("tab").count() == 0
        visit.get_by_label("username").fill("me")
        visit.get_by_label("password").fill("a:b")
        visit.get_by_role("button", name="Login").click()
        visit.get_by_role("tab", name="Attention").wait_for()
    page.close(verbose=False)
