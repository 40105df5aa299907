"""The gRPC server of the proxy: it relays calls as bytes or rewrites them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import cache, partial
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import grpc
from google.protobuf.message import DecodeError
from pymilvus.exceptions import MilvusException

from milvus_hubness.basics.logs import log
from milvus_hubness.errors import HubnessError, InvalidParameter, ServerUnavailable
from milvus_hubness.milvus.client.steps import Operation, Step
from milvus_hubness.milvus.proxy import messages
from milvus_hubness.milvus.proxy.admission import (
    ASK_SECONDS,
    STATUS_CODES_OF_REFUSALS,
    VALID_SECONDS,
    Admission,
)
from milvus_hubness.milvus.proxy.connections import Connections
from milvus_hubness.milvus.proxy.endings import CallEnded, FailureLog, release
from milvus_hubness.milvus.proxy.headers import (
    DATABASE,
    Identity,
    Metadata,
    header,
    identity_in,
    passed_on,
    repeated_in,
)
from milvus_hubness.milvus.proxy.intake import (
    ARRIVAL_SECONDS,
    COPIES,
    LARGE,
    MOST_PARTS,
    MOST_PARTS_OF_WRITES,
    TAKING_SECONDS,
    USERS,
    Held,
    Intake,
    expect_few_parts,
)
from milvus_hubness.milvus.proxy.operations import OUTDATES, REWRITTEN, SEARCHES
from milvus_hubness.milvus.proxy.options import ProxyOptions
from milvus_hubness.milvus.proxy.sessions import Caller, Sessions

T = TypeVar("T")

Context = Any
"""grpc.aio's ServicerContext."""


class Ending(NamedTuple):
    """How a call ends that has no answer."""

    code: grpc.StatusCode
    details: str | None
    trailing: Metadata = ()


class Answer(NamedTuple):
    """The answer to a call, and the metadata of the upstream call that brought it."""

    content: bytes
    initial: Metadata = ()
    trailing: Metadata = ()


class Heard(NamedTuple):
    """A caller that Milvus knows."""

    metadata: Metadata
    """All entries that are passed on."""
    identity: Identity
    """Those by which Milvus knows the caller."""
    held: Held
    """What the call holds in memory until gRPC has sent the answer."""


_SEND_FAILED = "Internal error from Core"
"""gRPC's details of a call whose messages could not be sent (set_internal_error, aio/call.pyx.pxi).
"""

_STATUS_SECONDS = 2.0
"""Seconds that the proxy then waits for the upstream's own status."""

WRITES = ("Insert", "Upsert")
"""Methods whose messages may have many parts: rows."""

MOVES = ("RenameCollection", "RestoreSnapshot")
"""Methods that may lead from one database to another."""

READS = ("Search", "HybridSearch", "Query")
"""Methods whose answers may be large."""


_SERVICE = "/milvus.proto.milvus.MilvusService/"
"""The beginning of the paths of Milvus's methods."""


class ProxyHandler(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Handler of every method.

    A method that is not rewritten passes as a stream, which works for any method.

    Rewritten methods are handled as streams of one message: gRPC receives the message of any other
    handler before it runs, and a stream's when the handler reads it.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        sessions: Sessions,
        admission: Admission,
        intake: Intake,
        connections: Connections,
    ) -> None:
        self._channel = channel
        self._sessions = sessions
        self._admission = admission
        self._intake = intake
        self._connections = connections
        self._failures = FailureLog(log)
        self._upstream = Upstream(channel, intake)
        self._handlers = {
            _SERVICE + method: grpc.stream_unary_rpc_method_handler(
                partial(self._rewritten, method)
            )
            for method in (*REWRITTEN, *SEARCHES)
        }

    def service(self, details: Any) -> Any:
        path: str = details.method
        return self._handlers.get(path) or grpc.stream_stream_rpc_method_handler(
            partial(self._streamed, path)
        )

    async def _heard(self, context: Context) -> Heard:
        """Return the caller once Milvus has taken its token. Raises CallEnded."""
        received = context.invocation_metadata()
        if name := repeated_in(received):
            reason = f"the call has the metadata entry {name!r} more than once: send it once"
            raise CallEnded(grpc.StatusCode.INVALID_ARGUMENT, reason)

        metadata = passed_on(received)
        identity = identity_in(metadata)
        await self._admission.expect_valid(identity, metadata)
        held = self._intake.held_by(identity, self._connections.of(context.peer()))
        # gRPC's task of the call ends once the answer is sent, or the caller is gone.
        task: Any = asyncio.current_task()
        task.add_done_callback(lambda _: held.end())
        return Heard(metadata, identity, held)

    async def _streamed(
        self, path: str, _: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[bytes]:
        opened = await self._opened(path, context)
        if isinstance(opened, Ending):
            await context.abort(opened.code, opened.details or "", opened.trailing)
            return

        heard, requests = opened
        refused: list[Ending] = []
        first_endings: list[Ending] = []
        call = self._channel.stream_stream(path)(
            requests or self._received(context, heard.held, refused),
            metadata=heard.metadata,
            timeout=context.time_remaining(),
        )
        # The names would keep the request in memory as long as the stream runs.
        del opened, requests
        call.add_done_callback(lambda it: first_endings.append(_at_hand(_ending(it))))
        method = path.removeprefix(_SERVICE)
        may_outdate = OUTDATES.fullmatch(method) is not None
        try:
            await context.send_initial_metadata(passed_on(await call.initial_metadata()))
            answers = self._answers(call, method, heard, refused)
            async for message in answers:
                may_outdate = may_outdate and not messages.is_refusal(method, message)
                yield message
            ending = refused[0] if refused else await _status_of(call, first_endings)
            if ending.code != grpc.StatusCode.OK:
                may_outdate = may_outdate and ending.code not in STATUS_CODES_OF_REFUSALS
                self._forget_refused(heard, ending.code)
                await context.abort(ending.code, ending.details or "", ending.trailing)
            context.set_trailing_metadata(ending.trailing)
        finally:
            call.cancel()
            if may_outdate:
                self._sessions.forget()

    async def _opened(
        self, path: str, context: Context
    ) -> tuple[Heard, AsyncIterator[bytes] | None] | Ending:
        """Return who calls and the request to pass on,
        None for a stream of them; or how the call ends.
        """
        try:
            heard = await self._heard(context)
            if messages.may_stream(path.removeprefix(_SERVICE)):
                # Its next message may come in an hour, so it takes no turn from others.
                heard.held.open_stream()
                return heard, None

            return heard, _only(await heard.held.receive(context.read))
        except grpc.aio.AioRpcError as error:
            ending = _ending_in(error)
            release(error)
            return ending

    async def _received(
        self, context: Context, held: Held, refused: list[Ending]
    ) -> AsyncIterator[bytes]:
        """Yield the messages of a stream. A refusal ends it and is put into `refused`."""
        while isinstance(message := await context.read(), bytes):
            try:
                held.count(message)
            except CallEnded as error:
                refused.append(_ending_in(error))
                return

            yield message
            held.hold(held.size - len(message))

    async def _answers(
        self, call: Any, method: str, heard: Heard, refused: list[Ending]
    ) -> AsyncIterator[bytes]:
        """Yield the answers of an upstream call as clients take them.

        A refusal ends them and is put into `refused`.
        """
        # Where one answer follows one message, it comes soon.
        answers = aiter(call)
        try:
            while True:
                if messages.may_stream(method):
                    message = await anext(answers, None)
                    heard.held.count_answer(len(message or b""))
                else:
                    message = await self._upstream.next_of(answers, call, heard)
                if message is None:
                    return

                with heard.held.giving(message):
                    yield message
        except CallEnded as error:
            refused.append(_ending_in(error))
            release(error)
        except grpc.aio.AioRpcError:
            # `call` has its status.
            return
        finally:
            await answers.aclose()

    def _forget_refused(self, heard: Heard, code: grpc.StatusCode) -> None:
        if code == grpc.StatusCode.UNAUTHENTICATED:
            self._admission.forget(heard.identity)

    async def _rewritten(self, method: str, _: AsyncIterator[bytes], context: Context) -> bytes:
        outcome = await self._outcome(method, context)
        if isinstance(outcome, Ending):
            await context.abort(outcome.code, outcome.details or "", outcome.trailing)
            raise RuntimeError("gRPC's abort has returned")

        if outcome.initial:
            await context.send_initial_metadata(outcome.initial)
        context.set_trailing_metadata(outcome.trailing)
        return outcome.content

    async def _outcome(self, method: str, context: Context) -> Answer | Ending:
        """Return the answer to a rewritten call, or how it ends.

        Nothing else of the call stays in memory.
        """
        call: _Call | None = None
        try:
            heard = await self._heard(context)
            call = _Call(method, context, heard, self._upstream)
            response = await self._answered(call)
            content = (
                response
                if isinstance(response, bytes)
                else await call.run(response.SerializeToString)
            )
            outcome: Answer | Ending = Answer(bytes(content))
        except Exception as error:
            # The frames of the error hold the request: see `release`.
            outcome = self._ended(method, error)
            if call is not None and isinstance(outcome, Ending):
                self._forget_refused(call.heard, outcome.code)
            release(error)
        finally:
            if call is not None and call.may_outdate:
                self._sessions.forget()

        if call is not None and isinstance(outcome, Answer):
            # The request is gone, and the answer may have another size than Milvus's.
            call.heard.held.hold(COPIES * len(outcome.content))
            call.heard.held.give(outcome.content)
            return Answer(outcome.content, *await call.metadata_of_answer())

        return outcome

    async def _answered(self, call: _Call) -> Any:
        """Return the response to a call, a message or its bytes.

        Raises what the operation raises.
        """
        request = await call.request()
        database = getattr(request, "db_name", "") or header(call.headers, DATABASE)
        if call.method in MOVES:
            # The operation compares it with the database that the request names besides.
            request.db_name = database
        session = self._sessions.of(call.heard.identity, database)
        collection = (
            request.oldName if call.method == "RenameCollection" else request.collection_name
        )

        with session.pools.entered(str(collection)) as pool:
            operations = session.operations
            if call.method in SEARCHES:
                operation = SEARCHES[call.method](
                    operations, request, messages.overrides_in(call.headers)
                )
            else:
                operation = REWRITTEN[call.method](operations, request)

            # A request may be large, and the operation drops it before this function ends.
            del request
            return await call.drive(
                operation, lambda step: session.answer(step, call.caller, pool, call.send)
            )

    def _ended(self, method: str, error: Exception) -> Answer | Ending:
        if isinstance(error, grpc.RpcError):
            return _ending_in(error)
        if isinstance(error, ServerUnavailable):
            return Ending(grpc.StatusCode.UNAVAILABLE, str(error))
        if isinstance(error, MilvusException) and isinstance(error.code, grpc.StatusCode):
            # pymilvus has repeated a request of the proxy's own, and has given up.
            return Ending(error.code, error.message)
        if isinstance(error, DecodeError):
            return Ending(grpc.StatusCode.INTERNAL, f"cannot parse the request of {method}")
        if not isinstance(error, HubnessError | MilvusException):
            self._failures.add(method, error)
        response = messages.refusal(method, error)
        if isinstance(error, messages.Refused) and isinstance(error.response, type(response)):
            response = error.response
            # It names the collection as the caller did.
            messages.status_in(response).reason = error.message
        return Answer(bytes(response.SerializeToString()))


class Upstream:
    """Calls to Milvus.

    An answer arrives whole once it is read, and large ones of one user arrive one after the other.
    """

    def __init__(self, channel: grpc.aio.Channel, intake: Intake) -> None:
        self._unary = cache(channel.unary_unary)
        self._stream = cache(channel.unary_stream)
        self._intake = intake
        self.threads = intake.threads

    def call(self, method: str) -> Any:
        """Return what starts a call. gRPC reads the answer to others as it comes."""
        return (self._stream if method in READS else self._unary)(_SERVICE + method)

    async def answer(self, call: Any, method: str, heard: Heard) -> bytes:
        """Return the answer to a call. Raises CallEnded, and gRPC's error."""
        if method not in READS:
            answer: bytes = await call
            heard.held.hold_answer(len(answer))
            return answer

        answers = aiter(call)
        try:
            answer = await self.next_of(answers, call, heard) or b""
            # Its status, which may be an error.
            await anext(answers, None)
        finally:
            # gRPC's generator would keep the answer, in a circle with its call.
            await answers.aclose()
        return answer

    async def next_of(
        self, answers: AsyncGenerator[bytes, None], call: Any, heard: Heard
    ) -> bytes | None:
        """Return the next of the answers to a call; None after the last.

        Raises CallEnded, and gRPC's error.
        """
        # Until it begins, others of the user may have the turn.
        await call.initial_metadata()
        async with self._intake.answering(heard.identity):
            answer = await anext(answers, None)
            if answer is not None:
                await heard.held.find_room(len(answer))
            return answer


class _Call:
    """One call of a rewritten method. A large one is worked on in threads."""

    def __init__(
        self,
        method: str,
        context: Context,
        heard: Heard,
        upstream: Upstream,
    ) -> None:
        self.method = method
        self.heard = heard
        self.headers = dict(context.invocation_metadata() or ())
        self.caller = Caller(context.time_remaining())
        self._context = context
        self._held = heard.held
        self._upstream = upstream
        self._last: Any = None
        self.may_outdate = False
        """Whether Milvus may have done what outdates the cached states: a call that it has refused,
        or that has not reached it, has not.
        """

    async def request(self) -> Any:
        """Receive and parse the request. Raises CallEnded, DecodeError."""
        message = await self._held.receive(self._context.read)
        if not isinstance(message, bytes):
            reason = f"a call of {self.method} has one message, and none came"
            raise CallEnded(grpc.StatusCode.INVALID_ARGUMENT, reason)

        if self._held.is_large:
            most = MOST_PARTS_OF_WRITES if self.method in WRITES else MOST_PARTS
            descriptor = messages.request_type(self.method)
            parts = await self.run(
                partial(expect_few_parts, self.method, descriptor, message, most)
            )
            self._held.count_parts(parts)

        return await self.run(partial(messages.request_of, self.method, message))

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of work that takes as long as the messages of this call are large."""
        if not self._held.is_large:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._upstream.threads, work)

    async def drive(
        self, operation: Operation[Any], answer: Callable[[Step], Awaitable[Any]]
    ) -> Any:
        """Run an operation as `drive_async` does, and what it computes between its steps by `run`."""
        move: Callable[[Any], Step] = operation.send
        outcome: Any = None
        try:
            while True:
                is_over, step = await self.run(partial(_moved, move, outcome))
                if is_over:
                    return step

                try:
                    outcome = await answer(step)
                    move = operation.send
                except Exception as error:
                    outcome = error
                    move = operation.throw
        finally:
            # A thread may still move the operation of a call that was cancelled.
            with suppress(ValueError):
                operation.close()

    async def send(self, request: Any, with_bytes: bool = False) -> Any:
        """Return the outcome of a `Send`. Raises messages.Refused, CallEnded, and gRPC's error."""
        name = messages.method_of(request)
        content = await self.run(request.SerializeToString)
        call = self._upstream.call(name)(
            content, metadata=self.heard.metadata or None, timeout=self._context.time_remaining()
        )
        del content
        is_the_callers = name == self.method
        if is_the_callers:
            self._last = call
            self.may_outdate = OUTDATES.fullmatch(name) is not None
        try:
            answer = await self._upstream.answer(call, name, self.heard)
        except grpc.aio.AioRpcError as error:
            if is_the_callers and error.code() in STATUS_CODES_OF_REFUSALS:
                self.may_outdate = False
            raise

        response = await self.run(partial(messages.response_of, name, answer))
        status = messages.status_in(response)
        if status.code or status.error_code:
            if is_the_callers:
                self.may_outdate = False
            raise messages.Refused(response, status)

        return (response, answer) if with_bytes else response

    async def metadata_of_answer(self) -> tuple[Metadata, Metadata]:
        """Return the initial and the trailing metadata of the upstream call of the same method."""
        if self._last is None:
            return (), ()

        try:
            initial = passed_on(await self._last.initial_metadata())
            return initial, passed_on(await self._last.trailing_metadata())
        except grpc.aio.AioRpcError:
            return (), ()


async def _status_of(call: Any, first_endings: list[Ending]) -> Ending:
    """Return the status of a stream that has ended.

    If the upstream ends a stream early, gRPC may report its own write failure in place of the
    upstream's status at first, so both are watched. first_endings: the status at that moment.
    """
    deadline = monotonic() + _STATUS_SECONDS
    while (end := await _ending(call)).details == _SEND_FAILED and monotonic() <= deadline:
        if first_endings[0].details != _SEND_FAILED:
            return first_endings[0]

        await asyncio.sleep(0.005)
    return end


async def _ending(call: Any) -> Ending:
    return Ending(
        await call.code(), await call.details(), passed_on(await call.trailing_metadata())
    )


def _ending_in(error: Any) -> Ending:
    """Return the status of an upstream call that failed."""
    return Ending(error.code(), error.details() or "", passed_on(error.trailing_metadata()))


async def _only(message: Any) -> AsyncIterator[bytes]:
    """Yield the message of a call that has one; nothing for gRPC's end of messages."""
    if isinstance(message, bytes):
        yield message


def _moved(move: Callable[[Any], Step], outcome: Any) -> tuple[bool, Any]:
    """Return False and the next step of an operation, or True and its result."""
    try:
        return False, move(outcome)
    except StopIteration as done:
        return True, done.value


def _at_hand(answer: Any) -> Any:
    """Return the result of a coroutine that has nothing to wait for."""
    try:
        answer.send(None)
    except StopIteration as returned:
        return returned.value

    raise RuntimeError("the status of an ended call is not available")


class Proxy:
    """A gRPC proxy in front of one Milvus; corrected
    collections behave as with HubnessClient, in any language.

        async with Proxy(ProxyOptions("localhost:19530")):
            await stopped.wait()

    ask_seconds, valid_seconds, large, arrival_seconds, taking_seconds: of `Admission` and `Intake`.
    most_connections: of `Connections`; None for as many as the limit of open files leaves room for.
    """

    def __init__(
        self,
        options: ProxyOptions,
        *,
        ask_seconds: float = ASK_SECONDS,
        valid_seconds: float = VALID_SECONDS,
        large: int = LARGE,
        arrival_seconds: float = ARRIVAL_SECONDS,
        taking_seconds: float = TAKING_SECONDS,
        most_connections: int | None = None,
    ) -> None:
        self.options = options
        self._ask_seconds = ask_seconds
        self._valid_seconds = valid_seconds
        self.port = options.port
        self.sessions = Sessions(options)
        self.intake = Intake(
            options.budget,
            options.calls_of_user,
            large=large,
            arrival_seconds=arrival_seconds,
            taking_seconds=taking_seconds,
        )
        self.connections = Connections(most_connections)
        self._admission: Admission | None = None
        self._watch: asyncio.Task[None] | None = None
        self._server: grpc.aio.Server | None = None
        self._channel: grpc.aio.Channel | None = None

    async def start(self) -> None:
        """Listen; `port` is then the actual port.

        Raises InvalidParameter for an unusable address or certificate.
        """
        self._channel = self.options.open_channel(grpc.aio)
        self._admission = Admission(
            self._channel, self.options.upstream, self._ask_seconds, self._valid_seconds
        )
        handler = ProxyHandler(
            self._channel, self.sessions, self._admission, self.intake, self.connections
        )
        self._server = grpc.aio.server(
            handlers=[handler],
            options=[
                *self.options.server_options(),
                ("grpc.max_allowed_incoming_connections", self.connections.most),
            ],
            # With the calls whose tokens Milvus does not know yet.
            maximum_concurrent_rpcs=2 * USERS * self.options.calls_of_user,
        )
        address = f"{self.options.host}:{self.options.port}"
        # Older versions of gRPC return the port 0 for a failure, newer ones raise.
        with suppress(RuntimeError):
            self.port = 0
            if self.options.tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                credentials = grpc.ssl_server_credentials([self.options.tls])
                self.port = self._server.add_secure_port(address, credentials)

        if not self.port:
            await self._channel.close()
            remedy = "choose a free port"
            if self.options.tls:
                remedy += ", and a key that gRPC knows: RSA, or elliptic on P-256 or P-384"
            raise InvalidParameter(f"cannot listen on {address}: {remedy}")

        await self._server.start()
        self.connections.port = self.port
        self._watch = asyncio.create_task(self.connections.watch())

    async def stop(self) -> None:
        """Accept no more calls, give running ones `drain` seconds, and close the connections."""
        if self._watch is not None:
            self._watch.cancel()
        if self._server is not None:
            await self._server.stop(self.options.drain)
        if self._admission is not None:
            self._admission.close()
        if self._channel is not None:
            await self._channel.close()
        self.intake.close()
        await asyncio.to_thread(self.sessions.close)

    async def __aenter__(self) -> Proxy:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()
