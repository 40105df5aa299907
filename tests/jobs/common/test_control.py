"""A running migration steered through a file and over HTTP."""

import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from milvus_hubness.errors import InvalidParameter, UnreadableFile
from milvus_hubness.jobs.common.control import (
    Controls,
    MigrationMetrics,
    following_control_file,
    postpone_cutover,
)
from milvus_hubness.jobs.common.http_limits import HttpLimits
from milvus_hubness.jobs.common.http_server import control_server
from milvus_hubness.jobs.common.progress import Events, LatestEvents, Throttle


class Migration:
    """What the job holds while it runs."""

    def __init__(self):
        self.heard = []
        self.latest, self.metrics = LatestEvents(), MigrationMetrics("products", "products_hubness")
        self.events = Events([self.heard.append, self.latest, self.metrics])
        self.throttle, self.release = Throttle(), threading.Event()

    def controls(self, name):
        return Controls(name, self.throttle, self.release, self.events)

    def file(self, path):
        return following_control_file(
            path, self.controls("control file"), self.events, poll_seconds=0.02
        )

    def server(self, address="127.0.0.1:0", **limits):
        return control_server(
            address, self.controls("http"), self.latest, self.metrics, HttpLimits(**limits)
        )

    def told(self):
        return [event.name for event in self.heard]


@pytest.fixture
def migration():
    return Migration()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "control.json"


def write_control(path, **changes):
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.with_suffix(".new").write_text(json.dumps({**settings, **changes}))
    path.with_suffix(".new").replace(path)


def until(holds):
    ends_at = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < ends_at, "it never came to that"
        time.sleep(0.01)


def test_a_file_steers_from_the_beginning_and_when_it_changes(migration, path):
    path.write_text('{"paused": true, "rows_per_second": 500}')
    with migration.file(path):
        now = migration.throttle.snapshot()
        assert (now["paused_by"], now["rows_per_second"]) == (["control file"], 500)
        write_control(path, paused=False, bytes_per_second=9, chunk_seconds=1.5, cutover="now")
        until(lambda: migration.throttle.snapshot()["running"])
        now = migration.throttle.snapshot()
        assert (now["rows_per_second"], now["bytes_per_second"], now["chunk_seconds"]) == (
            500,
            9,
            1.5,
        )
        assert migration.release.is_set()
        write_control(path, rows_per_second=None, cutover="postponed")
        until(lambda: migration.throttle.snapshot()["rows_per_second"] is None)
        assert not migration.release.is_set()
    assert migration.told() == ["rate", "paused", "rate", "resumed", "rate"]


def test_a_file_that_comes_later_or_goes_is_fine(migration, path):
    with migration.file(path):
        write_control(path, paused=True)
        until(lambda: not migration.throttle.snapshot()["running"])
        path.unlink()
        time.sleep(0.08)
        assert not migration.throttle.snapshot()["running"]
    assert migration.told() == ["paused"]


@pytest.mark.parametrize(
    "broken",
    [
        '{"paused": fal',
        "[1]",
        '{"paused": "yes"}',
        '{"rows_per_second": -1, "paused": true}',
        '{"rows_per_minute": 3}',
        '{"cutover": "soon"}',
        b"\xff\xfe\xfd",
    ],
)
def test_a_broken_file_is_warned_of_once_and_changes_nothing(migration, path, broken):
    path.write_text('{"rows_per_second": 7}')
    with migration.file(path):
        path.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
        until(lambda: "warning" in migration.told())
        time.sleep(0.1)
        assert migration.told() == ["rate", "warning"]
        assert migration.throttle.snapshot()["rows_per_second"] == 7
        assert migration.throttle.snapshot()["running"]
        path.write_text('{"rows_per_second": 8}')
        until(lambda: migration.throttle.snapshot()["rows_per_second"] == 8)


def test_what_did_not_change_in_the_file_is_left_as_it_is(migration, path):
    write_control(path, rows_per_second=100)
    with migration.file(path):
        migration.controls("http").apply({"rows_per_second": 5})
        write_control(path, paused=True)
        until(lambda: not migration.throttle.snapshot()["running"])
        assert migration.throttle.snapshot()["rows_per_second"] == 5


def test_a_release_of_an_earlier_run_is_taken_back(path):
    postpone_cutover(path)
    assert not path.exists()
    path.write_text('{"cutover": "now", "rows_per_second": 5}')
    postpone_cutover(path)
    assert json.loads(path.read_text()) == {"cutover": "postponed", "rows_per_second": 5}
    path.write_text("{")
    with pytest.raises(UnreadableFile, match="not JSON"):
        postpone_cutover(path)


def ask(url, body=None, *, content_type="application/json", method=None, **headers):
    """The status and what was answered."""
    request = urllib.request.Request(url, method=method, headers=headers)
    if body is not None:
        request.data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request.add_header("Content-Type", content_type)
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture
def url(migration):
    with migration.server() as server:
        yield server.url


def test_a_pause_shows_in_the_status_and_holds_the_writer(migration, url):
    migration.events.report(
        "copying", rows=5, rows_total=10, bytes=1, seconds=0.1, eta_seconds=None
    )
    assert ask(f"{url}/control", {"paused": True})[0] == 200
    code, answer = ask(f"{url}/status")
    status = json.loads(answer)
    assert code == 200
    assert (status["phase"], status["running"], status["paused_by"]) == ("copying", False, ["http"])
    assert status["events"]["copying"]["facts"]["rows"] == 5
    assert status["cutover"] == "postponed"
    admitted = threading.Event()
    writer = threading.Thread(target=lambda: (migration.throttle.admit(1, 1), admitted.set()))
    writer.start()
    assert not admitted.wait(0.05)
    assert json.loads(ask(f"{url}/control", {"paused": False})[1])["running"]
    assert admitted.wait(1)
    writer.join()
    assert migration.told() == ["copying", "paused", "resumed"]


def test_one_operator_does_not_resume_what_another_paused(migration, url, path):
    write_control(path, paused=True)
    with migration.file(path):
        status = json.loads(ask(f"{url}/control", {"paused": False})[1])
    assert status["paused_by"] == ["control file"]


def test_the_rate_is_set_over_http(migration, url):
    status = json.loads(ask(f"{url}/control", {"rows_per_second": 250, "chunk_seconds": None})[1])
    assert status["rows_per_second"] == 250
    assert migration.throttle.snapshot()["rows_per_second"] == 250
    assert migration.heard[-1].facts == {
        "rows_per_second": 250,
        "bytes_per_second": None,
        "chunk_seconds": None,
    }


def test_the_cutover_is_released_over_http(migration, url):
    assert json.loads(ask(f"{url}/control", {"cutover": "now"})[1])["cutover"] == "now"
    assert migration.release.is_set()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"rows_per_second": -5}, "rows_per_second must be a positive number"),
        ({"rows_per_second": 5, "chunk_seconds": 0}, "chunk_seconds must be a positive number"),
        ({"rows_per_second": 5, "paused": 1}, "paused must be true or false"),
        ({"rows_per_second": 5, "pace": 1}, "'pace' is not one of paused, rows_per_second"),
        ([5], "must be a JSON object"),
        (b"{", "not JSON"),
    ],
)
def test_bad_values_are_answered_with_what_is_wrong(migration, url, body, said):
    code, answer = ask(f"{url}/control", body)
    assert code == 400
    assert said in json.loads(answer)["error"]["message"]
    assert migration.throttle.snapshot()["rows_per_second"] is None


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", ""]
)
@pytest.mark.parametrize(("path", "body"), [("/status", None), ("/control", {"paused": True})])
def test_requests_that_name_another_host_are_refused(migration, url, host, path, body):
    assert ask(url + path, body, Host=host)[0] == 403
    assert migration.throttle.snapshot()["running"]


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:1", "[::1]:7"])
def test_requests_that_name_this_machine_are_answered(url, host):
    assert ask(f"{url}/healthz", Host=host) == (200, '{"status": "ok"}\n')


@pytest.mark.parametrize(
    "header",
    [
        ("Origin", "http://127.0.0.1:8000"),
        ("Origin", "null"),
        ("Origin", ""),
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Site", "same-site"),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"), [("/control", {"paused": True}), ("/status", None), ("/nothing", None)]
)
def test_requests_of_web_pages_are_refused(migration, url, header, path, body):
    status, told = ask(url + path, body, **dict([header]))
    message = "web pages may not use this server: use a program that sends no Origin header"
    assert (status, json.loads(told)) == (403, {"error": {"message": message}})
    assert migration.throttle.snapshot()["running"]


@pytest.mark.parametrize("site", ["none", "same-origin"])
def test_a_person_may_look_at_the_status_in_a_browser(url, site):
    assert ask(f"{url}/status", **{"Sec-Fetch-Site": site})[0] == 200


def test_the_probe_of_a_migration_is_answered_beyond_the_limit(migration):
    with migration.server(requests=0) as server:
        assert ask(f"{server.url}/status")[0] == 503
        assert ask(f"{server.url}/healthz")[0] == 200


@pytest.mark.parametrize(
    "content_type", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data"]
)
def test_forms_of_other_sites_cannot_steer(migration, url, content_type):
    assert ask(f"{url}/control", {"paused": True}, content_type=content_type)[0] == 415
    assert migration.throttle.snapshot()["running"]


def test_unknown_paths_and_wrong_methods(url):
    assert ask(f"{url}/nothing")[0] == 404
    assert ask(f"{url}/control")[0] == 405
    assert ask(f"{url}/status", {})[0] == 405
    for method in ("PUT", "DELETE", "OPTIONS"):
        assert ask(f"{url}/control", method=method)[0] == 405


def test_a_body_without_or_beyond_a_length_is_refused(url):
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=2)
    connection.putrequest("POST", "/control")
    connection.putheader("Content-Type", "application/json")
    connection.endheaders()
    assert connection.getresponse().status == 411
    connection.close()
    assert ask(f"{url}/control", b" " * 70_000)[0] == 413


def test_the_metrics_are_served(migration, url):
    migration.events.report("before-copy")
    code, text = ask(f"{url}/metrics")
    assert code == 200
    assert 'milvus_hubness_migration_phase{phase="copying"' in text


def test_the_server_is_silent_and_leaves_no_thread(migration, capfd):
    before = threading.active_count()
    with migration.server() as server:
        ask(f"{server.url}/status")
        ask(f"{server.url}/nothing")
        port = int(server.url.rsplit(":", 1)[1])
        socket.create_connection(("127.0.0.1", port)).close()
    assert threading.active_count() == before
    assert capfd.readouterr() == ("", "")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=1)


@pytest.mark.parametrize(
    "address", ["0.0.0.0:0", "192.168.1.5:80", "example.org:80", "[::]:0", ":0"]
)
def test_only_loopback_is_listened_on(migration, address):
    with pytest.raises(InvalidParameter, match="loopback"):
        migration.server(address)


@pytest.mark.parametrize(
    "address", ["localhost", "127.0.0.1:x", "127.0.0.1:99999", "http://localhost:1", ""]
)
def test_addresses_of_another_form_are_refused(migration, address):
    with pytest.raises(InvalidParameter, match="HOST:PORT"):
        migration.server(address)


def test_a_port_that_is_taken_is_named(migration, url):
    with pytest.raises(InvalidParameter, match="in use"):
        migration.server(url.removeprefix("http://"))
