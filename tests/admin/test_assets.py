"""The files of the pages: few bytes, all of them used, none from elsewhere."""

from __future__ import annotations

import re

from flintmq.admin.assets import FOLDER

#: Bytes of all files that a browser loads, as they lie in the repository.
MOST_BYTES = 200_000
#: Texts for people, which no page loads.
UNLOADED = ("vendor/LICENSES.txt",)


def test_the_pages_are_small() -> None:
    sizes = {str(path.relative_to(FOLDER)): path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()}
    loaded = {name: size for name, size in sizes.items() if name not in UNLOADED}
    assert sum(loaded.values()) <= MOST_BYTES, sorted(loaded.items(), key=lambda one: -one[1])


def test_every_file_is_loaded_by_the_pages() -> None:
    document = (FOLDER / "index.html").read_text()
    scripts = "".join(path.read_text() for path in sorted((FOLDER / "js").rglob("*.js")))
    for path in FOLDER.rglob("*"):
        name = str(path.relative_to(FOLDER))
        if path.is_file() and name not in (*UNLOADED, "index.html"):
            assert f"/static/{name}" in document, name
            if path.suffix in (".mjs", ".js") and name not in ("js/app.js", "js/theme.js"):
                assert re.search(rf'from "[./a-z]*{re.escape(path.name)}"', scripts), name


def test_every_rule_of_the_style_sheet_has_an_element() -> None:
    style = re.sub(r"/\*.*?\*/|\d*\.\d+", "", (FOLDER / "app.css").read_text(), flags=re.DOTALL)
    words = set(re.findall(r"[\w-]+", "".join(path.read_text() for path in (FOLDER / "js").rglob("*.js"))))
    classes = set(re.findall(r"\.([a-z][\w-]*)", style))
    assert classes - words - {"boot"} == set()
