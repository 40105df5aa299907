"""Which tests run in which tier, in which order, and on which worker.

`make test` shows every behaviour once, on Milvus Lite or Qdrant's local mode, and the main ones on Milvus 2.3.5 and on
the models of other servers. `make test-server` runs the other cases on servers, `make test-long` the same behaviours in
other places, further trials and long ones, `make crash` hours of them. tests/README.md has the rule.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.milvus.caching import CachingServer
from tests.support import servers

SERVERS = {
    "server-2.3.5": servers.MilvusServer,
    "caching": CachingServer,
    "server-current": servers.CurrentMilvus,
    "qdrant-server": servers.QdrantServer,
}
STRICT = ("strict", "qdrant-strict")
"""The strict Qdrant server, see tests/qdrant/strict: its requests cost about three times those of the local mode."""
EVERYDAY_ON_STRICT = (
    "congruence/test_store.py", "qdrant/test_store.py", "qdrant/test_enabling.py", "rows_deleted_meanwhile",
    "stays[Dot-strict]", "halves_are_stored", "from_corrected_scores[strict-rrf]",
    "without_a_direction", "while_biases_are_written_stays[strict-Dot]",
)  # fmt: skip
"""Parts of the names of the cases on it that `make test` runs; `make test-long` runs the others."""
EVERYDAY_ON_CACHING = (
    "congruence/test_cutover.py", "congruence/test_migrating.py", "test_refresh_by_copy.py::test_a_copy_takes_over",
    "the_end_of_a_rollback_fails_nobody[caching-{'ids': [5]}", "is_given_to_the_copy[caching-3600.0",
    "a_rollback_spares_a_new_collection", "a_clean_that_is_killed_can_be_taken_over[caching-run-_forget_identity",
    "test_nobody_adopts_what_belongs_to_another", "keeps_its_biases_and_its_bank[caching-HubnessClient",
    "harms_nothing[caching-a required copy-drop", "harms_nothing[caching-biases, a helper-disable",
    "congruence/test_store.py::test_fences_are_listed",
)  # fmt: skip
"""Parts of the names of the cases on the caching Milvus 2.6 (tests/milvus/caching) that `make test` runs: dual writes,
cutover, rollback, clean, ownership and fences. `make test-server` runs the others."""
BEYOND_CACHING = (
    "an_index_that_cannot_be_is_refused", "test_nullable_and_default_values_survive",
    "test_jobs_keep_json_values_as_they_are", "biases_beside_the_vectors_have_groups_too",
)  # fmt: skip
"""Parts of the names of cases that it cannot show, as Milvus Lite is below it: that has fewer index types, returns the
text of a JSON field without its quotes and adds no field, while its version promises these and refuses `auto_id`."""
EVERYDAY_ON_2_3_5 = (
    "congruence/test_store.py", "congruence/test_client.py", "congruence/test_every_call.py",
    "congruence/test_cutover.py", "congruence/test_async.py::test_rows_come_and_go_as_over_the_plain_client",
    "congruence/test_async.py::test_searches_are_those_of_the_sync_client",
    "congruence/test_hostile_keys.py::test_a_deletion_takes_the_row",
    "congruence/test_hostile_keys.py::test_rows_are_read_by_hostile_keys",
    "congruence/test_iterators.py::test_search_iterator_goes_through_all_rows",
    "congruence/test_refresh.py::test_a_new_bank_is_adopted",
    "congruence/test_candidate_reranking.py::test_scores_and_ranking",
    "congruence/test_candidate_reranking.py::test_rows_come_and_go",
    "congruence/test_dual_write.py::test_both_hold_what_was_written_to_one",
    "milvus/proxy/test_congruence.py",
    *(f"test_hidden_rows.py::test_{what}" for what in (
        "a_bank", "a_claim", "a_holder", "nobody_takes_a_lease", "an_alias", "a_run_sees_the_copy",
    )),
)  # fmt: skip
"""Parts of the names of tests of which `make test` runs one case on Milvus 2.3.5: what is stored, found and written, a
migration, a refresh by a copy and biases beside, hidden rows of a ledger. `make test-server` runs the others."""
ON_ONE_DATABASE = (
    *(f"congruence/test_kinds_everywhere.py::{name}" for name in (
        "test_a_refresh", "test_a_further_profile", "test_a_copy_that_a_refresh_makes", "test_the_source", "test_auto",
    )),
    *(f"congruence/test_prior.py::{name}" for name in (
        "test_a_refresh", "test_the_source", "test_jobs", "test_a_copy_that_a_refresh_makes", "test_clicks",
    )),
    *(f"congruence/test_near_copies.py::{name}" for name in (
        "test_the_default_method", "test_a_refresh", "test_the_demand", "test_any_method", "test_biases_beside",
    )),
    "congruence/test_verdict.py::test_who_insists", "congruence/test_verdict.py::test_a_refresh",
)  # fmt: skip
"""Parts of the names of tests of what jobs do by themselves, whatever the database: `make test` runs one of their cases
on Milvus Lite and in Qdrant's local mode. What each database stores and finds, and what its clients write, is shown on
each by the other tests of the module."""
PLACES = (
    ("COSINE", "IP", "L2"),
    ("Cosine", "Dot", "Euclid"),
    ("vector", "beside"),
    ("local", "states"),
    ("qdrant-local", "qdrant-states"),
)
"""Values of parameters that say where a behaviour is shown, not what it is: metrics, bias locations, and where Qdrant
has states. `make test` runs one case of those that differ in nothing else."""
QUICK_DATABASES = ("lite", "qdrant-local", "qdrant-states")
METRICS = {*PLACES[0], *PLACES[1]}
WITHOUT_A_DATABASE = ("tests/basics/", "tests/correction/", "tests/quality/")
"""Folders whose tests are so quick that all their cases run in `make test`."""
TRIALS = ("tests/chaos/", "tests/qdrant/test_kills.py")
EVERYDAY_TRIALS = (
    "before_a_write[migrate]",
    "chaos/test_kills.py::test_a_refresh[11]", "a_late_write_of_a_refresh_undoes_nothing",
    "qdrant/test_kills.py::test_a_migration[7]", "qdrant/test_kills.py::test_a_migration[21]",
    "qdrant/test_kills.py::test_a_copy", "chaos/test_clients.py",
    "killed_clients_lose_at_most_what_they_had_not_sent[0]",
)  # fmt: skip
"""Parts of the names of the trials that `make test` runs: a migration, a refresh, a rollback (`[21]`) and clients
survive a kill, a pause or an overlap. The other trials are long."""
TAKES_LONG = (
    "test_more_rows_need_no_more_memory",
    "test_thousands_of_rows_of_every_kind_arrive_whole[lite-varchar",
    "test_recall_through_milvus_is_the_references_on_real_data[lite-text_video_msrvtt v2t",
    "test_an_l2_gallery_far_from_zero_is_searched_and_read_as_before[lite-100.0",
    "test_the_plan_counts_them_and_says_what_to_do[lite-1",
    "test_notebook.py::test_the_verdict_is_printed", "test_notebook.py::test_the_page_is_shown_inline",
    "test_notebook.py::test_searches_find_more",
    "test_langchain_store_gives_more_right_answers", "test_migrate_with_progress_loses_no_row",
    "test_beir_folder_has_the_same_figures_everywhere",
    "test_fastapi_search_answers_without_the_libraries_of_jobs",
    "test_the_report_of_diagnose[uncorrected", "test_the_report_of_diagnose[of few things",
    "test_the_page_of_serve[/still", "test_the_learning_curves_of_quari[1-", "test_the_learning_curves_of_quari[20-",
    "test_what_was_left_is_carried_on_with[lite-True", "test_former_copies_do_not_pile_up[lite-1",
    "test_a_delete_that_meets_the_end_of_a_rollback_fails_nobody[lite-{'ids': [5]}-rename",
    "test_a_delete_that_meets_the_end_of_a_rollback_fails_nobody[lite-{'filter': 'id == 5'}-alias",
    "test_a_name_that_moves_between_the_new_look_and_the_call_is_followed[insert",
    "test_a_name_that_moves_between_the_new_look_and_the_call_is_followed[search",
    "test_writing_is_the_first_that_happens_after_the_switch[insert",
    "test_biases_of_vectors_in_half_precision_are_those_of_the_copy_within_its_rounding[rest-2",
    "test_biases_of_vectors_in_half_precision_are_those_of_the_copy_within_its_rounding[rest-3",
    "test_biases_of_vectors_in_half_precision_are_those_of_the_copy_within_its_rounding[rest-4",
    "test_biases_of_vectors_in_half_precision_are_those_of_the_copy_within_its_rounding[rest-5",
    "test_a_copy_that_was_refreshed_since_goes_back_and_comes_again_as_it_is[rename",
    "test_a_write_is_divided[insert",
    "test_kinds.py::test_written_rows_get_their_kind",
    "test_kinds.py::test_a_refresh_renews_the_means_and_is_taken_back",
    "test_kinds.py::test_a_second_profile_has_means_of_its_own_bank",
    "test_rows_that_a_plain_collection_takes_at_once_are_taken[upsert-born",
    "test_servers.py::test_a_killed_server_starts_again",
    "test_servers.py::test_a_given_server_that_does_not_answer_fails",
    *(f"test_a_deep_file_is_one_line[text{number}" for number in (2, 4, 5, 6)),
    "test_a_reader_takes_no_endless_rows_of_a_stranger[lite", "test_former_copies_do_not_pile_up[lite-2-migrated",
    "test_two_saves_that_overlap_at_any_request_end_with_whole_generations[lite-two banks-existing",
    "test_two_saves_that_overlap_at_any_request_end_with_whole_generations[lite-one bank-new",
    *(f"test_moving_names.py::test_{what}" for what in (
        "so_does_one_whose_dual_writes", "a_rollback_that_was_killed_after_its_move", "half_a_rollback",
        "clean_finds_a_copy_that_was_rolled_back", "clean_finds_what_is_to_go", "a_former_copy_that_is_dropped",
        "what_a_plain_client_writes_before_the_repetition_is_kept[back, with",
        "what_a_plain_client_writes_before_the_repetition_is_kept[forth",
        "a_source_that_changes_while_it_is_copied_is_copied_anew[an index",
        "an_alias_that_was_dropped_since_a_switch",
        "an_alias_that_is_moved_away_during_a_killed_switch_blocks_nothing[after",
    )),
    "test_overlaps_beside.py::test_gates_of_two_profiles", "test_overlaps_beside.py::test_so_is_the_bank_of_a_refresh",
)  # fmt: skip
"""Beginnings of the names of what `make test` leaves to `make test-long` for what it costs: further cases of functions,
and tests that are long as a whole. What these show, others show in part: the memory of kernels, the LangChain store in
`integrations/langchain`, a migration with its progress in the blocks of `docs/how-to/migrate.md`, a BEIR folder in
`cli/test_beir.py`, a service without the libraries of jobs in `test_startup.py`, parts that a page may lack in
`quality/test_report_page.py`, and of the notebook the verdict and its frame in `quality/test_check.py` and that all its
names exist."""
USES_THE_SERVER = (
    "[server-2.3.5", "/chaos/test_", "/milvus/store/test_hidden_rows.py", "_on_a_server",
    "of_another_database", "the_client_image_searches", "a_second_service_started_by_mistake",
    "test_many_switches_under_searches_and_writes[served",
)  # fmt: skip
"""Parts of the names of tests on the Milvus 2.3.5 that workers share. It ends with the last of them."""
ALONE = ("whose_server_is_killed", "test_any_call_is_held")
WAITING = (*USES_THE_SERVER, "/chaos/")
SHARE_IMPORTS = ("integrations/langchain/",)
"""Folders whose tests share a worker, for what they import or start."""
LONGEST_FIRST = (*ALONE, "test_migrate.py", "test_copy_index", "demo", "/kernels/")


def server_of(item: pytest.Item) -> str | None:
    """Return the server on which a case runs; None for Milvus Lite, Qdrant's local mode and units."""
    return next((value for value in _params(item).values() if value in SERVERS), None)


def is_left_out(item: pytest.Item) -> bool:
    """Whether another case shows the same, or the database cannot hold what the case is about.

    A module's MADE names, by a fixture or test function, the parameters of the cases that are made. On servers,
    tests marked `lite_only` are left out, and ON_SERVERS names, by fixture or parameter, the values with which a
    module runs. tests/test_servers.py has one test for each server that says why it is missing.
    """
    params = _params(item)
    for name, allowed in getattr(item.module, "MADE", {}).items():
        is_meant = name in (item.originalname, *item.fixturenames)  # type: ignore[attr-defined]
        if is_meant and any(params.get(param) not in values for param, values in allowed.items()):
            return True
    server = server_of(item)
    if server is None:
        return False
    if item.get_closest_marker("lite_only") or SERVERS[server].unavailable():
        return True
    if server == "caching" and _has_part(item, BEYOND_CACHING):
        return True
    on_servers = getattr(item.module, "ON_SERVERS", {})
    return any(value not in on_servers.get(name, [value]) for name, value in params.items())


def mark_tiers(items: list[pytest.Item]) -> None:
    """Mark the cases that `make test` leaves to `make test-server` or `make test-long`."""
    for item in items:
        if (
            is_a_further_trial(item)
            or is_a_further_strict_case(item)
            or _has_part(item, TAKES_LONG)
        ):
            item.add_marker(pytest.mark.long)
    # What is long already, or on a server, does not stand for others.
    everyday = [
        item
        for item in items
        if server_of(item) is None and not is_strict(item) and not item.get_closest_marker("long")
    ]
    for item in repeats_of(everyday):
        item.add_marker(pytest.mark.long)
    mark_servers(items)


def mark_servers(items: list[pytest.Item]) -> None:
    """Mark the cases of `make test-server`: all on servers but those that EVERYDAY_ON_CACHING names, and the first
    case of each function that EVERYDAY_ON_2_3_5 names."""
    first: set[str] = set()
    for item in items:
        server = server_of(item)
        is_trial = item.nodeid.startswith(TRIALS)
        if is_trial or (server is None and not needs_shared_server(item.nodeid)):
            continue
        if server == "caching" and _has_part(item, EVERYDAY_ON_CACHING):
            continue

        function = function_of(item)
        is_everyday = (
            server in (None, "server-2.3.5")
            and _has_part(item, EVERYDAY_ON_2_3_5)
            and function not in first
            and not item.get_closest_marker("beyond_contract")
        )
        if is_everyday:
            first.add(function)
        else:
            item.add_marker(pytest.mark.server)


def is_a_further_trial(item: pytest.Item) -> bool:
    return item.nodeid.startswith(TRIALS) and not _has_part(item, EVERYDAY_TRIALS)


def is_a_further_strict_case(item: pytest.Item) -> bool:
    return is_strict(item) and not _has_part(item, EVERYDAY_ON_STRICT)


def is_strict(item: pytest.Item) -> bool:
    return any(value in STRICT for value in _params(item).values())


def repeats_of(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases that show in another place what another case of their function shows.

    Of cases that differ in nothing but PLACES one is no repeat. Which metric it has is drawn for a module, whose
    fixtures are then made for one metric, and its other places for each function: all are in `make test`.
    """
    alike: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if not item.nodeid.startswith(WITHOUT_A_DATABASE):
            alike.setdefault((function_of(item), what_is_shown(item)), []).append(item)
    repeats: list[pytest.Item] = []
    for cases in alike.values():
        shown = min(cases, key=_turn)
        repeats += [item for item in cases if item is not shown]
    return repeats


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def what_is_shown(item: pytest.Item) -> tuple[Any, ...]:
    """Return the parameters of a case; of those that are PLACES, only of which kind they are."""
    if not (callspec := getattr(item, "callspec", None)):
        return ()
    places = places_of(item)
    return tuple(
        (name, _without_places(value, places)) for name, value in sorted(callspec.params.items())
    )


def places_of(item: pytest.Item) -> tuple[tuple[str, ...], ...]:
    return (QUICK_DATABASES, *PLACES) if _has_part(item, ON_ONE_DATABASE) else PLACES


def _without_places(value: Any, places: tuple[tuple[str, ...], ...]) -> Any:
    """Return the kind of place, or what tells the value from others if it is none; of a tuple, those of its values."""
    if isinstance(value, tuple):
        return tuple(_without_places(part, places) for part in value)
    if (alike := _alike(value, places)) is not None:
        return "place", alike
    # Cases that share a list, a class or another object have the same one.
    return type(value), value if isinstance(value, str | int | float) else id(value)


def _alike(value: Any, places: tuple[tuple[str, ...], ...]) -> tuple[str, ...] | None:
    if not isinstance(value, str):
        return None
    return next((values for values in places if value in values), None)


def _turn(item: pytest.Item) -> tuple[int, ...]:
    """Return how far the places of a case are from those that its module and its function have drawn."""
    distances = []
    for value in _params(item).values():
        for part in value if isinstance(value, tuple) else (value,):
            values = _alike(part, places_of(item))
            if values is None:
                continue
            drawn_for = item.nodeid.split("::")[0] if part in METRICS else function_of(item)
            distances.append((values.index(part) - zlib.crc32(drawn_for.encode())) % len(values))
    return tuple(distances)


def _has_part(item: pytest.Item, parts: tuple[str, ...]) -> bool:
    return any(part in item.nodeid for part in parts)


def needs_shared_server(nodeid: str) -> bool:
    """Whether a test runs on the Milvus 2.3.5 that all workers share."""
    return any(part in nodeid for part in USES_THE_SERVER)


def expect_named(items: list[pytest.Item]) -> None:
    """Raise UsageError for a test on the shared server that USES_THE_SERVER does not name: it would end before."""
    unnamed = [
        item.nodeid
        for item in items
        if "served_uri" in getattr(item, "fixturenames", ())
        and not needs_shared_server(item.nodeid)
    ]
    if unnamed:
        raise pytest.UsageError(
            f"USES_THE_SERVER in tests/support/tiers.py names none of {unnamed}"
        )


def given_server_of(nodeid: str) -> str:
    """Return the variable of a given server on which a test runs; "" if it runs on none. Such a server is the same for
    all workers, so that only one of them may use its names of aliases and its ledger."""
    places = {"server-current": "MILVUS_URI", "qdrant-server": "QDRANT_URL"}
    return next(
        (name for kind, name in places.items() if kind in nodeid and servers.given(name)), ""
    )


def scope_of(nodeid: str) -> str:
    """Return what a test shares a worker with: the tests of its module on one database, with what was made for the
    module. Tests of the demo and of the examples share the functions that they read. A
    long trial is alone."""
    file = nodeid.split("::")[0]
    if given := given_server_of(nodeid):
        return given
    if any(part in nodeid for part in ALONE):
        return nodeid
    if "/demo/" in file or "test_example" in file:
        return "demo"
    if any(folder in file for folder in SHARE_IMPORTS):
        return file.rpartition("/")[0]
    return f"{file} on the server" if needs_shared_server(nodeid) else file


def order(items: list[pytest.Item]) -> None:
    """Sort scopes so that some workers wait for a server while others compute, and no worker is alone in the end:
    the longest come first, and those that wait begin before a sixth of the others have run, for their server computes
    even when it is idle."""
    scopes: dict[str, list[pytest.Item]] = {}
    for item in items:
        scopes.setdefault(scope_of(item.nodeid), []).append(item)

    def length(scope: str) -> int:
        return next(
            (i for i, part in enumerate(LONGEST_FIRST) if part in scope), len(LONGEST_FIRST)
        )

    def waits(scope: str) -> bool:
        return any(part in scopes[scope][0].nodeid for part in WAITING)

    by_length = sorted(scopes, key=length)
    waiting = [scope for scope in by_length if waits(scope)]
    computing = [scope for scope in by_length if not waits(scope)]
    places = {scope: 0.15 * i / len(waiting) for i, scope in enumerate(waiting)}
    places |= {scope: i / len(computing) for i, scope in enumerate(computing)}
    items[:] = [item for scope in sorted(places, key=places.__getitem__) for item in scopes[scope]]


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def _params(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return dict(_hashable(callspec.params)) if callspec else {}


def _hashable(params: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in params.items():
        if isinstance(value, str | int | tuple):
            yield name, value
