"""Checks the links of the book in a folder: each leads to a file of it, and to an anchor if it names one."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.anchors.add(value)
            elif (tag, name) in (("a", "href"), ("img", "src")):
                self.links.append(value)


root = Path(sys.argv[1]).resolve()
# These repeat others: all pages in one, and a page that is shown for any path.
left_out = {"print.html", "404.html", "toc.html"}
pages = {path: Page(path) for path in root.rglob("*.html") if path.name not in left_out}
dead, seen = [], 0
for path, page in pages.items():
    for link in page.links:
        if "://" in link or link.startswith("mailto:"):
            continue
        seen += 1
        name, _, anchor = unquote(link).partition("#")
        target = (path.parent / name).resolve() if name else path
        known = pages[target].anchors if target in pages else {""}
        if not target.is_file() or anchor not in known and target.name not in left_out:
            dead.append(f"{path.relative_to(root)}: {link}")
if dead or seen < 100:
    sys.exit("\n".join(["dead links in the book:", *dead, f"{seen} links seen"]))
print(f"book: {len(pages)} pages, {seen} links")
