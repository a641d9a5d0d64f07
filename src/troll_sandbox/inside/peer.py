"""One end of the channel between two processes. Each can ask the other for operations on the other's objects."""

from __future__ import annotations

from messages import MAX_BYTES, MessageError, decode, encode
from proxy import Proxy, Twin, describe, made, original_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Closed(BaseException):
    """The other side is gone, or did not send a message. Not an `Exception`, so that tests do not catch it."""


class Peer:
    """One end of a channel.

    Args:
        channel: File descriptor of a stream socket.
        serve: Called with the name of an operation and its operands when the other side asks for one.
        kind: The class that stands here for objects of the other side.

    Attributes:
        closed: Whether the other side is gone or has broken the protocol.
        comparing: Pairs of the other side's objects, by number, that are being compared.
    """

    def __init__(self, channel: int, serve: Callable[..., object], kind: type[Proxy] = Proxy):
        self.closed = False
        self.comparing: set[tuple[int, int]] = set()
        self._reader = open(channel, "rb")  # noqa: SIM115
        self._writer = open(channel, "wb", buffering=0, closefd=False)  # noqa: SIM115
        self._serve = serve
        self._mine: list[object] = []
        self._numbers: dict[int, int] = {}
        self._kind = kind
        self._theirs: dict[int, Proxy] = {}
        self._twins: dict[int, type[BaseException]] = {}

    def request(self, operation: str, *operands: object) -> Any:
        """Asks for an operation, and serves the other side's requests until the answer arrives.

        Raises:
            Closed: No answer came.
            BaseException: The operation raised it: a builtin exception, or the twin of an exception of the other side,
                which inherits from the same builtin exceptions. `remote` is its text for a report.
        """
        self._send(("ask", operation, operands))
        while (answer := self._next_answer()) is None:
            pass
        if answer[0] == "value":
            return answer[1]
        error = self._exception(answer[1])
        if isinstance(error, StopIteration) and operation != "next":
            # It would silently end a loop of the tests that makes the call, e.g. `map`.
            raise RuntimeError("StopIteration") from error
        raise error

    def serve(self) -> None:
        """Serves requests until the channel is closed."""
        try:
            while self._next_answer() is None:
                pass
        except Closed:
            pass

    def twin(self, lineage: object) -> type[BaseException]:
        """Returns the twin of an exception class of the other side, from its `lineage`.

        Raises:
            Closed: The other side sent something else.
        """
        if isinstance(lineage, type) and issubclass(lineage, BaseException):
            return lineage
        if type(lineage) is not tuple or len(lineage) != 3 or type(lineage[0]) is not str:
            raise self.close()
        name, origin, bases = lineage
        if not isinstance(origin, Proxy):  # a class of this side comes back
            return self.twin(origin)
        number = origin._proxy_number
        if number not in self._twins:
            parents = tuple(map(self.twin, bases)) if type(bases) is tuple else ()
            if not parents:
                raise self.close()
            self._twins[number] = Twin.of(name, parents, origin)
        return self._twins[number]

    def pack(self, value: object) -> bytes:
        """Returns the bytes of a value, with references to what cannot be copied."""
        return encode(value, self._refer)

    def unpack(self, data: bytes) -> Any:
        """Returns the value of bytes that the other side packed."""
        return decode(data, self._resolve)

    def _next_answer(self) -> tuple[str, Any] | None:
        """Receives a message: returns an answer, or answers a request and returns None."""
        kind, *content = self._receive()
        if kind != "ask":
            return kind, content[0]
        operation, operands = content
        try:
            self._send(("value", self._serve(operation, *operands)))
        except Closed:
            raise
        except BaseException as error:
            self._send(("error", self._description(error)))
        return None

    def _send(self, message: tuple[object, ...]) -> None:
        content = self.pack(message)
        rest = memoryview(len(content).to_bytes(4, "big") + content)
        try:
            while rest:
                rest = rest[self._writer.write(rest) :]
        except OSError:
            raise self.close() from None

    def _receive(self) -> tuple[Any, ...]:
        try:
            size = int.from_bytes(self._reader.read(4), "big")
            data = self._reader.read(size) if 0 < size <= MAX_BYTES else b""
            message = self.unpack(data)
        except (OSError, MessageError):
            raise self.close() from None
        shapes = {"ask": (str, tuple), "value": (object,), "error": (tuple,)}
        if type(message) is not tuple or not message or type(message[0]) is not str:
            raise self.close()
        shape = shapes.get(message[0], ())
        if len(message) != len(shape) + 1 or not all(map(isinstance, message[1:], shape)):
            raise self.close()
        return message

    def close(self) -> Closed:
        """Marks the channel as closed; returns the exception to raise."""
        self.closed = True
        return Closed()

    def _description(self, error: BaseException) -> tuple[object, ...]:
        description = describe(error)
        try:
            self.pack(description)
        except MessageError:  # its arguments are too large or too deep
            return (*description[:2], (description[1],), error)
        return description

    def _exception(self, description: tuple[Any, ...]) -> BaseException:
        if len(description) != 4 or type(description[1]) is not str or type(description[2]) is not tuple:
            raise self.close()
        lineage, text, args, original = description
        if isinstance(original, BaseException):  # an exception of this side comes back
            return original
        return made(self.twin(lineage), text, args, original)

    def _refer(self, value: Any) -> tuple[bool, int]:
        value = original_of(value)
        if issubclass(type(value), Proxy):
            return True, value._proxy_number
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._mine)
            self._mine.append(value)  # kept for ever, so that its id is not used again
        return False, number

    def _resolve(self, yours: bool, number: int) -> object:
        if yours:
            return self._mine[number]
        if number not in self._theirs:
            self._theirs[number] = self._kind(self, number)
        return self._theirs[number]
