"""One function per experiment; each returns the whole configuration of a run."""

from collections.abc import Callable
from functools import partial

from longspan.layers.registry import NOT_CAUSAL
from longspan.recipes import (
    ablations,
    books,
    causal,
    enwik8,
    finetuning,
    lra,
    memory,
    mlm,
    rivals,
    summaries,
    tiny,
)
from longspan.train.finetuning import Finetuning
from longspan.train.recipe import Recipe, unknown

RECIPES: dict[str, Callable[[], Recipe]] = {
    "tiny": tiny.tiny,
    "books": books.books,
    "books-small": books.books_small,
    "rival-longformer": rivals.longformer,
    "rival-staged": rivals.staged,
    "rival-xl": rivals.xl,
    "rival-compressive": rivals.compressive,
    "rival-compressive-mean": rivals.compressive_mean,
    "rival-dense": rivals.dense,
    **{f"causal-{arm}": partial(causal.causal, arm) for arm in causal.ARMS},
    "small-increasing": ablations.small_increasing,
    "small-decreasing": ablations.small_decreasing,
    "small-fixed": ablations.small_fixed,
    "small-dilation": ablations.small_dilation,
    "enwik8-small": enwik8.enwik8_small,
    "enwik8-large": enwik8.enwik8_large,
    "text8-small": enwik8.text8_small,
    "xl-enwik8": memory.xl_enwik8,
    "xl-enwik8-large": memory.xl_enwik8_large,
    "xl-text8": memory.xl_text8,
    "xl-text8-large": memory.xl_text8_large,
    "compressive-enwik8": memory.compressive_enwik8,
    "ablation-increasing": ablations.increasing,
    "ablation-decreasing": ablations.decreasing,
    "ablation-fixed": ablations.fixed,
    "ablation-dilation": ablations.dilation,
}
# Recipes to be compared with one another, by what the comparison is about.
STUDIES: dict[str, tuple[str, ...]] = {
    "rivals": tuple(name for name in RECIPES if name.startswith("rival-")),
    "windows": tuple(name for name in RECIPES if name.startswith("small-")),
    "causal": causal.STUDY,
}


# On examples rather than running text.
FINETUNING: dict[str, Callable[[], Finetuning]] = {
    "classify": finetuning.classify,
    "hyperpartisan": finetuning.hyperpartisan,
    "imdb": finetuning.imdb,
    "spans": finetuning.spans,
    "triviaqa": finetuning.triviaqa,
    "cuad": finetuning.cuad,
    "coref": finetuning.coref,
    "litbank": finetuning.litbank,
    "ontonotes": finetuning.ontonotes,
    "choice": finetuning.choice,
    "wikihop": finetuning.wikihop,
    "race": finetuning.race,
    "multihop": finetuning.multihop,
    "hotpotqa": finetuning.hotpotqa,
    "mlm": mlm.mlm,
    "mlm-head": mlm.head,
    "mlm-positions": mlm.positions,
    "summarize": summaries.summarize,
    "arxiv": summaries.arxiv,
    "lra-listops": lra.listops,
    "lra-text": lra.text,
}


# Studies of one of these recipes with every kind of attention.
ARENA = ("lra-listops", "lra-text")


def find(name: str) -> Recipe:
    """The recipe of this name, or an error with the nearest name there is."""
    if name not in RECIPES:
        kind = name.removeprefix("causal-")
        if kind != name and kind in NOT_CAUSAL:
            raise ValueError(f"recipe {name}: there is no causal {kind}: {NOT_CAUSAL[kind]}")
        raise ValueError(unknown(f"recipe {name}", name, {**RECIPES, **FINETUNING}))
    return RECIPES[name]()


def find_any(name: str) -> Recipe | Finetuning:
    """The same, among those on examples too."""
    return FINETUNING[name]() if name in FINETUNING else find(name)


def find_study(name: str) -> list[Recipe]:
    """The recipes of a study, or an error with the nearest name there is."""
    if name not in STUDIES:
        raise ValueError(
            unknown(f"study {name}", name, {*STUDIES, "positions", "summaries", *ARENA})
        )
    return [find(own) for own in STUDIES[name]]


def summary(name: str) -> str:
    """The first line of a recipe's description."""
    made = RECIPES.get(name) or FINETUNING[name]
    if isinstance(made, partial):
        return f"Novels, two minutes: {made.args[0].replace('_', ' ')} on rows of 8,192."
    return (made.__doc__ or "").strip().partition("\n")[0]
