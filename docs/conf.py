"""The documentation site: ``sphinx-build -W -c docs . build/site`` in the root of the repository.

The source folder is the repository, so that guides, notebooks and measurements stay where they are, with their links.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import reference  # noqa: E402

project = "bert-jax"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
language = "en"
smartquotes = False  # two hyphens begin an option
highlight_language = "none"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "notebooks/*.ipynb",
    "benchmarks/RESULTS.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "README.md",
]
exclude_patterns = [".*", "bert", "build", "configs", "dist", "runs", "tests"]
suppress_warnings = ["misc.highlighting_failure"]  # there are no colours for csv

# Notebooks are shown with the outputs that they are committed with.
nb_execution_mode = "off"
myst_enable_extensions = ["deflist", "dollarmath"]
myst_dmath_allow_digits = myst_dmath_allow_space = False  # a price is no formula
myst_heading_anchors = 4

# A name in single quotes of a docstring is a link if the reference has it, and else code.
default_role = "py:obj"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"bert-jax {release}"
html_extra_path = ["_site", "../configs/schema.json"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app: Sphinx) -> None:
    app.connect("source-read", reference.fill_in)
    app.connect("env-get-outdated", reference.generated_pages)
    app.connect("autodoc-process-signature", reference.shorten)
