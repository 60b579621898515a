"""Measured hardware profiles: stored by name, every version kept, and their figures in the epochs that name them."""

import httpx
import pytest

from bucketplan_core.hardware import CollectiveCost, Hardware, Protocol
from bucketplan_core.presets import GroupShape, MeasuredProfile
from bucketplan_core.wire import digest_of, pack, unpack
from tests.support.documents import MSGPACK
from tests.support.server import running_server


def measured(name: str, *, alpha_ns: int = 10_000, size: int = 8) -> dict:
    figures = Hardware(
        flops_per_us=(("matmul:bfloat16", 1_000_000),),
        memory_bytes_per_us=1_000_000,
        copy_bytes_per_us=1_000_000,
        launch_ns=1_000,
        slowdown_permille=0,
        collectives=(CollectiveCost("measured", "all_gather", (Protocol(alpha_ns, 100_000),)),),
    )
    profile = MeasuredProfile(name=name, shape=GroupShape(size, 1), backend="gloo", device="cpu", figures=figures)
    return profile.to_wire()


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("profiles")) as server, httpx.Client(base_url=server.url) as opened:
        yield opened


def put(client: httpx.Client, name: str, profile: dict, reason: str = "measured") -> httpx.Response:
    return client.put(f"/v1/profiles/{name}", json={"profile": profile, "reason": reason})


def opening(key: str, hardware: object, **changed: object) -> bytes:
    body = {
        "held_epoch": None,
        "key": key,
        "options": {"hardware": hardware},
        "participants": {"fsdp": [list(range(8))]},
        "topology": {"fsdp": 1},
        "uuid": None,
    }
    return pack(body | changed)


def test_each_content_is_another_version_and_none_is_lost(client):
    first, second = measured("versions"), measured("versions", alpha_ns=20_000)
    answers = [put(client, "versions", profile) for profile in (first, first, second, first)]
    assert [(answer.status_code, answer.json()["version"]) for answer in answers] == [
        (201, 1),
        (200, 1),
        (201, 2),
        (201, 3),
    ]
    found = client.get("/v1/profiles/versions").json()
    assert (found["profile"], found["version"]) == (first, 3)
    assert found["digest"] == digest_of(pack(first))
    assert [each["version"] for each in found["versions"]] == [3, 2, 1]
    assert client.get("/v1/profiles/versions?version=2").json()["profile"] == second
    assert client.get("/v1/profiles/versions?version=9").status_code == 404
    (listed,) = [each for each in client.get("/v1/profiles").json()["profiles"] if each["name"] == "versions"]
    assert (listed["version"], listed["reason"], listed["size"]) == (3, "measured", 8)


def test_storing_is_in_the_log_and_verifies(client):
    put(client, "logged", measured("logged"), "after the driver update")
    events = client.get("/v1/events?limit=1000").json()["events"]
    (event,) = [each for each in events if each["kind"] == "profile.stored" and each["body"]["name"] == "logged"]
    assert (event["reason"], event["body"]["version"]) == ("after the driver update", 1)
    assert client.get("/v1/events/verify").json()["findings"] == []


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"name": "other"}, "body.profile.name"),
        ({"size": 0}, "body.profile.size"),
        ({"hardware": None}, "body.profile.hardware"),
        ({"extra": 1}, "body.profile.extra"),
    ],
)
def test_what_is_no_profile_is_refused_by_field(client, change, path):
    answer = put(client, "refused", measured("refused") | change)
    assert (answer.status_code, answer.json()["path"]) == (400, path)
    assert client.get("/v1/profiles/refused").status_code == 404


def test_an_attempt_takes_the_figures_of_the_profile_it_names_and_keeps_them(client):
    put(client, "fixed", measured("fixed", alpha_ns=11_000))
    url = "/v1/jobs/named/attempts"
    before = unpack(client.post(url, content=opening("a", "fixed"), headers=MSGPACK).raise_for_status().content)
    (cost,) = before["epoch"]["options"]["hardware"]["collectives"]
    assert (cost["group"], cost["alpha_ns"]) == ("fsdp", [11_000])
    put(client, "fixed", measured("fixed", alpha_ns=33_000))
    again = unpack(client.post(url, content=opening("a", "fixed"), headers=MSGPACK).content)
    assert again["epoch_id"] == before["epoch_id"]
    later = unpack(client.post(url, content=opening("b", ["fixed"]), headers=MSGPACK).content)
    assert later["epoch"]["options"]["hardware"]["collectives"][0]["alpha_ns"] == [33_000]


def test_a_profile_that_does_not_fit_or_exist_is_said_by_name(client):
    put(client, "small", measured("small", size=4))
    url = "/v1/jobs/unfit/attempts"
    unknown = client.post(url, content=opening("a", "nobody"), headers=MSGPACK)
    assert (unknown.status_code, unpack(unknown.content)["path"]) == (404, "body.options.hardware")
    unfit = client.post(url, content=opening("b", "small"), headers=MSGPACK)
    assert unfit.status_code == 422
    assert "8 ranks on 1 nodes" in unpack(unfit.content)["detail"]
    assert client.get(url).json()["attempts"] == []


def test_repeating_an_opening_is_harmless_whatever_was_stored_since(client):
    put(client, "again", measured("again"))
    path, body = "/v1/jobs/again/attempts", opening("a", "again")
    first = client.post(path, content=body, headers=MSGPACK)
    assert first.status_code == 201, first.content
    # On another group size these figures answer nothing, so that the options could not be completed today.
    assert put(client, "again", measured("again", size=4)).status_code == 201
    assert client.post(path, content=opening("b", "again"), headers=MSGPACK).status_code == 422
    again = client.post(path, content=body, headers=MSGPACK)
    assert (again.status_code, again.content) == (200, first.content)
