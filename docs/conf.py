"""How Sphinx builds the documentation: `python -m sphinx -W docs docs/_build/html`.

The notebooks are run while it builds, so a page never shows what the code no longer does.
"""

import os
import pathlib
import re
import shutil
from typing import Any

import jact

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent

# Read by the kernels that run the notebooks. No notebook needs more than a CPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# They compile much and run little. This leaves memory figures alone.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
os.environ["PYTHONPATH"] = os.pathsep.join(
    str(path) for path in (ROOT, ROOT / "kernels", os.environ.get("PYTHONPATH")) if path
)

# Sphinx reads what is below this folder; the notebooks belong to the examples.
shutil.copytree(ROOT / "examples" / "notebooks", HERE / "notebooks", dirs_exist_ok=True)

project = "jact"
release = jact.__version__
author = "the jact authors"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
html_theme = "sphinx_book_theme"
html_title = "jact"
html_theme_options = {"show_toc_level": 2, "home_page_in_toc": True}

# A name in single backquotes is a link where it names something documented, and code elsewhere.
default_role = "py:obj"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_output_stderr = "remove-warn"


def _plurals(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Lets docstrings say "`Rule`s": reStructuredText wants a space or an escape after a name."""
    lines[:] = [re.sub(r"(?<![`\w])(`[^`\s][^`]*`)(?=s\b)", r"\1\\ ", line) for line in lines]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _plurals)
