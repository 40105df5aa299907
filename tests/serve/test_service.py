"""The service over HTTP, and what it does when looks fail, are left to others, or are to end."""

import json
import math
import socket
import threading
import time
import urllib.error
import urllib.request
from datetime import timedelta

import numpy as np
import pytest
import time_machine
from prometheus_client.parser import text_string_to_metric_families

from milvus_hubness.correction.estimators import NNN
from milvus_hubness.errors import (
    Cancelled,
    InvalidConfig,
    InvalidParameter,
    LeaseHeld,
    ServerUnavailable,
    StoreError,
)
from milvus_hubness.serve import ServicePolicy, service
from milvus_hubness.serve.http_limits import HttpLimits
from milvus_hubness.serve.reconcile import now
from tests.serve.worlds import EXCESS_ANSWERS, Job, Ledger, Running, config_file, kept

HTTP = '[http]\nlisten = "127.0.0.1:0"\n'
NEVER = 'fill = "1d"\nrefresh = "1d"\n'
PRODUCTS = HTTP + '[[collection]]\nname = "products"\n' + NEVER


def ask(url, method="GET", **headers):
    """The status, what was answered, and its headers."""
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers


def samples(url):
    """Values by name, without the prefix, and by the labels that are no collection's."""
    read = {}
    for family in text_string_to_metric_families(ask(f"{url}/metrics")[1]):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if value}
            labels.pop("collection", None)
            read[(sample.name.removeprefix("milvus_hubness_"), *labels.values())] = sample.value
    return read


@pytest.fixture
def file(tmp_path, any_collection):
    return config_file(tmp_path, PRODUCTS)


def test_it_is_ready_once_everything_was_looked_at(file):
    job = Job()
    job.gate.clear()
    with Running(file, job) as running:
        job.began.acquire(timeout=5)
        assert ask(f"{running.url}/healthz")[:2] == (200, '{"status": "ok"}\n')
        code, said, _ = ask(f"{running.url}/readyz")
        assert (code, json.loads(said)["for"]) == (503, "the first reconciliation of products")
        assert samples(running.url)[("ready",)] == 0
        job.gate.set()
        running.wait_for("ready")
        assert ask(f"{running.url}/readyz")[0] == 200
        assert samples(running.url)[("ready",)] == 1


def test_what_looks_come_to_is_measured(file):
    full = kept(action="full", scanned=900, written=20, pending=7, excess_answers=EXCESS_ANSWERS)
    with Running(file, Job({"products": full})) as running:
        running.wait_for("ready")
        read = samples(running.url)
    assert (read[("rows",)], read[("pending_rows",)]) == (1_000, 7)
    assert [read[(f"rows_{what}_total",)] for what in ("scanned", "changed", "skipped")] == [
        900,
        20,
        880,
    ]
    assert [read[("excess_answers_ratio", which)] for which in ("raw", "old", "new")] == [
        0.31,
        0.14,
        0.09,
    ]
    assert read[("refreshes_total", "full", "ok")] == 1
    assert read[("refreshes_total", "pending", "ok")] == 0
    assert read[("refresh_seconds_count",)] == 1
    assert read[("last_success_timestamp_seconds",)] > 1.7e9
    assert 0 <= read[("bias_age_seconds",)] < 10


def test_the_status_and_the_page_tell_the_same(file):
    with Running(
        file, Job({"products": kept(action="full", written=20, excess_answers=EXCESS_ANSWERS)})
    ) as running:
        running.wait_for("ready")
        status = json.loads(ask(f"{running.url}/status.json")[1])
        _, page, headers = ask(f"{running.url}/")
    [products] = status["collections"]
    assert status["ready"]
    assert status["database"] == "http://milvus:19530"
    assert (products["last"]["action"], products["last"]["written"]) == ("full", 20)
    assert [outcome["excess_answers"] for outcome in products["history"]] == [EXCESS_ANSWERS]
    assert "up to date" in page
    assert "in use 9.0%" in page
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'sha256-")


@pytest.mark.parametrize("path", ["/", "/still", "/status.json", "/metrics", "/healthz", "/readyz"])
def test_it_is_only_read(file, path):
    with Running(file, Job()) as running:
        running.wait_for("ready")
        assert ask(running.url + path, "HEAD")[:2] == (200, "")
        for method in ("POST", "PUT", "DELETE"):
            code, _, headers = ask(running.url + path, method)
            assert (code, headers["Allow"]) == (405, "GET, HEAD")
        assert ask(running.url + path, Host="evil.example")[0] == 403
        assert ask(f"{running.url}/nothing")[0] == 404


def test_the_page_is_renewed_by_browsers_and_still_is_not(file):
    with Running(file, Job()) as running:
        running.wait_for("ready")
        assert 'http-equiv="refresh"' in ask(f"{running.url}/")[1]
        still = ask(f"{running.url}/still")[1]
    assert "products" in still
    assert 'http-equiv="refresh"' not in still


def test_a_failed_look_is_told_and_the_next_one_tried(file):
    answers = iter([ServerUnavailable("no answer"), kept()])
    opened = []

    def open_store():
        opened.append(Ledger())
        return opened[-1]

    with Running(
        file, Job({"products": lambda _: next(answers)}), open_store=open_store
    ) as running:
        assert running.wait_for("reconciled")["message"] == "no answer"
        assert samples(running.url)[("failures_in_a_row",)] == 1
        assert "no answer" in ask(f"{running.url}/")[1]
        assert ask(f"{running.url}/readyz")[0] == 503
        assert ask(f"{running.url}/healthz")[0] == 200
        before = len(opened)
        running.service._workers[0].request("fill")
        assert running.wait_for("reconciled", 2)["result"] == "ok"
        assert len(opened) == before + 1
        read = samples(running.url)
    assert read[("failures_in_a_row",)] == 0
    assert (
        read[("refreshes_total", "unfinished", "failed")],
        read[("refreshes_total", "none", "ok")],
    ) == (1, 1)


class Connection(Ledger):
    """One of several to the same records, which may break for good."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept
        self.is_broken = False

    def records(self, ledger, *groups):
        if self.is_broken:
            raise ServerUnavailable("the token has expired")
        return super().records(ledger, *groups)

    def put_records(self, ledger, records):
        self.records(ledger)
        super().put_records(ledger, records)


def test_a_connection_that_stays_broken_is_replaced_and_closed(file):
    """The service's own lease goes on by the new one."""
    kept_records, opened = {}, []

    def open_store():
        opened.append(Connection(kept_records))
        return opened[-1]

    def job(store, collection, options):
        store.records("hubness_ledger")
        return kept()

    with Running(file, job, open_store=open_store) as running:
        running.wait_for("ready")
        worker = running.service._workers[0]
        opened[-1].is_broken = True
        worker._reconciler._lease._checked_at = -math.inf
        worker.request("fill")
        assert running.wait_for("reconciled", 2)["message"] == "the token has expired"
        worker._reconciler._lease._checked_at = -math.inf
        worker.request("fill")
        assert running.wait_for("reconciled", 3)["result"] == "ok"
        assert [each.is_closed for each in opened] == [True, True, False]


def test_a_database_that_refuses_a_request_has_one_connection_at_a_time(file, monkeypatch):
    """Each that stays open would keep a socket, and there is one every two seconds."""
    opened = []

    def refuse(file, store, **options):
        raise StoreError("permission denied")

    def open_store():
        opened.append(Ledger())
        return opened[-1]

    monkeypatch.setattr(service, "database_faults", refuse)
    policy = ServicePolicy(connect_seconds=0.01)
    with Running(file, Job(), open_store=open_store, policy=policy) as running:
        running.wait_for("waiting")
        while len(opened) < 5:
            time.sleep(0.01)
    assert all(each.is_closed for each in opened)


def test_an_error_nobody_foresaw_does_not_end_the_service(file):
    answers = iter([ZeroDivisionError("oh"), kept(), kept()])
    with Running(file, Job({"products": lambda _: next(answers)})) as running:
        assert running.wait_for("reconciled")["message"].startswith("ZeroDivisionError: oh (")
        running.wait_for("ready")


def test_new_rows_do_not_wait_for_a_bank_that_is_broken(tmp_path, any_collection):
    """And the bank is tried again, and the trouble told of, until it is not."""
    np.save(tmp_path / "past.npy", np.ones((2, 3)))
    file, job = config_file(tmp_path, PRODUCTS + 'bank = "past.npy"\nmethod = "nnn"\n'), Job()
    with Running(file, job) as running:
        running.wait_for("ready")
        assert (job.calls[0][1].recipe.bank.dim, job.calls[0][1].recipe.estimator) == (3, NNN())
        (tmp_path / "past.npy").write_text("broken")
        worker = running.service._workers[0]
        worker.request("refresh")
        assert "past.npy" in running.wait_for("reconciled", 2)["message"]
        assert running.wait_for("reconciled", 3)["result"] == "ok"
        assert (job.calls[1][1].recipe.bank, job.calls[1][1].recipe.estimator) == (None, None)
        assert "past.npy" in ask(f"{running.url}/")[1]
        assert samples(running.url)[("failures_in_a_row",)] == 1
        np.save(tmp_path / "past.npy", np.ones((2, 4)))
        worker.request("fill")
        assert running.wait_for("reconciled", 4)["result"] == "ok"
        assert job.calls[2][1].recipe.bank.dim == 4
        assert samples(running.url)[("failures_in_a_row",)] == 0
        worker.request("fill")
        running.wait_for("reconciled", 5)
        assert job.calls[3][1].recipe.bank is None


def test_new_rows_do_not_wait_for_a_bank_that_is_dropped(tmp_path, any_collection):
    job = Job()
    file = config_file(tmp_path, PRODUCTS + 'bank = "collection:past"\n')
    with Running(file, job) as running:
        assert "no collection or alias 'past'" in running.wait_for("reconciled")["message"]
        assert running.wait_for("reconciled", 2)["result"] == "ok"
        assert job.calls[0][1].recipe.bank is None


def test_another_process_at_work_is_no_failure(file):
    with Running(file, Job({"products": LeaseHeld("process 7 on db-1 is at work")})) as running:
        running.wait_for("ready")
        read = samples(running.url)
        assert "process 7 on db-1" in ask(f"{running.url}/")[1]
    assert (read[("busy_total",)], read[("failures_in_a_row",)]) == (1, 0)
    assert running.store.records("hubness_ledger", "history/products") == []


def test_a_second_service_on_the_same_collections_does_nothing(file):
    ledger, first, second = Ledger(), Job(), Job()
    with Running(file, first, ledger) as one:
        one.wait_for("ready")
        with Running(file, second, ledger) as other:
            assert other.wait_for("reconciled")["result"] == "busy"
            before = dict(ledger.kept)
            other.service._workers[0].request("fill")
            other.wait_for("reconciled", 2)
            assert ledger.kept == before
    assert second.calls == []
    with Running(file, second, ledger) as other:
        assert other.wait_for("reconciled")["result"] == "ok"


def test_a_profile_that_is_called_like_a_field_has_a_lease_of_its_own(tmp_path, any_collection):
    tables = "".join(
        f'[[collection]]\nname = "products"\n{key} = "image"\n{NEVER}'
        for key in ("field", "profile")
    )
    with Running(config_file(tmp_path, HTTP + tables), Job()) as running:
        results = [running.wait_for("reconciled", count) for count in (1, 2)]
    assert [each["result"] for each in results] == ["ok", "ok"]
    assert {each["collection"] for each in results} == {"products/image", "products//image"}


def test_a_worker_looks_at_the_clock_again_while_it_waits(file):
    """The clock may be set, or a machine sleep, while nothing is due for a day."""
    policy = ServicePolicy(longest_wait=0.02)
    with (
        Running(file, Job(), policy=policy) as running,
        time_machine.travel(now(), tick=True) as clock,
    ):
        running.wait_for("ready")
        clock.shift(timedelta(hours=25))
        assert running.wait_for("reconciled", 2)["result"] == "ok"


def test_a_restart_shows_what_was_seen_before(file):
    ledger = Ledger()
    with Running(
        file, Job({"products": kept(action="full", excess_answers=EXCESS_ANSWERS)}), ledger
    ) as running:
        running.wait_for("ready")
        running.service._workers[0].request("fill")
        running.wait_for("reconciled", 2)
    job = Job({"products": ServerUnavailable("no answer")})
    with Running(file, job, ledger) as running:
        running.wait_for("reconciled")
        [products] = json.loads(ask(f"{running.url}/status.json")[1])["collections"]
        read = samples(running.url)
    assert [outcome["result"] for outcome in products["history"]] == ["ok", "ok", "failed"]
    assert products["last_success"] == products["history"][1]["at"]
    assert read[("excess_answers_ratio", "new")] == 0.09
    assert read[("refreshes_total", "full", "ok")] == 0


def test_stopping_ends_a_look_between_two_batches(file):
    def answer(store, collection, options):
        options.progress("computing biases", 40, 100)
        began.set()
        assert options.throttle.stopped.wait(5)
        raise Cancelled("after 40 rows")

    began = threading.Event()
    with Running(file, answer) as running:
        assert began.wait(5)
        assert "at work: computing biases, 40 of 100" in ask(f"{running.url}/")[1]
        running.service.stop()
        assert running.wait_for("reconciled")["result"] == "stopped"
        running.wait_for("stopped")
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(running.url, timeout=1)
    left = [
        thread.name for thread in threading.enumerate() if thread.name.startswith("milvus-hubness")
    ]
    assert left == []


def test_a_database_that_does_not_answer_yet_is_waited_for(file):
    there = threading.Event()

    def open_store():
        if not there.is_set():
            raise ServerUnavailable("no Milvus answers")
        return Ledger()

    with Running(
        file, Job(), open_store=open_store, policy=ServicePolicy(connect_seconds=0.02)
    ) as running:
        assert running.wait_for("waiting")["message"] == "no Milvus answers"
        assert json.loads(ask(f"{running.url}/readyz")[1])["for"] == "no Milvus answers"
        assert ask(f"{running.url}/healthz")[0] == 200
        there.set()
        running.wait_for("ready")


def test_what_the_database_has_not_ends_it_with_the_line(tmp_path):
    running = Running(config_file(tmp_path, PRODUCTS), Job())
    with running:
        running._thread.join(10)
    assert isinstance(running.error, InvalidConfig)
    assert str(running.error).startswith(
        f"{tmp_path / 'hubness.toml'}: collection[0].name: no collection"
    )


def test_a_port_that_is_taken_is_told(tmp_path, any_collection):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        text = PRODUCTS.replace(":0", f":{taken.getsockname()[1]}")
        running = Running(config_file(tmp_path, text), Job())
        with running:
            running._thread.join(10)
    assert isinstance(running.error, InvalidParameter)
    assert "in use" in str(running.error)


def test_on_other_addresses_it_answers_whatever_host_is_named(tmp_path, any_collection):
    """The probes of a container name its address, and Prometheus its name."""
    file = config_file(tmp_path, PRODUCTS.replace("127.0.0.1", "0.0.0.0"))
    with Running(file, Job()) as running:
        running.wait_for("ready")
        url = running.url.replace("0.0.0.0", "127.0.0.1")
        assert ask(f"{url}/readyz", Host="hubness:9108")[0] == 200


def test_probes_are_answered_when_all_other_requests_are_refused(file):
    policy = ServicePolicy(http=HttpLimits(requests=0))
    with Running(file, Job(), policy=policy) as running:
        running.wait_for("ready")
        codes = {
            path: ask(running.url + path)[0]
            for path in ("/", "/status.json", "/metrics", "/healthz", "/readyz")
        }
    assert codes == {
        "/": 503,
        "/status.json": 503,
        "/metrics": 503,
        "/healthz": 200,
        "/readyz": 200,
    }


def test_secrets_are_shown_nowhere(file, monkeypatch):
    monkeypatch.setenv("MILVUS_HUBNESS_TOKEN", "sesame")
    with Running(file, Job({"products": LeaseHeld("token sesame")})) as running:
        running.wait_for("ready")
        for path in ("/", "/still", "/status.json", "/readyz", "/metrics"):
            assert "sesame" not in ask(running.url + path)[1]
        assert "token ***" in ask(f"{running.url}/")[1]


def test_collections_in_one_file_are_looked_at_side_by_side_but_profiles_of_one_in_turn(
    tmp_path, any_collection
):
    text = HTTP + "".join(
        f'[[collection]]\nname = "{name}"\nprofile = "{profile}"\n{NEVER}'
        for name, profile in (("products", "text"), ("products", "image"), ("videos", "text"))
    )
    job = Job()
    job.gate.clear()
    with Running(config_file(tmp_path, text), job) as running:
        assert job.began.acquire(timeout=5)
        assert job.began.acquire(timeout=5)
        assert not job.began.acquire(timeout=0.1)
        assert {collection for collection, _ in job.calls} == {"products", "videos"}
        job.gate.set()
        running.wait_for("ready")
    assert len(job.calls) == 3


def test_once_looks_at_everything_and_ends(tmp_path, any_collection):
    text = PRODUCTS + '[[collection]]\nname = "videos"\n'
    job = Job({"products": ServerUnavailable("no answer")})
    service = Running(config_file(tmp_path, text), job).service
    assert [outcome.result for outcome in service.once()] == ["failed", "ok"]
    assert [collection for collection, _ in job.calls] == ["products", "videos"]
