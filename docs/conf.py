"""How Sphinx builds the pages of this folder: `make docs`. Nothing is looked up in the network."""

project = "ringspark"
author = "the ringspark authors"
copyright = "the ringspark authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_design"]
html_theme = "furo"
html_title = "ringspark"
html_copy_source = False

myst_enable_extensions = ["colon_fence"]  # cards of the landing page
myst_heading_anchors = 3  # links to headings, as a git host makes them

default_role = "code"  # of `name` in docstrings
napoleon_use_ivar = True  # "Attributes:" are fields of their class, not separate entries
autodoc_typehints = "none"  # signatures show names and defaults; docstrings say what is meant
autodoc_member_order = "groupwise"
autodoc_default_options = {"members": True, "show-inheritance": True}
