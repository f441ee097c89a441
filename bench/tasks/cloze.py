"""Questions made of HotpotQA's own paragraphs, to practise on before the few real ones.

    python bench/tasks/cloze.py IN.jsonl.xz OUT.jsonl [--count 12000] [--keep 5]

A name, a year or a number is taken out of a sentence, and some of its other words with it: what is
left is the question. A third of them lead over two paragraphs: where one names the other's title,
what it says of it stands in the place of the title. Right answers and facts of the real questions
are not looked at.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from longspan.data.tables import read_rows
from longspan.train.checkpoint import write_text

_MONTH = "January|February|March|April|May|June|July|August|September|October|November|December"
_NAME = r"[A-Z][\w'’-]*\w"  # noqa: RUF001
_ANSWER = re.compile(
    rf"(?:{_MONTH}) \d{{1,2}}, \d{{4}}|\d{{1,2}} (?:{_MONTH}) \d{{4}}|\b\d[\d,.]*\d\b"
    rf"|\b{_NAME}(?: (?:(?:of|the|and|de|von|for|in) )?{_NAME})*"
)
# With a capital at the beginning of a sentence alone.
_COMMON = re.compile(
    "The|A|An|In|It|He|She|They|His|Her|Its|This|On|At|As|For|After|From|By|When|While|During|There"
    "|Since|With|Although|Their|These|One|Both|Two|Some|Most|However|Also|Other|That|And|But|To|Of"
    "|Born"
)
_REFERRING = re.compile(
    r"^\s*(?:He|She|It|They|The (?:film|band|song|album|series|show|book|novel|company|city|town|"
    r"team|player|group|university|school))\b"
)


class Paragraph(NamedTuple):
    title: str
    sentences: list[str]
    row: int  # of the table: others of it stand beside this one

    @property
    def name(self) -> str:
        """The title without what tells it from others of the same name."""
        return re.sub(r"\s*\(.*?\)", "", self.title).strip()


def answers(sentence: str) -> list[str]:
    """Names, dates and numbers."""
    found = []
    for match in _ANSWER.finditer(sentence):
        first, _, rest = match[0].partition(" ")
        answer = rest if _COMMON.fullmatch(first) else match[0]
        if answer[:1].isupper() or answer[:1].isdigit():
            found.append(answer)
    return found


def ask(sentence: str, answer: str, chance: random.Random) -> str:
    """A sentence without an answer and some other words."""
    before, _, behind = sentence.strip().partition(answer)
    lost = chance.uniform(0.0, 0.5)
    left = [word for word in before.split()[-14:] if chance.random() > lost]
    right = [word for word in behind.rstrip(" .").split()[:14] if chance.random() > lost]
    asked = ["what", "which", "who", "where"]
    if re.fullmatch(r"[12]\d{3}", answer):
        asked = ["what year", "when"]
    elif re.search(r"\d{4}", answer):
        asked = ["what date", "when"]
    elif answer[0].isdigit():
        asked = ["how many"]
    words = [*left, chance.choice(asked), *right]
    if chance.random() < 0.5:
        words = [words[len(left)], *right, *left]
    return " ".join(words)


def over_one(one: Paragraph, chance: random.Random) -> tuple[str, str, list[Any]] | None:
    """A question, its answer and the facts; None where a paragraph allows for none."""
    number = chance.randrange(len(one.sentences))
    sentence = one.sentences[number]
    known = [own for own in answers(sentence) if own not in one.title]
    if not known:
        return None
    answer = chance.choice(known)
    if chance.random() < 0.5:
        sentence = _REFERRING.sub(lambda _: one.name, sentence, count=1)
    return ask(sentence, answer, chance), answer, [(one.title, number)]


def over_two(
    first: Paragraph, number: int, second: Paragraph, chance: random.Random
) -> tuple[str, str, list[Any]] | None:
    """The same, over what the first says of the second in a sentence."""
    made = over_one(second, chance)
    if made is None:
        return None
    question, answer, facts = made
    before, _, behind = first.sentences[number].partition(second.name)
    said = " ".join([*before.split()[-8:], *behind.rstrip(" .").split()[:8]])
    parts = [question.replace(second.name, ""), said]
    chance.shuffle(parts)
    return " ".join(" ".join(parts).split()), answer, [(first.title, number), *facts]


def links(paragraphs: list[Paragraph]) -> Iterator[tuple[Paragraph, int, Paragraph]]:
    """Sentences that name another paragraph."""
    named = {one.name: one for one in paragraphs if len(one.name) > 4}
    for one in paragraphs:
        for number, sentence in enumerate(one.sentences):
            for name in set(answers(sentence)) & named.keys():
                if named[name].title != one.title:
                    yield one, number, named[name]


def main(path: str, target: Path, count: int = 12000, keep: int = 5, seed: int = 0) -> None:
    if keep < 2 or count < 1:
        raise ValueError("--count must be at least 1, --keep at least 2")
    rows = [row.get("context") for row in read_rows(path)]
    found = {
        title: Paragraph(title, sentences, number)
        for number, context in enumerate(rows)
        for title, sentences in context
        if any(answers(sentence) for sentence in sentences)
    }
    paragraphs = list(found.values())
    if not paragraphs:
        raise ValueError(f"{path} has no paragraph that names anything")
    chance = random.Random(seed)
    linked = list(links(paragraphs))
    lines: list[str] = []
    for _ in range(100 * count):
        if len(lines) == count:
            break
        if linked and chance.random() < 1 / 3:
            first, number, second = chance.choice(linked)
            own, made = [first, second], over_two(first, number, second, chance)
        else:
            first = chance.choice(paragraphs)
            own, made = [first], over_one(first, chance)
        if made is None:
            continue
        titles = {one.title for one in own}
        others = [one for one in rows[first.row] if one[0] not in titles]
        context = [(one.title, one.sentences) for one in own]
        context += chance.sample(others, min(len(others), keep - len(own)))
        chance.shuffle(context)
        question, answer, facts = made
        row = {"_id": f"cloze-{len(lines)}", "question": question, "answer": answer}
        lines.append(json.dumps(row | {"supporting_facts": facts, "context": context}) + "\n")
    write_text(target, "".join(lines))
    print(f"{target}: {len(lines):,} questions about {len(paragraphs):,} paragraphs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", help="HotpotQA's training questions, as JSON lines")
    parser.add_argument("target", type=Path, help="where to write others, as JSON lines")
    parser.add_argument("--count", type=int, default=12000, help="questions, 12000")
    parser.add_argument("--keep", type=int, default=5, help="paragraphs of each question, 5")
    given = parser.parse_args()
    try:
        main(given.rows, given.target, given.count, given.keep)
    except (OSError, ValueError) as error:
        parser.error(str(error))
