"""What `bert.load` returns, as far as others can read it: in files of several formats, and on the Hugging Face hub."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert.errors import UserError
from bert.inference.int8 import TOLERANCE, Int8Check
from bert.inference.language_model import LanguageModel
from bert.interchange import hub
from bert.interchange.names import ARCHITECTURES
from bert.messages import log_message
from bert.runtime.system_errors import system_errors_as_user_errors
from bert.urls import writable


@dataclass(frozen=True, kw_only=True, repr=False)
class ExportableModel(LanguageModel):
    """A model that is written for other programs.

    Attributes:
        num_feature_layers: of a head over a frozen encoder: how many last layers it reads; else None.
        graph: the file of an ONNX graph that ONNX Runtime runs in place of the model's functions; None for these.
    """

    num_feature_layers: int | None = None
    graph: Path | None = None

    @system_errors_as_user_errors()
    def save(
        self,
        out: str | Path,
        format: str = "hf",
        say: Callable[[str], None] = log_message,
        *,
        length: int | None = None,
        dynamic_length: bool = False,
        quantize: str | None = None,
        dev: Any = None,
        tolerance: float = TOLERANCE,
    ) -> None:
        """Writes the model for others, as a whole or not at all, and checked against this one.

        Args:
            out: a folder that is not there yet, or an empty one, or the URL of a new one.
            format: ``hf``, a folder that Hugging Face transformers reads; ``stablehlo``, a function that JAX alone
                calls; ``onnx``, a graph for ONNX Runtime and others, of any number of rows and tokens.
            say: called with what was written and compared. By default the logger ``bert`` warns of settings that the
                format cannot express.
            length: tokens T of the inputs of a ``stablehlo`` function; None for the longest that the model reads.
            dynamic_length: leave T of a ``stablehlo`` function free, up to that longest.
            quantize: ``int8`` writes the weights of an ``onnx`` graph in 8 bits (dynamic quantisation). The score on
                dev is compared with that of the float graph; of an embedding model without a task, the mean cosine of
                its embeddings with those of the float graph.
            dev: what an int8 graph is scored on. None takes the dev rows of a run. Others: labelled rows, or the path
                of their file, as `Pretrained.score` takes them; the folder of a task that reads its own files; of an
                embedding model without a task, texts, or the path of a file with one a line.
            tolerance: share of the float score that int8 may lose.

        Raises:
            ExportError: the int8 graph loses more.
            UserError: an unknown format, a head that others have no names for, settings that are not the format's own,
                a library that is not installed, or ``out`` is there already and not an empty folder.
        """
        from bert.interchange.writers import hf, onnx, stablehlo  # which most programs do not need

        writers = {"hf": hf.export, "stablehlo": stablehlo.export, "onnx": onnx.export}
        if format not in writers:
            raise UserError(f"format is {format!r}: choose one of {', '.join(writers)}")
        if self.architecture not in ARCHITECTURES:
            raise UserError(
                f"{self.source} has the head {self.architecture}, which has no names outside of this toolkit: give it "
                "some as CONTRIBUTING.md tells"
            )
        if self.num_feature_layers is not None:
            raise UserError(
                f"{self.source} has a head over {self.num_feature_layers} layers of a frozen encoder, which no export "
                "format has: fine-tune without num_feature_layers"
            )
        options: dict[str, Any] = {"length": length, "dynamic_length": dynamic_length} if format == "stablehlo" else {}
        if not options and (length is not None or dynamic_length):
            raise UserError(f"length and dynamic_length are for stablehlo: leave them out for {format}")
        if quantize not in (None, "int8"):
            raise UserError(f"quantize is {quantize!r}: pass int8, or None for none")
        if quantize is not None and format != "onnx":
            raise UserError(f"quantize is for onnx: leave it out for {format}")
        if quantize is None and dev is not None:
            raise UserError("dev is what an int8 graph is scored on: pass quantize as well, or leave it out")
        if quantize is not None:
            onnx.check_exportable(self)
            check = Int8Check.of(self, dev, tolerance)
            model: Any = self
            options["accept"] = lambda *graphs: check(*(dataclasses.replace(model, graph=graph) for graph in graphs))
        with writable(out) as folder:
            writers[format](self, folder, lambda text: say(_with_path(text, folder, out)), **options)

    def push_to_hub(self, name: str, *, private: bool = False, message: str = "Add a model of bert-jax") -> str:
        """Writes the model as `save` does with the format ``hf``, and uploads it to the Hugging Face hub as one commit.

        Args:
            name: of the repository, ``organisation/name``; it is made if it is not there.
            private: whether a new repository is.
            message: of the commit.

        Returns:
            The URL of the commit.

        Raises:
            UserError: as `save`; or the repository cannot be written: no such name, no access, no network.
        """
        return hub.upload(self.save, name, private, message)


def _with_path(text: str, folder: Path, out: str | Path) -> str:
    """A message about ``out`` of a function that wrote to ``folder``."""
    return type(text)(text.replace(str(folder), str(out)))
