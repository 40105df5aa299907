"""The files of docker/ pass the tools that check them, and both images run where a Docker engine answers."""

import functools
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement

from milvus_hubness import NNN, CorrectionConfig, HubnessClient, QueryBank
from milvus_hubness.serve import ConfigFile
from milvus_hubness.serve.worker import ServiceMetrics
from tests.servers import CurrentMilvus, free_ports

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
KUBERNETES = sorted((DOCKER / "kubernetes").glob("*.yaml"))
YAML_RULES = "{extends: default, rules: {line-length: {max: 110}, document-start: disable}}"


def passes(tool, *arguments):
    command = Path(sys.executable).with_name(tool)
    done = subprocess.run([command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


def of_kind(kind):
    return [each for path in KUBERNETES for each in documents(path) if each["kind"] == kind]


def test_the_image_passes_hadolint():
    passes("hadolint", "--failure-threshold", "style", DOCKER / "Dockerfile")


def test_jobs_is_built_on_client_and_by_default():
    stages = re.findall(r"^FROM (\S+) AS (\w+)$", DOCKERFILE, re.MULTILINE)
    assert stages == [("python:${PYTHON}", "build"), ("python:${PYTHON}", "client"), ("client", "jobs")]
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    assert compose["services"]["hubness"]["build"]["target"] == "jobs"


def test_the_image_installs_extras_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = [Requirement(name) for name in re.findall(r"'(milvus-hubness\[.*?\])'", DOCKERFILE)]
    assert [sorted(each.extras) for each in installed] == [["serve"], ["gpu", "serve"]]
    assert {extra for each in installed for extra in each.extras} <= set(extras)


def test_all_yaml_passes_yamllint():
    passes("yamllint", "--strict", "-d", YAML_RULES, DOCKER)


def test_compose_fits_its_schema():
    passes("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DOCKER / "compose.yaml")


def test_kubernetes_would_take_the_manifests():
    passes("kubernetes-validate", "--strict", *KUBERNETES)


def test_no_job_runs_twice_and_the_service_once():
    [job] = of_kind("CronJob")
    assert job["spec"]["concurrencyPolicy"] == "Forbid"
    [service] = of_kind("Deployment")
    assert (service["spec"]["replicas"], service["spec"]["strategy"]) == (1, {"type": "Recreate"})


@pytest.mark.parametrize("kind", ["CronJob", "Deployment"])
def test_pods_are_bounded_and_have_no_rights(kind):
    [owner] = of_kind(kind)
    spec = owner["spec"]["jobTemplate"]["spec"] if kind == "CronJob" else owner["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert f"USER {pod['securityContext']['runAsUser']}:" in DOCKERFILE
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert {"requests", "limits"} == set(container["resources"])


def test_probes_ask_what_the_service_answers():
    [service] = of_kind("Deployment")
    [container] = service["spec"]["template"]["spec"]["containers"]
    probes = {name: probe["httpGet"]["path"] for name, probe in container.items() if name.endswith("Probe")}
    assert probes == {"livenessProbe": "/healthz", "readinessProbe": "/readyz", "startupProbe": "/healthz"}


def test_the_configurations_are_right(tmp_path):
    [given] = of_kind("ConfigMap")
    shipped = tmp_path / "hubness.toml"
    shipped.write_text(given["data"]["hubness.toml"])
    for path in (DOCKER / "hubness.toml", shipped):
        assert ConfigFile(path).config.http.listen == "0.0.0.0:9108"


def test_prometheus_asks_the_service_for_metrics_that_it_has():
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    scraped = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    for job in scraped:
        [target] = job["static_configs"][0]["targets"]
        assert target.split(":")[0] in compose["services"]
    asked = set(re.findall(r"milvus_hubness_\w+", (DOCKER / "rules.yml").read_text()))
    metrics = ServiceMetrics()
    metrics.watch(ConfigFile(DOCKER / "hubness.toml").config.collection[0])
    there = set(re.findall(r"^# HELP (\w+)", metrics.text(ready=False), re.MULTILINE))
    assert asked
    assert asked <= there


def test_ports_are_open_to_this_machine_only():
    for name, service in yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


@pytest.fixture(scope="module")
def build():
    """Build a target and return the id of its image."""
    if reason := CurrentMilvus.unavailable() or (None if shutil.which("docker") else "no docker command"):
        pytest.skip(reason)
    command = ["docker", "build", "-q", "-f", DOCKER / "Dockerfile", ROOT, "--target"]
    return functools.cache(lambda target: output([*command, target]))


def output(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.long
def test_jobs_adds_layers_to_client_and_neither_runs_as_root(build):
    images = [json.loads(output(["docker", "inspect", build(target)]))[0] for target in ("client", "jobs")]
    assert [image["Config"]["User"] for image in images] == ["10001:10001"] * 2
    client, jobs = (image["RootFS"]["Layers"] for image in images)
    assert jobs[: len(client)] == client
    assert images[0]["Size"] < images[1]["Size"] / 2


@pytest.mark.slow
@pytest.mark.long
def test_the_client_image_searches_without_torch(build, served_uri):
    rng = np.random.default_rng(0)
    items, bank = (rng.standard_normal((count, 8)).astype(np.float32) for count in (64, 32))
    with closing(HubnessClient(served_uri)) as client:
        correction = CorrectionConfig(QueryBank(bank), NNN(8))
        client.create_collection("in_docker", dimension=8, metric_type="IP", hubness=correction)
        client.insert("in_docker", [{"id": row, "vector": vector} for row, vector in enumerate(items)])
        client.flush("in_docker")
        [hits] = client.search("in_docker", bank[:1], limit=5, consistency_level="Strong")
    script = f"""
import importlib.util, json, sys
from milvus_hubness import HubnessClient
heavy = [name for name in ("torch", "sklearn", "pyarrow", "faiss", "scipy") if importlib.util.find_spec(name)]
client = HubnessClient({served_uri!r})
[hits] = client.search("in_docker", {bank[:1].tolist()}, limit=5, consistency_level="Strong")
print(json.dumps([heavy, [hit["id"] for hit in hits]]))
"""
    command = ["docker", "run", "--rm", "--read-only", "--network", "host", "--entrypoint", "python", build("client")]
    assert json.loads(output([*command, "-c", script])) == [[], [hit["id"] for hit in hits]]
    command = ["docker", "run", "--rm", "--read-only", "--network", "host", build("client")]
    status = json.loads(output([*command, "status", "in_docker", "--uri", served_uri, "--json"]))
    assert status["rows"] == 64
    refused = [*command, "refresh", "in_docker", "--uri", served_uri]
    done = subprocess.run(refused, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
@pytest.mark.long
def test_the_jobs_image_says_what_is_wrong_with_its_configuration(build, tmp_path):
    (tmp_path / "hubness.toml").write_text("[[collection]]\n")
    command = ["docker", "run", "--rm", "-v", f"{tmp_path}:/etc/milvus-hubness:ro", build("jobs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "/etc/milvus-hubness/hubness.toml:1: collection 1, name: is missing\n")


@pytest.mark.slow
@pytest.mark.long
def test_the_jobs_image_serves_and_ends_on_sigterm(build, tmp_path):
    """Without a database it is alive, and not ready."""
    [port] = free_ports(1)
    text = '[server]\nuri = "http://127.0.0.1:9"\n[http]\nlisten = "0.0.0.0:9108"\n[[collection]]\nname = "a"\n'
    (tmp_path / "hubness.toml").write_text(text)
    folder = f"{tmp_path}:/etc/milvus-hubness:ro"
    command = ["docker", "run", "-d", "--rm", "--read-only", "--tmpfs", "/tmp", "-v", folder]
    container = output([*command, "-p", f"127.0.0.1:{port}:9108", build("jobs")])
    try:
        for _ in range(600):
            try:
                answer = urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1)
                break
            except OSError:
                time.sleep(0.1)
        assert answer.status == 200
        done = subprocess.run(["docker", "stop", "-t", "20", container], capture_output=True, check=False)
        assert done.returncode == 0
    finally:
        subprocess.run(["docker", "rm", "-f", container], capture_output=True, check=False)
