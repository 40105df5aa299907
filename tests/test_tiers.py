"""`make test` leaves out what is shown elsewhere, and nothing by mistake."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import tiers

ROOT = Path(__file__).parents[1]
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in ("tests", "integrations")
    for path in ROOT.glob(f"{folder}/**/test_*.py")
}
LISTS = {
    "EVERYDAY_ON_STRICT": tiers.EVERYDAY_ON_STRICT[:4],
    "EVERYDAY_ON_CACHING": tiers.EVERYDAY_ON_CACHING,
    "BEYOND_CACHING": tiers.BEYOND_CACHING,
    "EVERYDAY_ON_2_3_5": tiers.EVERYDAY_ON_2_3_5,
    "ON_ONE_DATABASE": tiers.ON_ONE_DATABASE,
    "EVERYDAY_TRIALS": tiers.EVERYDAY_TRIALS,
    "TAKES_LONG": tiers.TAKES_LONG,
    "TRIALS": tiers.TRIALS,
}


def case(file, function, **params):
    """A case as pytest collects it."""
    values = "-".join(map(str, params.values()))
    callspec = SimpleNamespace(params=params)
    return SimpleNamespace(nodeid=f"{file}::{function}[{values}]", callspec=callspec)


def shown(cases):
    repeats = tiers.repeats_of(cases)
    return [item.callspec.params for item in cases if item not in repeats]


@pytest.mark.parametrize("name", LISTS)
def test_each_part_of_a_name_is_that_of_a_test(name):
    for part in LISTS[name]:
        file, _, function = part.partition("[")[0].rpartition("::")
        file, function = (file, function) if function[-3:] != ".py" else (function, "")
        assert any(
            file in path and (function in source or function in path)
            for path, source in SOURCES.items()
        ), part


def test_of_cases_that_differ_in_their_metric_one_stays():
    cases = [
        case("tests/congruence/test_client.py", "test_it", metric=metric, limit=limit)
        for metric in ("IP", "COSINE", "L2")
        for limit in (3, 5)
    ]
    stays = shown(cases)
    assert [params["limit"] for params in stays] == [3, 5]
    assert len({params["metric"] for params in stays}) == 1


def test_what_jobs_do_by_themselves_is_shown_on_one_quick_database():
    def databases(function):
        cases = [
            case("tests/congruence/test_prior.py", function, found=found)
            for found in ("lite", "qdrant-local", "qdrant-states", "qdrant-server")
        ]
        return [params["found"] for params in shown(cases)]

    everywhere = databases("test_each_row_stores_its_bias_and_its_prior")
    assert everywhere[0] == "lite"
    assert len(everywhere) == 3
    assert len(databases("test_a_refresh_reads_the_values_again")) == 2


def test_what_is_no_place_stays_whatever_its_type():
    values = [1, True, "insert", "upsert", [1], {"limit": 1}, {"limit": 2}, int, None]
    cases = [case("tests/qdrant/test_client.py", "test_it", value=value) for value in values]
    assert shown(cases) == [{"value": value} for value in values]


def test_places_within_a_tuple_count_too():
    pairs = [("IP", "vector"), ("L2", "beside"), ("L2", "gate"), ("IP", "gate")]
    cases = [case("tests/congruence/test_it.py", "test_it", pair=pair) for pair in pairs]
    first, second = (params["pair"][1] for params in shown(cases))
    assert (first in {"vector", "beside"}, second) == (True, "gate")


def test_functions_of_a_module_have_one_metric_and_modules_have_all():
    def metrics(file):
        cases = [
            case(file, f"test_{number}", metric=metric)
            for number in range(3)
            for metric in ("L2", "IP", "COSINE")
        ]
        return {params["metric"] for params in shown(cases)}

    drawn = [metrics(f"tests/congruence/test_{number}.py") for number in range(20)]
    assert all(len(each) == 1 for each in drawn)
    assert set.union(*drawn) == {"L2", "IP", "COSINE"}


def test_without_a_database_all_cases_stay():
    cases = [
        case("tests/correction/codec/test_layout.py", "test_it", metric=metric)
        for metric in ("IP", "L2")
    ]
    assert len(shown(cases)) == 2
