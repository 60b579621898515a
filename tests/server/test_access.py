"""Tokens, roles, namespaces and TLS, on real servers; what is refused is logged, and no secret is."""

import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi.routing import APIRoute

from bucketplan_client.errors import ServerUnreachable
from bucketplan_client.transport import PlanClient
from bucketplan_core.collectives import Options
from bucketplan_core.hardware import CollectiveCost, Hardware, Protocol
from bucketplan_core.wire import pack, to_json, unpack
from bucketplan_server import cli_tokens
from bucketplan_server.access.authenticate import is_public
from bucketplan_server.access.tokens import Token, TokenTable, hash_token, new_token
from bucketplan_server.http.app import build_app
from bucketplan_server.settings import SettingsError, check_tls, load_settings
from tests.server.test_profiles import measured
from tests.support.documents import MSGPACK, plan_body, profile_of, small_request
from tests.support.guarded import REFRESH_SECONDS, Guarded, make_token, open_body, report_body, wait_until
from tests.support.paths import ROOT
from tests.support.postgres import running_postgres
from tests.support.server import FAULTS, running_server, wait_for_gauge
from tests.support.tls import make_tls_files

ROLES = ("rank", "auditor", "operator")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    database = str(folder / "bucketplan.db")
    secrets = {role: make_token(database, role, role) for role in ROLES}
    for team in ("a", "b"):
        for role in ROLES:
            secrets[f"{team}-{role}"] = make_token(database, f"{team}-{role}", role, namespace=f"team-{team}")
    secrets["short"] = make_token(database, "short", "operator", expires="1s")
    secrets["unknown"] = new_token()
    with running_server(
        folder, database=database, refresh_seconds=REFRESH_SECONDS, stall_seconds=1, log_level="debug"
    ) as server:
        yield Guarded(server, secrets)


@pytest.fixture(scope="module")
def signature(guarded: Guarded) -> str:
    request = small_request(900)
    posted = guarded.call("rank", "POST", "/v1/plans", content=plan_body(request), headers=MSGPACK)
    assert posted.status_code == 201, posted.content
    return request.signature


class TestRoles:
    def test_every_route_declares_who_may_call_it(self):
        included = [getattr(route, "original_router", None) for route in build_app(cast("Any", None)).routes]
        routes = [
            route for router in included if router is not None for route in router.routes if isinstance(route, APIRoute)
        ]
        assert len(routes) > 15
        declared = {}
        for route in routes:
            roles = [
                dependency.call.role for dependency in route.dependant.dependencies if hasattr(dependency.call, "role")
            ]
            assert len(roles) == 1, f"{route.path} must say needs(...) or needs_nothing() once"
            declared[route.path, *sorted(route.methods)] = roles[0]
        for (path, *_), role in declared.items():
            assert (role is None) == is_public(path), f"{path} and the front disagree whether it needs a token"
        assert declared["/v1/plans/{signature}/activate", "POST"] == "operator"

    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            ("GET", "/v1/plans/{signature}", ROLES),
            ("POST", "/v1/plans", ("rank", "operator")),
            ("POST", "/v1/jobs/roles/attempts", ("rank", "operator")),
            ("POST", "/v1/jobs/roles/attempts/1/reports", ("rank", "operator")),
            ("GET", "/v1/plans", ("auditor", "operator")),
            ("GET", "/v1/plans/{signature}/request", ("auditor", "operator")),
            ("GET", "/v1/plans/{signature}/revisions", ("auditor", "operator")),
            ("GET", "/v1/jobs/roles/attempts", ("auditor", "operator")),
            ("GET", "/v1/events", ("auditor", "operator")),
            ("GET", "/v1/events/verify", ("auditor", "operator")),
            ("POST", "/v1/plans/{signature}/revisions", ("operator",)),
            ("POST", "/v1/plans/{signature}/activate", ("operator",)),
        ],
    )
    def test_a_role_may_do_what_it_is_for_and_nothing_else(self, guarded, signature, method, path, allowed):
        for role in ROLES:
            # An empty body: whoever is allowed gets as far as being told that it is not right.
            answer = guarded.call(role, method, path.format(signature=signature), headers=MSGPACK)
            if role in allowed:
                assert answer.status_code not in (401, 403), (role, answer.content)
            else:
                problem = unpack(answer.content)
                assert (answer.status_code, problem["type"]) == (403, "urn:bucketplan:problem:forbidden")
                assert problem["token"] == role
                assert "Use a token of that role" in problem["detail"]
                assert guarded.refusals()[-1]["reason"] == "role"

    def test_without_a_token_only_public_addresses_answer(self, guarded, signature):
        for path in ("/healthz", "/readyz", "/metrics", "/openapi.json"):
            assert guarded.call(None, "GET", path).status_code == 200
        for path in (f"/v1/plans/{signature}", "/v1/plans", "/v1/events", "/nothing"):
            answer = guarded.call(None, "GET", path, headers=MSGPACK)
            assert answer.status_code == 401
            assert answer.headers["WWW-Authenticate"] == 'Bearer realm="bucketplan"'
            assert "BUCKETPLAN_TOKEN" in unpack(answer.content)["detail"]

    def test_a_browser_is_sent_to_sign_in(self, guarded):
        answer = guarded.call(None, "GET", "/v1/plans?limit=1", headers={"Accept": "text/html"})
        assert (answer.status_code, answer.headers["Location"]) == (303, "/login?next=%2Fv1%2Fplans%3Flimit%3D1")


class TestTokens:
    def test_known_plans_come_from_memory_with_a_token_and_not_without(self, guarded, signature):
        path = f"/v1/plans/{signature}"
        before = guarded.server.metric("bucketplan_plan_hits_total", source="memory")
        answers = [guarded.call(token, "GET", path, headers=MSGPACK) for token in ("rank", "a-rank", "auditor")]
        assert {answer.status_code for answer in answers} == {200}
        assert guarded.server.metric("bucketplan_plan_hits_total", source="memory") == before + 3
        assert "x-request-id" not in answers[0].headers, "answered without routing"
        for token in (None, "unknown"):
            assert guarded.call(token, "GET", path, headers=MSGPACK).status_code == 401

    def test_expired_unknown_and_revoked_tokens_are_refused_and_logged(self, guarded, signature):
        make = make_token(guarded.server.database, "leaver", "auditor")
        guarded.secrets["leaver"] = make
        assert guarded.call("leaver", "GET", "/v1/plans").status_code == 200, "effective once the command returns"
        wait_until(lambda: guarded.call("short", "GET", "/v1/plans").status_code == 401)
        settings = load_settings(database=guarded.server.database, refresh_seconds=REFRESH_SECONDS)
        cli_tokens.revoke(settings, "leaver", reason="left the team")
        expected = {"short": "expired-token", "leaver": "revoked-token", "unknown": "unknown-token"}
        for token, reason in expected.items():
            counted = guarded.server.metric("bucketplan_access_refused_total", reason=reason)
            for path in (f"/v1/plans/{signature}", "/v1/events"):
                answer = guarded.call(token, "GET", path, headers=MSGPACK)
                assert answer.status_code == 401
                assert 'error="invalid_token"' in answer.headers["WWW-Authenticate"]
                refused = guarded.refusals()[-1]
                assert (refused["reason"], refused["path"]) == (reason, path)
                assert refused["token"] == (None if token == "unknown" else token)
            assert guarded.server.metric("bucketplan_access_refused_total", reason=reason) == counted + 2

    def test_names_are_actors_and_never_used_twice(self, guarded):
        for name in ("rank", "leaver-2", "leaver-2"):
            if name == "leaver-2" and "leaver-2" not in guarded.secrets:
                guarded.secrets[name] = make_token(guarded.server.database, name, "auditor")
                continue
            with pytest.raises(cli_tokens.TokenError, match="never used again"):
                make_token(guarded.server.database, name, "auditor")
        assert guarded.post("a-rank", "/v1/jobs/actors/attempts", open_body("k")).status_code == 201
        (opened,) = guarded.call("auditor", "GET", "/v1/events?job=team-a~actors").json()["events"]
        assert opened["actor"] == "a-rank"

    def test_making_and_revoking_are_events_and_the_chain_holds(self, guarded):
        events = guarded.call("auditor", "GET", "/v1/events?limit=1000").json()["events"]
        made = {event["body"]["name"]: event for event in events if event["kind"] == "token.created"}
        assert set(ROLES) | {"a-rank", "b-operator"} <= made.keys()
        assert made["a-rank"]["body"]["namespace"] == "team-a"
        assert made["a-rank"]["reason"] == "test"
        stored = hash_token(guarded.secrets["rank"].encode()).hex()
        assert stored not in json.dumps(events)
        assert guarded.call("auditor", "GET", "/v1/events/verify").json()["holds"]

    def test_no_secret_is_logged_or_stored(self, guarded, signature):
        for header in ("Authorization", "X-Unexpected"):
            value = f"Bearer {guarded.secrets['operator']}"
            httpx.get(f"{guarded.server.url}/v1/plans/{signature}", headers={header: value})
            httpx.post(f"{guarded.server.url}/v1/plans", headers={header: value}, content=b"\x00")
        httpx.get(f"{guarded.server.url}/v1/plans", headers={"Cookie": f"bucketplan_token={guarded.secrets['rank']}"})
        log = guarded.server.log.read_text()
        assert "access.refused" in log
        folder = Path(guarded.server.database).parent
        stored = b"".join(path.read_bytes() for path in folder.glob("bucketplan.db*") if path.is_file())
        for secret in guarded.secrets.values():
            assert secret not in log
            assert secret.encode() not in stored
        assert not list((folder / "bucketplan.db.inbox").iterdir()), "commands and answers are removed"

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({"role": "root"}, "--role: 'root' is none of rank, auditor, operator"),
            ({"name": "a b"}, "name 'a b'"),
            ({"name": "anonymous"}, "name 'anonymous'"),
            ({"namespace": "x~y"}, "namespace 'x~y'"),
            ({"expires": "soon"}, "--expires: 'soon'"),
            ({"expires": "2001-01-01"}, "in the past"),
            ({"expires": "0s"}, "in the past"),
            ({"expires": "999999w"}, "beyond the year 2262"),
            ({"expires": "2262-04-12"}, "beyond the year 2262"),
            ({"expires": "9999-12-31T23:59-23:59"}, "beyond the year 2262"),
        ],
    )
    def test_what_cannot_be_made_is_named(self, tmp_path, arguments, said):
        given = {"name": "n", "role": "rank", "namespace": None, "expires": None, **arguments}
        with pytest.raises(cli_tokens.TokenError, match=re.escape(said)):
            make_token(str(tmp_path / "db"), given.pop("name"), given.pop("role"), **given)

    @pytest.mark.parametrize("obeyed", ["\x1b[2J", "\x9b1m", "a\rb", "\u202eb", "\udcff"], ids=ascii)
    def test_nothing_that_a_terminal_obeys_comes_into_the_log(self, tmp_path, monkeypatch, obeyed):
        database = str(tmp_path / "db")
        settings = load_settings(database=database)
        make_token(database, "kept", "rank")
        with pytest.raises(cli_tokens.TokenError, match=r"reason: .* must hold no control characters"):
            cli_tokens.revoke(settings, "kept", reason=obeyed)
        with pytest.raises(cli_tokens.TokenError, match=r"name: .* must hold no control characters"):
            cli_tokens.revoke(settings, obeyed, reason="plain")
        monkeypatch.setenv("LOGNAME", obeyed)
        with pytest.raises(cli_tokens.TokenError, match=r"actor: .* must hold no control characters"):
            make_token(database, "other", "rank")
        assert [token.name for token in cli_tokens.list_tokens(settings)] == ["kept"]
        monkeypatch.undo()
        cli_tokens.revoke(settings, "kept", reason="one\n\ttwo")

    def test_a_database_may_hold_what_a_terminal_obeys_and_it_is_shown_escaped(self, tmp_path):
        database = str(tmp_path / "db")
        make_token(database, "plain", "rank")
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("UPDATE tokens SET name = ?, namespace = ?", ("a\x1b[2J", "[red]b\x9b1m"))
            connection.commit()
        listed = run_cli("token", "list", "--database", database).stdout
        assert r"a\x1b[2J" in listed
        assert r"[red]b\x9b1m" in listed
        found = run_cli("verify", "--database", database).stderr
        assert r"tokens[a\x1b[2J]" in found
        assert (listed + found).replace("\n", "").isprintable()

    def test_a_row_written_past_the_log_is_found(self, tmp_path):
        database = str(tmp_path / "bucketplan.db")
        for name in ("kept", "changed", "gone"):
            make_token(database, name, "rank")
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("UPDATE tokens SET role = 'operator' WHERE name = 'changed'")
            connection.execute("DELETE FROM tokens WHERE name = 'gone'")
            connection.execute(
                "INSERT INTO tokens (name, hash, role, created_ns) VALUES ('thief', ?, 'operator', 1)",
                (hash_token(b"x").hex(),),
            )
            connection.commit()
        done = run_cli("verify", "--database", database)
        assert done.returncode == 1
        assert "tokens[changed].role: is 'operator', event 2 says 'rank'" in done.stderr
        assert "tokens[gone]: is missing" in done.stderr
        assert "tokens[thief]: no event says that it was made" in done.stderr
        assert "tokens[kept]" not in done.stderr


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bucketplan_server", *arguments],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


class TestOpenServers:
    def test_loopback_is_open_until_the_first_token_and_closed_for_good(self, tmp_path):
        with running_server(tmp_path, refresh_seconds=REFRESH_SECONDS) as server:
            assert httpx.get(f"{server.url}/v1/plans").status_code == 200
            foreign = {"Origin": "https://evil.example", **MSGPACK}
            body = plan_body(small_request(1))
            assert httpx.post(f"{server.url}/v1/plans", content=body, headers=foreign).status_code == 403
            secret_file = tmp_path / "first.token"
            done = run_cli(
                "token", "create", "first", "--role", "auditor", "--database", server.database,
                "--output", str(secret_file),
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert secret_file.stat().st_mode & 0o777 == 0o600
            bearer = {"Authorization": f"Bearer {secret_file.read_text().strip()}"}
            assert httpx.get(f"{server.url}/v1/plans").status_code == 401
            assert httpx.get(f"{server.url}/v1/plans", headers=bearer).status_code == 200
            assert run_cli("token", "revoke", "first", "--database", server.database).returncode == 0
            assert httpx.get(f"{server.url}/v1/plans", headers=bearer).status_code == 401
            server.restart()
            assert httpx.get(f"{server.url}/v1/plans").status_code == 401, "revoking the last token opens nothing"
            listed = json.loads(run_cli("token", "list", "--json", "--database", server.database).stdout)
            assert [(row["name"], row["state"]) for row in listed] == [("first", "revoked")]

    @pytest.mark.parametrize(
        ("settings", "required"),
        [
            ({}, False),
            ({"require_tokens": True}, True),
            ({"host": "0.0.0.0"}, True),
            ({"host": "0.0.0.0", "allow_anonymous": True}, False),
        ],
    )
    def test_when_tokens_are_needed(self, settings, required):
        assert load_settings(**settings).needs_tokens is required

    def test_the_table_closes_with_any_token_that_ever_was(self):
        table = TokenTable(required=False)
        table.replace([])
        assert not table.required
        revoked = Token("r", hash_token(b"s"), "rank", None, 1, None, 2)
        table.replace([revoked])
        assert table.required
        assert table.valid(b"s") is None
        assert table.known(b"s") == revoked

    def test_what_is_remembered_of_a_header_ends_with_its_token(self, monkeypatch):
        table = TokenTable(required=True)
        ends_soon = Token("r", hash_token(b"s"), "rank", None, 1, 1_000, None)
        table.replace([ends_soon])
        now = 999
        monkeypatch.setattr("bucketplan_server.access.tokens.time.time_ns", lambda: now)
        assert table.admits(b"Bearer s")
        assert table.admits(b"Bearer s")
        assert not table.admits(b"Bearer t")
        assert not table.admits(b"Basic s")
        now = 1_000
        assert not table.admits(b"Bearer s")
        now = 999
        table.replace([replace(ends_soon, revoked_ns=2)])
        assert not table.admits(b"Bearer s")


class TestCookies:
    def test_a_cookie_reads_and_changes_only_from_our_own_pages(self, guarded, signature):
        cookie = {"Cookie": f"bucketplan_token={guarded.secrets['operator']}"}
        assert guarded.call(None, "GET", "/v1/plans", headers=cookie).status_code == 200
        path = f"/v1/plans/{signature}/activate"
        body = {"reason": "cookie", "revision": 1}
        host = guarded.server.url.partition("//")[2]
        for evidence, status in (
            ({}, 403),
            ({"Sec-Fetch-Site": "cross-site"}, 403),
            ({"Sec-Fetch-Site": "same-site"}, 403),
            ({"Origin": "https://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Sec-Fetch-Site": "same-origin"}, 200),
            ({"Origin": f"http://{host}"}, 200),
        ):
            assert guarded.post(None, path, body, **cookie, **evidence).status_code == status, evidence
        bearer = {"Authorization": f"Bearer {guarded.secrets['operator']}"}
        assert guarded.post(None, path, body, **bearer).status_code == 200, "programs send no such headers"


class TestNamespaces:
    def test_a_token_that_ends_while_a_call_waits_gets_no_answer(self, guarded):
        guarded.post("rank", "/v1/jobs/poll/attempts", open_body("a"))
        job, plan = "/v1/jobs/poll/attempts/1", f"/v1/plans/{small_request(901).signature}"
        # Once it counts as stalled, nothing changes any more by itself.
        wait_until(lambda: guarded.call("auditor", "GET", job).headers["etag"].endswith('-1"'))
        seen = guarded.call("auditor", "GET", job).headers["etag"]
        for path, headers, gauge in (
            (job, {"If-None-Match": seen}, "bucketplan_status_waiters"),
            (plan, {}, "bucketplan_post_waiters"),
        ):
            name = f"waits-{path[4]}"
            bearer = {"Authorization": f"Bearer {make_token(guarded.server.database, name, 'auditor')}"}
            wait_until(lambda bearer=bearer: httpx.get(guarded.server.url + job, headers=bearer).status_code == 200)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(
                    httpx.get, f"{guarded.server.url}{path}?wait=8", headers={**headers, **bearer}, timeout=60
                )
                # A call that arrives behind the revocation would be refused at once, which is another answer.
                wait_for_gauge(guarded.server, gauge)
                cli_tokens.revoke(load_settings(database=guarded.server.database), name, reason="test")
                wait_until(lambda bearer=bearer: httpx.get(guarded.server.url + job, headers=bearer).status_code == 401)
                answer = waiting.result()
            assert answer.status_code == 401
            assert "while the call waited" in answer.json()["detail"]
            assert guarded.refusals()[-1]["reason"] == "ended-token"

    def test_a_token_that_ends_while_a_post_waits_for_its_plan_gets_no_answer(self, tmp_path):
        database = str(tmp_path / "bucketplan.db")
        secrets = {name: make_token(database, name, "rank") for name in ("leaver", "stays")}
        settings = load_settings(database=database)
        started = {"database": database, "refresh_seconds": REFRESH_SECONDS, "planning_seconds": 4.0}
        with running_server(tmp_path, **started) as server, ThreadPoolExecutor(1) as pool:
            guarded, body = Guarded(server, secrets), plan_body(small_request(902))
            waiting = pool.submit(guarded.call, "leaver", "POST", "/v1/plans", content=body, headers=MSGPACK)
            wait_until(lambda: server.metric("bucketplan_waiters") == 1)
            cli_tokens.revoke(settings, "leaver", reason="test")
            assert waiting.result().status_code == 401
            assert guarded.call("stays", "POST", "/v1/plans", content=body, headers=MSGPACK).status_code == 200

    def test_of_two_credentials_none_is_guessed(self, guarded, signature):
        bearers = [("Authorization", f"Bearer {guarded.secrets[name]}") for name in ("rank", "auditor")]
        path = f"/v1/plans/{signature}"
        twice = httpx.get(f"{guarded.server.url}{path}", headers=[*bearers, *MSGPACK.items()])
        assert (twice.status_code, unpack(twice.content)["path"]) == (400, "Authorization")
        cookie = {"Cookie": f"bucketplan_token={guarded.secrets['auditor']}"}
        assert httpx.get(f"{guarded.server.url}{path}", headers=cookie).status_code == 200
        basic = httpx.get(f"{guarded.server.url}{path}", headers={**cookie, "Authorization": "Basic dTpw"})
        assert basic.status_code == 401

    def test_jobs_of_one_name_are_two_in_two_namespaces(self, guarded, signature):
        path = "/v1/jobs/llama/attempts"
        for team in ("a", "b"):
            opened = guarded.post(f"{team}-rank", path, open_body(team))
            assert (opened.status_code, unpack(opened.content)["attempt"]) == (201, 1)
            assert unpack(opened.content)["epoch"]["job"] == "llama"
        assert guarded.post("a-rank", f"{path}/1/reports", report_body(signature)).status_code == 200
        seen = {token: guarded.call(token, "GET", f"{path}/1").json() for token in ("a-auditor", "b-auditor")}
        assert [state["job"] for state in seen.values()] == ["llama", "llama"]
        listed = {
            token: [row["signature"] for row in guarded.call(token, "GET", "/v1/plans").json()["plans"]]
            for token in ("a-auditor", "b-auditor", "auditor")
        }
        assert listed == {"a-auditor": [signature], "b-auditor": [], "auditor": listed["auditor"]}
        assert signature in listed["auditor"]
        assert guarded.call("auditor", "GET", path).json()["attempts"] == [], "unscoped, it names no namespace"
        assert len(guarded.call("auditor", "GET", "/v1/jobs/team-a~llama/attempts").json()["attempts"]) == 1

    def test_another_namespaces_token_is_refused_and_logged(self, guarded):
        for method, path, token in (
            ("POST", "/v1/jobs/team-a~llama/attempts/1/reports", "b-rank"),
            ("POST", "/v1/jobs/team-a~llama/attempts", "b-rank"),
            ("GET", "/v1/jobs/team-a~llama/attempts/1", "b-auditor"),
            ("GET", "/v1/events?job=team-a~llama", "b-operator"),
        ):
            body = report_body(None) if path.endswith("reports") else open_body("x")
            content = pack(body) if method == "POST" else None
            answer = guarded.call(token, method, path, content=content, headers=MSGPACK)
            assert answer.status_code == 403
            assert "team-a" in unpack(answer.content)["detail"]
            refused = guarded.refusals()[-1]
            assert (refused["reason"], refused["token"]) == ("namespace", token)

    def test_events_are_those_of_the_namespace(self, guarded, signature):
        for token, others in (("a-auditor", "team-b"), ("b-auditor", "team-a")):
            events = guarded.call(token, "GET", "/v1/events?limit=1000").json()["events"]
            assert events
            assert others not in json.dumps(events)
            assert not [event for event in events if event["kind"].startswith("token.")]
        assert guarded.call("a-auditor", "GET", "/v1/events/verify").status_code == 403

    def test_figures_that_every_namespace_takes_are_not_one_namespaces_to_change(self, guarded):
        body = {"profile": measured("shared"), "reason": "r"}
        answers = [guarded.call(token, "PUT", "/v1/profiles/shared", json=body) for token in ("a-operator", "operator")]
        assert [answer.status_code for answer in answers] == [403, 201]
        assert "without one" in answers[0].json()["detail"]
        assert guarded.call("a-auditor", "GET", "/v1/profiles/shared").json()["version"] == 1

    def test_who_changed_a_shared_plan_and_why_stays_in_the_namespace(self, guarded, signature):
        secret = "for the launch of llama"
        body = {"reason": secret, "options": {"strategy": "none"}}
        assert guarded.post("a-operator", f"/v1/plans/{signature}/revisions", body).status_code == 201
        for team in ("a", "b"):
            guarded.post(f"{team}-rank", "/v1/jobs/shares/attempts", open_body("a"))
            guarded.post(f"{team}-rank", "/v1/jobs/shares/attempts/1/reports", report_body(signature))
        paths = (f"/v1/plans/{signature}/revisions", "/v1/events?limit=1000", f"/plans/{signature}", "/events")
        for path in paths:
            texts = {name: guarded.call(name, "GET", path) for name in ("a-auditor", "b-auditor", "auditor")}
            assert {answer.status_code for answer in texts.values()} == {200}
            assert [secret in answer.text for answer in texts.values()] == [True, False, True], path
            assert "a-operator" not in texts["b-auditor"].text

    def test_activation_stays_in_the_namespace(self, guarded, signature):
        added = guarded.post(
            "a-operator", f"/v1/plans/{signature}/revisions", {"reason": "r", "options": {"strategy": "none"}}
        )
        number = unpack(added.content)["revision"]
        path = f"/v1/plans/{signature}/activate"
        everyone = guarded.post("a-operator", path, {"reason": "r", "revision": number})
        assert everyone.status_code == 403
        assert "without one" in unpack(everyone.content)["detail"]
        mine = guarded.post("a-operator", path, {"reason": "r", "revision": number, "job": "llama"})
        assert (mine.status_code, unpack(mine.content)["job"]) == (200, "llama")
        epochs = {}
        for team in ("a", "b"):
            opened = unpack(guarded.post(f"{team}-rank", "/v1/jobs/llama/attempts", open_body(f"{team}2")).content)
            epochs[team] = opened["epoch_id"]
            assert len(opened["overrides"]) == (1 if team == "a" else 0)
        rows = guarded.call("b-auditor", "GET", f"/v1/plans/{signature}/revisions").json()["revisions"]
        assert [row["active_for"] for row in rows if row["revision"] == number] == [[]]
        assert guarded.call("a-rank", "GET", f"/v1/epochs/{epochs['a']}").status_code == 200
        assert guarded.call("b-rank", "GET", f"/v1/epochs/{epochs['a']}").status_code == 404
        assert guarded.call("auditor", "GET", "/v1/events/verify").json()["holds"]


class TestTls:
    def test_https_with_flags_and_a_client_that_trusts_the_authority(self, tmp_path):
        files = make_tls_files(tmp_path)
        tls = {"tls_certificate": str(files.certificate), "tls_key": str(files.key)}
        with running_server(tmp_path, **tls) as server:
            request = small_request(3)
            with PlanClient(server.url, ca_file=str(files.authority), deadline_s=30) as client:
                assert client.plan(request).digest
            with PlanClient(server.url, deadline_s=1) as client, pytest.raises(ServerUnreachable, match="certificate"):
                client.known_plan(request.signature)
            assert f'"url": "{server.url}"' in server.log.read_text()

    def test_files_that_do_not_do_are_named(self, tmp_path):
        files = make_tls_files(tmp_path)
        missing = str(tmp_path / "none.pem")
        for certificate, key, said in (
            (missing, str(files.key), f"--tls-certificate .BUCKETPLAN_TLS_CERTIFICATE.: {missing} cannot be read"),
            (str(files.certificate), missing, f"--tls-key .BUCKETPLAN_TLS_KEY.: {missing} cannot be read"),
            (str(files.key), str(files.certificate), "are no PEM certificate and its unencrypted key"),
        ):
            with pytest.raises(SettingsError, match=said):
                check_tls(load_settings(tls_certificate=certificate, tls_key=key))
        done = run_cli("serve", "--tls-certificate", missing, "--tls-key", missing)
        assert done.returncode == 2
        assert "cannot be read" in done.stderr


@pytest.mark.postgres
def test_tokens_reach_every_replica_within_the_refresh(tmp_path):
    with running_postgres() as postgres:
        database = postgres.new_database()
        folders = [tmp_path / name for name in ("one", "two")]
        for folder in folders:
            folder.mkdir()
        with (
            running_server(folders[0], database=database, refresh_seconds=REFRESH_SECONDS) as one,
            running_server(folders[1], database=database, refresh_seconds=REFRESH_SECONDS) as two,
        ):
            bearer = {"Authorization": f"Bearer {make_token(database, 'ops', 'operator', namespace='t')}"}

            def statuses(headers: dict[str, str]) -> set[int]:
                return {httpx.get(f"{server.url}/v1/plans", headers=headers).status_code for server in (one, two)}

            wait_until(lambda: statuses({}) == {401})
            assert statuses(bearer) == {200}
            assert httpx.get(f"{two.url}/v1/events", headers=bearer).json() == {"events": []}
            cli_tokens.revoke(load_settings(database=database), "ops", reason="test")
            wait_until(lambda: statuses(bearer) == {401})


def test_no_source_imports_an_unsafe_serializer_or_what_uses_one():
    unsafe = re.compile(r"^\s*(?:import|from)\s+(?:pickle|marshal|shelve|dill|cloudpickle)\b", re.MULTILINE)
    carriers = re.compile(r"\bmultiprocessing\b|\bProcessPoolExecutor\b")
    sources = [path for top in ("core", "server", "client") for path in (ROOT / top).rglob("*.py")]
    assert len(sources) > 100
    assert [str(path) for path in sources if unsafe.search(path.read_text())] == []
    assert [str(path) for path in (ROOT / "server").rglob("*.py") if carriers.search(path.read_text())] == []


def test_the_server_and_its_planners_work_where_pickle_is_an_error(tmp_path):
    environment = {"PYTHONPATH": os.pathsep.join([str(FAULTS), *sys.path]), "TEST_NO_PICKLE": "1"}
    for use in ("pickle.loads(b'')", "pickle.Unpickler(None)", "multiprocessing.reduction.ForkingPickler.dumps(1)"):
        command = [sys.executable, "-c", f"import multiprocessing.reduction, pickle; {use}"]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
        assert "pickle is used" in done.stderr
    hardware = Hardware(
        flops_per_us=(("matmul:bfloat16", 1_000_000),),
        memory_bytes_per_us=1_000_000,
        copy_bytes_per_us=1_000_000,
        launch_ns=1_000,
        slowdown_permille=0,
        collectives=(CollectiveCost("fsdp", "all_gather", (Protocol(10_000, 100_000),)),),
    )
    request = small_request(options=Options(strategy="size", planner="size/1", hardware=hardware))
    with running_server(tmp_path, environment=environment) as server, httpx.Client(base_url=server.url) as client:
        plan = f"/v1/plans/{request.signature}"
        posted = client.post("/v1/plans", content=plan_body(request, profile_of(request)), headers=MSGPACK)
        assert posted.status_code == 201
        body = {"profile": None, "request": request.to_wire(), "signature": request.signature}
        as_json = {"Content-Type": "application/json"}
        assert client.post("/v1/plans", content=to_json(body), headers=as_json).status_code == 200
        revised = client.post(f"{plan}/revisions", json={"options": {"strategy": "none"}, "reason": "test"})
        assert revised.status_code == 201
        diff = f"/v1/diff?a={request.signature}&b={request.signature}&revision_b=2"
        page = f"/plans/{request.signature}"
        reads = (f"{plan}/explain", f"{plan}/trace", diff, page, f"{page}/buckets/0", "/v1/events/verify?replay=true")
        for path in reads:
            answer = client.get(path)
            assert answer.status_code == 200, (path, answer.text)
        assert server.metric("bucketplan_planner_crashes_total") == 0
