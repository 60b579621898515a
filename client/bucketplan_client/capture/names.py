"""Names for people and for identity: parameters and the modules that they belong to, equal on every rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import fx

from bucketplan_client.capture.binding import CandidateNodes
from bucketplan_client.capture.recognize import Recognised

__all__ = ["module_fqns_of", "module_of", "parameter_name"]

_MODULE_PREFIX = re.compile(r"^(?:L\[['\"]self['\"]\]|self)(?:\.|(?=\[)|$)")
_INDEXING = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")


def parameter_name(entry: Recognised) -> str | None:
    """The parameter's path: from an annotation, the tracer's description of the input, or the attribute that is read.

    None for an input of which no metadata tells: what a tracer calls it may differ between ranks, its position does
    not.
    """
    annotated = entry.collective.node.meta.get("param_name")
    if isinstance(annotated, str):
        return annotated
    if entry.source is not None:
        named = entry.source.meta.get("param_name")
        if isinstance(named, str):
            return named
        path = str(entry.source.target) if entry.source.op == "get_attr" else None
        return _described(entry.source.meta.get("desc")) or path
    if entry.output_slot is None:
        return None
    outputs = entry.wait.graph.output_node().meta.get("desc")
    if not isinstance(outputs, list | tuple) or entry.output_slot >= len(outputs):
        return None
    return _described(outputs[entry.output_slot])


def _described(described: Any) -> str | None:
    """The parameter that AOTAutograd's description of an input, or of a gradient among the outputs, names.

    A sharded parameter is described by its local tensor, whose `base` is the parameter.
    """
    while described is not None:
        target = getattr(described, "target", None)
        if isinstance(target, str):
            return target
        described = getattr(described, "base", None) or getattr(described, "grad_of", None)
    return None


def module_of(entry: Recognised) -> str | None:
    """The module in which a gather is read, as far as its own nodes and its readers tell."""
    for node in (entry.collective.node, entry.wait, *entry.wait.users):
        found = _annotated(node) or _from_stack(node)
        if found is not None:
            return found
    return None


def module_fqns_of(entry: Recognised, nodes: CandidateNodes, name: str | None) -> tuple[str, ...]:
    """Module paths that the collective belongs to: annotation, module stack of its neighbours, or the parameter's
    parent.
    """
    neighbours = (entry.collective.node, entry.wait, *nodes.result, *nodes.prep)
    for node in neighbours:
        found = _annotated(node) or _from_stack(node)
        if found is not None:
            return (found,)
    users = [user for node in (entry.wait, *nodes.result) for user in node.users]
    producers = [source for node in (*nodes.prep, entry.collective.node) for source in node.all_input_nodes]
    for node in (*users, *producers):
        found = _annotated(node) or _from_stack(node)
        if found is not None:
            return (found,)
    annotated = isinstance(entry.collective.node.meta.get("param_name"), str)
    if annotated and name is not None and "." in name:
        return (name.rsplit(".", 1)[0],)
    return ()


def _annotated(node: fx.Node) -> str | None:
    custom = node.meta.get("custom")
    found = custom.get("module_fqn") if isinstance(custom, Mapping) else None
    return found if isinstance(found, str) else None


def _from_stack(node: fx.Node) -> str | None:
    stack: Any = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not isinstance(stack, Mapping) or not stack:
        return None
    last = list(stack.values())[-1]
    path = last[0] if isinstance(last, tuple | list) and last else last
    if not isinstance(path, str):
        return None
    plain = _INDEXING.sub(r".\1", _MODULE_PREFIX.sub("", path, count=1))
    return plain.strip(".") or None
