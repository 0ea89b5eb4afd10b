"""The page of an inspection: one HTML file that needs no network, for browsers and notebooks.

`page.html`, `page.css` and `page.js` are its parts. The data is JSON inside the page. Names and texts come from files
that may be hostile: JSON without `<` cannot end its element, the script adds text only as text nodes, and the page's
policy allows no other script than this one and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files

from rlx_jax.dataclasses import dataclass, field
from rlx_jax.errors import TargetExistsError, quote
from rlx_jax.inspection.records import Inspection
from rlx_jax.io.atomic import atomic_directory, write_synced

# The height of the page in a notebook's cell.
NOTEBOOK_HEIGHT = 720


@dataclass(frozen=True)
class Page:
    """A self-contained HTML page. A notebook shows it; elsewhere `save` it and open the file in a browser.

    Attributes:
        title: the title.
        html: the text of the page.
    """

    title: str
    html: str = field(repr=False)

    def _repr_html_(self) -> str:
        """Return the page in a frame, so that its styles and scripts are apart from the notebook's."""
        style = f"width:100%;height:{NOTEBOOK_HEIGHT}px;border:0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(self.html)}"></iframe>'

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the page to a file; raises as `write_file`."""
        write_file(path, self.html.encode(), overwrite)


def write_file(path: str | os.PathLike[str], content: bytes, overwrite: bool) -> None:
    """Write a file, which appears completely or not at all.

    Raises:
        TargetExistsError: as `check_target`. NoSpaceError, SaveFailedError: the system refused; an existing file is as
            it was.
    """
    check_target(path, overwrite)
    with atomic_directory(os.path.abspath(os.fspath(path)), overwrite, len(content)) as new:
        write_synced(new, content)


def check_target(path: str | os.PathLike[str], overwrite: bool) -> None:
    """Check that a file may be written to a path.

    Raises:
        TargetExistsError: the file exists and `overwrite` is false; or it is a directory or a device.
    """
    if os.path.lexists(path) and not os.path.isfile(path):
        raise TargetExistsError(f"{quote(os.fspath(path))} is not a file; pass the path of one, such as model.html")
    if os.path.lexists(path) and not overwrite:
        raise TargetExistsError(f"{quote(os.fspath(path))} exists; overwrite=True (--overwrite in a shell) replaces it")


def make_page(inspections: Sequence[Inspection], texts: Sequence[Mapping[str, str]] = ()) -> Page:
    """Return the page of one or more inspections: programs of a model, or models and profiles to compare.

    Args:
        inspections: the first is shown first; a reader chooses among them, and which two are compared.
        texts: for each inspection, the text of each level of the program by name, such as `mir`.
    """
    # `to_json` writes strict JSON, and `<` occurs in JSON only inside strings, where an escape may replace it.
    data = f'{{"inspections":[{",".join(i.to_json() for i in inspections)}],"texts":{json.dumps([*map(dict, texts)])}}}'
    style, script = (_read(name) for name in ("page.css", "page.js"))
    title = f"{inspections[0].name}: {inspections[0].program}"
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy, "title": html.escape(title), "style": style, "script": script,
        "data": data.replace("<", "\\u003c"),
    }  # fmt: skip
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("page.html"))
    # Lone surrogates have no UTF-8; as `\\udc80` they are the same in JSON.
    return Page(title, page.encode("utf-8", "backslashreplace").decode())


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the source expression of a Content-Security-Policy that allows an inline element with this text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
