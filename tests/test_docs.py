"""The documentation tells the truth: its Python runs, its links lead somewhere."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")])


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def snippets(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The names by which a page's headings can be linked to."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p.read_text())], ids=page_id)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippets of a page run in order, each going on from the one before."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "__main__"}
    for number, snippet in enumerate(snippets(page.read_text()), start=1):
        exec(compile(snippet, f"{page_id(page)}, snippet {number}", "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_resolve(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue  # elsewhere on the web, not ours to break
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page_id(page)} links to {target}, which is not there"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked.read_text()), f"{page_id(page)}: no heading {target}"


def test_readme_begins_with_the_two_commands() -> None:
    beginning = "\n".join((ROOT / "README.md").read_text().splitlines()[:15])
    assert "make demo" in beginning
    assert "make test" in beginning


def test_scores_of_tasks_are_those_of_the_runs() -> None:
    """Every row of the table is an arm of scores.json, to the last digit that it shows."""
    folder = ROOT / "bench" / "tasks"
    arms = {one["name"]: one for one in json.loads((folder / "scores.json").read_text())["arms"]}
    rows = re.findall(
        r"^\| (?:(\w+)|-)[, ]*([\w, ]+) \| [\w ]*(?:F1|accuracy) \| (.+?) \| (.+?) \| (\d) \|$",
        (folder / "README.md").read_text(),
        flags=re.MULTILINE,
    )
    assert len(rows) > 15
    task = ""
    for new, way, test, valid, seeds in rows:
        task = new.lower() or task
        way = way.replace("batches of like length", "alike").replace(", ", "-")
        arm = arms[f"{task}-{way}"]
        assert len(arm["seeds"]) == int(seeds), arm["name"]
        for shown, split in ((test, "test"), (valid, "valid")):
            found = arm[split][arm["measure"]]
            told = [found["mean"], *([found["deviation"]] if int(seeds) > 1 else [])]
            assert re.findall(r"0\.\d+", shown) == [f"{one:.3f}" for one in told], arm["name"]
