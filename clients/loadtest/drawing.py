"""Draws charts with Vega: as SVG in Python, and by its JavaScript in the page, with hover and zoom.

vl-convert brings Vega's JavaScript and runs it, so nothing here needs a network or a browser. Colours are variables of
`clients/colours.css`, which has a light and a dark set of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile

from clients.loadtest.chart_parts import Spec


def draw_svg(spec: Spec) -> str:
    """Draw a chart as an SVG element whose colours are variables of `colours.css`."""
    import vl_convert  # 84 MB of shared library: loaded when there is something to draw

    return vl_convert.vegalite_to_svg(spec, show_warnings=False)


def with_own_ids(svg: str, prefix: str) -> str:
    """Prefix the ids in an SVG element of `draw_svg`, which are the same in each, so that a page can hold several."""
    return re.sub(r'(\bid="|url\(#)(?=clip)', rf"\g<1>{prefix}-", svg)


def svg_file(svg: str) -> str:
    """Return the content of a file for an SVG element of `draw_svg`, with the colours in it."""
    head, _, rest = svg.partition(">")
    style = f"{_read('clients', 'colours.css')}svg {{ background: var(--paper); }}"
    return f"{head}><style>{style}</style>{rest}\n"


def javascript() -> str:
    """Return Vega, Vega-Lite and their embedding as one script, which defines `vegaEmbed`; 0.9 MB.

    Bundling takes seconds, so the script is kept in the user's cache folder, one for each version of vl-convert.
    """
    import vl_convert

    home = os.environ.get("HOME", os.devnull)  # nothing can be read or written below the latter
    folder = Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache") / "loraplex"
    file = folder / f"vega-{version('vl-convert-python')}.js"
    with suppress(OSError):
        return file.read_text(encoding="utf-8")
    bundle: Callable[..., str] = vl_convert.javascript_bundle  # its type lacks the default of its parameter
    script = bundle()
    with suppress(OSError):  # a folder that cannot be written: bundled again the next time
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", encoding="utf-8", dir=folder, delete=False) as fresh:
            fresh.write(script)
        os.replace(fresh.name, file)
    return script


def style_sheet() -> str:
    """Return the page's style sheet, with the colours of its charts."""
    return _read("clients", "colours.css") + _read("clients.loadtest", "page.css")


def _read(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
