"""A Milvus Lite server and proxies, each a process of its own, and clients that know of neither."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
from pymilvus import MilvusClient

from milvus_hubness.milvus.proxy import Proxy, ProxyOptions
from tests.support.servers import die_with_parent, free_ports

ROOT = Path(__file__).parents[3]
STARTUP_SECONDS = 60


class LiteServer:
    """`milvus-lite server` over a folder."""

    def __init__(self, folder):
        self.folder = str(folder)
        [self.port] = free_ports(1)
        self.address = f"127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        command = [sys.executable, "-m", "milvus_lite", "server"]
        options = ["--data-dir", self.folder, "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = started([*command, *options], stdout=subprocess.DEVNULL)
        answers(self.address)
        return self

    def kill(self):
        self.process.kill()
        self.process.wait()


class ProxyProcess:
    """`milvus-hubness proxy` before an upstream. files: how many it may open; None for as many as this process."""

    def __init__(self, upstream, *options, files=None):
        command = proxy_command(upstream, "--json", *options)
        if files is not None:
            command = ["/bin/sh", "-c", f'ulimit -n {files} && exec "$0" "$@"', *command]
        self.process = started(command, stdout=subprocess.PIPE)
        line = self.process.stdout.readline()
        self.address = json.loads(line)["address"]
        self.uri = f"http://{self.address}"

    def stop(self):
        """What SIGTERM makes of it: its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class ProxyHere:
    """A proxy in a thread of this process, on a loop of its own. timing: further arguments of `Proxy`."""

    def __init__(self, upstream, *, timing=None, **options):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.proxy = Proxy(ProxyOptions(upstream, port=0, drain=1.0, **options), **(timing or {}))
        self.run(self.proxy.start())
        self.address = f"127.0.0.1:{self.proxy.port}"
        self.uri = f"http://{self.address}"

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def stop(self):
        self.run(self.proxy.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.stop()


class ForeignClient(MilvusClient):
    """A plain MilvusClient that says by a search parameter how a search is to be corrected, as clients of any
    language can. hubness_state: what it asks the database behind the proxy."""

    behind = None

    def search(self, *args, strength=None, profile=None, kinds=None, search_params=None, **options):
        return super().search(
            *args, search_params=wishing(search_params, strength, profile, kinds), **options
        )

    def hubness_state(self, name):
        return self.behind.hubness_state(name)


def at(request):
    """(kind, uri) of the database that a fixture is asked for."""
    fixture = "lite_server_uri" if request.param == "lite" else "served_uri"
    return request.param, request.getfixturevalue(fixture)


def wishing(search_params, strength, profile=None, kinds=None):
    result = {
        "hubness_strength": strength,
        "hubness_profile": profile,
        "hubness_kinds": kinds,
    }
    result = {name: value for name, value in result.items() if value is not None}
    if not result:
        return search_params
    params = dict(search_params or {})
    return {**params, "params": {**params.get("params", {}), **result}}


def proxy_command(upstream, *options):
    """The command of a proxy on a free port."""
    program = [sys.executable, "-m", "milvus_hubness", "proxy"]
    return [*program, "--upstream", upstream, "--port", "0", *options]


def started(command, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(die_with_parent(command), env=environment, **options)


def answers(address):
    with grpc.insecure_channel(address, [("grpc.max_reconnect_backoff_ms", 200)]) as channel:
        grpc.channel_ready_future(channel).result(STARTUP_SECONDS)


def eventually(call, seconds=20.0):
    """What it returns once it raises nothing."""
    until = time.monotonic() + seconds
    while True:
        try:
            return call()
        except Exception:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
