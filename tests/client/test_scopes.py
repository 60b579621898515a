"""Module scopes against live models: paths, patterns, and what is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bucketplan_client.errors import EmptyScope, OverlappingScopes, ScopeError, UnknownScope
from bucketplan_client.scopes import ModuleScope, build_module_bucket_plans


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(4, 4, bias=False)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Block() for _ in range(12))
        self.dropout = nn.Dropout()
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def names(scopes: tuple[ModuleScope, ...]) -> list[str]:
    return [scope.name for scope in scopes]


class TestPaths:
    def test_exact_path_takes_every_parameter_below_it(self):
        (scope,) = build_module_bucket_plans(Model(), ["layers.3"])
        assert scope.name == "layers.3"
        assert scope.param_names == {
            "layers.3.attn.weight",
            "layers.3.mlp.0.weight",
            "layers.3.mlp.0.bias",
            "layers.3.mlp.2.weight",
            "layers.3.mlp.2.bias",
        }

    def test_path_does_not_match_a_longer_name_that_begins_alike(self):
        (scope,) = build_module_bucket_plans(Model(), ["layers.1"])
        assert not any(name.startswith(("layers.10", "layers.11")) for name in scope.param_names)

    def test_order_is_that_of_the_specs_and_of_the_modules(self):
        scopes = build_module_bucket_plans(Model(), ["head", "layers.*", "embed"])
        assert names(scopes) == ["head", *(f"layers.{i}" for i in range(12)), "embed"]

    def test_list_of_paths_is_one_scope(self):
        scopes = build_module_bucket_plans(Model(), [["norm", "head"], "embed"])
        assert names(scopes) == ["norm+head", "embed"]
        assert scopes[0].param_names == {"norm.weight", "norm.bias", "head.weight"}

    def test_wrapped_model_has_the_same_scopes(self):
        wrapped = torch.compile(Model())
        scopes = build_module_bucket_plans(wrapped, ["layers.*"])
        assert names(scopes)[:2] == ["layers.0", "layers.1"]
        assert {"layers.0.attn.weight", "_orig_mod.layers.0.attn.weight"} <= scopes[0].param_names


class TestPatterns:
    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            ("layers.*", [f"layers.{i}" for i in range(12)]),
            ("layers.?", [f"layers.{i}" for i in range(10)]),
            ("layers.[0-2]", ["layers.0", "layers.1", "layers.2"]),
            ("layers.0.*", ["layers.0.attn", "layers.0.mlp"]),
            ("**.attn", [f"layers.{i}.attn" for i in range(12)]),
            ("layers.1*.attn", ["layers.1.attn", "layers.10.attn", "layers.11.attn"]),
            ("emb*", ["embed"]),
        ],
    )
    def test_pattern_matches_component_by_component(self, spec, expected):
        assert names(build_module_bucket_plans(Model(), [spec])) == expected

    def test_modules_without_parameters_drop_out_of_a_pattern(self):
        assert names(build_module_bucket_plans(Model(), ["layers.0.mlp.*"])) == ["layers.0.mlp.0", "layers.0.mlp.2"]

    def test_the_path_of_a_module_wins_over_the_pattern_that_it_could_be(self):
        model = nn.Module()
        model.d = nn.ModuleDict({"a[0]": nn.Linear(2, 2), "a0": nn.Linear(2, 2), "b*": nn.Linear(2, 2)})
        assert names(build_module_bucket_plans(model, ["d.a[0]"])) == ["d.a[0]"]
        assert names(build_module_bucket_plans(model, [["d.b*", "d.a0"]])) == ["d.b*+d.a0"]
        assert names(build_module_bucket_plans(model, ["d.a[[]*"])) == ["d.a[0]"]


class TestRefused:
    def test_unknown_path_is_named_with_what_is_close(self):
        with pytest.raises(UnknownScope) as caught:
            build_module_bucket_plans(Model(), ["layer.3"])
        assert caught.value.spec == "layer.3"
        assert "layers.3" in caught.value.similar
        assert "'layer.3'" in str(caught.value)

    @pytest.mark.parametrize("spec", ["blocks.*", "", "layers.12", "layers.*.router", []])
    def test_what_matches_nothing_is_unknown(self, spec):
        with pytest.raises(UnknownScope):
            build_module_bucket_plans(Model(), [spec])

    @pytest.mark.parametrize("spec", ["dropout", "layers.0.mlp.1", "drop*"])
    def test_scope_without_parameters_is_empty(self, spec):
        with pytest.raises(EmptyScope) as caught:
            build_module_bucket_plans(Model(), [spec])
        assert caught.value.spec == spec

    @pytest.mark.parametrize(
        ("specs", "first", "second"),
        [
            (["layers.0", "layers.0"], "layers.0", "layers.0"),
            (["layers.*", "layers.3"], "layers.*", "layers.3"),
            (["layers", "layers.3.attn"], "layers", "layers.3.attn"),
            (["layers.3.attn", "layers.*"], "layers.*", "layers.3.attn"),
            (["layers.0.**"], "layers.0.**", "layers.0.**"),
            ([["norm", "norm"]], "norm", "norm"),
            ([["norm", "head"], "h*"], "norm+head", "h*"),
        ],
    )
    def test_overlapping_scopes_are_both_named(self, specs, first, second):
        with pytest.raises(OverlappingScopes) as caught:
            build_module_bucket_plans(Model(), specs)
        assert (caught.value.first, caught.value.second) == (first, second)
        assert first in str(caught.value)
        assert second in str(caught.value)

    @pytest.mark.parametrize("specs", ["layers", b"layers", None, 5])
    def test_scopes_that_are_no_list_say_so(self, specs):
        with pytest.raises(ScopeError, match="are a list of paths and patterns") as caught:
            build_module_bucket_plans(Model(), specs)
        assert repr(specs) in str(caught.value)

    @pytest.mark.parametrize("spec", [None, 5, ["norm", None], ["norm", ["head"]]])
    def test_a_scope_that_is_no_path_is_named(self, spec):
        with pytest.raises(ScopeError, match=r"is no (module scope|path)") as caught:
            build_module_bucket_plans(Model(), ["embed", spec])
        assert repr(spec) in str(caught.value)

    def test_every_refusal_is_a_scope_error_with_a_remedy(self):
        for specs in (["nope"], ["dropout"], ["layers", "layers.0"]):
            with pytest.raises(ScopeError) as caught:
                build_module_bucket_plans(Model(), specs)
            assert caught.value.remedy in str(caught.value)


class TestTiedParameters:
    def test_tied_parameter_belongs_to_its_first_module_under_both_names(self):
        (scope,) = build_module_bucket_plans(Model(tied=True), ["embed"])
        assert scope.param_names == {"embed.weight", "head.weight"}

    def test_scope_of_nothing_but_tied_parameters_says_so(self):
        with pytest.raises(EmptyScope, match="tied"):
            build_module_bucket_plans(Model(tied=True), ["embed", "head"])

    def test_tied_head_drops_out_of_a_pattern_that_matches_more(self):
        scopes = build_module_bucket_plans(Model(tied=True), ["*"])
        assert names(scopes) == ["embed", "layers", "norm"]
        assert scopes[0].param_names == {"embed.weight", "head.weight"}

    @pytest.mark.parametrize("specs", [["h*"], ["embed", "[dh]*"]])
    def test_pattern_of_nothing_but_tied_parameters_says_so(self, specs):
        with pytest.raises(EmptyScope, match=r"tied to others, 'head\.weight' is 'embed\.weight'"):
            build_module_bucket_plans(Model(tied=True), specs)

    def test_tied_head_joins_a_scope_that_has_more(self):
        scopes = build_module_bucket_plans(Model(tied=True), ["embed", ["norm", "head"]])
        assert scopes[1].param_names == {"norm.weight", "norm.bias"}
