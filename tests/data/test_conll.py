"""CoNLL-2012 files: read as they are, written as they were, and refused where they are broken."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.data.conll import read_conll, write_conll
from longspan.data.tables import read_rows

FILE = """\
#begin document (bc/cctv/00/cctv_0000); part 000
bc/cctv/00/cctv_0000   0   0      Mary    NNP   (TOP(S(NP*)  -   -   -   Ann#1  (PERSON)  (0)
bc/cctv/00/cctv_0000   0   1      says    VBZ          (VP*  say 01  1   Ann#1  *         -
bc/cctv/00/cctv_0000   0   2       the     DT         (NP*   -   -   -   Ann#1  *     (1|(0
bc/cctv/00/cctv_0000   0   3       sea     NN           *)   -   -   -   -      *        0)|(2)
bc/cctv/00/cctv_0000   0   4      calm     JJ         *)))   -   -   -   -      *         1)

bc/cctv/00/cctv_0000   0   0        It    PRP   (TOP(S*))    -   -   -   -      *        (1)

#end document
#begin document (bc/cctv/00/cctv_0000); part 001
bc/cctv/00/cctv_0000   1   0        No     UH      (TOP*)    -   -   -   -      *         -

#end document
"""


def documents(text):
    return [values for _, values in read_conll(text.splitlines(keepends=True))]


def test_documents_parts_words_speakers_and_clusters():
    first, second = documents(FILE)
    assert first["sentences"] == [["Mary", "says", "the", "sea", "calm"], ["It"]]
    assert first["speakers"] == [["Ann#1", "Ann#1", "Ann#1", "", ""], [""]]
    assert first["clusters"] == [[[0, 0], [2, 3]], [[2, 4], [5, 5]], [[3, 3]]]
    assert (first["id"], second["id"]) == ("bc/cctv/00/cctv_0000#000", "bc/cctv/00/cctv_0000#001")
    assert first["genre"] == "bc"
    assert second["clusters"] == []


def test_columns_are_kept():
    """What is written reads the same, and differs in its last column alone."""
    written = "".join("".join(write_conll(one, one["clusters"])) for one in documents(FILE))
    for mine, theirs in zip(documents(written), documents(FILE), strict=True):
        assert mine == theirs
    strip = re.compile(r"\S+$", flags=re.MULTILINE)
    assert strip.sub("", written) == strip.sub("", FILE)


def test_other_white_space_is_part_of_a_word():
    """As in 10 000 with a space that does not break, which would move all columns behind it."""
    first = documents(FILE.replace(" Mary ", " 10\u00a0000 ").replace("Ann#1", "Ann\u3000B"))[0]
    assert first["sentences"][0][:2] == ["10\u00a0000", "says"]
    assert first["speakers"][0][:2] == ["Ann\u3000B"] * 2
    assert "10\u00a0000" in "".join(write_conll(first, first["clusters"]))


def test_what_is_not_from_a_file_has_columns_too():
    made = {"id": "a tale", "sentences": [["a", "cat"], ["it"]], "speakers": [["", ""], ["Al B"]]}
    written = "".join(write_conll(made, [[(0, 1), (2, 2)]]))
    (found,) = documents(written)
    assert found["sentences"] == made["sentences"]
    assert found["speakers"] == [["", ""], ["Al_B"]]
    assert found["clusters"] == [[[0, 1], [2, 2]]]
    assert all(len(line.split()) == 12 for line in written.splitlines() if line and line[0] != "#")


def crossing(one, other):
    (a, b), (c, d) = sorted([one, other])
    return a < c <= b < d


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1), max_size=5))
def test_any_clusters_come_back(drawn):
    """Nested and overlapping ones, as long as no two of one cluster cross."""
    clusters, seen = [], set()
    for given_ in drawn:
        own = []
        for pair in given_:
            span = (min(pair), max(pair))
            if span not in seen and not any(crossing(span, other) for other in own):
                own.append(span)
                seen.add(span)
        clusters += [own] if own else []
    words = [list("abcdefghij")]
    (found,) = documents("".join(write_conll({"id": "d", "sentences": words}, clusters)))
    expected = sorted(sorted(map(list, own)) for own in clusters)
    assert found["clusters"] == expected


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0)|(2)", "(2)", r"line 4: unbalanced brackets: \(0 is not closed .* line 10"),
        ("(1|(0", "(0", r"line 6: unbalanced brackets: 1\) closes what was not opened"),
        ("(0)\n", "x)\n", r"line 2: 'x\)' in the coreference column"),
        ("(0)\n", "0\n", "line 2: '0' in the coreference column"),
        ("(0)\n", "(0)|\n", "line 2: '' in the coreference column"),
        ("#end document\n#begin", "#begin", "line 10: the document of line 1 has no end"),
        ("#begin document (bc/cctv/00/cctv_0000); part 000\n", "", "line 1: a word before any"),
        ("#begin document (bc/cctv/00/cctv_0000); part 000", "#begin document", "should be #begin"),
        ("\n\n#end document\n#begin", "\n#end document\n#end document\n#begin", "not begun"),
    ],
)
def test_mistakes_are_named_with_their_line(old, new, message, tmp_path):
    assert old in FILE
    path = tmp_path / "broken.v4_gold_conll"
    path.write_text(FILE.replace(old, new, 1))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}, .*{message}"):
        list(read_rows(path))


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    path = tmp_path / "cut.conll"
    path.write_text(FILE.rpartition("#end")[0])
    with pytest.raises(ValueError, match="line 13: the document of line 11 has no #end document"):
        list(read_rows(path))
    path.write_text("#begin document (a); part 0\na 0 0 word\n#end document\n")
    with pytest.raises(ValueError, match=r"line 2: 4 columns; there should be five"):
        list(read_rows(path))


def test_rows_know_their_place(tmp_path):
    path = tmp_path / "some.conll"
    path.write_text(FILE)
    assert [row.where for row in read_rows(path)] == [f"{path}, line 1", f"{path}, line 11"]
