"""What a user sees when it goes wrong: every error of the client says where it happened and what to do."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
import re
from collections.abc import Iterator

import pytest

import bucketplan_client
from bucketplan_client import errors
from bucketplan_client.arguments import BadArgument
from bucketplan_client.calibrate.fit import LatencyTooLong
from bucketplan_client.errors import ClientError, Problem, Where
from bucketplan_client.inductor_options import CompileConflict
from bucketplan_client.rewrite.errors import RewriteError, StalePlan
from bucketplan_client.torchtitan import PipelineConflict
from bucketplan_server.settings import Settings

HERE = Where(rank=3, job="llama", signature="ab" * 32, server="http://plans:8000")
PROBLEM = Problem(type="urn:bucketplan:problem:cannot-plan", title="t", status=422, detail="no plan", extra={"a": 1})
SAMPLES: list[ClientError] = [
    errors.ServerUnreachable("refused", num_tries=2, elapsed_s=1.0),
    errors.DeadlineExceeded("slow", num_tries=2, elapsed_s=1.0),
    errors.ServerRefused(PROBLEM),
    errors.AccessRefused(PROBLEM),
    errors.CorruptAnswer("other digest"),
    errors.BadAddress("plans", "no scheme"),
    errors.BadToken("it has a line break"),
    errors.UnknownScope("layer.0", ["layers.0"]),
    errors.EmptyScope("act"),
    errors.OverlappingScopes("a", "a.b", "a.b.weight"),
    errors.RanksDisagree(role="fsdp", what="plan", holders={"x": [0, 1], "y": [2]}, difference="request.phase"),
    errors.RankFailed(role="fsdp", failures={1: "broken"}),
    errors.RanksMissing(role="fsdp", missing=[1], what="comparison"),
    errors.OpeningAborted("rank 1 is missing", remedy="Look at its log", missing=[1]),
    errors.StoreFailed("get", "connection lost"),
    errors.CacheDamaged("/cache/x", "other digest"),
    errors.FallbackRefused("foreign-planner", "auto/9 is not here"),
    errors.PassFailed("describe", ValueError("odd graph")),
    BadArgument("exclude", "*.bias", "a list of texts", remedy="Write exclude=['*.bias']"),
    LatencyTooLong("all_gather", 2**60),
    CompileConflict("suppress_errors", True, "failures are hidden", remedy="Set it to False"),
    PipelineConflict("ep_overlap", True, "it moves the same collectives", remedy="Switch it off"),
    RewriteError("wait_3", "its input would come after it"),
    StalePlan("node mul_2 is new"),
]
BASES = {errors.ClientError, errors.ServerError, errors.ScopeError, errors.AgreementError}


def kinds(base: type[ClientError] = ClientError) -> Iterator[type[ClientError]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def test_every_error_of_the_client_is_sampled_here_and_drawn_in_the_tree():
    for module in pkgutil.walk_packages(bucketplan_client.__path__, "bucketplan_client."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    ours = {kind for kind in kinds() if kind.__module__.startswith("bucketplan_client")}
    assert ours - BASES == {type(sample) for sample in SAMPLES}
    tree = inspect.getdoc(errors)
    assert tree is not None
    assert all(re.search(rf"\b{kind.__name__}\b", tree) for kind in ours)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_it_says_rank_job_signature_server_and_one_thing_to_do(sample):
    error = pickle.loads(pickle.dumps(sample)).located(HERE)
    text = str(error)
    for fact in ("rank 3", "job 'llama'", "signature abababababab", "server http://plans:8000"):
        assert fact in text
    assert error.message in text
    assert text.endswith(error.remedy)
    # One sentence that begins with what to do, such as "Check", and says it in more than a word.
    assert re.match(r"[A-Z][a-z]+ ", error.remedy)
    assert not re.search(r"[.!?] [A-Z]", error.remedy)
    assert not error.remedy.endswith(".")


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_it_crosses_a_process_border_with_its_fields(sample):
    copy = pickle.loads(pickle.dumps(sample))
    assert str(copy) == str(sample)
    mine = {name: value for name, value in vars(sample).items() if not isinstance(value, BaseException)}
    assert mine == {name: value for name, value in vars(copy).items() if not isinstance(value, BaseException)}


def test_what_is_known_already_stays():
    error = errors.StoreFailed("get", "lost", where=Where(rank=1)).located(HERE)
    assert error.where == Where(rank=1, job="llama", signature="ab" * 32, server="http://plans:8000")


def test_address_that_is_suggested_has_the_port_on_which_a_server_listens():
    error = errors.BadAddress("plans", "no scheme")
    assert f":{Settings.model_fields['port'].default}" in error.remedy
