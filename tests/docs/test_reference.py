"""The reference names what the code has: commands, options, metrics, errors, keys, variables, names and privileges."""

import inspect
import json
import re
from datetime import date
from importlib import import_module

import pytest
import yaml

import milvus_hubness
from milvus_hubness import errors
from tests.docs import pages
from tests.support.projects import tomllib


def page(name):
    return (pages.DOCS / f"{name}.md").read_text()


def first_code(rows):
    return [re.match(r"`([^`]+)`", row[0])[1] for row in rows if row[0].startswith("`")]


def test_the_command_reference_has_every_command_and_option():
    assert "<!-- generated: commands -->" in page("reference/cli")
    sections = dict(
        re.findall(
            r"^## (milvus-hubness .*?)\n(.*?)(?=^## |\Z)",
            pages.hooks().command_reference(),
            re.M | re.S,
        )
    )
    commands = {
        name: command for name, command in pages.all_commands().items() if name.startswith("milvus")
    }
    assert sections.keys() == commands.keys()
    for name, command in commands.items():
        assert command.help.splitlines()[0][:30] in sections[name]
        for option in pages.options(command):
            assert re.search(rf"{re.escape(option)}(?![\w-])", sections[name]), f"{name} {option}"
        for parameter in command.params:
            assert parameter.help.split()[0] in sections[name], f"{name} {parameter.name}"


def test_every_generated_part_is_on_a_page():
    markers = [
        marker
        for path in pages.PAGES
        for marker in re.findall(r"^<!-- generated: (\w+) -->$", path.read_text(), re.M)
    ]
    assert sorted(markers) == sorted(pages.hooks().GENERATED)


def metrics(text):
    """The name and the type of each metric that Prometheus would read."""
    return set(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


def listed_metrics():
    return {
        (re.match(r"`([^`]+)`", row[0])[1], row[1])
        for row in pages.table_rows(page("reference/metrics"), "Metrics")
    }


def without_creation_times(found):
    return {(name, kind) for name, kind in found if not name.endswith("_created")}


def test_every_metric_of_the_service_is_listed():
    from milvus_hubness.serve.worker import ServiceMetrics

    assert listed_metrics() == without_creation_times(metrics(ServiceMetrics().text(ready=True)))


def test_metrics_on_other_pages_exist():
    listed = {name for name, _ in listed_metrics()}
    for path in pages.PAGES:
        named = set(re.findall(r"\bmilvus_hubness_[a-z_]+", path.read_text())) - listed
        assert named == set(), path


def test_every_error_is_in_the_runbook():
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    text = page("operations/runbook")
    groups = (
        "Your data or arguments",
        "The database",
        "The state of a collection or a job",
        "What cannot be done",
    )
    listed = [name for group in groups for name in first_code(pages.table_rows(text, group))]
    assert sorted(listed) == sorted(kinds)
    assert all(f"`{name}`" in pages.hooks().error_reference() for name in kinds)


def test_every_exit_code_is_in_the_runbook():
    from milvus_hubness.cli.console import FAILURE, REFUSED, TERMINATED, USAGE

    codes = [int(row[0]) for row in pages.table_rows(page("operations/runbook"), "Exit codes")]
    assert codes == [0, FAILURE, USAGE, REFUSED, 130, TERMINATED]


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("Top level", "ServeConfig"),
        ("[server]", "ServerTable"),
        ("[http]", "HttpTable"),
        ("[[collection]]", "CollectionTable"),
    ],
)
def test_every_key_of_the_configuration_is_listed(heading, table):
    model = getattr(import_module("milvus_hubness.serve.config"), table)
    rows = {
        first_code([row])[0]: row[1]
        for row in pages.table_rows(page("reference/configuration"), heading)
    }
    assert rows.keys() == model.model_fields.keys()
    required = {name for name, field in model.model_fields.items() if field.is_required()}
    assert {name for name, default in rows.items() if default == "required"} == required


def test_the_example_of_the_configuration_is_valid():
    from milvus_hubness.serve.config import ServeConfig

    (block,) = [
        block
        for block in pages.blocks(pages.DOCS / "how-to/monitor.md")
        if block.language == "toml"
    ]
    assert ServeConfig.model_validate(tomllib.loads(block.text)).collection[0].refit_share == 0.2


def test_every_environment_variable_is_listed():
    from milvus_hubness.basics import defaults
    from milvus_hubness.cli import options
    from milvus_hubness.correction.kernels.policy import SCREEN_VARIABLE, WAIT_POLICY_VARIABLE

    exist = {
        options.TOKEN_VARIABLE,
        options.TOKEN_VARIABLE + options.FILE_SUFFIX,
        options.APPLICATION_TOKEN_VARIABLE,
        options.APPLICATION_TOKEN_VARIABLE + options.FILE_SUFFIX,
        *options.URI_VARIABLES,
        SCREEN_VARIABLE,
        WAIT_POLICY_VARIABLE,
    }
    exist |= {
        defaults.CA_VARIABLE,
        defaults.CERT_VARIABLE,
        defaults.KEY_VARIABLE,
        defaults.CLIENT_TTL_VARIABLE,
        defaults.LEASE_VARIABLE,
        defaults.WAIT_VARIABLE,
        defaults.VERDICT_VARIABLE,
    }
    rows = pages.table_rows(page("reference/environment"), "Environment variables")
    assert {name for row in rows for name in re.findall(r"`([A-Z_]+)`", row[0])} == exist


def test_every_public_name_is_in_the_python_reference():
    listed = re.findall(r"^::: (\S+)$", page("reference/python"), re.MULTILINE)
    # A job that takes any database in place of its store is described where it is written.
    public = {
        name: inspect.unwrap(getattr(milvus_hubness, name))
        for name in dir(milvus_hubness)
        if name != "__version__"
    }
    expected = {name: value for name, value in public.items() if not hasattr(errors, name)}
    found = {}
    for path in listed:
        module, _, name = path.rpartition(".")
        found[name] = getattr(import_module(module), name)
    assert found == expected
    assert len(listed) == len(expected)


def test_every_key_of_the_state_is_listed():
    from pydantic import BaseModel

    from milvus_hubness.correction.state import CollectionState, Profile

    reference = pages.hooks().state_reference()
    for model in (CollectionState, Profile):
        assert issubclass(model, BaseModel)
        section = reference.split(f"## {model.__name__}\n")[1].split("\n## ")[0]
        assert re.findall(r"^\| `(\w+)`", section, re.MULTILINE) == list(model.model_fields)
    assert (
        json.loads(re.search(r"```json\n(.*?)```", reference, re.DOTALL)[1])
        == CollectionState.model_json_schema()
    )


def test_the_tables_of_the_state_say_what_a_key_means():
    """From the docstrings under the fields, in one line each, of records and of the layout."""
    reference = pages.hooks().state_reference()
    rows = [line.split(" | ") for line in reference.splitlines() if line.startswith("| `")]
    meanings = {row[0].strip("| `"): row[3].removesuffix(" |") for row in rows}
    assert meanings["slot"] == (
        "The slot of its biases: their column in the vectors, or where this generation is beside them."
    )
    assert all(len(row) == 4 for row in rows)


def test_a_bar_in_the_meaning_of_a_key_does_not_end_its_cell(tmp_path):
    hooks = pages.hooks()
    (tmp_path / "state.py").write_text(
        'class State:\n    k: int\n    """One of |a|\n    and b."""\n'
    )
    assert hooks.field_texts(tmp_path) == {"State": {"k": "One of |a| and b."}}
    section = hooks._state_section(
        "State", {"properties": {"k": {"type": "integer"}}}, {"k": "a|b"}
    )
    assert r"a\|b" in section


def test_every_event_of_a_migration_is_listed():
    from milvus_hubness.jobs.common.progress import EVENT_NAMES

    listed = [
        name
        for row in pages.table_rows(page("how-to/control"), "Events")
        for name in re.findall("`(.+?)`", row[0])
    ]
    assert sorted(listed) == sorted(EVENT_NAMES)


def test_every_alert_is_described():
    rules = yaml.safe_load((pages.ROOT / "docker" / "rules.yml").read_text())["groups"][0]["rules"]
    rows = pages.table_rows(page("operations/alerts"), "Alerts")
    assert [(re.match(r"`(\w+)`", row[0])[1], row[2]) for row in rows] == [
        (rule["alert"], rule["labels"]["severity"]) for rule in rules
    ]


REQUESTS = [
    "CreateCollection", "DropCollection", "DescribeCollection", "AlterCollection", "RenameCollection",
    "CreateAlias", "DropAlias", "ListAliases", "LoadCollection", "GetLoadState", "Insert",
    "Upsert", "Delete", "Search", "Query", "Flush", "GetFlushState", "CreateIndex", "DescribeIndex", "CreatePartition",
    "ShowPartitions", "HasPartition", "SelectRole", "SelectGrant", "OperatePrivilege",
]  # fmt: skip
"""The requests that jobs and clients make."""


def test_every_privilege_that_a_request_needs_is_in_the_table_of_grants():
    from pymilvus.grpc_gen import common_pb2, milvus_pb2

    needed = set()
    for request in REQUESTS:
        settings = (
            getattr(milvus_pb2, f"{request}Request")
            .DESCRIPTOR.GetOptions()
            .Extensions[common_pb2.privilege_ext_obj]
        )
        needed.add(
            common_pb2.ObjectPrivilege.Name(settings.object_privilege).removeprefix("Privilege")
        )
    rows = pages.table_rows(page("operations/permissions"), "Exact rights, and built-in groups")
    # Names of privileges have capitals, names of collections have none.
    named = {
        name for row in rows for cell in row[1:3] for name in re.findall(r"`([A-Z]\w+)`", cell)
    }
    assert named == needed


def dates(value):
    if isinstance(value, dict):
        for key, part in value.items():
            yield from [part] if key == "date" else dates(part)
    elif isinstance(value, list):
        for part in value:
            yield from dates(part)


def test_every_benchmark_is_listed_with_the_date_of_its_results():
    folder = pages.ROOT / "benchmarks" / "results"
    rows = pages.table_rows(page("benchmarks/results"), "Where the figures are")
    listed = {}
    for script, result, when in rows:
        assert (pages.DOCS / "benchmarks" / re.search(r"\((.*)\)", script)[1]).is_file(), script
        listed[re.search(r"results/(\w+)\.", result)[1]] = date.fromisoformat(when)
    assert listed == {
        path.stem: date.fromisoformat(max(dates(json.loads(path.read_text()))))
        for path in folder.glob("*.json")
    }
    run = set(
        re.findall(
            r"python -m benchmarks\.(\w+)",
            page("benchmarks/quality") + page("benchmarks/banks") + page("benchmarks/speed"),
        )
    )
    assert {
        name for name in run if not (pages.ROOT / "benchmarks" / f"{name}.py").exists()
    } == set()


def test_every_benchmark_finds_what_it_imports():
    names = [path.stem for path in (pages.ROOT / "benchmarks").glob("*.py")]
    assert len(names) > 30
    for name in names:
        import_module(f"benchmarks.{name}")
