"""The site: `make docs` builds it in build/docs, with warnings as errors."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
os.environ["COLUMNS"] = "76"  # of the usages in the command line reference

import oktopk

project = "oktopk"
author = "the oktopk authors"
copyright = author
release = version = oktopk.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "command_line",
    "public_names",
    "repository_links",
]
exclude_patterns = ["_ext", "_static", "pictures/*.py"]
nitpicky = True
nitpick_ignore_regex = [
    # What is not ours, and types that only annotations name.
    ("py:.*", r"(?!oktopk\.[A-Z_]\w*$|oktopk\.(metrics\.sinks|integrations\.\w+|testing)\.\w+$).*"),
]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]

default_role = "literal"  # docstrings write `names` as Markdown does
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_mock_imports = ["accelerate", "lightning", "mlflow", "ray", "transformers", "wandb"]
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"oktopk {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
highlight_language = "python"  # of the examples in docstrings
smartquotes_action = "De"  # dashes; quotes stay as they are typed
