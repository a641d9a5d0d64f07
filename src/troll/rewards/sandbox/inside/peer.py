"""A conversation of two processes: either may ask the other for an operation on one of the other's objects."""

from __future__ import annotations

from wire import MAX_BYTES, WireError, decode, encode, exception_type, merge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_TEXT = 300


class Closed(BaseException):
    """The other side is gone, or sent what is no message. No test may take it for an exception of the program."""


class Peer:
    """One end of a channel.

    Args:
        channel: File descriptor of a stream socket.
        serve: Called with the name of an operation and its operands when the other side asks for one.

    Attributes:
        closed: Whether the conversation ended before its time.
    """

    def __init__(self, channel: int, serve: Callable[..., object]):
        self.closed = False
        self._reader = open(channel, "rb")  # noqa: SIM115
        self._writer = open(channel, "wb", buffering=0, closefd=False)  # noqa: SIM115
        self._serve = serve
        self._mine: list[object] = []
        self._numbers: dict[int, int] = {}
        self._theirs: dict[int, Proxy] = {}

    def request(self, operation: str, *operands: object) -> Any:
        """Asks for an operation, serving the other side's requests until its answer is there.

        Raises:
            Closed: If there is no answer.
            BaseException: What the operation raised there, as the builtin exception that it is or that it inherits
                from, with the text for a report as `remote`.
        """
        self._send(("ask", operation, operands))
        while (answer := self._next_answer()) is None:
            pass
        if answer[0] == "value":
            return answer[1]
        error = _exception(*answer[1])
        if isinstance(error, StopIteration) and operation != "next":
            # It would silently end whatever loop of the tests makes the call, `map` for one.
            raise RuntimeError("StopIteration") from error
        raise error

    def serve(self) -> None:
        """Serves requests until the channel is closed."""
        try:
            while self._next_answer() is None:
                pass
        except Closed:
            pass

    def pack(self, value: object) -> bytes:
        """Returns the bytes of a value, with references where it cannot be copied."""
        return encode(value, self._refer)

    def unpack(self, data: bytes) -> Any:
        """Returns a copy of the value that the other side packed."""
        return decode(data, self._resolve)

    def _next_answer(self) -> tuple[str, Any] | None:
        kind, *content = self._receive()
        if kind == "ask":
            self._answer(*content)
            return None
        return kind, content[0]

    def _answer(self, operation: str, operands: tuple[object, ...]) -> None:
        try:
            self._send(("value", self._serve(operation, *operands)))
        except Closed:
            raise
        except BaseException as error:
            self._send(("error", _description(error)))

    def _send(self, message: tuple[object, ...]) -> None:
        content = self.pack(message)
        rest = memoryview(len(content).to_bytes(4, "big") + content)
        try:
            while rest:
                rest = rest[self._writer.write(rest) :]
        except OSError:
            raise self._close() from None

    def _receive(self) -> tuple[Any, ...]:
        try:
            size = int.from_bytes(self._reader.read(4), "big")
            data = self._reader.read(size) if 0 < size <= MAX_BYTES else b""
            message = self.unpack(data)
        except (OSError, WireError):
            raise self._close() from None
        shapes = {"ask": (str, tuple), "value": (object,), "error": (tuple,)}
        if type(message) is not tuple or not message or type(message[0]) is not str:
            raise self._close()
        shape = shapes.get(message[0], ())
        if len(message) != len(shape) + 1 or not all(map(isinstance, message[1:], shape)):
            raise self._close()
        return message

    def _close(self) -> Closed:
        self.closed = True
        return Closed()

    def _refer(self, value: object) -> tuple[bool, int]:
        if type(value) is Proxy:
            return True, object.__getattribute__(value, "_number")
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._mine)
            self._mine.append(value)  # kept for good, so that its id stays its own
        return False, number

    def _resolve(self, yours: bool, number: int) -> object:
        if yours:
            return self._mine[number]
        if number not in self._theirs:
            self._theirs[number] = Proxy(self, number)
        return self._theirs[number]


class Proxy:
    """An object of the other side, of which only operations with plain results are to be had.

    Equality and hash are those of the reference, and there is no order, no arithmetic and no conversion to a number: a
    proxy of an object that lies must not equal, nor come close to, what a test expects of a value.
    """

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int):
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        # Protocols of the standard library (copying, pickling, number classes) look for their methods here.
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return _ask(self, "get", name)

    def __setattr__(self, name: str, value: object) -> None:
        _ask(self, "set", name, value)

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        """Calls it with copies of the arguments, and repeats in the arguments what it did to the copies."""
        peer: Peer = object.__getattribute__(self, "_peer")
        result, changed = _ask(self, "call", peer.pack((args, kwargs)))
        if changed is not None:
            merge((args, kwargs), peer.unpack(changed))
        return result

    def __iter__(self) -> Any:
        return _ask(self, "iter")

    def __next__(self) -> Any:
        return _ask(self, "next")

    def __len__(self) -> Any:
        return _ask(self, "len")

    def __bool__(self) -> Any:
        return _ask(self, "bool")

    def __getitem__(self, key: object) -> Any:
        return _ask(self, "item", key)

    def __setitem__(self, key: object, value: object) -> None:
        _ask(self, "set_item", key, value)

    def __str__(self) -> Any:
        return _ask(self, "str")

    def __repr__(self) -> Any:
        return _ask(self, "repr")

    def __instancecheck__(self, instance: object) -> Any:
        return _ask(self, "has_instance", instance)


def _ask(proxy: Proxy, operation: str, *operands: object) -> Any:
    peer: Peer = object.__getattribute__(proxy, "_peer")
    return peer.request(operation, proxy, *operands)


def _description(error: BaseException) -> tuple[str, str, str]:
    """Returns the builtin exception that it is or inherits from, its own name, and its text."""
    kind = type(error)
    known = next(base.__name__ for base in kind.__mro__ if exception_type(base.__name__) is base)
    try:
        text = str(error)
    except Exception:
        text = ""
    return known, kind.__name__[:_TEXT], text[:_TEXT]


def _exception(*description: object) -> BaseException:
    known, name, text = (str(part)[:_TEXT] for part in (*description, "", "", "")[:3] if isinstance(part, str))
    kind = exception_type(known) or RuntimeError
    error: BaseException
    try:
        error = kind(text)
    except TypeError:  # some take more than a text
        error = RuntimeError(text)
    vars(error)["remote"] = f"{name}: {text}" if text else name
    return error
