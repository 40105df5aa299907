"""A service without a database: what it keeps in a ledger lies in a dictionary, and the test is the job."""

import threading

from milvus_hubness.errors import CollectionNotFound
from milvus_hubness.jobs.refresh.evaluation import RefreshEvaluation
from milvus_hubness.jobs.refresh.result import RefreshResult
from milvus_hubness.serve import ConfigFile, Service

EXCESS_ANSWERS = {"raw": 0.31, "old": 0.14, "new": 0.09}


def kept(collection="products", action="none", excess_answers=None, **facts):
    judged = None
    if excess_answers:
        judged = RefreshEvaluation(
            measured_rows=0,
            items=500,
            queries=100,
            real_queries=False,
            excess_answers=excess_answers,
            noise={"raw": 0.01, "old": 0.01},
            skewness={"raw": 3.1, "old": 1.4, "new": 0.9},
            overlap=0.8,
            measure="R@1",
            measured={},
            gains={},
            objection="",
        )
    given = {
        "reason": "bank and parameters are unchanged",
        "rows": 1_000,
        "pending": 0,
        "scanned": 0,
        "written": 0,
        "epoch": 3,
        "bias_age_seconds": 0.0,
        "seconds": 0.25,
        "judged": judged,
    }
    return RefreshResult(collection=collection, action=action, **{**given, **facts})


class Ledger:
    """The records of a store, and no more of it; any thread may use it."""

    def __init__(self):
        self.kept = {}
        self.is_closed = False
        self._lock = threading.Lock()

    def close(self):
        self.is_closed = True

    def put_records(self, ledger, records):
        with self._lock:
            self.kept |= {record.key: record for record in records}

    def record(self, ledger, key):
        return self.kept.get(key)

    def records(self, ledger, *groups):
        with self._lock:
            return [self.kept[key] for key in sorted(self.kept) if self.kept[key].group in groups]

    def drop_records(self, ledger, group, keys=None):
        with self._lock:
            for key in [key for key, record in self.kept.items() if record.group == group]:
                if keys is None or key in keys:
                    del self.kept[key]

    def exists(self, collection):
        return False

    def fenced(self, fences):
        return self

    def fences_of(self, collection):
        return []

    def read_back(self, collection, read, is_whole):
        return read()

    def info(self, collection, *, counted=True):
        raise CollectionNotFound(f"no collection or alias {collection!r}")


class Job:
    """The job the service runs: it answers what it was given for a collection, and waits for `gate` first."""

    def __init__(self, answers=None):
        self.answers = answers or {}
        self.calls = []
        self.stores = []
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Semaphore(0)

    def __call__(self, store, collection, options):
        self.calls.append((collection, options))
        self.stores.append(store)
        self.began.release()
        self.gate.wait(10)
        answer = self.answers.get(collection, kept)
        answer = answer(collection) if callable(answer) else answer
        if isinstance(answer, Exception):
            raise answer
        return answer


def config_file(folder, text):
    path = folder / "hubness.toml"
    path.write_text(text, encoding="utf-8")
    file = ConfigFile(path)
    if file.faults:
        raise file.refusal(file.faults)
    return file


class Running:
    """A service in a thread, until the end of the block."""

    def __init__(self, file, job, store=None, **options):
        self.heard = []
        self.store = store or Ledger()
        self._told = threading.Condition()
        open_store = options.pop("open_store", lambda: self.store)
        self.service = Service(
            file, "http://milvus:19530", open_store, [self._hear], refresh=job, **options
        )
        self.error = None
        self._thread = threading.Thread(target=self._run)

    def _hear(self, event):
        with self._told:
            self.heard.append(event)
            self._told.notify_all()

    def _run(self):
        try:
            self.service.run()
        except Exception as error:
            self.error = error

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self.service.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def wait_for(self, name, count=1):
        """The facts of the event of that name that is the count-th."""

        def found():
            return [event.facts for event in self.heard if event.name == name]

        with self._told:
            assert self._told.wait_for(lambda: len(found()) >= count, 10), f"{name}: {self.heard}"
            return found()[count - 1]

    @property
    def url(self):
        return self.wait_for("started")["url"]
