"""Reads a page: its texts by element, its tables, links and ids."""

from html.parser import HTMLParser
from pathlib import Path


class Page(HTMLParser):
    """The texts of a page by element, its tables as lists of rows, and what it refers to."""

    def __init__(self, text):
        super().__init__()
        self.texts, self.tables, self.links, self.ids, self._open = {}, [], [], [], []
        self.feed(text)

    @classmethod
    def of(cls, folder: Path) -> "Page":
        return cls((folder / "report.html").read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self._open.append(tag)
        self.texts.setdefault(tag, []).append("")
        self.links += [attrs[key] for key in ("src", "href", "xlink:href") if key in attrs]
        self.ids += [attrs["id"]] if "id" in attrs else []
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        for tag in {*self._open}:
            self.texts[tag][-1] += data
        if {"td", "th"} & {*self._open}:
            self.tables[-1][-1][-1] += data

    @property
    def headings(self) -> list[str]:
        return [text.strip() for text in self.texts["h2"]]

    def table(self, heading) -> list[dict[str, str]]:
        """The table that has this heading."""
        found = next(table for table in self.tables if heading in table[0])
        return [dict(zip(found[0], (cell.strip() for cell in row), strict=True)) for row in found[1:]]
