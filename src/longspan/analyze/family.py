"""The tables of docs/results/family.md, from the results files alone.

    python -m longspan.analyze.family docs/results/family.md bench/results

writes them anew between the page's two marks, from those of these files that are there:
family-cpu.json and family-cuda.json of `longspan bench family`, lra-listops.json and lra-text.json
of `longspan study`, and causal.json, the runs.json of `longspan study causal` or `plot`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from longspan.analyze.arena import CITED, OTHERS, PUBLISHED, margin
from longspan.bench.benchmark import OUT_OF_MEMORY, PASSES
from longspan.bench.family.cases import ENCODERS
from longspan.bench.family.claims import worst_share
from longspan.bench.family.contenders import CONTENDERS
from longspan.bench.family.rivals import RIVALS
from longspan.bench.store import Results, load
from longspan.train.checkpoint import read_json, write_text

BEGIN = "<!-- from bench/results, by python -m longspan.analyze.family -->"
END = "<!-- up to here -->"
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
SOURCES = (
    *(f"family-{device}.json" for device in DEVICES),
    "lra-listops.json",
    "lra-text.json",
    "causal.json",
)
KIND = "forward+backward"
Scores = dict[str, str]
# In a row of their own.
_CAUSAL = (
    *("dense", "window", "performer", "bigbird", "poolingformer", "blockwise", "bp"),
    *("reformer", "routing"),
)


class Row(NamedTuple):
    sees: str
    run: str | None = None  # of novels, for decoders


# By contender; n is the number of tokens, and what is said of reach holds for 512.
ROWS = {
    "dense": Row("everything"),
    "window": Row("513 keys, global tokens"),
    "linformer": Row("everything, in 256 mixtures"),
    "performer": Row("everything, through 256 features"),
    "bigbird": Row("8 blocks of 64"),
    "poolingformer": Row("257 keys, then pools over 1,025"),
    "blockwise": Row("a block of 512"),
    "bp": Row("everything, in spans that get longer with the distance"),
    "funnel": Row("everything, for pools of 2"),
    "clusterformer": Row("a chunk of 512 of the sorted document"),
    "reformer": Row("in 4 rounds, its chunk of 64 and the one before"),
    "routing": Row("√n tokens of each of its clusters"),
    "causal-dense": Row("all before", "rival-dense"),
    "causal-window": Row("513 keys", "rival-longformer"),
    "causal-performer": Row("all before, through 256 features", "causal-performer"),
    "causal-bigbird": Row("8 blocks of 64, none later", "causal-bigbird"),
    "causal-poolingformer": Row("257 keys, then pools over 1,025", "causal-poolingformer"),
    "causal-blockwise": Row("its block of 512, or the one before", "causal-blockwise"),
    "sparse-strided": Row("the last √n keys, and every √n-th before", "causal-sparse"),
    "sparse-fixed": Row("its block of √n, and 8 of each before", "causal-sparse-fixed"),
    "adaptive-span": Row("at most 513 keys", "causal-adaptive_span"),
    "causal-bp": Row("all before, in spans", "causal-bp"),
    "shortformer": Row("its segment of 256 and the one before", "causal-shortformer"),
    "causal-reformer": Row("in 4 rounds, the last 128 of its bucket", "causal-reformer"),
    "causal-routing": Row("the last √n of its cluster", "causal-routing"),
    "xl": Row("its segment of 512 and the one before, scored with two", "rival-xl"),
    "compressive": Row(
        "its segment of 512, the one before, and 1,024 more, compressed", "rival-compressive"
    ),
}


def render(folder: Path) -> str:
    """Everything between the marks."""
    if not any((folder / name).exists() for name in SOURCES):
        raise ValueError(f"{folder} has none of {', '.join(SOURCES)}: there is nothing to tell")
    results = {d: load(path) for d in DEVICES if (path := folder / f"family-{d}.json").exists()}
    parts = [
        _paragraph(_table(_kinds(folder, results))),
        *(_paragraph(_measured(device, own)) for device, own in results.items()),
        *_figures(folder, ("family-cuda", "family-cpu", "causal-curves")),
        "## Beside public implementations\n\nThe time of ours over theirs at the length that is "
        "worst for ours, both called from Python; 1.2 is the most we want.\n",
        _paragraph(_table(_rivals(results))),
        *_arena(folder),
        *_errors(folder, results),
    ]
    return "\n".join(parts).strip() + "\n"


def _paragraph(text: str) -> str:
    return text.strip() + "\n"


def _table(rows: Iterator[list[str]]) -> str:
    first, *others = rows
    lines = [first, ["---:" if ":" in name or "%" in name else "---" for name in first], *others]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _kinds(folder: Path, results: dict[str, Results]) -> Iterator[list[str]]:
    """What every kind reached and took, at the longest documents of each device."""
    lists, text = (_accuracies(folder / f"lra-{task}.json") for task in ("listops", "text"))
    novels = _bits(folder / "causal.json")
    heads = [f"{DEVICES[d]}, {n:,}: ms / MiB" for d in results for n in _lengths(results[d])]
    yield ["kind", "ListOps, %", "text, %", "novels, bits/character", *heads, "a token sees"]
    for name, row in ROWS.items():
        cells = [_cell(one, name, n) for one in results.values() for n in _lengths(one)]
        yield [_label(name), *_quality(name, lists, text, novels), *cells, row.sees]


def _quality(name: str, lists: Scores, text: Scores, novels: Scores) -> list[str]:
    """Decoders are not asked for labels, nor are encoders for the next byte."""
    if name not in ENCODERS:
        return ["", "", novels.get(ROWS[name].run or "", "")]
    return [lists.get(name, ""), text.get(name, ""), "" if name in _CAUSAL else "no causal form"]


def _label(name: str) -> str:
    label = CONTENDERS[name].label if name in CONTENDERS else name
    return f"{label}, causal" if name.startswith("causal-") else label


def _lengths(results: Results) -> list[int]:
    """Shortest and longest."""
    known = sorted({case.tokens for case, _, _ in results.points})
    return known if len(known) < 3 else [known[0], known[-1]]


def _cell(results: Results, name: str, tokens: int) -> str:
    for (case, contender, kind), point in results.points.items():
        if (case.tokens, contender, kind) == (tokens, name, KIND):
            if point.ms is None:
                return "out of memory" if point.error == OUT_OF_MEMORY else "failed"
            return f"{_number(point.ms)} / {point.mib:,.0f}"
    return ""


def _number(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def _accuracies(path: Path) -> Scores:
    if not path.exists():
        return {}
    return {arm["kind"]: f"{100 * arm['test']:.1f}" for arm in read_json(path)["arms"]}


def _bits(path: Path) -> Scores:
    if not path.exists():
        return {}
    runs: list[dict[str, Any]] = read_json(path)["runs"]
    return {run["name"]: f"{run['bits_per_character']['valid']:.3f}" for run in runs}


def _measured(device: str, results: Results) -> str:
    head, size = results.header, next(case for case, _, _ in results.points)
    return (
        f"{DEVICES[device]}: forward and backward of one self-attention layer with its projections "
        f"to q, k and v, {size.heads} heads of {size.hidden // size.heads}, {size.dtype}, "
        f"{head['machine']}, torch {head['versions']['torch']}, commit {head.get('commit')}"
        f"{head.get('note', '')} "
        f"([family-{device}.json](../../bench/results/family-{device}.json))."
    )


def _figures(folder: Path, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        if (folder / f"{name}.png").exists():
            yield f"![{name}](../../bench/results/{name}.png)\n"


def _rivals(results: dict[str, Results]) -> Iterator[list[str]]:
    yield ["ours", "theirs", *(f"{DEVICES[d]}, {kind}" for d in results for kind in PASSES)]
    for name, rival in RIVALS.items():
        ours = _label(rival.ours.removesuffix("-matched"))
        cells = []
        for one in results.values():
            for kind in PASSES:
                found = worst_share(one, name, kind)
                cells.append("" if found is None else f"{found[0]:.2f} (at {found[1]:,})")
        yield [ours, rival.label, *cells]


def _arena(folder: Path) -> Iterator[str]:
    """Long Range Arena, the whole of the published table beside ours."""
    paths = [folder / f"lra-{task}.json" for task in ("listops", "text")]
    if not any(path.exists() for path in paths):
        return
    found = [read_json(path) if path.exists() else {"arms": []} for path in paths]
    yield (
        "## Long Range Arena\n\nAccuracy in per cent on test examples, ± 95% of these alone, one "
        f"seed. Published: {CITED}; its kinds that are none of our encoders stand below.\n"
    )
    yield _paragraph(_table(_accuracy_rows(found)))
    yield from _figures(folder, ("lra-text", "lra-listops"))


def _accuracy_rows(found: list[dict[str, Any]]) -> Iterator[list[str]]:
    yield ["kind", "ListOps, %", "published, %", "text, %", "published, %"]
    for kind in (name for name in ROWS if name in ENCODERS):
        _, *published = PUBLISHED.get(kind, ("", None, None))
        cells = zip((_accuracy(kind, study) for study in found), published, strict=True)
        yield [_label(kind), *(text for own, cited in cells for text in (own, _percent(cited)))]
    for name, lists, text in OTHERS:
        yield [name, "", _percent(lists), "", _percent(text)]


def _accuracy(kind: str, study: dict[str, Any]) -> str:
    for arm in study["arms"]:
        if arm["kind"] == kind:
            return f"{100 * arm['test']:.1f} ± {100 * margin(arm['test'], study['examples']):.1f}"
    return ""


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2f}"


def _errors(folder: Path, results: dict[str, Results]) -> Iterator[str]:
    """Computed, not timed: where the CPU's results are, they are, too."""
    found = results["cpu"].header.get("errors", []) if "cpu" in results else []
    if found:
        yield (
            "## Error against softmax attention\n\nThe norm of the difference to dense softmax "
            f"attention with the same q, k and v, over that of the exact output: "
            f"{found[0]['tokens']:,} tokens, by how many keys or features a token has.\n"
        )
        yield _paragraph(_table(_error_rows(found)))
        yield from _figures(folder, ("family-cpu-errors",))


def _error_rows(found: list[dict[str, Any]]) -> Iterator[list[str]]:
    documents = list(dict.fromkeys(one["documents"] for one in found))
    budgets = sorted({one["budget"] for one in found})
    yield [" / ".join(documents), *(f"{budget:,}" for budget in budgets)]
    known = {(o["mechanism"], o["budget"], o["documents"]): o["error"] for o in found}
    for name in dict.fromkeys(one["mechanism"] for one in found):
        cells = [
            " / ".join(f"{known[name, budget, kind]:.3g}" for kind in documents)
            for budget in budgets
        ]
        yield [_label(name), *cells]


def write(page: Path, folder: Path) -> None:
    """Puts the tables into the page."""
    before, mark, rest = page.read_text(encoding="utf8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"{page} has not both marks, {BEGIN} and {END}, on lines of their own")
    write_text(page, f"{before}{BEGIN}\n\n{render(folder)}\n{END}{after}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m longspan.analyze.family")
    parser.add_argument("page", type=Path, help="docs/results/family.md")
    parser.add_argument("folder", type=Path, help="where the results files are: bench/results")
    given = parser.parse_args()
    try:
        write(given.page, given.folder)
    except (OSError, ValueError) as error:
        parser.error(str(error))
