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
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement
from prometheus_client.parser import text_string_to_metric_families

from milvus_hubness import NNN, CorrectionConfig, HubnessClient, QueryBank, Recipe
from milvus_hubness.serve import ConfigFile
from milvus_hubness.serve.reconcile import Reconciliation
from milvus_hubness.serve.worker import ServiceMetrics
from tests.support.projects import project
from tests.support.servers import free_ports, no_docker

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
KUBERNETES = sorted((DOCKER / "kubernetes").glob("*.yaml"))
YAML_RULES = "{extends: default, rules: {line-length: {max: 110}, document-start: disable}}"


def passes(tool, *arguments):
    command = Path(sys.executable).with_name(tool)
    done = subprocess.run(
        [command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


def of_kind(kind):
    return [each for path in KUBERNETES for each in documents(path) if each["kind"] == kind]


def test_the_image_passes_hadolint():
    passes("hadolint", "--failure-threshold", "style", DOCKER / "Dockerfile")


def test_the_image_in_the_docs_passes_hadolint(tmp_path):
    """But for the versions of the image and of the packages, which are the reader's."""
    page = (ROOT / "docs" / "operations" / "containers.md").read_text()
    [block] = re.findall(r"^```dockerfile\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "Dockerfile").write_text(block)
    passes(
        "hadolint", "--failure-threshold", "style", "--ignore", "DL3013", tmp_path / "Dockerfile"
    )


def test_jobs_is_built_on_client_and_by_default():
    stages = re.findall(r"^FROM (\S+) AS (\w+)$", DOCKERFILE, re.MULTILINE)
    assert stages == [
        ("python:${PYTHON}", "build"),
        ("python:${PYTHON}", "client"),
        ("client", "jobs"),
    ]
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    assert compose["services"]["hubness"]["build"]["target"] == "jobs"


LOCKS = DOCKER / "locks"
IMAGES = {
    "client": (["client.txt"], []),
    "cpu": (["cpu.txt", "torch-cpu.txt"], ["serve"]),
    "gpu": (["gpu.txt"], ["serve", "gpu"]),
}
"""For each image the locks whose packages it has on top of each other, and the extras that it has."""

LINUX = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux"}


def pins(name):
    """The version of each package in a lock, and that each has a hash."""
    text = re.sub(r"\\\n", " ", (LOCKS / name).read_text())
    lines = [line for line in map(str.strip, text.splitlines()) if line and line[0] != "#"]
    for line in lines:
        assert re.match(r"[\w.-]+==[\w.+]+ .*--hash=sha256:[0-9a-f]{64}", line), line
    return dict(line.split()[0].split("==") for line in lines)


def asked_for(extras):
    """What milvus-hubness requires on Linux, with the extras of its extras."""
    metadata = project(".")
    asked = [*metadata["dependencies"]]
    for extra in extras:
        asked += metadata["optional-dependencies"][extra]
    for requirement in map(Requirement, asked):
        if requirement.name == metadata["name"]:
            yield from asked_for(requirement.extras)
        elif requirement.marker is None or requirement.marker.evaluate(LINUX):
            yield requirement


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_all_that_its_extras_ask_for(image):
    locks, extras = IMAGES[image]
    versions = {name: version for lock in locks for name, version in pins(lock).items()}
    for requirement in asked_for(extras):
        # faiss-gpu provides the module of faiss-cpu.
        name = (
            "faiss-gpu" if (image, requirement.name) == ("gpu", "faiss-cpu") else requirement.name
        )
        assert versions[name] in requirement.specifier, requirement


def test_images_share_the_layer_of_the_client():
    """pip would put a second version of a package on top of the first."""
    for lock in ("cpu.txt", "gpu.txt"):
        assert pins("client.txt").items() <= pins(lock).items()


def test_the_image_for_cpus_has_the_torch_of_the_constraints_and_no_cuda():
    [constraint] = re.findall(
        r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    assert pins("torch-cpu.txt") == {"torch": f"{constraint}+cpu"}
    assert pins("gpu.txt")["torch"] == constraint
    assert not [name for name in pins("cpu.txt") if name.startswith(("torch", "nvidia", "triton"))]


def test_nothing_in_an_image_comes_without_a_hash():
    """But for milvus-hubness itself, which is built from this folder with tools that have theirs."""
    commands = re.sub(r"\\\n", " ", DOCKERFILE)
    installs = re.findall(r"pip install [^;&\n]*", commands)
    own = [command for command in installs if command.split()[-1] == "."]
    assert ["--no-deps" in each and "--no-build-isolation" in each for each in own] == [True]
    hashed = [command for command in installs if command not in own]
    assert hashed
    assert all("--require-hashes" in command and "--no-deps" in command for command in hashed)
    named = set(re.findall(r"([\w-]+\.txt)", "\n".join(re.findall(r"-r \S+", commands))))
    assert named == {path.name for path in LOCKS.glob("*.txt")} | {"build-tools.txt"}


def test_the_image_below_is_named_by_its_digest():
    [default] = re.findall(r"^ARG PYTHON=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"3\.12-slim-\w+@sha256:[0-9a-f]{64}", default)
    [of_locks] = re.findall(
        r"^IMAGE_PYTHON := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert default.startswith(f"{of_locks}-")


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
    probes = {
        name: probe["httpGet"]["path"]
        for name, probe in container.items()
        if name.endswith("Probe")
    }
    assert probes == {
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
        "startupProbe": "/healthz",
    }


def test_probes_wait_longer_than_a_busy_service_takes():
    [service] = of_kind("Deployment")
    [container] = service["spec"]["template"]["spec"]["containers"]
    waits = {
        name: probe["timeoutSeconds"] for name, probe in container.items() if name.endswith("Probe")
    }
    assert waits == {"livenessProbe": 5, "readinessProbe": 5, "startupProbe": 5}


def test_only_prometheus_may_connect_and_only_to_the_service():
    def labels(kind):
        [owner] = of_kind(kind)
        spec = owner["spec"]["jobTemplate"]["spec"] if kind == "CronJob" else owner["spec"]
        return spec["template"]["metadata"]["labels"].items()

    everyone, reader = of_kind("NetworkPolicy")
    assert [each["spec"]["policyTypes"] for each in (everyone, reader)] == [["Ingress"]] * 2
    assert "ingress" not in everyone["spec"]
    for kind in ("Deployment", "CronJob"):
        assert everyone["spec"]["podSelector"]["matchLabels"].items() <= labels(kind)
    assert reader["spec"]["podSelector"]["matchLabels"].items() <= labels("Deployment")
    assert not reader["spec"]["podSelector"]["matchLabels"].items() <= labels("CronJob")
    [rule] = reader["spec"]["ingress"]
    [service] = of_kind("Deployment")
    [container] = service["spec"]["template"]["spec"]["containers"]
    assert [port["port"] for port in rule["ports"]] == [port["name"] for port in container["ports"]]
    assert all(
        source.get("namespaceSelector") or source.get("podSelector") for source in rule["from"]
    )


def test_the_configurations_are_right(tmp_path):
    [given] = of_kind("ConfigMap")
    shipped = tmp_path / "hubness.toml"
    shipped.write_text(given["data"]["hubness.toml"])
    for path in (DOCKER / "hubness.toml", shipped):
        assert ConfigFile(path).config.http.listen == "0.0.0.0:9108"


def test_prometheus_scrapes_services_of_compose():
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    for job in yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]:
        [target] = job["static_configs"][0]["targets"]
        assert target.split(":")[0] in compose["services"]


@pytest.fixture(scope="module")
def metrics():
    """The samples that `serve` exports, as Prometheus names them, with the labels of each."""
    service = ServiceMetrics()
    collection = ConfigFile(DOCKER / "hubness.toml").config.collection[0]
    service.watch(collection)
    measured = {
        "excess_answers": {"new": 0.1},
        "bias_age_seconds": 1.0,
        "overlap": 1.0,
        "unfitted_share": 0.3,
        "suspicious": 3,
        "suspicious_share": 0.01,
    }
    at = datetime.now(timezone.utc)
    service.reconciled(
        collection, Reconciliation(at=at, result="ok", action="full", **measured), failures=0
    )
    labels = {}
    for family in text_string_to_metric_families(service.text(ready=True)):
        assert family.samples, family.name
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def rules():
    groups = yaml.safe_load((DOCKER / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard():
    return json.loads((DOCKER / "grafana" / "milvus-hubness.json").read_text())


def targets():
    return [target for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def unknown_in(metrics, expression, shown=""):
    """Return the metrics of a PromQL expression that do not exist, and the labels in it, or in a text with {{label}}
    shown beside it, that one of its metrics lacks."""
    names = set(re.findall(r"milvus_hubness_\w+", expression))
    labels = set(re.findall(r"{{ *(?:\$labels\.)?(\w+) *}}", shown))
    for selector in re.findall(r"{(.*?)}", expression):
        labels |= set(re.findall(r"(\w+) *(?:=~|!~|!=|=)", selector))
    for group in re.findall(r"\b(?:by|without|label_values) *\((.*?)\)", expression):
        labels |= set(re.findall(r"\w+", group)) - names
    lacking = {(name, label) for name in names & set(metrics) for label in labels - metrics[name]}
    return (names - set(metrics)) | lacking if names else {"no metric of ours"}


def test_alerts_ask_for_metrics_and_labels_that_exist(metrics):
    assert rules()
    for rule in rules():
        assert unknown_in(metrics, rule["expr"], rule["annotations"]["summary"]) == set(), rule[
            "alert"
        ]


def test_the_dashboard_asks_for_metrics_and_labels_that_exist(metrics):
    assert targets()
    for target in targets():
        assert unknown_in(metrics, target["expr"], target["legendFormat"]) == set(), target["expr"]
    queries = [
        each["query"]["query"]
        for each in dashboard()["templating"]["list"]
        if each["type"] == "query"
    ]
    [query] = queries
    assert unknown_in(metrics, query) == set(), query


def test_the_dashboard_shows_every_metric(metrics):
    asked = {
        name for target in targets() for name in re.findall(r"milvus_hubness_\w+", target["expr"])
    }
    histograms = {name.removesuffix("_bucket") for name in metrics if name.endswith("_bucket")}
    parts = {f"{name}_{part}" for name in histograms for part in ("sum", "count")}
    assert set(metrics) - parts - asked == set()


@pytest.mark.parametrize(
    ("expression", "shown", "unknown"),
    [
        ("milvus_hubness_rowz", "", {"milvus_hubness_rowz"}),
        ("milvus_hubness_ready{collection='a'}", "", {("milvus_hubness_ready", "collection")}),
        ("sum by (shard) (milvus_hubness_rows)", "", {("milvus_hubness_rows", "shard")}),
        ("milvus_hubness_rows", "{{reason}}", {("milvus_hubness_rows", "reason")}),
        ("label_values(milvus_hubness_rows, source)", "", {("milvus_hubness_rows", "source")}),
        ("up", "", {"no metric of ours"}),
    ],
)
def test_an_unknown_metric_or_label_is_noticed(metrics, expression, shown, unknown):
    assert unknown_in(metrics, expression, shown) == unknown


def test_the_dashboard_is_one_that_grafana_loads():
    board = dashboard()
    assert board["schemaVersion"] >= 36
    assert board["uid"]
    assert board["title"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    for part in [
        *panels,
        *targets(),
        *(each for each in variables.values() if each["type"] == "query"),
    ]:
        assert part["datasource"] == source
    for panel in panels:
        assert panel["title"]
        assert panel["description"].endswith(".")
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
    text = json.dumps(board)
    assert set(re.findall(r"\$(\w+)", text)) - {"__rate_interval", "__all"} <= set(variables)


def test_panels_of_the_dashboard_do_not_overlap():
    places = set()
    for panel in dashboard()["panels"]:
        x, y, width, height = (panel["gridPos"][name] for name in "xywh")
        assert x + width <= 24
        own = {(column, row) for column in range(x, x + width) for row in range(y, y + height)}
        assert not own & places, panel["title"]
        places |= own


def test_grafana_finds_prometheus_and_the_dashboard():
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    grafana = compose["grafana"]
    mounts = dict(volume.removesuffix(":ro").split(":") for volume in grafana["volumes"])
    assert {"datasource.yaml", "dashboards.yaml", "milvus-hubness.json"} <= {
        Path(file).name for file in mounts
    }
    for file, target in mounts.items():
        if file.startswith("./"):
            assert (DOCKER / file).is_file()
            assert target.startswith("/etc/grafana/provisioning/") == file.endswith(".yaml")
    [source] = yaml.safe_load((DOCKER / "grafana" / "datasource.yaml").read_text())["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert compose[host]["ports"] == [f"127.0.0.1:{port}:{port}"]
    [provider] = yaml.safe_load((DOCKER / "grafana" / "dashboards.yaml").read_text())["providers"]
    assert mounts["./grafana/milvus-hubness.json"].startswith(f"{provider['options']['path']}/")
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == mounts["./grafana/milvus-hubness.json"]


def test_ports_are_open_to_this_machine_only():
    for name, service in yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


@pytest.fixture(scope="module")
def build():
    """Build a target and return the id of its image."""
    if reason := no_docker() or (None if shutil.which("docker") else "no docker command"):
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
    images = [
        json.loads(output(["docker", "inspect", build(target)]))[0] for target in ("client", "jobs")
    ]
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
        correction = CorrectionConfig(Recipe(QueryBank(bank), estimator=NNN(8)))
        client.create_collection("in_docker", dimension=8, metric_type="IP", hubness=correction)
        client.insert(
            "in_docker", [{"id": row, "vector": vector} for row, vector in enumerate(items)]
        )
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
    command = [
        "docker",
        "run",
        "--rm",
        "--read-only",
        "--network",
        "host",
        "--entrypoint",
        "python",
        build("client"),
    ]
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
    assert (done.returncode, done.stderr) == (
        2,
        "/etc/milvus-hubness/hubness.toml: collection[0].name: is missing\n",
    )


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
        done = subprocess.run(
            ["docker", "stop", "-t", "20", container], capture_output=True, check=False
        )
        assert done.returncode == 0
    finally:
        subprocess.run(["docker", "rm", "-f", container], capture_output=True, check=False)
