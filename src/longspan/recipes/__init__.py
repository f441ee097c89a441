"""One function per experiment; each returns the whole configuration of a run."""

from collections.abc import Callable

from longspan.recipes import ablations, books, enwik8, finetuning, memory, tiny
from longspan.train.finetuning import Finetuning
from longspan.train.recipe import Recipe, unknown

RECIPES: dict[str, Callable[[], Recipe]] = {
    "tiny": tiny.tiny,
    "books": books.books,
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


# On examples rather than running text.
FINETUNING: dict[str, Callable[[], Finetuning]] = {
    "classify": finetuning.classify,
    "hyperpartisan": finetuning.hyperpartisan,
    "imdb": finetuning.imdb,
    "spans": finetuning.spans,
    "triviaqa": finetuning.triviaqa,
    "cuad": finetuning.cuad,
}


def find(name: str) -> Recipe:
    """The recipe of this name, or an error with the nearest name there is."""
    if name not in RECIPES:
        raise ValueError(unknown(f"recipe {name}", name, {**RECIPES, **FINETUNING}))
    return RECIPES[name]()


def summary(name: str) -> str:
    """The first line of a recipe's description."""
    made = RECIPES.get(name) or FINETUNING[name]
    return (made.__doc__ or "").strip().partition("\n")[0]
