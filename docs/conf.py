"""Sphinx's settings for `make docs`: pages as they are on disk, the checkout's root as source folder.

That way a page may link to whatever is in the repository, and every link is checked.
"""

import re

project = html_title = "mindspeed_mem"
root_doc = "docs/README"
extensions = ["myst_parser"]
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "benchmarks/results/README.md"]
exclude_patterns = [".*", "build", "dist"]
nitpicky = True

html_theme = "furo"
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 4  # as GitHub makes them


def contents(app, page, source):
    """The start page's sections and links are the tree of pages; a page that it does not link to is a warning."""
    if page != root_doc:
        return
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
        links = dict.fromkeys(re.findall(r"\]\(([\w./-]+)\.md\)", section))
        tree = [":hidden:", f":caption: {section.splitlines()[0]}", *links]
        source[0] += "\n".join(["\n```{toctree}", *tree, "```\n"])


def setup(app):
    app.connect("source-read", contents)
