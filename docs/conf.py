"""Sphinx's settings. Nothing is fetched: neither while building, nor by the pages that are built."""

from __future__ import annotations

import inspect
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Before the frameworks are imported, which happens for the reference.
os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import clipaware

project = "clipaware"
author = "The clipaware developers"
version = release = clipaware.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "numpydoc",
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "measured",
]
exclude_patterns = ["_build", "gallery/*.py", "gallery/*.ipynb", "gallery/*.zip"]
templates_path = ["_templates"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(torch|foolbox|art|numpy)\..*")]  # of other projects, which are not looked up

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "substitution"]
myst_heading_anchors = 4
myst_substitutions = {"version": version}

autosummary_generate = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

# Doctests of the pages. Those of the docstrings are pytest's, which knows each module's own names.
doctest_global_setup = "import numpy as np\nimport clipaware as ca\n"
doctest_test_doctest_blocks = ""

sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "image_scrapers": ("matplotlib",),
    "min_reported_time": 1e9,
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "within_subsection_order": "FileNameSortKey",
    "write_computation_times": False,
}

linkcheck_retries = 2
linkcheck_timeout = 20

html_theme = "pydata_sphinx_theme"
html_title = "clipaware"
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_css_files = ["custom.css"]
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {"index": [], "comparison": []}
html_theme_options = {
    "footer_end": [],
    "logo": {"text": "clipaware"},
    "navbar_end": ["theme-switcher"],
    "navigation_with_keys": False,
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
}

# One file of MathJax, from the package that brings it, instead of a server's.
_mathjax = find_spec("sphinx-mathjax-offline")
if _mathjax is None or _mathjax.origin is None:
    raise RuntimeError("sphinx-mathjax-offline is not installed: make docs, or pip install -r requirements-docs.txt")
mathjax_path = "tex-svg.js"
html_static_path = ["_static", str(Path(_mathjax.origin).parent / "static" / "mathjax" / mathjax_path)]


def _as_init_says(_app: Any, what: str, _name: str, obj: Any, *_: Any) -> tuple[str, str] | None:
    """The signature of a class whose `__new__` only chooses between variants."""
    if what != "class" or not {"__new__", "__init__"} <= vars(obj).keys():
        return None
    parameters = list(inspect.signature(obj.__init__).parameters.values())[1:]
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(bare)), ""


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", _as_init_says)
