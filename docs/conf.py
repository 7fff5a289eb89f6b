"""How Sphinx makes the manual out of the pages in this directory: make docs."""

import sys
from pathlib import Path

_DOCS = Path(__file__).parent
sys.path.insert(0, str(_DOCS))
import http_reference  # noqa: E402
import proto_reference  # noqa: E402

proto_reference.write_reference(_DOCS.parent / "proto", _DOCS / "grpc")
http_reference.write_reference(_DOCS / "http.md", _DOCS / "openapi" / "openapi.json")

project = "Outrider"
author = "The Outrider authors"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "Outrider"
html_show_copyright = False
html_extra_path = ["openapi"]
myst_heading_anchors = 4
# Of make linkcheck: addresses on the reader's own machine.
linkcheck_ignore = [r"http://(127\.0\.0\.1|localhost)"]
exclude_patterns = ["_build", "upstream"]
# The text of code blocks is a diagram, output or a mixture of shells: Pygments need not read it.
highlight_language = "none"
