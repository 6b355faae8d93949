"""Sphinx's settings for the documentation; `make docs` builds it."""

import configparser
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import tfamp  # noqa: E402 (needs the path above)
from docs import site_pages  # noqa: E402

_SETUP = configparser.ConfigParser()
_SETUP.read(ROOT / "setup.cfg", encoding="utf-8")
REPOSITORY = _SETUP["metadata"]["url"]

PICTURES = f"{site_pages.GENERATED}/pictures"

project = "tfamp"
author = "The authors of tfamp"
project_copyright = author
release = tfamp.__version__
html_title = f"tfamp {release}"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
# Pages open from a folder, without a network, and their search too.
html_show_sourcelink = False
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
}

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
# Notebooks come with the outputs of a stated run.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence"]
# Headings have the anchors that they have on GitHub.
myst_heading_anchors = 4
exclude_patterns = ["_build"]

# Docstrings are written in Google's style, with code between single backticks.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Source", "notes_style")]
napoleon_use_rtype = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80


def setup(app):
    """Writes the pages that are made of code, and leads links out of docs/ to them."""
    app.connect("builder-inited", lambda _: site_pages.write(ROOT, REPOSITORY))

    def relink(_, docname, source):
        page = f"docs/{docname}.md"
        pictures = {path.stem for path in (ROOT / PICTURES).glob("*.png")}
        source[0] = site_pages.with_gallery(source[0], pictures)
        source[0] = site_pages.relinked(source[0], page, REPOSITORY)

    app.connect("source-read", relink)
