"""What docker/ holds is sound by the tools that check such files, and runs where a Docker engine answers."""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml

from milvus_hubness.serve import ConfigFile
from milvus_hubness.serve.worker import ServiceMetrics
from tests.servers import CurrentMilvus, free_ports

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
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
    assert f"USER {pod['securityContext']['runAsUser']}:" in (DOCKER / "Dockerfile").read_text()
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
def image():
    if reason := CurrentMilvus.unavailable() or (None if shutil.which("docker") else "no docker command"):
        pytest.skip(reason)
    command = ["docker", "build", "-q", "-f", DOCKER / "Dockerfile", ROOT]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.long
def test_the_image_is_not_run_by_root_and_tells_what_is_wrong(image, tmp_path):
    told = subprocess.run(["docker", "inspect", image], capture_output=True, text=True, check=True).stdout
    assert json.loads(told)[0]["Config"]["User"] == "10001:10001"
    (tmp_path / "hubness.toml").write_text("[[collection]]\n")
    command = ["docker", "run", "--rm", "-v", f"{tmp_path}:/etc/milvus-hubness:ro", image]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "/etc/milvus-hubness/hubness.toml:1: collection 1, name: is missing\n")


@pytest.mark.slow
@pytest.mark.long
def test_the_image_serves_and_ends_when_told_to(image, tmp_path):
    """Without a database it is alive, and not ready."""
    [port] = free_ports(1)
    text = '[server]\nuri = "http://127.0.0.1:9"\n[http]\nlisten = "0.0.0.0:9108"\n[[collection]]\nname = "a"\n'
    (tmp_path / "hubness.toml").write_text(text)
    folder = f"{tmp_path}:/etc/milvus-hubness:ro"
    command = ["docker", "run", "-d", "--rm", "--read-only", "--tmpfs", "/tmp", "-v", folder]
    command += ["-p", f"127.0.0.1:{port}:9108", image]
    container = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
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
