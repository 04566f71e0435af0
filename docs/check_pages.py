"""Look through built pages: links and anchors inside of them lead somewhere, and nothing is fetched from elsewhere.

    python docs/check_pages.py docs/_build/html

Links to other sites are counted and not followed: `make linkcheck` does that, where there is a network.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Elements that a browser fetches on its own, and the attribute that says what.
FETCHED = {"link": "href"} | dict.fromkeys(("script", "img", "iframe", "source", "video", "audio"), "src")


class Page(HTMLParser):
    """The anchors of a page, its links, and what it has a browser fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors.update(value for name in ("id", "name") if (value := found.get(name)))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in FETCHED and FETCHED[tag] in found and found.get("rel") not in ("canonical", "author"):
            self.fetched.append(found[FETCHED[tag]])


def faults(folder: Path) -> tuple[list[str], set[str]]:
    """What is wrong with the pages below a folder, and the links to other sites."""
    files = (path for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts)  # the theme's own
    pages = {path.resolve(): Page(path.read_text()) for path in files}
    wrong: list[str] = [] if pages else [f"{folder}: no pages"]
    elsewhere: set[str] = set()
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        for target in (*page.links, *page.fetched):
            parts = urlsplit(target)
            if parts.scheme in ("http", "https") or parts.netloc:
                if target in page.fetched:
                    wrong.append(f"{name}: fetches {target}")
                elsewhere.add(target)
            elif parts.scheme not in ("data", "mailto", "javascript"):
                there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                if not there.exists():
                    wrong.append(f"{name}: {target} does not exist")
                elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].anchors:
                    wrong.append(f"{name}: {target} has no such anchor")
    return wrong, elsewhere


def main() -> int:
    folder = Path(sys.argv[1])
    wrong, elsewhere = faults(folder)
    for fault in dict.fromkeys(wrong):
        print(fault, file=sys.stderr)
    print(f"{folder}: {len(set(wrong))} fault(s); {len(elsewhere)} links to other sites, not followed (make linkcheck)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
