"""Every change that a rewrite makes to a graph goes through here, so that a failure can take all of them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from bucketplan_client.capture.binding import GraphSnapshot

__all__ = ["Journal"]

_ABSENT = object()


class Journal:
    """Creates, moves and relabels nodes of one graph; `roll_back` restores nodes, order, arguments and metadata.

    Nodes to be erased are only noted: `commit` erases them last, and `roll_back` brings back those that it got to.
    """

    def __init__(self, graph: fx.Graph, snapshot: GraphSnapshot) -> None:
        self.graph = graph
        self._snapshot = snapshot
        self.created: list[fx.Node] = []
        self.moved: list[fx.Node] = []
        self._operations: list[tuple[fx.Node, str]] = []
        self._meta: list[tuple[fx.Node, str, Any]] = []
        self._obsolete: list[fx.Node] = []
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._users: dict[fx.Node, list[fx.Node]] = {}

    def create(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """A new call at the graph's insertion point.

        The arguments are set afterwards: `create_node` searches them for symbolic integers, which costs more than
        all the rest and finds nothing in arguments made of nodes and plain integers.
        """
        node = self.graph.create_node("call_function", target)
        node.args = args
        if kwargs:
            node.kwargs = kwargs
        self.created.append(node)
        return node

    def move_before(self, anchor: fx.Node, node: fx.Node) -> None:
        anchor.prepend(node)
        self.moved.append(node)

    def retarget(self, node: fx.Node, target: Callable[..., Any]) -> None:
        """Turn `node` into a call of the function `target` with the same arguments."""
        self._operations.append((node, node.op))
        node.op = "call_function"
        node.target = target

    def set_meta(self, node: fx.Node, key: str, value: Any) -> None:
        self._meta.append((node, key, node.meta.get(key, _ABSENT)))
        node.meta[key] = value

    def replace_uses(self, old: fx.Node, new: fx.Node) -> None:
        """Have every user of `old` read `new`, once `redirect` is called."""
        self._replaced[old] = new

    def current(self, node: fx.Node) -> fx.Node:
        """What stands for `node` once uses are redirected."""
        return self._replaced.get(node, node)

    def redirect(self) -> None:
        """Rewrite the arguments of each affected user once, however many of its inputs were replaced."""
        hooks = getattr(self.graph.owning_module, "_replace_hooks", None) or ()
        users = dict.fromkeys(user for old in self._replaced for user in old.users)
        for user in users:
            for source in user.all_input_nodes if hooks else ():
                if source in self._replaced:
                    for hook in hooks:
                        hook(old=source, new=self._replaced[source].name, user=user)
            user.args = fx.map_arg(user.args, self.current)
            if user.kwargs:
                user.kwargs = fx.map_arg(user.kwargs, self.current)

    def obsolete(self, node: fx.Node) -> None:
        """Erase `node` at commit, after those noted before it."""
        self._obsolete.append(node)

    @property
    def to_erase(self) -> frozenset[fx.Node]:
        return frozenset(self._obsolete)

    def commit(self) -> None:
        for node in self._obsolete:
            for source in node.all_input_nodes:
                self._users.setdefault(source, list(source.users))
        for node in self._obsolete:
            self.graph.erase_node(node)

    def roll_back(self) -> None:
        """Undo everything, whether `commit` was reached, broke off or was done."""
        self._revive()
        self._snapshot.restore_arguments()
        for node, operation in reversed(self._operations):
            node.op = operation
        for node, key, before in reversed(self._meta):
            if before is _ABSENT:
                node.meta.pop(key, None)
            else:
                node.meta[key] = before
        for node in reversed(self.created):
            self.graph.erase_node(node)
        nodes = self._snapshot.nodes
        for node, following in zip(reversed(nodes[:-1]), reversed(nodes[1:]), strict=True):
            if node.next is not following:
                following.prepend(node)
        self.graph._len = len(nodes)
        for source, users in self._users.items():
            ordered = dict.fromkeys(user for user in (*users, *source.users) if user in source.users)
            source.users.clear()
            source.users.update(ordered)

    def _revive(self) -> None:
        """Make erased nodes members of the graph again, each alone: their place and arguments are restored afterwards.

        fx has no call for this, and a copy in a node's place would not be the node that others hold. What is set here
        is what `Graph.erase_node` unsets.
        """
        for node in self._obsolete:
            if node not in self.graph._find_nodes_lookup_table:
                self.graph._find_nodes_lookup_table.insert(node)
            if node.prev.next is not node:
                # Taking it out of the list left its own links, through which it would unlink its old neighbours.
                node._prev = node._next = node
            node._erased = False
