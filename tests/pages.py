"""A page as a parser sees it."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Checks that tags nest; collects the texts of each kind of tag, all text that is shown, and the titles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: dict[str, list[str]] = {}
        self.titles: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.setdefault(tag, []).append("")
        self.titles += [value for name, value in attrs if name == "title" and value]
        if tag not in ("meta", "input", "circle", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("circle", "path"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.found[self.open[-1]][-1] += data
        if self.open and self.open[-1] not in ("style", "title"):
            self.text += data
