"""How Sphinx builds the pages of this folder: `make docs`. Nothing is looked up in the network."""

import subprocess
import sys
from pathlib import Path

from docutils import nodes
from sphinx.errors import ExtensionError

project = "ringspark"
author = "the ringspark authors"
copyright = "the ringspark authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_design"]
html_theme = "furo"
html_title = "ringspark"
html_static_path = ["_static"]
html_extra_path = ["job.schema.json"]
html_css_files = ["phone.css"]
smartquotes_action = "D"  # only dashes: quotes of a value stay as in code
html_copy_source = False

myst_enable_extensions = ["colon_fence"]  # cards of the landing page
myst_heading_anchors = 3  # links to headings, as a git host makes them

default_role = "code"  # of `name` in docstrings
napoleon_use_ivar = True  # "Attributes:" are fields of their class, not separate entries
autodoc_typehints = "none"  # signatures show names and defaults; docstrings say what is meant
autodoc_member_order = "groupwise"
# A class is the default of `averaged`; autodoc would list the class instead of the field.
autodoc_default_options = {"members": True, "show-inheritance": True, "exclude-members": "averaged"}


DOCS = Path(__file__).parent
# Pages that are built, not committed, and the scripts that print them.
PRINTED = {
    "settings.md": "scripts/show_settings.py",
    "pairs.md": "tests/pairs/pairs_page.py",
    "errors.md": "scripts/show_errors.py",
    "api/jobs.md": "scripts/show_commands.py",
}


def _print_pages(app, config):
    """Writes the pages of `PRINTED`; an equal page is left alone, so that Sphinx need not read it again."""
    for page, script in PRINTED.items():
        command = [sys.executable, str(DOCS.parent / script)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ExtensionError(f"{script} failed:\n{done.stderr}")
        path = DOCS / page
        if not path.exists() or path.read_text() != done.stdout:
            path.write_text(done.stdout)


def _link_pictures(app, doctree):
    """Gives each picture a width, so that Sphinx links it to the file in full size."""
    for picture in doctree.findall(nodes.image):
        picture["width"] = "100%"


def _without_settings(app, what, name, obj, options, lines):
    """Removes the list of settings from a stage's docstring if settings.md has it; searches keep theirs."""
    groups = {f"{setting.group.capitalize()}:" for setting in getattr(obj, "SETTINGS", {}).values()}
    first = next((place for place, line in enumerate(lines) if line in groups), None)
    if groups == {"Search:"}:
        lines[first] = "Args:"
    elif first is not None:
        lines[first:] = ["Its keywords are :doc:`settings </settings>`.", ""]


def setup(app):
    """Registers the hooks of this file."""
    app.connect("config-inited", _print_pages)
    app.connect("doctree-read", _link_pictures)
    app.connect("autodoc-process-docstring", _without_settings, priority=100)
