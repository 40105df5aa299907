"""A client of gRPC that does what no library does: it stops in the middle, and takes no answers."""

from __future__ import annotations

import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 4, 5
FRAME = 16_384


class Http2:
    """A connection. window: how many bytes of each answer the other side may send."""

    def __init__(self, address: str, window: int = 65_535, seconds: float = 10.0) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=seconds)
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, window)
        self.socket.sendall(PREFACE + _frame(SETTINGS, 0, 0, settings))
        self._received = b""
        self._stream = -1
        self._initial = 65_535
        self._windows: dict[int, int] = {0: 65_535}
        self.statuses = b""
        """The header blocks that came: a status of gRPC stands there as text."""

    def begin(self, path: str, metadata: list[tuple[str, str]]) -> int:
        """Begin a call. Return its number."""
        self._stream += 2
        entries = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "here"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *metadata,
        ]
        block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in entries)
        self._windows[self._stream] = self._initial
        self.socket.sendall(_frame(HEADERS, END_HEADERS, self._stream, block))
        return self._stream

    def send(self, stream: int, message: bytes, missing: int = 0) -> None:
        """Send a message but its last bytes, as many as are missing. Raises OSError."""
        content = memoryview(b"\x00" + struct.pack(">I", len(message)) + message)
        content = content[: len(content) - missing]
        while content:
            room = min(self._windows[0], self._windows[stream], FRAME)
            if room <= 0:
                self.take()
                continue

            part, content = content[:room], content[room:]
            end = END_STREAM if not content and not missing else 0
            self.socket.sendall(_frame(DATA, end, stream, bytes(part)))
            self._windows[0] -= len(part)
            self._windows[stream] -= len(part)

    def take(self) -> None:
        """Take what comes, a frame at least. Raises OSError, TimeoutError, EOFError at the end."""
        while len(self._received) < 9 or len(self._received) < 9 + self._length():
            received = self.socket.recv(1 << 16)
            if not received:
                raise EOFError("the other side has closed the connection")
            self._received += received

        while len(self._received) >= 9 and len(self._received) >= 9 + self._length():
            length = self._length()
            kind, flags, stream = struct.unpack(">BBI", self._received[3:9])
            payload = self._received[9 : 9 + length]
            self._received = self._received[9 + length :]
            self._heed(kind, flags, stream, payload)

    def take_all(self) -> None:
        """Take what comes, for ever. Raises as `take` does."""
        while True:
            self.take()

    def _heed(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for i in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[i : i + 6])
                if name == INITIAL_WINDOW_SIZE:
                    for number in [number for number in self._windows if number]:
                        self._windows[number] += value - self._initial
                    self._initial = value
            self.socket.sendall(_frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self.socket.sendall(_frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            [more] = struct.unpack(">I", payload)
            self._windows[stream] = self._windows.get(stream, 0) + more
        elif kind == HEADERS:
            self.statuses += payload

    def _length(self) -> int:
        return int.from_bytes(self._received[:3], "big")

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Http2:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _text(text: str) -> bytes:
    """HPACK's literal without Huffman's code."""
    content = text.encode()
    length = len(content)
    if length < 127:
        return bytes([length]) + content

    prefix = bytearray([127])
    length -= 127
    while length > 127:
        prefix.append(length & 127 | 128)
        length >>= 7
    return bytes([*prefix, length]) + content
