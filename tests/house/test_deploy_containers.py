"""The image, the compose file and the manifests: accepted by the validators of their users, and true of the server."""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import kubernetes_validate
import pytest
import trustme

from bucketplan_server.settings import SECRETS_VARIABLE, Settings
from tests.support.deploy import (
    DEPLOY,
    base_manifests,
    compose,
    copied_sources,
    dockerfile,
    load_yaml,
    seconds,
    settings_of,
    stopping_seconds,
)
from tests.support.paths import ROOT
from tests.support.server import free_port, running_server
from tests.support.tools import tool

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
KUBERNETES_VERSIONS = ["1.31", kubernetes_validate.latest_version()]
"""The oldest release in which every field that is used is stable, and the newest that the validator knows."""


def run(*command: str | Path, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options
    )  # fmt: skip


class TestImage:
    def test_hadolint_has_nothing_to_say(self):
        done = run(tool("hadolint", package="hadolint"), DEPLOY / "docker" / "Dockerfile")
        assert done.returncode == 0, done.stdout

    def test_everything_copied_exists_and_reaches_the_builder(self):
        ignore = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
        assert "*" in ignore, "nothing reaches the builder unless it is named"
        for source in copied_sources():
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignore, source

    def test_bases_are_pinned_and_of_the_python_that_constraints_are_for(self):
        bases = [instruction.words[0] for instruction in dockerfile() if instruction.name == "FROM"]
        assert len(bases) == 2
        for base in bases:
            assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", base)

    def test_it_runs_as_a_numbered_user_without_privileges(self):
        (user,) = [instruction.text for instruction in dockerfile() if instruction.name == "USER"]
        pod = base_manifests()["Deployment"]["spec"]["template"]["spec"]["securityContext"]
        assert user == f"{pod['runAsUser']}:{pod['runAsGroup']}"
        assert pod["runAsUser"] > 0

    def test_it_installs_what_the_torch_free_environment_of_the_tests_holds(self):
        (install,) = [i.words for i in dockerfile() if i.name == "RUN" and "pip install" in i.text]
        assert install[install.index("install") + 1 :] == ["--constraint", "constraints.txt", ".[server]"]

    def test_its_context_builds_a_whole_wheel(self, tmp_path):
        context = tmp_path / "context"
        for source in copied_sources():
            target = context / source
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, target)
        done = run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, context)
        assert done.returncode == 0, done.stderr
        (wheel,) = tmp_path.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            packed = set(archive.namelist())
            (metadata,) = [name for name in packed if name.endswith("METADATA")]
            assert "# bucketplan" in archive.read(metadata).decode(), "the description on an index is the README"
        expected = {
            file.relative_to(context / root).as_posix()
            for root in ("core", "server", "client")
            for file in (context / root / f"bucketplan_{root}").rglob("*")
            if file.is_file()
        }
        assert expected <= packed, "migrations, templates, static files and py.typed are in the wheel too"
        for package in ("core", "server", "client"):
            assert f"bucketplan_{package}/py.typed" in packed

    def test_the_entry_point_serves_and_the_health_check_tells(self, torch_free_bin, tmp_path):
        (entry,) = [i.words for i in dockerfile() if i.name == "ENTRYPOINT"]
        (command,) = [i.words for i in dockerfile() if i.name == "CMD"]
        assert command == ["serve"]
        with running_server(tmp_path, command=(str(torch_free_bin / entry[0]),)) as server:
            # python:slim has nothing but the standard library; -S and -E leave this one with as little.
            check = [sys.executable, "-ES", DEPLOY / "docker" / "healthcheck.py"]
            environment = {"BUCKETPLAN_PORT": str(server.port), "http_proxy": "http://127.0.0.1:9"}
            assert run(*check, env=environment).returncode == 0
            assert run(*check, "/healthz", env=environment).returncode == 0
            server.kill()
            failed = run(*check, env=environment)
            assert failed.returncode == 1
            assert "/readyz" in failed.stderr

    def test_the_health_check_speaks_https_where_the_server_does(self, tmp_path):
        certificate = trustme.CA().issue_cert("plans.example")
        certificate.private_key_pem.write_to_path(tmp_path / "tls.key")
        certificate.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
        files = {name: str(tmp_path / f"tls.{end}") for name, end in (("tls_certificate", "crt"), ("tls_key", "key"))}
        port = free_port()
        variables = {f"BUCKETPLAN_{name.upper()}": value for name, value in files.items()}
        variables |= {"BUCKETPLAN_PORT": str(port), "BUCKETPLAN_DATABASE": str(tmp_path / "plans.db")}
        server = subprocess.Popen(
            [sys.executable, "-m", "bucketplan_server", "serve"], env=os.environ | variables, stderr=subprocess.DEVNULL
        )
        try:
            deadline = time.monotonic() + 60
            while run(sys.executable, "-ES", DEPLOY / "docker" / "healthcheck.py", env=variables).returncode != 0:
                assert server.poll() is None
                assert time.monotonic() < deadline, "the health check never passed"
                time.sleep(0.2)
        finally:
            server.kill()
            server.wait()


class TestCompose:
    def test_it_follows_the_compose_specification(self):
        command = Path(sys.executable).with_name("check-jsonschema")
        done = run(command, "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose" / "compose.yaml")
        assert done.returncode == 0, done.stdout + done.stderr

    def test_what_it_waits_for_has_a_health_check(self):
        services = compose()["services"]
        for service in services.values():
            for name, wanted in service.get("depends_on", {}).items():
                assert wanted == {"condition": "service_healthy"}
                # Replicas have that of their image.
                assert "healthcheck" in services[name] or "build" in services[name]

    def test_secrets_are_files_and_no_values(self):
        document = compose()
        for service in document["services"].values():
            for entry in service.get("secrets", []):
                source = entry if isinstance(entry, str) else entry["source"]
                assert document["secrets"][source]["file"].startswith("./secrets/")
        text = (DEPLOY / "compose" / "compose.yaml").read_text()
        assert not re.search(r"(?i)password: *\S|://[^/\s]*:[^/\s]*@", text)

    @pytest.mark.parametrize("name", ["replica-1", "replica-2"])
    def test_a_replica_is_hardened_and_has_time_to_drain(self, name):
        replica = compose()["services"][name]
        assert replica["read_only"]
        assert replica["cap_drop"] == ["ALL"]
        assert replica["image"] == f"bucketplan-server:{VERSION}"
        (secret,) = replica["secrets"]
        assert secret["target"] == "bucketplan_database"
        settings = settings_of(replica["environment"])
        assert seconds(replica["stop_grace_period"]) >= stopping_seconds(settings)
        assert int(replica["mem_limit"].removesuffix("g")) * 2**30 >= needed_memory(settings)

    def test_the_proxy_knows_the_replicas_by_name(self):
        services = compose()["services"]
        named = re.findall(r"^\s+server (\S+):8321 ", (DEPLOY / "nginx" / "bucketplan.conf").read_text(), re.MULTILINE)
        aliases = [
            alias
            for service in services.values()
            if isinstance(service["networks"], dict)
            for alias in service["networks"]["service"]["aliases"]
        ]
        assert sorted(named) == sorted(aliases)
        for mount in services["proxy"]["volumes"]:
            source = mount.partition(":")[0]
            assert source.startswith("./tls/") or (DEPLOY / "compose" / source).is_file()


class TestKubernetes:
    @pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
    @pytest.mark.parametrize("kind", base_manifests())
    def test_a_manifest_follows_the_schema(self, kind, version):
        kubernetes_validate.validate(base_manifests()[kind], version, strict=True)

    def test_the_schema_notices_a_mistake(self):
        wrong = base_manifests()["Deployment"]
        wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, KUBERNETES_VERSIONS[-1], strict=True)

    def test_the_example_overlay_builds_into_valid_manifests(self, tmp_path):
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            pytest.skip("kubectl is not installed, and no Debian package brings one that is new enough")
        done = run(kubectl, "kustomize", DEPLOY / "kubernetes" / "overlays" / "example")
        assert done.returncode == 0, done.stderr
        (tmp_path / "built.yaml").write_text(done.stdout)
        built = kubernetes_validate.utils.resources_from_file(str(tmp_path / "built.yaml"))
        for resource in built:
            kubernetes_validate.validate(resource, KUBERNETES_VERSIONS[-1], strict=True)
        by_kind = {resource["kind"]: resource for resource in built}
        pod = by_kind["Deployment"]["spec"]["template"]["spec"]
        check_pod(pod, settings_of(by_kind["ConfigMap"]["data"]))
        assert pod["containers"][0]["envFrom"] == [{"configMapRef": {"name": by_kind["ConfigMap"]["metadata"]["name"]}}]

    def test_the_base_fits_the_server(self):
        check_pod(base_manifests()["Deployment"]["spec"]["template"]["spec"], settings_of(base_settings()))

    def test_settings_and_secrets_reach_the_server(self):
        pod = base_manifests()["Deployment"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert base_settings()[SECRETS_VARIABLE] == mounts["secrets"]
        assert {volume["name"] for volume in pod["volumes"]} == set(mounts)

    def test_the_network_lets_in_to_the_port_of_the_server_and_out_to_its_database(self):
        (container,) = base_manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
        (port,) = container["ports"]
        assert port["containerPort"] == settings_of(base_settings()).port
        rules = base_manifests()["NetworkPolicy"]["spec"]
        assert [entry["port"] for rule in rules["ingress"] for entry in rule["ports"]] == [port["name"]]
        assert base_manifests()["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
        assert {entry["port"] for rule in rules["egress"] for entry in rule["ports"]} == {53, 5432}

    def test_a_drain_of_nodes_never_takes_every_replica(self):
        budget = base_manifests()["PodDisruptionBudget"]["spec"]
        assert budget["maxUnavailable"] < base_manifests()["Deployment"]["spec"]["replicas"]
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow", "what is not ready must not hold up a drain"

    def test_everything_selects_the_pods_of_the_deployment(self):
        manifests = base_manifests()
        labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
        for selector in (
            manifests["Deployment"]["spec"]["selector"]["matchLabels"],
            manifests["Service"]["spec"]["selector"],
            manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
            manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
            *(
                spread["labelSelector"]["matchLabels"]
                for spread in manifests["Deployment"]["spec"]["template"]["spec"]["topologySpreadConstraints"]
            ),
        ):
            assert selector
            assert selector.items() <= labels


def base_settings() -> dict[str, str]:
    (generator,) = load_yaml(DEPLOY / "kubernetes" / "base" / "kustomization.yaml")["configMapGenerator"]
    return dict(literal.split("=", 1) for literal in generator["literals"])


def needed_memory(settings: Settings) -> int:
    """Bytes of the serving process with its plans, and of every planning process at its most."""
    return 512 * 2**20 + settings.memory_cache_bytes + settings.planner_processes * settings.planner_memory_bytes


def check_pod(pod, settings: Settings) -> None:
    """Time to stop, time to be noticed, memory and rights fit the settings."""
    (container,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] >= stopping_seconds(settings)
    readiness = container["readinessProbe"]
    assert (
        settings.drain_seconds
        >= readiness["periodSeconds"] * readiness["failureThreshold"] + readiness["timeoutSeconds"]
    ), "new connections must end before the replica stops taking them"
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800, "a migration of large tables is not cut"
    limit = container["resources"]["limits"]["memory"]
    assert int(limit.removesuffix("Gi")) * 2**30 >= needed_memory(settings)
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert [container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")] == [
        "/healthz",
        "/healthz",
        "/readyz",
    ]
