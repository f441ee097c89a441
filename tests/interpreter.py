"""Triton's interpreter without work that it does again and again."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any


def quicken() -> None:
    """The interpreter puts its own functions in the place of `triton.language`'s for every launch,
    and again whenever one function calls another inside of a kernel, which takes a quarter of the
    time. Here it is for launches alone, in all modules that such functions look into."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    language: Any = import_module("triton.language")
    replace = interpreter._patch_lang
    everywhere = SimpleNamespace(__globals__={"tl": language, "core": language.core})

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = lambda fn: replace(everywhere)
    interpreter.InterpretedFunction.__call__ = call
