"""`PlanClient` over real sockets, through a proxy that misbehaves, and against servers that answer anything."""

from __future__ import annotations

import gzip
import inspect
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from bucketplan_client.bodies import MAX_ANSWER_BYTES
from bucketplan_client.errors import (
    BadAddress,
    ClientError,
    CorruptAnswer,
    DeadlineExceeded,
    ServerError,
    ServerRefused,
    ServerUnreachable,
)
from bucketplan_client.opening import open_attempt
from bucketplan_client.testing import InMemoryPlanServer
from bucketplan_client.transport import PlanClient, shared_client
from bucketplan_core import Plan, make_plan
from bucketplan_core.wire import pack, to_json
from tests.client.requests import small_request
from tests.support.counts import count, seeds
from tests.support.proxy import Fault, always, faulty_proxy, first, seeded

MSGPACK = "application/msgpack"
Handler = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def server() -> Iterator[tuple[InMemoryPlanServer, str]]:
    plan_server = InMemoryPlanServer()
    with plan_server.listening() as address:
        yield plan_server, address


def client_of(handler: Handler, **options: float) -> PlanClient:
    return PlanClient("http://server", transport=httpx.MockTransport(handler), rank=3, job="llama", **options)


def problem(status: int, slug: str, **extra: object) -> httpx.Response:
    body = {"type": f"urn:bucketplan:problem:{slug}", "title": slug, "status": status, "detail": "because", **extra}
    return httpx.Response(status, headers={"Content-Type": "application/problem+msgpack"}, content=pack(body))


def coded(body: bytes, coding: str) -> httpx.Response:
    """An answer as it comes from the network; made from `content`, httpx would undo the coding here already."""
    headers = {"Content-Type": MSGPACK, "Content-Encoding": coding}
    return httpx.Response(200, headers=headers, stream=httpx.ByteStream(body))


def plan_answer(plan: Plan) -> httpx.Response:
    headers = {"Content-Type": MSGPACK, "ETag": f'"{plan.digest}"'}
    return httpx.Response(200, headers=headers, content=plan.encoded)


class TestPlan:
    def test_first_call_plans_and_second_fetches_the_same_bytes(self, server):
        plan_server, address = server
        request = small_request()
        with PlanClient(address) as client:
            first_plan = client.plan(request)
            second = client.plan(request)
        assert first_plan.encoded == second.encoded == make_plan(request).encoded
        assert plan_server.num_plannings == 1
        assert [call.split()[0] for call in plan_server.calls] == ["GET", "POST", "GET"]

    def test_known_plan_of_an_unknown_signature_is_none(self, server):
        with PlanClient(server[1]) as client:
            assert client.known_plan("0" * 64) is None

    def test_server_that_is_still_planning_is_asked_again(self):
        plan_server = InMemoryPlanServer(num_busy=3)
        with plan_server.client() as client:
            client.plan(small_request())
        assert len(plan_server.calls) == 5

    def test_epoch_and_token_travel_as_headers(self):
        seen: list[httpx.Request] = []
        plan = make_plan(small_request())

        def handler(request: httpx.Request) -> httpx.Response:
            seen.append(request)
            return plan_answer(plan)

        client = PlanClient("http://server", token="secret", transport=httpx.MockTransport(handler))
        client.known_plan(plan.decision.signature, epoch="e" * 64)
        assert seen[0].headers["Authorization"] == "Bearer secret"
        assert seen[0].headers["Bucketplan-Epoch"] == "e" * 64

    def test_token_is_in_no_error_and_no_repr(self):
        client = PlanClient(
            "http://server", token="hush", transport=httpx.MockTransport(lambda _: problem(403, "forbidden"))
        )
        with pytest.raises(ServerRefused) as caught:
            client.plan(small_request())
        assert "hush" not in repr(caught.value) + str(caught.value) + repr(client) + repr(vars(caught.value))

    def test_threads_share_one_client(self, server):
        request = small_request()
        with PlanClient(server[1]) as client:
            answers: list[bytes] = []
            threads = [threading.Thread(target=lambda: answers.append(client.plan(request).encoded)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(answers) == 8
        assert len(set(answers)) == 1

    def test_shared_client_is_one_per_server(self):
        assert shared_client("http://a.example") is shared_client("http://a.example")
        assert shared_client("http://a.example") is not shared_client("http://b.example")


class TestDeadline:
    def test_refused_port_is_unreachable_after_several_tries(self):
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        with (
            PlanClient(f"http://127.0.0.1:{port}", rank=5, job="llama", deadline_s=1.0) as client,
            pytest.raises(ServerUnreachable) as caught,
        ):
            client.plan(small_request())
        error = caught.value
        assert error.num_tries > 1
        assert (error.where.rank, error.where.job) == (5, "llama")
        assert error.where.signature == small_request().signature
        assert str(port) in str(error)
        assert "bucketplan doctor" in str(error)

    @pytest.mark.parametrize("fault", [Fault.DROP, Fault.RESET_AFTER_REQUEST, Fault.TRUNCATE])
    def test_connection_that_never_delivers_ends_at_the_deadline(self, server, fault):
        with (
            faulty_proxy(server[1], always(fault)) as (address, _),
            PlanClient(address, deadline_s=1.0) as client,
            pytest.raises(DeadlineExceeded),
        ):
            client.known_plan("0" * 64)

    def test_answer_that_drips_cannot_outlive_the_deadline(self):
        """The peer sends one header byte every 50 ms, for ever: each read succeeds, only a total deadline helps."""
        stop = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def drip() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                    while not stop.wait(0.05):
                        try:
                            connection.sendall(b"x")
                        except OSError:
                            return

            thread = threading.Thread(target=drip)
            thread.start()
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with PlanClient(address, deadline_s=0.6) as client, pytest.raises(DeadlineExceeded):
                client.known_plan("0" * 64)
            stop.set()
            thread.join()

    def test_retry_after_beyond_the_deadline_does_not_hold_the_call(self):
        def handler(_: httpx.Request) -> httpx.Response:
            answer = problem(503, "busy")
            answer.headers["Retry-After"] = "3600"
            return answer

        with pytest.raises(ServerRefused) as caught:
            client_of(handler, deadline_s=0.2).plan(small_request())
        assert caught.value.problem.slug == "busy"

    @pytest.mark.parametrize(("slug", "num_tries"), [("store-damaged", 1), ("store-unavailable", 3)])
    def test_a_damaged_store_is_asked_once_and_one_that_is_away_again(self, slug, num_tries):
        plan = make_plan(small_request())
        answers = [problem(503, slug), problem(503, slug), plan_answer(plan)]
        handler = iter(answers)
        client = client_of(lambda _: next(handler))
        if num_tries == 1:
            with pytest.raises(ServerRefused, match="restore a backup"):
                client.known_plan(plan.decision.signature)
        else:
            client.known_plan(plan.decision.signature)
        assert len(answers) - len(list(handler)) == num_tries

    def test_retry_after_is_waited_for_before_the_next_try(self):
        plan = make_plan(small_request())
        times: list[float] = []

        def handler(_: httpx.Request) -> httpx.Response:
            times.append(time.monotonic())
            if len(times) == 1:
                answer = problem(503, "busy")
                answer.headers["Retry-After"] = "1"
                return answer
            return plan_answer(plan)

        client_of(handler).known_plan(plan.decision.signature)
        # Not a speed: the server forbade anything earlier.
        assert times[1] - times[0] >= 1.0


class TestFaults:
    @pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.DROP])
    def test_call_survives_two_bad_connections(self, server, fault):
        request = small_request()
        with (
            faulty_proxy(server[1], first(2, fault), delay_s=0.05) as (address, proxy),
            PlanClient(address, deadline_s=30.0) as client,
        ):
            assert client.post_plan(request).encoded == make_plan(request).encoded
        assert proxy.suffered

    @pytest.mark.soak
    def test_seeded_faults_never_give_another_plan(self, server):
        plan_server, address = server
        request = small_request()
        wanted = make_plan(request).encoded
        for seed in seeds("proxy schedules", test=10, soak=300):
            plan_server.plans.clear()
            with (
                faulty_proxy(address, seeded(seed), delay_s=0.02) as (bad_address, _),
                PlanClient(bad_address, deadline_s=5.0, read_timeout_s=0.5, plan_timeout_s=0.5) as client,
            ):
                try:
                    plan = client.plan(request)
                except ServerError:
                    continue
            assert plan.encoded == wanted


class TestVerification:
    def test_plan_of_another_signature_is_refused(self):
        other = make_plan(small_request(num_params=2))
        with pytest.raises(CorruptAnswer, match="signature"):
            client_of(lambda _: plan_answer(other), deadline_s=0.2).known_plan(small_request().signature)

    def test_plan_whose_etag_is_another_digest_is_refused(self):
        plan = make_plan(small_request())

        def handler(_: httpx.Request) -> httpx.Response:
            return httpx.Response(200, headers={"Content-Type": MSGPACK, "ETag": '"abc"'}, content=plan.encoded)

        with pytest.raises(CorruptAnswer, match="ETag"):
            client_of(handler, deadline_s=0.2).known_plan(plan.decision.signature)

    @pytest.mark.parametrize("coding", ["gzip, gzip", "zstd", "br", "gzip, identity, gzip"])
    def test_coding_that_was_not_asked_for_is_refused_and_never_undone(self, coding):
        twice = gzip.compress(gzip.compress(bytes(2**20)))
        client = client_of(lambda _: coded(twice, coding), deadline_s=0.2)
        with pytest.raises(CorruptAnswer, match="content coding"):
            client.get("/v1/plans")

    def test_gzip_is_read_once(self):
        client = client_of(lambda _: coded(gzip.compress(pack({"plans": []})), "gzip"))
        assert client.get("/v1/plans").body == {"plans": []}

    def test_gzip_that_inflates_beyond_the_bound_is_refused(self):
        bomb = gzip.compress(bytes(MAX_ANSWER_BYTES + 1), 1)
        with pytest.raises(CorruptAnswer, match="inflates to more than"):
            client_of(lambda _: coded(bomb, "gzip"), deadline_s=1.0).get("/v1/plans")

    @pytest.mark.parametrize("change", [lambda z: z[:-9], lambda z: z + b"x", lambda z: b"no gzip"])
    def test_damaged_gzip_is_refused(self, change):
        damaged = change(gzip.compress(pack({"plans": []})))
        with pytest.raises(CorruptAnswer, match="compression is damaged"):
            client_of(lambda _: coded(damaged, "gzip"), deadline_s=0.2).get("/v1/plans")

    def test_body_that_is_not_its_content_digest_is_refused(self):
        def handler(_: httpx.Request) -> httpx.Response:
            headers = {"Content-Type": MSGPACK, "Content-Digest": "sha-256=:AAAA:"}
            return httpx.Response(200, headers=headers, content=pack({"plans": []}))

        with pytest.raises(CorruptAnswer, match="Content-Digest"):
            client_of(handler, deadline_s=0.2).get("/v1/plans")

    @pytest.mark.soak
    def test_no_body_crashes_the_client(self):
        plan = make_plan(small_request())

        @given(
            body=st.one_of(
                st.binary(max_size=200), st.integers(0, len(plan.encoded) - 1).map(lambda n: plan.encoded[:n])
            ),
            status=st.sampled_from([200, 201, 202, 204, 301, 400, 404, 422, 500, 503]),
            kind=st.sampled_from([MSGPACK, "application/json", "text/html", ""]),
        )
        def check(body: bytes, status: int, kind: str) -> None:
            client = client_of(
                lambda _: httpx.Response(status, headers={"Content-Type": kind}, content=body), deadline_s=0.0
            )
            with pytest.raises(ServerError):
                client.post_plan(small_request())

        from hypothesis import settings

        settings(max_examples=count(test=100, soak=5_000))(check)()


class TestRefusals:
    def test_problem_reaches_the_caller_with_its_fields(self):
        client = client_of(lambda _: problem(422, "cannot-plan", option="strategy", value="module"))
        with pytest.raises(ServerRefused) as caught:
            client.plan(small_request())
        found = caught.value.problem
        assert (found.slug, found.status, found.detail) == ("cannot-plan", 422, "because")
        assert found.extra == {"option": "strategy", "value": "module"}
        assert "rank 3" in str(caught.value)

    def test_json_problem_reads_the_same(self):
        body = {"type": "urn:bucketplan:problem:forbidden", "title": "no", "status": 403, "detail": "why"}

        def handler(_: httpx.Request) -> httpx.Response:
            return httpx.Response(403, headers={"Content-Type": "application/problem+json"}, content=to_json(body))

        with pytest.raises(ServerRefused) as caught:
            client_of(handler).plan(small_request())
        assert caught.value.problem.slug == "forbidden"

    def test_page_of_a_proxy_is_still_a_refusal(self):
        with pytest.raises(ServerRefused) as caught:
            client_of(lambda _: httpx.Response(404, html="<h1>nginx</h1>")).post_plan(small_request())
        assert caught.value.problem.status == 404
        assert "'text/html'" in str(caught.value)
        assert "BUCKETPLAN_SERVER" in caught.value.remedy

    def test_redirect_says_where_to_and_what_to_do(self):
        headers = {"Location": "https://login.example/"}
        with pytest.raises(ServerRefused, match=r"redirected to 'https://login\.example/'.*BUCKETPLAN_SERVER"):
            client_of(lambda _: httpx.Response(302, headers=headers)).plan(small_request())

    def test_answer_without_a_document_is_named(self):
        with pytest.raises(ServerRefused, match="204 with no document"):
            client_of(lambda _: httpx.Response(204)).plan(small_request())

    def test_signature_mismatch_that_repeats_is_the_servers_word(self):
        calls: list[int] = []

        def handler(_: httpx.Request) -> httpx.Response:
            calls.append(1)
            return problem(422, "signature-mismatch")

        with pytest.raises(ServerRefused):
            client_of(handler).post_plan(small_request())
        assert len(calls) == 3

    def test_call_that_must_not_repeat_is_tried_once(self):
        calls: list[int] = []

        def handler(_: httpx.Request) -> httpx.Response:
            calls.append(1)
            raise httpx.ReadError("reset")

        with pytest.raises(DeadlineExceeded):
            client_of(handler).post("/v1/plans/x/activate", {}, repeatable=False)
        assert len(calls) == 1

    @pytest.mark.parametrize("address", ["", "server:8400", "ftp://server", "http://", "http://[bad"])
    def test_bad_address_is_refused_at_once(self, address, monkeypatch):
        monkeypatch.delenv("BUCKETPLAN_SERVER", raising=False)
        with pytest.raises(BadAddress):
            PlanClient(address)


def httpx_exceptions() -> list[type[Exception]]:
    found = [value for _, value in inspect.getmembers(httpx, inspect.isclass) if issubclass(value, Exception)]
    return [kind for kind in found if kind is not httpx.CookieConflict]


class TestEveryLowerException:
    @pytest.mark.parametrize("kind", httpx_exceptions(), ids=lambda kind: kind.__name__)
    def test_of_httpx_becomes_a_typed_error(self, kind):
        """Whatever httpx raises, and whatever a later release adds to it, a caller sees a `ServerError` only."""
        parameters = inspect.signature(kind.__init__).parameters

        def handler(request: httpx.Request) -> httpx.Response:
            if "response" in parameters:
                raise kind("broken", request=request, response=httpx.Response(500))
            if "message" in parameters:
                raise kind("broken")
            raise kind()

        with pytest.raises(ServerError) as caught:
            client_of(handler, deadline_s=0.0).plan(small_request())
        assert caught.value.where.rank == 3
        assert caught.value.remedy

    def test_of_httpcore_is_raised_as_one_of_httpx(self):
        import httpcore

        from bucketplan_client.deadline_http import _as_httpx

        kinds = [v for _, v in inspect.getmembers(httpcore, inspect.isclass) if issubclass(v, Exception)]
        assert len(kinds) > 10
        for kind in kinds:
            with pytest.raises(httpx.HTTPError), _as_httpx():
                raise kind("broken")


def test_every_error_can_be_pickled_with_its_fields():
    import pickle

    with pytest.raises(ClientError) as caught:
        client_of(lambda _: problem(422, "cannot-plan", option="x")).plan(small_request())
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.problem == caught.value.problem


class TestSomethingElseAnswers:
    """A captive portal, a login page or the default page of an ingress answers 200 with a page of its own."""

    PAGE = "<html>\x1b[31m<title>Sign in</title></html>"

    @pytest.mark.parametrize(
        "call",
        [
            lambda client: client.known_plan("0" * 64, deadline_s=0.3),
            lambda client: client.post_plan(small_request(), deadline_s=0.3),
            lambda client: client.get("/v1/plans", deadline_s=0.3),
        ],
    )
    def test_message_says_what_came_from_where_and_what_to_do(self, call):
        with pytest.raises(CorruptAnswer) as caught:
            call(client_of(lambda _: httpx.Response(200, html=self.PAGE)))
        said = str(caught.value)
        assert "'text/html'" in said
        assert r"<html>\x1b[31m<title>Sign in" in said
        assert "\x1b" not in said
        assert "http://server" in said
        assert "BUCKETPLAN_SERVER" in caught.value.remedy

    def test_attempt_goes_on_as_without_a_server(self):
        client = client_of(lambda _: httpx.Response(200, html=self.PAGE))
        opened = open_attempt(
            client, groups={"fsdp": (0,)}, job="llama", store=dist.HashStore(), rank=0, server_s=0.3, plan_s=0.3
        )
        with opened as attempt:
            assert attempt.source == "local"
            assert attempt.plans is not None
