"""Commands that take --set: an option they lack may be a setting of their recipe."""

from shlex import quote
from typing import Any

from typer.core import TyperCommand


class SettingCommand(TyperCommand):
    """Says of `--epochs 1`, which is no option, that it is meant to be `--set epochs=1`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)  # parsing takes them away
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "possibilities"):  # NoSuchOption is typer's own, or click's
                self._add_hint(error, given)
            raise

    def _add_hint(self, error: Any, given: list[str]) -> None:
        from longspan.train.recipe import find_setting

        names = [*given, *(param.default for param in self.params)]
        recipe = next((found for name in names if (found := _recipe(name)) is not None), None)
        name = error.option_name.lstrip("-").replace("-", "_")
        found = None if recipe is None else find_setting(recipe, name)
        if found is None:
            return
        key, known = found
        value = _value(error.option_name, given, known)
        error.message += f"; did you mean --set {quote(f'{key}={value}')}?"
        if key.endswith(name):
            error.possibilities = None  # options that are merely spelt alike


def _value(option: str, given: list[str], known: Any) -> str:
    """What was given to an option, or how that has to look."""
    if isinstance(known, list | tuple):
        return "[...]"
    for one, behind in zip(given, [*given[1:], "--"], strict=True):
        if one == option and not behind.startswith("--"):
            return behind
        if one.startswith(f"{option}="):
            return one.partition("=")[2]
    return "true" if isinstance(known, bool) else "..."


def _recipe(name: Any) -> Any:
    """What a recipe, task or study of this name starts from, None if there is none."""
    from longspan.recipes import FINETUNING, RECIPES, STUDIES
    from longspan.recipes.summaries import scratch

    made = {**RECIPES, **FINETUNING, "positions": FINETUNING["mlm"], "summaries": scratch}
    made |= {study: RECIPES[first] for study, (first, *_) in STUDIES.items()}
    return made[name]() if isinstance(name, str) and name in made else None
