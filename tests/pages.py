"""Pages of HTML, read as strictly as tests need."""

from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser

LOADING = {"script", "link", "img", "iframe", "object", "embed", "base", "form", "image", "use"}
LOADING_BY = {"src", "href", "xlink:href", "srcset", "action", "onclick", "onload"}
VOID = {"meta", "br", "hr", "img", "input", "link"}
NASTY = '<script>alert("x")</script>&'


def nasty(value, kept=()):
    """With markup at the end of every text but those that are `kept`."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{one.name: nasty(getattr(value, one.name), kept) for one in fields(value)}
        )
    if isinstance(value, dict):
        return {key: nasty(one, kept) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(nasty(one, kept) for one in value)
    return value + NASTY if isinstance(value, str) and value not in kept else value


class Read(HTMLParser):
    """Reads a page as strictly as this needs: what is opened is closed, in order."""

    def __init__(self, page: str):
        super().__init__(convert_charrefs=True)
        self.open = []
        self.tags = []
        self.words = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs):
        self.tags.append((tag, dict(attrs)))
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice in {tag}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str):
        assert self.open, f"{tag} is closed and was never opened"
        assert self.open.pop() == tag

    def handle_data(self, data: str):
        if not self.open or self.open[-1] not in ("style",):
            self.words.append(data)

    @property
    def text(self) -> str:
        """All that is read on the page."""
        return " ".join(" ".join(self.words).split())

    def must_be_whole(self, page: str):
        """It can be read by all, loads nothing from elsewhere, has colours for a dark screen and
        prints on A4.
        """
        assert page.startswith("<!doctype html>")
        assert ("html", {"lang": "en"}) in self.tags
        headings = [tag for tag, _ in self.tags if tag in ("h1", "h2", "h3")]
        assert (headings[0], headings.count("h1")) == ("h1", 1)
        ids = [attributes["id"] for _, attributes in self.tags if "id" in attributes]
        assert len(set(ids)) == len(ids)
        for tag, attributes in self.tags:
            assert tag not in LOADING
            assert not attributes.keys() & LOADING_BY
            if tag == "th":
                assert attributes["scope"] in ("col", "row")
            elif tag == "svg":
                assert attributes["role"] == "img"
                assert set(str(attributes["aria-labelledby"]).split()) <= set(ids)
        assert "url(" not in page
        assert "@import" not in page
        assert "default-src 'none'" in page
        assert "prefers-color-scheme:dark" in page
        assert "@page{size:A4" in page

    def count(self, tag: str) -> int:
        """How many elements of a kind there are."""
        return sum(name == tag for name, _ in self.tags)
