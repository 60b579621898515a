"""What the passes take as arguments, checked when they are made: a wrong one is named before anything is compiled.

A text is a collection of its characters to Python. Unchecked, ``exclude="*.bias"`` would be six patterns of one
character, among them ``*``, which excludes every parameter; and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from bucketplan_client.errors import ClientError

__all__ = ["BadArgument", "is_unicode", "printable", "refuse_bad_arguments"]

_LONGEST_VALUE = 200


class BadArgument(ClientError):
    """The argument `option` of a pass is no value that it takes: `value` as it is printed, `expected` in words."""

    def __init__(self, option: str, value: object, expected: str, *, remedy: str | None = None) -> None:
        self.option = option
        self.value = repr(value)[:_LONGEST_VALUE]
        self.expected = expected
        super().__init__(
            f"{option} is {self.value}, but it takes {expected}", remedy=remedy or f"Give {option} {expected}"
        )


def printable(text: str) -> str:
    """`text` as UTF-8 can hold it: bytes of arguments and paths that are none, Python has as lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def is_unicode(text: str) -> bool:
    """Whether `text` can be sent: MessagePack, JSON and URLs hold no lone surrogates."""
    return printable(text) == text


def refuse_bad_arguments(**arguments: object) -> None:
    """Raise `BadArgument` for the first of `arguments` that is not what an argument of that name must be."""
    for option, value in arguments.items():
        fits, expected = _RULES[option]
        if not fits(value):
            remedy = (
                f"Write {option}=[{value!r}]" if expected.startswith("a list of texts") and _is_text(value) else None
            )
            raise BadArgument(option, value, expected, remedy=remedy)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _one_of(*words: str) -> tuple[Callable[[object], bool], str]:
    return lambda value: isinstance(value, str) and value in words, " or ".join(map(repr, words))


def _are_texts(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping) and all(map(_is_text, value))


def _are_scopes(value: object) -> bool:
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        return False
    return all(_is_text(getattr(at, "name", None)) and _are_texts(getattr(at, "param_names", None)) for at in value)


def _are_roles(value: object) -> bool:
    return isinstance(value, Mapping) and all(_is_text(name) and _is_text(role) for name, role in value.items())


def _are_hosts(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        _is_text(role) and isinstance(hosts, int) and not isinstance(hosts, bool) and hosts >= 0
        for role, hosts in value.items()
    )


def _or_none(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or fits(value)


_RULES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "compute_ops": (_are_texts, "a list of texts: operators as 'ns::name' or 'ns::*'"),
    "epoch": (_is_text, "a text: the epoch id of the opened attempt"),
    "exclude": (_are_texts, "a list of texts: patterns of parameter names"),
    "keep_gathered": (_are_texts, "a list of texts: names of parameters"),
    "kinds": (_or_none(_are_texts), "a list of texts: kinds of collectives"),
    "mode": _one_of("bucketed", "unbucketed"),
    "on_error": _one_of("abort", "raise"),
    "only_roles": (_or_none(_are_texts), "a list of texts: roles of groups"),
    "phase": _one_of("joint", "forward", "backward"),
    "reshard": (_or_none(_are_texts), "a list of texts: names of parameters"),
    "roles": (_or_none(_are_roles), "a mapping of torch's group names to roles, both of them texts"),
    "scopes": (_are_scopes, "a list of scopes, as build_module_bucket_plans(model, paths) gives them"),
    "topology": (_or_none(_are_hosts), "a mapping of roles to numbers of hosts"),
}
