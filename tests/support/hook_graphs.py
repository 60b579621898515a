"""Small graphs, options and another pass for the tests of the torch.compile hook."""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from bucketplan_client.capture.ops import packet_of
from bucketplan_core.collectives import Options

c10d = torch.ops._c10d_functional
aten = torch.ops.aten
SIZE = Options(strategy="size", planner="size/1", placement="scheduled")


def gathers(num_params: int = 4, *, size: int = 2) -> fx.GraphModule:
    """`num_params` gathered parameters, each read by one product."""
    graph = fx.Graph()
    value = graph.placeholder("primals_1")
    value.meta["val"] = torch.empty(4, 4, device="meta")
    params = [graph.placeholder(f"primals_{index + 2}") for index in range(num_params)]
    for param in params:
        param.meta["val"] = torch.empty(2, 4, device="meta")
        cast = graph.call_function(aten._to_copy.default, (param,), {"dtype": torch.bfloat16})
        launch = graph.call_function(c10d.all_gather_into_tensor.default, (cast, size, "0"))
        wait = graph.call_function(c10d.wait_tensor.default, (launch,))
        transposed = graph.call_function(aten.t.default, (wait,))
        value = graph.call_function(aten.mm.default, (value, transposed))
        cast.meta["val"] = torch.empty(2, 4, dtype=torch.bfloat16, device="meta")
        for node in (launch, wait, transposed, value):
            node.meta["val"] = torch.empty(4, 4, dtype=torch.bfloat16, device="meta")
    graph.output((value,))
    return fx.GraphModule(torch.nn.Module(), graph)


def launches(gm: fx.GraphModule) -> int:
    return sum(packet_of(node) is c10d.all_gather_into_tensor for node in gm.graph.nodes)


class OtherPass(CustomGraphPass):
    def __call__(self, graph):
        self.seen = graph

    def uuid(self):
        return "other"
