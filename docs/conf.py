"""Sphinx: `make docs` builds these pages into build/docs, and any warning fails the build.

Most texts are the repository's own Markdown files, as they are read on GitHub. Those outside of
docs/ have a page here that includes them, and links to them are led there.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

import lossops

project = "lossops"
author = "The lossops authors"
copyright = "The lossops authors"
version = release = lossops.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxcontrib.programoutput",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["benchmarks"]

html_theme = "furo"
html_title = f"lossops {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
highlight_language = "none"  # a fence without a language is no Python
pygments_style = "friendly"
pygments_dark_style = "monokai"

myst_enable_extensions = ["tasklist"]
myst_heading_anchors = 3  # as on GitHub, so that links to headings work in both places

# The docstrings are Google's style, with code in single backticks.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_rtype = False  # "The loss: a scalar" is a description, not a type
napoleon_custom_sections = ["Shape"]
autodoc_member_order = "bysource"
autodoc_mock_imports = ["transformers", "trl"]  # lossops.integrations; the build has only torch
autodoc_typehints = "signature"
autodoc_typehints_format = "short"

# torch's documentation is not looked up: the build needs no network.
nitpick_ignore = [
    ("py:class", name)
    for name in (
        "Tensor",
        "collections.abc.Iterator",
        "torch.Tensor",
        "torch.dtype",
        "torch.nn.modules.module.Module",
        "transformers.PreTrainedModel",
    )
]

# Where files of the repository outside of docs/ are found on the site; see `lead_links`.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarking.md",
    "examples/README.md": "examples.md",
}
logger = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s]+)(?=\))")


def lead_links(text: str, folder: str, docname: str) -> str:
    """The Markdown of a file in this folder of the repository, with links to pages of the site."""
    page_folder = posixpath.dirname(posixpath.join("docs", docname))

    def lead(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        path, _, anchor = target.partition("#")
        if not (ROOT / path).exists():
            logger.warning("a link to %s, which does not exist", target, location=docname)
        page = posixpath.join("docs", PAGES[path]) if path in PAGES else path
        return posixpath.relpath(page, page_folder) + (f"#{anchor}" if anchor else "")

    return LINK.sub(lead, text)


def on_source_read(app: Sphinx, docname: str, source: list[str]) -> None:
    folder = posixpath.dirname(posixpath.join("docs", docname))
    source[0] = lead_links(source[0], folder, docname)


def on_include_read(app: Sphinx, path: Path, docname: str, source: list[str]) -> None:
    folder = os.path.relpath((Path(app.srcdir) / path).resolve().parent, ROOT)
    source[0] = lead_links(source[0], "" if folder == "." else folder, docname)


def setup(app: Sphinx) -> None:
    app.connect("source-read", on_source_read)
    app.connect("include-read", on_include_read)
