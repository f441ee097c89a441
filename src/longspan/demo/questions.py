"""Questions about Python's language reference, each with words of the passages that answer it.

None was chosen or left out for which way of reading answers it better. The first three are shown
in full, all are counted.
"""

from typing import NamedTuple


class Question(NamedTuple):
    text: str
    answers: tuple[str, ...] = ()  # words of a passage that answers it; none: nobody can judge


SHOWN = 3
BUILT_IN = (
    Question(
        "What happens to an exception raised inside a with block if __exit__ returns a true value?",
        ("wishes to suppress the exception", "the exception is suppressed, and execution"),
    ),
    Question(
        "Why does a list used as a default argument keep its contents between calls?",
        ("evaluated once, when the function is defined",),
    ),
    Question(
        "When is the else clause of a while loop skipped?",
        ('without executing the "else" clause',),
    ),
    Question(
        "How does Python choose the except clause that handles an exception?",
        ("selected depending on the class of the instance", "an exception handler is started"),
    ),
    Question("When is __getattr__ called?", ("Called when the default attribute access fails",)),
    Question(
        "Does the loop variable still exist after a for loop has finished?",
        ("are not deleted when the loop is finished",),
    ),
    Question("Which objects count as false?", ("objects considered false",)),
    Question("Can a lambda contain statements?", ("cannot contain statements",)),
    Question(
        "How can a function change a variable of its enclosing function?",
        ("rebind variables outside of the local scope",),
    ),
    Question(
        "Are assertions checked when Python runs with optimization?",
        ("emits no code for an assert statement",),
    ),
    Question(
        "Is __init__ called if __new__ returns an object of another class?",
        ("does not return an instance of",),
    ),
    Question(
        "What should an arithmetic method return when it does not support the other operand?",
        ('it should return "NotImplemented"',),
    ),
    Question(
        "What must hold for the hash of two objects that compare equal?",
        ("have the same hash value",),
    ),
    Question(
        "What does a raise statement without an exception do?",
        ("re-raises the exception that is currently being handled",),
    ),
    Question(
        "How is a name looked up in nested scopes?",
        ("resolved using the nearest enclosing scope",),
    ),
    Question(
        "How do I write a tuple with one element?",
        ("trailing comma is required", "tuple of one item"),
    ),
    Question(
        "May an integer literal contain underscores?",
        ("Underscores are ignored for determining the numeric value",),
    ),
    Question(
        "What happens to an exception when the finally clause executes a return statement?",
        ("the saved exception is discarded",),
    ),
    Question(
        "Are the names of a class body visible inside its methods?",
        ("does not extend to the code blocks of methods",),
    ),
    Question("Can comparisons be chained?", ("can be chained arbitrarily",)),
    Question(
        "How can instances use less memory by having no __dict__?",
        ("can be significant",),
    ),
)
