"""The Gradio page of `bert demo`, with one tab and one API function per ability of a model."""

from __future__ import annotations

import functools
import html
import importlib.util
import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from bert.demo.abilities import Ability, abilities_of
from bert.errors import UserError
from bert.inference.pretrained import Pretrained
from bert.serving.guard import RequestGuard, hosts_of, is_local

if TYPE_CHECKING:
    import gradio as gr

MAX_WAITING = 256
"""Maximum number of waiting requests of up to `bert.serving.guard.MAX_BODY` bytes each. Others are rejected."""

CSS = """
.gradio-container .html-container { padding: 0; }
.gradio-container .textfield { word-break: normal; overflow-wrap: anywhere; }
.gradio-container footer .divider { display: none; }
@media (max-width: 640px) { .gradio-container > main { padding: .75rem; } }
.gradio-container iframe { width: 100%; height: 75vh; border: 0; }
.gradio-container h1 { overflow-wrap: anywhere; }
"""

OUTPUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bars": ("Label", {"num_top_classes": 10}),
    "shares": ("Label", {"num_top_classes": 10, "show_heading": False}),
    "highlights": ("HighlightedText", {}),
    "number": ("Number", {"precision": 4, "interactive": False}),
    "text": ("Textbox", {"interactive": False}),
    "json": ("JSON", {}),
    "page": ("HTML", {"show_label": False}),
}
"""Gradio component and its settings for each kind of output."""

NO_NETWORK: dict[str, Any] = {"share": False, "ssr_mode": False, "mcp_server": False, "enable_monitoring": False}
NO_FILES: dict[str, Any] = {"max_file_size": 0, "run_history": False}


def require_gradio() -> None:
    """Raises UserError if Gradio is not installed."""
    if importlib.util.find_spec("gradio") is None:
        raise UserError("bert demo needs gradio, which is not installed: use pip install 'bert-jax[demo]'")


def build(model: Pretrained) -> gr.Blocks:
    """Builds the page for a model. It processes one request at a time.

    Raises:
        UserError: Gradio is not installed.
    """
    require_gradio()
    import gradio as gr

    with gr.Blocks(analytics_enabled=False, title=f"{model.source} - bert demo") as page:
        gr.HTML(f"<h1>{_inert(model.source)}</h1><p>{_inert(_summary(model))}</p>")
        for ability in abilities_of(model):
            with gr.Tab(ability.title, id=ability.name):
                _fill_tab(ability)
    page.queue(api_open=False, max_size=MAX_WAITING)
    return page


def serve(
    page: gr.Blocks, host: str, port: int, auth: tuple[str, str] | None = None, allowed_hosts: Collection[str] = ()
) -> str:
    """Serves a page in the background until ``page.close()``, and returns its address.

    No data is sent to or loaded from other hosts. `bert.serving.guard.RequestGuard` restricts the requests.

    Args:
        host: address to listen on. If other machines can reach it, the Host header may be any IP address.
        allowed_hosts: additional values of the Host header.

    Raises:
        OSError: the port is in use.
    """
    import gradio as gr
    from starlette.middleware import Middleware

    guard = Middleware(RequestGuard, hosts=hosts_of(host, allowed_hosts), any_address=not is_local(host))
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        auth=auth,
        theme=theme,
        css=CSS,
        footer_links=["api"],
        prevent_thread_lock=True,
        quiet=True,
        app_kwargs={"middleware": [guard]},
        **NO_NETWORK,
        **NO_FILES,
    )
    return str(address)


def _fill_tab(ability: Ability) -> None:
    import gradio as gr

    gr.Markdown(ability.description)
    with gr.Column() if ability.is_page else gr.Row():
        with gr.Column():
            lines = 2 if len(ability.inputs) == 1 else 1
            texts = [gr.Textbox(label=label, lines=lines, max_lines=12) for label in ability.inputs]
            button = gr.Button("Run", variant="primary")
            examples = gr.Examples([list(example) for example in ability.examples], texts, cache_examples=False)
        with gr.Column():
            outputs = [_output(kind, label) for kind, label in ability.outputs]
    call = {"fn": _answer_or_error(ability), "inputs": texts, "outputs": outputs}
    one_at_a_time = {"concurrency_id": "model", "concurrency_limit": 1}
    described = {"api_name": ability.name, "api_description": ability.description}
    gr.on([button.click, *(text.submit for text in texts)], **call, **one_at_a_time, **described)
    examples.load_input_event.then(**call, **one_at_a_time, api_visibility="undocumented")


def _output(kind: str, label: str) -> Any:
    import gradio as gr

    component, settings = OUTPUTS[kind]
    return getattr(gr, component)(label=label, **settings)


def _answer_or_error(ability: Ability) -> Callable[..., Any]:
    """Wraps an ability for Gradio, with the parameters of its answer. Errors are shown on the page."""
    import gradio as gr

    @functools.wraps(ability.answer)
    def answer(*texts: str) -> Any:
        try:
            output = ability(*texts)
        except UserError as error:
            # Gradio renders messages as HTML.
            raise gr.Error(html.escape(str(error), quote=False), print_exception=False) from None
        return _frame(output) if ability.is_page else output

    return answer


def _frame(page: str) -> str:
    """Returns a sandboxed frame with the page, which cannot access the outer page."""
    return f'<iframe title="attention" sandbox="allow-scripts" srcdoc="{_inert(page)}"></iframe>'


def _inert(text: str) -> str:
    """Escapes a text for HTML and for Gradio's templates, which evaluate ${...} and {{...}}."""
    return re.sub(r"[&<>\"'`${}\\]", lambda match: f"&#{ord(match[0])};", text)


def _summary(model: Pretrained) -> str:
    sizes = model.config
    step = [] if model.step is None else [f"step {model.step:,}"]
    layers = f"{sizes.num_hidden_layers} layers, hidden size {sizes.hidden_size}, {sizes.num_attention_heads} heads"
    return ", ".join([model.architecture, layers, *step])
