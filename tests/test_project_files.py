"""The workflows, forms and documents of the project pass the tools that check them, and name what exists."""

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from qdrant_client.common.version_check import is_compatible

from tests.support import tiers
from tests.support.projects import package_folders, project, pyproject
from tests.support.servers import CurrentMilvus

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
BUILD_TOOLS = GITHUB / "build-tools"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "custom.github-workflows-require-timeout": WORKFLOWS,
    "vendor.github-actions": sorted(GITHUB.glob("actions/*/action.yml")),
    "vendor.github-issue-forms": [
        GITHUB / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "feature.yml")
    ],
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.dependabot": [GITHUB / "dependabot.yml"],
}
DOCUMENTS = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PINNED = re.compile(r"uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def workflow(name):
    return yaml.safe_load((GITHUB / "workflows" / name).read_text())


def assert_passes(tool, *arguments):
    programs = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    command = [programs / tool, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_pass_actionlint():
    assert_passes("actionlint", *WORKFLOWS)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_on_github_fit_their_schemas(schema):
    assert_passes("check-jsonschema", "--builtin-schema", schema, *SCHEMAS[schema])


def test_hooks_before_a_commit_are_valid():
    assert_passes("pre-commit", "validate-config")


@pytest.mark.parametrize(
    "path", [*WORKFLOWS, *SCHEMAS["vendor.github-actions"]], ids=lambda path: path.name
)
def test_actions_are_pinned_to_a_commit(path):
    uses = [
        line
        for line in path.read_text().splitlines()
        if "uses: " in line and "uses: ./" not in line
    ]
    assert [line for line in uses if not PINNED.search(line)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_only_publishing_and_reporting_get_more_than_the_right_to_read(path):
    content = yaml.safe_load(path.read_text())
    assert content["permissions"] == {"contents": "read"}
    assert content["concurrency"]["group"]
    rights = {
        name: job["permissions"] for name, job in content["jobs"].items() if "permissions" in job
    }
    expected = {
        "release.yml": {
            "publish": {"id-token": "write"},
            "bill-of-materials": {"contents": "write"},
        },
        "codeql.yml": {"analyze": {"contents": "read", "security-events": "write"}},
    }
    assert rights == expected.get(path.name, {})


def test_every_supported_python_runs_the_tests():
    versions = workflow("ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert f">={versions[0]}" == project(".")["requires-python"]
    first, last = (int(version.removeprefix("3.")) for version in (versions[0], versions[-1]))
    assert versions == [f"3.{minor}" for minor in range(first, last + 1)]


def test_every_supported_server_runs_its_tests():
    legs = workflow("servers.yml")["jobs"]["server"]["strategy"]["matrix"]["include"]
    assert {leg["tests"] for leg in legs} == set(tiers.SERVERS)
    images = [leg["image"] for leg in legs if leg["tests"] == "server-current"]
    assert [re.sub(r".*:v(\d+\.\d+)\..*", r"\1", image) for image in images] == [
        "2.4",
        "2.5",
        "2.6",
        "3.0",
    ]
    if "MILVUS_IMAGE" not in os.environ:
        assert CurrentMilvus.IMAGE in images


def test_the_image_of_qdrant_is_one_that_the_client_accepts():
    """It warns of others, and warnings are errors in tests."""
    legs = workflow("servers.yml")["jobs"]["server"]["strategy"]["matrix"]["include"]
    images = [leg["image"] for leg in legs if leg["tests"] == "qdrant-server"]
    pinned = re.search(
        r'"QDRANT_IMAGE", "(.*)"', (ROOT / "tests" / "support" / "servers.py").read_text()
    )
    assert images == [pinned[1]]
    assert is_compatible(version("qdrant-client"), images[0].rpartition(":v")[2])


def test_every_package_is_built_and_published():
    built = workflow("ci.yml")["jobs"]["packages"]["strategy"]["matrix"]["include"]
    folders = [
        ".",
        *(
            f"integrations/{path.name}"
            for path in (ROOT / "integrations").iterdir()
            if path.is_dir()
        ),
    ]
    names = {
        folder: project(folder)["name"]
        for folder in folders
        if (ROOT / folder / "pyproject.toml").exists()
    }
    assert {leg["folder"]: leg["project"] for leg in built} == names
    assert set(workflow("release.yml")["jobs"]["publish"]["strategy"]["matrix"]["project"]) == set(
        names.values()
    )
    assert len({project(folder)["version"] for folder in names}) == 1


def requirements(path):
    """The lines of a requirements file, without comments; a line with its hashes is one."""
    text = re.sub(r"\\\n", " ", path.read_text())
    return [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]


def test_the_tools_of_a_release_are_pinned_with_their_hashes():
    asked = [Requirement(line) for line in requirements(BUILD_TOOLS / "requirements.in")]
    pins = requirements(BUILD_TOOLS / "requirements.txt")
    assert [
        pin for pin in pins if not re.match(r"[\w.-]+==[\w.]+ .*--hash=sha256:[0-9a-f]{64}", pin)
    ] == []
    versions = dict(pin.split()[0].split("==") for pin in pins)
    assert {each.name for each in asked} <= set(versions)
    for folder in package_folders():
        for backend in map(Requirement, pyproject(folder)["build-system"]["requires"]):
            assert versions[backend.name] in backend.specifier


def test_a_release_installs_nothing_but_these_tools():
    """Building in isolation would fetch the newest hatchling."""
    for job in ("packages", "bill-of-materials"):
        steps = workflow("ci.yml")["jobs"][job]["steps"]
        [install] = [step["run"] for step in steps if "pip install" in step.get("run", "")]
        assert "--require-hashes" in install
        assert "-r .github/build-tools/requirements.txt" in install
    steps = workflow("ci.yml")["jobs"]["packages"]["steps"]
    [build] = [step["run"] for step in steps if "-m build" in step.get("run", "")]
    assert "--no-isolation" in build
    assert "pip install" not in (GITHUB / "workflows" / "release.yml").read_text()


def test_dependabot_watches_all_that_is_installed():
    updates = yaml.safe_load((GITHUB / "dependabot.yml").read_text())["updates"]
    watched = {update["package-ecosystem"]: update for update in updates}
    assert set(watched) == {"github-actions", "docker", "pip"}
    patterns = watched["pip"]["directories"]
    for folder in [*package_folders(), ".github/build-tools", "docker/locks"]:
        path = "/" if folder == "." else f"/{folder}"
        assert any(fnmatch(path, pattern) for pattern in patterns), folder


def test_vulnerabilities_are_looked_for_daily_and_when_dependencies_change():
    content = workflow("audit.yml")
    # YAML reads `on` as true.
    when = content[True]
    assert when["schedule"]
    changes = when["push"]["paths"]
    assert changes == when["pull_request"]["paths"]
    files = [f"{folder}/pyproject.toml".removeprefix("./") for folder in package_folders()]
    locks = [".github/build-tools/requirements.txt", "docker/locks/cpu.txt"]
    for file in [*files, "constraints.txt", *locks]:
        assert any(Path(file).match(change.replace("**", "*")) for change in changes), file
    assert {"run": "make audit"} in content["jobs"]["audit"]["steps"]


def test_a_release_has_a_bill_of_materials_for_each_image(tmp_path):
    """`make bills` gives the lock of each image to the tool, whose stand-in copies it."""
    tool = tmp_path / "cyclonedx-py"
    tool.write_text(
        '#!/bin/bash\nwhile [ "$1" != -o ]; do case "$1" in --of) [ "$2" = JSON ] || exit 1;; esac; shift; done\n'
        'cp "$3" "$2"\n'
    )
    tool.chmod(0o755)
    for path in ("Makefile", "docker/locks"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).symlink_to(ROOT / path)
    subprocess.run(["make", "bills", f"CYCLONEDX={tool}"], cwd=tmp_path, check=True)
    bills = {path.name: path.read_text() for path in (tmp_path / "bills").iterdir()}
    locks = {path.stem: path.read_text() for path in (ROOT / "docker" / "locks").iterdir()}
    assert bills == {
        "milvus-hubness-client.cdx.json": locks["client"],
        "milvus-hubness-cpu.cdx.json": locks["cpu"] + locks["torch-cpu"],
        "milvus-hubness-gpu.cdx.json": locks["gpu"],
    }

    written, attached = (
        workflow(name)["jobs"]["bill-of-materials"]["steps"] for name in ("ci.yml", "release.yml")
    )
    assert {"run": "make bills"} in written
    [kept] = [step["with"]["name"] for step in written if "upload" in step.get("uses", "")]
    [taken] = [step["with"]["name"] for step in attached if "download" in step.get("uses", "")]
    assert kept == taken
    assert "cyclonedx-bom" in map(str.strip, requirements(BUILD_TOOLS / "requirements.in"))


@pytest.mark.parametrize("path", [*WORKFLOWS, *DOCUMENTS], ids=lambda path: path.name)
def test_targets_of_make_and_files_that_are_named_exist(path):
    text = path.read_text()
    targets = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {
        name for name in re.findall(r"(?:run: |`)make ([\w./-]+)", text) if name not in targets
    } == set()
    if path.suffix == ".md":
        files = re.findall(
            r"`((?:milvus_hubness|integrations|tests|benchmarks|docker)/[\w./-]*)", text
        )
        files += re.findall(r"\]\(([\w./-]+)\)", text)
        assert [file for file in files if not (ROOT / file).exists()] == []


PLACES_OF_THE_ADDRESS = [
    *(f"{folder}/pyproject.toml" for folder in package_folders()),
    "README.md",
    "mkdocs.yml",
]


@pytest.mark.parametrize("missing", [None, *PLACES_OF_THE_ADDRESS])
def test_a_release_names_its_repository(tmp_path, missing):
    [script] = [
        step["run"]
        for step in workflow("release.yml")["jobs"]["version"]["steps"]
        if step.get("name") == "Look for the address of this repository"
    ]
    for place in PLACES_OF_THE_ADDRESS:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        address = "https://git.test/shop/hubness"
        (tmp_path / place).write_text(
            "nothing" if place == missing else f'Repository = "{address}"'
        )

    github = {"GITHUB_SERVER_URL": "https://git.test", "GITHUB_REPOSITORY": "shop/hubness"}
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=tmp_path,
        env={**os.environ, **github},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (0 if missing is None else 1)
    assert missing is None or Path(missing).as_posix().removeprefix("./") in done.stdout


CONDITIONS = {
    "Chromium is there": ({"chromium": "exit 0"}, [], False),
    "Chrome is there": ({"google-chrome": "exit 0"}, [], False),
    "Debian, as root": ({"apt-get": "exit 0"}, ["update -qq", "install"], False),
    "no network": ({"apt-get": "exit 100"}, ["update -qq"], True),
    "no such package": ({"apt-get": '[ "$1" = update ]'}, ["update -qq", "install"], True),
    "not root": ({"apt-get": "exit 0", "id": "echo 1000"}, [], False),
    "not Debian": ({}, [], False),
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_chromium_is_installed_where_it_can_be_and_the_tests_run_anyway(tmp_path, condition):
    programs, expected, is_missed = CONDITIONS[condition]
    for name in ("bash", "dirname", "env", "timeout"):
        (tmp_path / name).symlink_to(shutil.which(name))
    calls = tmp_path / "calls"
    for name, body in {"id": "echo 0", "make": "exit 0", **programs}.items():
        script = f'#!/bin/bash\necho "{name} $*" >> {calls}\n{body}\n'
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)

    command = [ROOT / ".ci" / "run"]
    done = subprocess.run(
        command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    made = calls.read_text().splitlines()
    assert [call for call in made if call.startswith("make ")] == ["make lint", "make test"]
    installed = [call.removeprefix("apt-get ") for call in made if call.startswith("apt-get ")]
    assert len(installed) == len(expected)
    assert all(call.startswith(start) for call, start in zip(installed, expected, strict=True))
    assert done.stderr == (
        "Chromium was not installed: tests of pages in a browser are skipped\n" if is_missed else ""
    )


def test_what_contributors_read_is_short_and_the_changelog_names_what_comes_next():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 220
    sections = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "[Unreleased]"


def test_until_a_release_the_lines_of_pip_install_from_a_clone():
    """No package of the project is on an index: a line that names one would end in an error."""
    if "Nothing has been released yet" not in (ROOT / "CHANGELOG.md").read_text():
        pytest.skip("there is a release: its lines may name it")
    names = "|".join(re.escape(project(folder)["name"]) for folder in package_folders())
    of_an_index = re.compile(rf"pip install\b[^\n`]*[ \t\"']({names})(?=[\[\s\"'`])")
    shown = [
        path
        for pattern in ("*.md", "docs/**/*.md", "examples/*", "integrations/**/*.md")
        for path in ROOT.glob(pattern)
        if path.is_file()
    ]
    assert len(shown) > 40
    assert {
        path.name: of_an_index.findall(path.read_text())
        for path in shown
        if of_an_index.search(path.read_text())
    } == {}
    assert of_an_index.search('pip install "milvus-hubness[check]"')
