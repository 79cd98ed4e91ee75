# SPDX-License-Identifier: Apache-2.0
"""Files of figures: HTML pages that need nothing else, for screens of any width, and drawings. Each is written whole or
not at all."""

from __future__ import annotations

import html
import importlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvoffload.errors import ConfigError, MissingExtraError

__all__ = [
    "COLOURS",
    "check_folder",
    "check_target",
    "page",
    "pyplot",
    "save_small_png",
    "svg_of",
    "table",
    "whole_file",
    "write_drawing",
]

COLOURS = ("#1f6fb4", "#d9730d", "#2f9e44", "#8b5cf6", "#c2255c", "#0b7285", "#868e96")
_STYLE = """
:root{color-scheme:light dark;--ink:#212529;--soft:#6c757d;--line:#dee2e6;--paper:#fff;--card:#f8f9fa}
@media(prefers-color-scheme:dark){:root{--ink:#e9ecef;--soft:#adb5bd;--line:#495057;--paper:#16191d;--card:#212529}}
*{box-sizing:border-box}body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:0 auto;padding:1.2em;
color:var(--ink);background:var(--paper)}h1{font-size:1.5em;margin:.2em 0}h2{font-size:1.15em;margin:1.8em 0 .4em}
p.lead{color:var(--soft);margin:.2em 0 1em}.cards{display:grid;gap:.7em;grid-template-columns:repeat(auto-fit,
minmax(9.5em,1fr))}.card{background:var(--card);border:1px solid var(--line);border-radius:.5em;padding:.6em .8em}
.card b{display:block;font-size:1.5em}.card span{color:var(--soft);font-size:.88em}
.bar{display:flex;height:1.9em;border-radius:.4em;overflow:hidden;margin:.5em 0}.bar i{display:block}
.legend{display:flex;flex-wrap:wrap;gap:.2em 1.1em;color:var(--soft);font-size:.9em}.legend i{display:inline-block;
width:.8em;height:.8em;border-radius:.15em;margin-right:.4em}.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.35em .6em;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:600;font-size:.88em}th:first-child,td:first-child,.text{text-align:left}
td.text{color:var(--soft);min-width:14em;white-space:normal}.plots{display:grid;gap:1em;
grid-template-columns:repeat(auto-fit,minmax(min(100%,26em),1fr))}svg{width:100%;height:auto;background:#fff;
border-radius:.5em}summary{padding:.3em 0}
"""


# --------------------------------------------------------------------------------------------------------------- files


def check_target(path: Path) -> None:
    """Raises ``ConfigError`` or ``MissingExtraError`` if no drawing could be written to ``path``. Call it first."""
    if path.suffix.lower() not in {".png", ".html"}:
        raise ConfigError(f"A plot is a .png or .html file, not {path.name!r}.")
    check_folder(path)
    pyplot()


def check_folder(path: Path) -> None:
    """Raises ``ConfigError`` if the file ``path`` could not be written. Creates nothing."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {str(folder)!r} to write {path.name!r} to.")
    if path.is_dir():
        raise ConfigError(f"{str(path)!r} is a folder; name a file in it.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"This user may not write to the folder {str(folder)!r}.")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file to write, which becomes ``path`` at the end. After an exception ``path`` is as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_drawing(figure: Any, path: Path, page_of: Callable[[str], str]) -> None:
    """Writes ``figure`` as a PNG, or the page that ``page_of`` makes of its SVG, and closes it."""
    try:
        with whole_file(path) as file:
            if path.suffix.lower() == ".png":
                save_small_png(figure, file)
            else:
                file.write_text(page_of(svg_of(figure)))
    finally:
        pyplot().close(figure)


# ------------------------------------------------------------------------------------------------------------ drawings


def pyplot() -> Any:
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as exc:
        raise MissingExtraError("Plots need kvoffload's extra 'sim': pip install matplotlib.") from exc


def save_small_png(figure: Any, path: Path) -> None:
    """Saves with a palette, which takes a third of the bytes."""
    image = importlib.import_module("PIL.Image")  # matplotlib needs it too
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=130)
    image.open(drawn).convert("RGB").quantize(128).save(path, format="PNG", optimize=True)


def svg_of(figure: Any) -> str:
    """As an element of a page."""
    text = io.StringIO()
    figure.savefig(text, format="svg")
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


# --------------------------------------------------------------------------------------------------------------- pages


def page(title: str, *parts: str) -> str:
    """A whole page of elements."""
    head = (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
    )
    return "".join([head, *parts, "</body></html>\n"])


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], sentences: str = "") -> str:
    """``sentences``: the heading of a column that has some."""
    kinds = [" class=text" if heading == sentences else "" for heading in headings]

    def line(cells: Sequence[str], tag: str) -> str:
        filled = (f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(filled)}</tr>"

    return f"<div class=wide><table>{line(headings, 'th')}{''.join(line(row, 'td') for row in rows)}</table></div>"
