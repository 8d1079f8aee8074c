"""What to call a thing that a person gave: the name of its type, with the article that it is spoken with. Pure."""

from __future__ import annotations


def a_kind(thing: object) -> str:
    """`an int`, `a Tensor`, `an SGD`."""
    name = type(thing).__name__
    spelled = name[:2].isupper()  # SGD is spoken letter by letter
    return f"{'an' if name[:1] in ('AEFHILMNORSX' if spelled else 'AEIOaeio') else 'a'} {name}"
