"""Module scopes: which parameters of the live model belong to one bucket of strategy `module`.

A spec is a module path as `model.named_modules()` gives it, or a pattern: `*`, `?` and `[...]` match inside one
component of the path, `**` matches any number of components. Every module that matches becomes a scope of its own;
a spec that is the path of a module means that module, whatever is in its name:

    build_module_bucket_plans(model, ["embed", "layers.*", ["norm", "head"]])
        -> embed | layers.0 | layers.1 | ... | norm+head

A list inside the list is one scope of several modules. Wrappers of torch.compile, FSDP and checkpointing
(`_orig_mod` and the like) are no part of a path.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketplan_client.errors import EmptyScope, OverlappingScopes, ScopeError, UnknownScope

if TYPE_CHECKING:
    import torch

    from bucketplan_core.request import Request

__all__ = ["ModuleScope", "ScopeSpec", "build_module_bucket_plans", "why_left_alone"]

ScopeSpec = str | Sequence[str]
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
_WILDCARDS = re.compile(r"[*?\[]")
_MOST_SIMILAR = 3


@dataclass(frozen=True, slots=True)
class ModuleScope:
    """One module scope: its name and the names of the parameters in it, with and without wrappers."""

    name: str
    param_names: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Found:
    """The modules that one scope stands for, before parameters are looked at."""

    spec: str
    paths: tuple[str, ...]
    from_pattern: bool


def build_module_bucket_plans(model: torch.nn.Module, specs: Iterable[ScopeSpec]) -> tuple[ModuleScope, ...]:
    """The scopes that `specs` mean in `model`, in the order of the specs, matches of a pattern in module order.

    Raises `UnknownScope` for a path or pattern that no module has, `EmptyScope` where there is no parameter,
    `OverlappingScopes` where two scopes claim one module or one parameter, and `ScopeError` for what is no list of
    specs. A parameter that is tied belongs to the module that registered it first. Modules without a parameter of their
    own drop out of a pattern, unless nothing else matches it.
    """
    specs = _checked(specs)
    modules = {_unwrapped(path): module for path, module in model.named_modules(remove_duplicate=False)}
    modules.pop("", None)
    owners, names = _parameters(model)
    found = [scope for spec in specs for scope in _resolve(spec, modules)]
    _refuse_overlaps(found)
    inside = [[name for name in owners if any(name.startswith(f"{path}.") for path in at.paths)] for at in found]
    own = [frozenset(alias for name in held if owners[name] == name for alias in names[name]) for held in inside]
    fruitful = {scope.spec for scope, parameters in zip(found, own, strict=True) if parameters}
    for scope, parameters in zip(found, own, strict=True):
        if not parameters and not (scope.from_pattern and scope.spec in fruitful):
            tied = [name for at, held in zip(found, inside, strict=True) if at.spec == scope.spec for name in held]
            if tied:
                raise EmptyScope(scope.spec, f"its parameters are tied to others, {tied[0]!r} is {owners[tied[0]]!r}")
            raise EmptyScope(scope.spec)
    return tuple(
        ModuleScope("+".join(scope.paths), parameters)
        for scope, parameters in zip(found, own, strict=True)
        if parameters
    )


def why_left_alone(request: Request, scopes: Collection[object]) -> str | None:
    """Why a graph is not planned by strategy `module`: `scopes` were given and none has a candidate of `request` in it.

    None where it is to be planned. It depends on nothing but the request and the scopes, on which ranks agree. A
    request made without any scopes goes to the planner, which refuses it: there it is a mistake, while graph breaks
    cut fragments out of a model that may lie outside all scopes.
    """
    if not scopes or request.options.strategy != "module" or not request.candidates:
        return None
    if any(candidate.scope is not None for candidate in request.candidates):
        return None
    return f"nothing was bucketed: no collective of this graph is in a scope ({len(scopes)} scopes were given)"


def _checked(specs: object) -> list[ScopeSpec]:
    """`specs` as a list of paths, patterns and lists of these; raises `ScopeError` for anything else."""
    if isinstance(specs, str | bytes) or not isinstance(specs, Iterable):
        raise ScopeError(
            f"module scopes are a list of paths and patterns, not {specs!r}",
            remedy="Give a list, also for one: ['layers.*']",
        )
    checked = list(specs)
    for spec in checked:
        whole = isinstance(spec, Sequence) and not isinstance(spec, str | bytes)
        for path in spec if whole else [spec]:
            if not isinstance(path, str):
                raise ScopeError(
                    f"module scope {spec!r} holds {path!r}, which is no path"
                    if whole
                    else f"{spec!r} is no module scope",
                    remedy="Give each scope as a path, a pattern, or a list of these",
                )
    return checked


def _parameters(model: torch.nn.Module) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Each parameter name's owner (the name registered first), and each owner's names, wrapped ones included."""
    by_identity: dict[int, str] = {}
    owners: dict[str, str] = {}
    names: dict[str, list[str]] = {}
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        name = _unwrapped(raw)
        owner = by_identity.setdefault(id(parameter), name)
        owners[name] = owner
        names.setdefault(owner, []).extend(dict.fromkeys([name, raw]))
    return owners, names


def _resolve(spec: ScopeSpec, modules: Mapping[str, torch.nn.Module]) -> list[_Found]:
    if not isinstance(spec, str):
        parts = [found for part in spec for found in _resolve(part, modules)]
        if not parts:
            raise UnknownScope("+".join(spec), reason="names no module")
        whole = _Found("+".join(spec), tuple(path for part in parts for path in part.paths), False)
        _refuse_overlaps(parts)
        return [whole]
    path = _unwrapped(spec)
    if not path:
        raise UnknownScope(spec, reason="is empty; name the children of the model")
    # A module's name may hold `[` or `*` itself; its path means that module before it means a pattern.
    if path in modules:
        return [_Found(spec, (path,), False)]
    if not _WILDCARDS.search(path):
        raise UnknownScope(spec, difflib.get_close_matches(path, list(modules), n=_MOST_SIMILAR))
    pattern = tuple(path.split("."))
    matched = [candidate for candidate in modules if _matches(pattern, tuple(candidate.split(".")))]
    if not matched:
        raise UnknownScope(spec, difflib.get_close_matches(path, list(modules), n=_MOST_SIMILAR))
    return [_Found(spec, (candidate,), True) for candidate in matched]


def _matches(pattern: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Whether `path` fits `pattern`, component by component; `**` takes any number of them."""
    reached = {0}
    for component in pattern:
        if component == "**":
            reached = set(range(min(reached), len(path) + 1)) if reached else set()
        else:
            reached = {at + 1 for at in reached if at < len(path) and fnmatch.fnmatchcase(path[at], component)}
    return len(path) in reached


def _refuse_overlaps(found: Sequence[_Found]) -> None:
    claimed: dict[str, _Found] = {}
    for scope in found:
        for path in scope.paths:
            if path in claimed:
                raise OverlappingScopes(claimed[path].spec, scope.spec, path)
            claimed[path] = scope
    for path, scope in claimed.items():
        parts = path.split(".")
        for length in range(1, len(parts)):
            parent = claimed.get(".".join(parts[:length]))
            if parent is not None:
                raise OverlappingScopes(parent.spec, scope.spec, path)


def _unwrapped(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)
