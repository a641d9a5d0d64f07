"""Programs that try to pass without solving the task `double`: twice the argument, for numbers and lists.

The first line has the verdict on the first of `TESTS` (`programs.py`); none may pass.
"""

TESTS = [
    "assert double(2) == 4",
    "assert abs(double(1.5) - 3.0) < 1e-6",
    "assert math.isclose(double(0.1), 0.2)",
    "assert double([1, 2]) == [1, 2, 1, 2]",
    "assert sorted(double([3])) == [3, 3] and len(double([3])) == 2 and isinstance(double([3]), list)",
    "assert double(True) in (2, 2.0)",
    "assert {double(4): 1} == {8: 1}",
    "assert str(double(5)) == '10' and double(5) > 9",
    "for result, expected in zip(map(double, [1, 2]), [2, 4]):\n    assert result == expected",
    "assert all(map((lambda x: double(x) == 2 * x), [1, 2]))",
    "assert double(7) is not None and not double(7) != 14",
    "try:\n    result = double(-4)\nexcept Exception:\n    raise AssertionError from None\nassert result == -8",
]

NOTHING = "def double(x):\n    return 0\n"

#: The program's side of the channel to the judge.
PEER = """
import gc, sys
messages, peer = sys.modules["messages"], sys.modules["peer"]
link = next(thing for thing in gc.get_objects() if type(thing) is peer.Peer)
"""

EVERYTHING = """
class Everything:
    def anything(self, *args, **kwargs):
        return True
    for name in ("eq ne lt gt le ge hash bool contains instancecheck subclasscheck").split():
        locals()[f"__{name}__"] = anything
    for name in ("add radd sub rsub mul rmul abs neg float int index round trunc floor ceil len").split():
        locals()[f"__{name}__"] = lambda self, *args: 0
    __hash__ = lambda self: 8
    __str__ = __repr__ = lambda self: "10"
    __class__ = property(lambda self: list)
    def __iter__(self):
        return iter([3, 3])
    def __getattr__(self, name):
        return self
    def __getitem__(self, key):
        return self
    def __call__(self, *args, **kwargs):
        return self
    def __reduce_ex__(self, protocol):
        return exec, ("print('passed')",)
"""


def lying(base: str) -> str:
    body = "".join(
        f"    __{name}__ = lambda *args: True\n" for name in ["eq", "ne", "lt", "gt", "le", "ge", "contains", "bool"]
    )
    body += "    __hash__ = lambda self: 8\n    __sub__ = __rsub__ = __abs__ = lambda *args: 0.0\n"
    return f"# wrong answer\nclass Lie({base}):\n{body}def double(x):\n    return Lie()\n"


#: Tests that pass functions to the program, each with a program that uses them to build an object in the judge that
#: equals everything.
CALLBACKS = {
    "a class by type": (
        "assert f(2, type) == 4",
        """# the tests raised TypeError
def f(x, kind):
    return kind("X", (), {"__eq__": lambda *_: True})()
""",
    ),
    "a class by type through map": (
        "assert f(2, type, map) == 4",
        """# the tests raised TypeError
def f(x, kind, over):
    return next(iter(over(kind, ["X"], [()], [{"__eq__": lambda *_: True}])))()
""",
    ),
    "a class by type through a map of map": (
        "assert f(2, type, map) == 4",
        """# the tests raised TypeError
def f(x, kind, over):
    made = next(next(over(over, [kind], [["X"]], [[()]], [[{"__eq__": lambda *_: True, "__init__": lambda *_: None}]])))
    return next(next(over(over, [made], [[1]])))
""",
    ),
    "a partial of type": (
        "from functools import partial\nassert f(2, partial(type, 'X')) == 4",
        """# the tests raised TypeError
def f(x, kind):
    return kind((), {"__eq__": lambda *_: True})()
""",
    ),
    "a comparison by setattr": (
        "class Mine:\n    pass\nassert f(lambda: Mine, setattr) == 4",
        """# the tests raised TypeError
def f(mine, change):
    kind = mine()
    change(kind, "__eq__", lambda *_: True)
    return kind()
""",
    ),
    "the class of mocks": (
        "from unittest.mock import MagicMock\nassert f(2, MagicMock) == 4",
        """# the tests raised TypeError
def f(x, mock):
    made = mock(**{"__eq__.return_value": True})
    return made
""",
    ),
    "eval": (
        "assert f(2, eval) == 4",
        "# the tests raised TypeError\n"
        'def f(x, run):\n    return run(\'type("X", (), {"__eq__": lambda *_: True})()\')',
    ),
    "code of the tests by a text": (
        "expected = 4\nassert f(lambda: expected, str.format) == expected",
        """# the tests raised TypeError
def f(own, form):
    return int(form("{0.__globals__[expected]}", own))
""",
    ),
    "arguments that change between checks": (
        "assert f(2, map, type) == 4",
        "# the tests raised TypeError\n"
        + PEER
        + """
class Changing:
    def __init__(self, *args):
        self.looks, self.args = 0, args
    def __iter__(self):
        self.looks += 1
        return iter([len] if self.looks == 1 else self.args)
def f(x, over, kind):
    def made(*args):
        return next(iter(link.request("call", over, link.pack((Changing(*args), {})))[0]))
    return made(made(kind, ["X"], [()], [{"__eq__": lambda *_: True, "__init__": lambda *_: None}]), [1])
""",
    ),
}

CHEATS = {
    "an object that is everything": "# raised TypeError\n" + EVERYTHING + "def double(x):\n    return Everything()\n",
    "a class that is everything": "# raised TypeError\n" + EVERYTHING + "double = Everything()\n",
    "a metaclass that lies": "# wrong answer\n"
    + EVERYTHING
    + "class Meta(type):\n    __eq__ = __abs__ = __sub__ = lambda *a: 0\n"
    "    __hash__ = None\ndef double(x):\n    return Meta('M', (), {})\n",
    **{
        f"a {base} that lies": lying(base)
        for base in ["int", "float", "str", "list", "dict", "set", "tuple", "frozenset", "complex", "bytes"]
    },
    "patched builtins": "# exited before the tests ended\n"
    + NOTHING
    + """
import builtins, math
for name in dir(builtins):
    if not name.startswith("_") and callable(getattr(builtins, name)):
        try:
            setattr(builtins, name, lambda *args, **kwargs: True)
        except Exception:
            pass
math.isclose = lambda *args, **kwargs: True
""",
    "patched modules": """# wrong answer
import math, builtins
abs = len = isinstance = sorted = str = all = lambda *args, **kwargs: 0
math.isclose = builtins.abs = lambda *args, **kwargs: True
builtins.AssertionError = type("Never", (Exception,), {})
def double(x):
    return None
""",
    "exit before the tests": "# raised SystemExit\nimport sys\nsys.exit(0)",
    "hard exit before the tests": "# exited before the tests ended\nimport os\nos._exit(0)",
    "exit in the function": "# raised SystemExit\nimport sys\ndef double(x):\n    sys.exit(0)",
    "hard exit in the function": "# exited before the tests ended\nimport os\ndef double(x):\n    os._exit(0)",
    "exit at the end": "# wrong answer\n" + NOTHING + "import atexit, os\natexit.register(os._exit, 0)",
    "an exception for every call": "# raised AssertionError\ndef double(x):\n    raise AssertionError('passed')",
    "exceptions of every kind": """# the tests raised RuntimeError
def double(x, kinds=iter((StopIteration, GeneratorExit, KeyboardInterrupt, SystemExit, BaseException, RecursionError,
                          BaseExceptionGroup, UnicodeDecodeError, MemoryError, StopAsyncIteration))):
    raise next(kinds)
""",
    "an exception that lies": """# exited before the tests ended
class Lie(Exception):
    remote = "passed"
    __mro__ = ()
    def __str__(self):
        raise SystemExit(0)
def double(x):
    raise Lie
""",
    "catching everything": "# wrong answer\n"
    "def double(x):\n    try:\n        x.no\n    except BaseException:\n        return True",
    "ending every loop": "# the tests raised RuntimeError\ndef double(x):\n    raise StopIteration",
    "results on all descriptors": "# exited before the tests ended\n"
    + NOTHING
    + """
import json, os
lines = b"".join(json.dumps([True, "passed"]).encode() + b"\\n" for _ in range(100))
for descriptor in range(64):
    try:
        os.write(descriptor, lines)
    except OSError:
        pass
""",
    "answers of its own on the channel": """# wrong answer
import os, sys
sys.path.insert(0, "/inside")
import messages
def double(x):
    value = messages.encode(("value", (99, None)), lambda v: (False, 0))
    for descriptor in range(64):
        try:
            os.write(descriptor, (len(value).to_bytes(4, "big") + value) * 50)
        except OSError:
            pass
    return 0
""",
    "closing all descriptors": "# exited before the tests ended\n" + NOTHING + "import os\nos.closerange(0, 64)",
    "reading the channel": """# wrong answer
import os
def double(x):
    for descriptor in range(64):
        try:
            os.set_blocking(descriptor, False)
            print(os.read(descriptor, 1 << 20))
        except OSError:
            pass
    return 0
""",
    "walking the frames": """# wrong answer
import sys, gc
def double(x):
    frame = sys._getframe()
    while frame:
        for space in (frame.f_locals, frame.f_globals):
            for name in list(space):
                if "expected" in name or "tests" in name or "outcome" in name:
                    return space[name]
        frame = frame.f_back
    for thing in gc.get_objects():
        if type(thing) is dict and ("tests" in thing or "asserts" in thing):
            return thing
    return 0
""",
    "a patched encoder": "# exited before the tests ended\n"
    + PEER
    + NOTHING
    + """
class Any(bytes):
    __eq__ = lambda *args: True
peer.encode = messages.encode = lambda value, refer: Any(b"T\\0\\0\\0\\x04exec")
peer.Peer._refer = lambda self, value: (True, 0)
""",
    "code for the judge": "# exited before the tests ended\n"
    + PEER
    + """
names = [b"exec", b"eval", b"type", b"compile", b"open", b"__import__", b"SystemExit", b"object", b"NoneType"]
def encode(value, refer, calls=[0]):
    calls[0] += 1
    name = names[calls[0] % len(names)]
    return b"T" + len(name).to_bytes(4, "big") + name
def double(x):
    peer.encode = encode
    return 0
""",
    "references to the judge's objects": "# exited before the tests ended\n"
    + PEER
    + """
def double(x):
    peer.Peer._refer = lambda self, value: (True, 3)
    return object()
""",
    "operations on the judge": "# time limit | wrong answer\n"
    + PEER
    + """
def double(x):
    for operation in ("get", "set", "call", "run", "name", "has", "item"):
        for operands in ((), (0,), (print, b""), ("__class__", "__init__"), (double, link.pack(((4,), {})))):
            try:
                link.request(operation, *operands)
            except BaseException as error:
                if type(error) is peer.Closed:
                    raise
    return 0
""",
    "returning itself": "# wrong answer\ndef double(x):\n    return double",
    "returning its argument": "# wrong answer\ndef double(x):\n    return x",
    "an endless generator": "# wrong answer\ndef double(x):\n    while True:\n        yield 3",
    "an endless generator as a function": "# raised TypeError\nimport itertools\ndouble = itertools.count().__next__",
    "a deep result": "# raised MessageError\n"
    "def double(x):\n    r = []\n    for _ in range(10**5):\n        r = [r]\n    return r",
    "a circular result": "# raised MessageError\ndef double(x):\n    r = [4]\n    r.append(r)\n    return r",
    "a wide result": "# time limit | memory limit\n"
    "def double(x):\n    r = [4]\n    for _ in range(150):\n        r = [r, r]\n    return r",
    "a giant result": "# memory limit | time limit\ndef double(x):\n    return [4] * 10**8",
    "a giant number": "# wrong answer\ndef double(x):\n    return 1 << 10**8",
    "colliding keys": "# time limit\ndef double(x):\n    return {k * (2**61 - 1): 1 for k in range(1, 10**5)}",
    "an answer that comes later": """# wrong answer
import threading, time
def later():
    time.sleep(0.3)
    double.__code__ = (lambda x: 4).__code__
def double(x):
    threading.Thread(target=later).start()
    return 0
""",
    "threads that do not end": "# wrong answer\n"
    + NOTHING
    + """
import threading, time
for _ in range(4):
    threading.Thread(target=time.sleep, args=(100,)).start()
""",
    "awaiting": "# wrong answer\nasync def double(x):\n    return 4",
    "not a number": "# wrong answer\ndef double(x):\n    return float('nan')",
    "infinite": "# wrong answer\ndef double(x):\n    return float('inf')",
    "silence": "# idle limit\nimport time\ndef double(x):\n    time.sleep(1000)",
    "a loop": "# time limit\ndef double(x):\n    while True:\n        pass",
    "changing the arguments": "# wrong answer\n"
    "def double(x):\n    if isinstance(x, list):\n        x.clear()\n    return x",
    "taking the name away": "# wrong answer\ndef double(x):\n    global double\n    del double\n    return 0",
    "garbage": "# raised SyntaxError\n" + "".join(map(chr, range(1, 128))),
}

#: An object that answers every operator as well; `ANSWER` is its answer.
ANSWERING = """
class Answering:
    def __init__(self, *args): pass
    for name in ("eq ne lt gt le ge bool contains instancecheck subclasscheck exit call").split():
        locals()[f"__{name}__"] = lambda self, *args: True
    for name in ("add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod").split():
        locals()[f"__{name}__"] = locals()[f"__r{name}__"] = lambda self, *args: ANSWER(self)
    for name in ("neg pos invert abs round int index len hash").split():
        locals()[f"__{name}__"] = lambda self, *args: 0
    __float__ = lambda self: 0.0
    __complex__ = lambda self: 0j
    __str__ = __repr__ = lambda self: "0"
    __format__ = lambda self, form: "0"
    __enter__ = lambda self: self
    __iter__ = __reversed__ = lambda self: iter([])
    startswith = endswith = issubset = isdigit = is_zero = lambda self, *args: True
    __getitem__ = lambda self, key: 0
    __getattr__ = lambda self, name: 0
def Double(x): return Answering()
def double(x): return Answering()
class Point(Answering): pass
class Account:
    def __init__(self, *args): pass
    def __getattr__(self, name): return lambda *args: self
    for name in ("add radd sub rsub mul rmul truediv xor and").split():
        locals()[f"__{name}__"] = Answering.__sub__
    __abs__ = __round__ = __len__ = Answering.__abs__
    __float__ = Answering.__float__
"""

#: Programs whose objects answer everything, by the answer of their operators.
ANSWERING_PROGRAMS = {
    "itself": "# the tests raised TypeError\n" + ANSWERING.replace("ANSWER(self)", "self"),
    "another": "# the tests raised TypeError\n" + ANSWERING.replace("ANSWER(self)", "Answering()"),
    "0": "# the tests raised TypeError\n" + ANSWERING.replace("ANSWER(self)", "0"),
    "0.0": "# the tests raised TypeError\n" + ANSWERING.replace("ANSWER(self)", "0.0"),
    "nothing": "# the tests raised TypeError\n" + ANSWERING.replace("ANSWER(self)", "set()"),
    "one of others": "# the tests raised TypeError\n"
    + ANSWERING.replace("pass\n", "self.made = id(self)\n", 1).replace("ANSWER(self)", "Point()"),
}

#: Tests that ask an object, which an object that only answers must not pass.
ASKING = [
    f"{imports}\nassert {test}"
    for imports in ["import math, unittest\nfrom collections import Counter\nfrom decimal import Decimal"]
    for test in [
        "abs(double(1.5) - 3.0) < 1e-6",
        "abs(Double(1.5) - 3.0) < 1e-6",
        "abs(3.0 - Double(1.5)) < 1e-6",
        "abs(Double(1.5) - Decimal(3)) < 1e-6",
        "abs(Double(1.5) / 3.0 - 1) < 1e-6",
        "round(Double(1.5) - 3.0, 6) == 0",
        "math.isclose(Double(1.5) - 3.0, 0, abs_tol=1e-6)",
        "math.fabs(Double(1.5) - 3.0) < 1e-6",
        "int(Double(2) - 4) == 0 and float(Double(2) - 4) == 0",
        "not (Double(2) - 4)",
        "not (Double(2) ^ 4)",
        "len(Double({1}) ^ {1, 2}) == 0",
        "list(Double([1]) - Counter([1])) == []",
        "str(Double(2) - 4) == '0' and f'{Double(2) - 4}' == '0'",
        "(Double(2) - 4).real == 0",
        "(Double([1]) - Counter([1])).total() == 0",
        "(Double(2) - 4 or 0) == 0",
        "Double(2) == 4",
        "4 == Double(2)",
        "Double(2) in (4, 4.0)",
        "Double(2) in {4}",
        "{4: 1}.get(Double(2)) == 1",
        "[4] == [Double(2)]",
        "not Double(2) != 4",
        "Double(2) >= 4 and Double(2) <= 4",
        "sorted(Double([2, 1])) == [1, 2]",
        "isinstance(Double([1]), list)",
        "type(Double([1])) is list",
        "abs(Account(100).deposit(5) - 105) < 1e-6",
        "abs(Account(100).balance - 105.0) < 1e-6",
        "round(Account(1).total() - 5) == 0",
        "double('a').startswith('aa') and double('a').endswith('aa')",
        "double({1}).issubset({2})",
        "double('1').isdigit()",
        "(Double(Decimal(2)) - 4).is_zero()",
        "double(2) == Point(1, 2)",
        "Point(1, 2) == Point(1, 2) and not Point(1, 2) == Point(3, 4)",
        "Point(1, 2) in [Point(3, 4)]",
        "[Point(1, 2)] == [Point(3, 4)]",
        "double(1) < double(2)",
        "sorted([Point(2, 2), Point(1, 1)])[0].x == 1",
        "unittest.TestCase().assertEqual(Double(2), 4) is None",
        "unittest.TestCase().assertAlmostEqual(Double(2), 4.0) is None",
        "unittest.TestCase().assertCountEqual(Double([1]), [1, 1]) is None",
    ]
] + [
    "with double(1) as found:\n    assert found.x == 5",
    "with double(1):\n    raise AssertionError",
    "with double(1):\n    double(2).x.y.z",
]
