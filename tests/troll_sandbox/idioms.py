"""Right programs, with asserts that use their functions and classes as tests in data sets do.

The first line of a program has its verdict (`programs.py`), and that of a test in `PLAIN` its verdict in a judge.
"""

PROGRAM = '''# passed
import contextlib, enum, functools
from collections import namedtuple
from dataclasses import dataclass, field

def add(a, b): return a + b
def half(x): return x / 2
def squares(n): return [i * i for i in range(n)]
def index(words): return {word: i for i, word in enumerate(words)}
def numbers(n):
    for i in range(n):
        yield i
def divide(a, b):
    if b == 0:
        raise ZeroDivisionError("no division by 0")
    return a // b
def find(x): return None if x < 0 else x
def divmod_(a, b): return a // b, a % b
def letters(text): return set(text)
def make_adder(n): return lambda x: x + n
def sort_by(items, key): return sorted(items, key=key)

class ShortageError(ValueError):
    def __init__(self, needed):
        super().__init__(f"needs {needed}")
        self.needed = needed

@dataclass
class Point:
    """A point."""
    x: int
    y: int = 0
    def moved(self, by): return Point(self.x + by, self.y + by)

@dataclass(frozen=True, order=True)
class Card:
    rank: int
    suit: str = field(default="", compare=False)

Pair = namedtuple("Pair", "first second")
def pair(a, b): return Pair(a, b)

class Color(enum.Enum):
    RED = 1
    BLUE = 2
def color(name): return Color[name]

class Vector:
    dimensions = 2
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y) if isinstance(other, Vector) else NotImplemented
    def __sub__(self, other): return Vector(self.x - other.x, self.y - other.y)
    def __mul__(self, number): return Vector(self.x * number, self.y * number)
    __rmul__ = __mul__
    def __matmul__(self, other): return self.x * other.x + self.y * other.y
    def __neg__(self): return Vector(-self.x, -self.y)
    def __abs__(self): return (self.x**2 + self.y**2) ** 0.5
    def __eq__(self, other): return isinstance(other, Vector) and (self.x, self.y) == (other.x, other.y)
    def __hash__(self): return hash((self.x, self.y))
    def __bool__(self): return bool(self.x or self.y)
    def __iter__(self): return iter((self.x, self.y))
    def __getitem__(self, key): return (self.x, self.y)[key]
    def __len__(self): return 2
    def __str__(self): return f"<{self.x}, {self.y}>"
    def __repr__(self): return f"Vector({self.x}, {self.y})"
    def __format__(self, form): return f"{self.x:{form}}|{self.y:{form}}"
    def __call__(self, t): return self.x + self.y * t
    @property
    def length(self): return abs(self)
    @staticmethod
    def zero(): return Vector(0, 0)
    @classmethod
    def unit(cls): return cls(1, 0)

class Celsius:
    def __init__(self, degrees): self.degrees = degrees
    def __float__(self): return float(self.degrees)
    def __int__(self): return int(self.degrees)
    def __round__(self, digits=None): return round(self.degrees, digits)
    def __lt__(self, other): return self.degrees < other.degrees

class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item)
    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()
    def need(self, n):
        if len(self) < n:
            raise ShortageError(n - len(self))
    def __len__(self): return len(self.items)
    def __contains__(self, item): return item in self.items
    def __iter__(self): return iter(self.items)
    def __delitem__(self, index): del self.items[index]
    def __enter__(self):
        self.push("open")
        return self
    def __exit__(self, kind, value, trace): self.items.clear()

@contextlib.contextmanager
def opened(log):
    log.append("open")
    yield len(log)
    log.append("closed")

class Cat:
    def speak(self): return "meow"
class Kitten(Cat):
    pass

async def later(x): return x + 1

@functools.lru_cache
def slow(n): return n
'''

#: Tests that pass in a judge.
JUDGED = {
    "a sum of results": "assert add(1, 2) + add(3, 4) == 10 and add('a', 'b') * 2 == 'abab'",
    "a difference to a float": "assert abs(half(3) - 1.5) < 1e-9",
    "isclose": "import math\nassert math.isclose(half(0.2), 0.1) and round(half(0.25), 2) == 0.12",
    "items and slices": "assert squares(5)[2] == 4 and squares(5)[1:3] == [1, 4] and squares(5)[-1] == 16",
    "length and membership": "assert len(squares(4)) == 4 and 9 in squares(4) and 5 not in squares(4)",
    "a dictionary": "found = index(['a', 'b'])\nassert found['b'] == 1 and found.get('c') is None and 'a' in found",
    "a comprehension": "assert [x + 1 for x in squares(3)] == [1, 2, 5] and all(x >= 0 for x in squares(9))",
    "a generator": "assert list(numbers(3)) == [0, 1, 2] and sum(numbers(4)) == 6 and next(numbers(1)) == 0",
    "the end of a generator": "g = numbers(1)\nnext(g)\ntry:\n    next(g)\nexcept StopIteration:\n    pass\n"
    "else:\n    raise AssertionError",
    "an exception": "try:\n    divide(1, 0)\nexcept ZeroDivisionError as e:\n    assert str(e) == 'no division by 0'\n"
    "else:\n    raise AssertionError('nothing raised')",
    "the arguments of an exception": "try:\n    Stack().pop()\nexcept LookupError as e:\n"
    "    assert e.args == ('pop from an empty stack',)\nelse:\n    assert False",
    "an exception class of the program": "try:\n    Stack().need(2)\nexcept ShortageError as e:\n"
    "    assert e.needed == 2 and str(e) == 'needs 2' and isinstance(e, ValueError)\nelse:\n    assert False",
    "a base of that class": "try:\n    Stack().need(2)\nexcept ValueError as e:\n"
    "    assert type(e).__name__ == 'ShortageError' and type(e) is ShortageError\nelse:\n    assert False",
    "a helper that expects an exception": "def raises(kind, f, *args):\n    try:\n        f(*args)\n"
    "    except kind:\n        return True\n    return False\n"
    "assert raises(ShortageError, Stack().need, 1) and not raises(ShortageError, Stack([1]).need, 1)",
    "unittest": "import unittest\ncase = unittest.TestCase()\ncase.assertEqual(add(1, 2), 3)\n"
    "case.assertAlmostEqual(half(1), 0.5)\ncase.assertIsNone(find(-1))\ncase.assertIn(1, squares(3))\n"
    "with case.assertRaises(ShortageError) as caught:\n    Stack().need(3)\n"
    "assert caught.exception.needed == 3",
    "None": "assert find(-1) is None and find(1) is not None",
    "unpacking": "a, b = divmod_(7, 2)\nfirst, *rest = squares(4)\nassert (a, b) == (3, 1) and rest == [1, 4, 9]",
    "sets": "assert letters('aab') == {'a', 'b'} and letters('ab') | {'c'} == set('abc') and 'a' in letters('a')",
    "sorted results": "assert sorted(letters('cab')) == ['a', 'b', 'c'] and max(squares(3)) == 4",
    "types": "assert isinstance(squares(1), list) and type(add(1, 2)) is int and isinstance(half(1), float)",
    "formats of results": "assert f'{half(3):.2f}' == '1.50' and str(squares(2)) == '[0, 1]'"
    "\nassert '%d' % add(1, 1) == '2'",
    "a function that returns a function": "add2 = make_adder(2)\nassert add2(3) == 5 and callable(add2)",
    "a function of the tests": "assert sort_by(['bb', 'a'], key=len) == ['a', 'bb']",
    "equal data": "assert Point(1, 2) == Point(1, 2) and Point(1, 2) != Point(1, 3) and Point(1) == Point(1, 0)",
    "equal data in containers": "assert [Point(1), Point(2)] == [Point(1), Point(2)]"
    "\nassert Point(2) in [Point(1), Point(2)]"
    "\nassert {'a': Point(1)} == {'a': Point(1)} and [Point(1), Point(2)].index(Point(2)) == 1",
    "attributes": "p = Point(1, 2)\np.x = 5\nassert p.x == 5 and p.y == 2 and hasattr(p, 'x') and not hasattr(p, 'z')"
    "\nassert getattr(p, 'z', None) is None and vars(p) == {'x': 5, 'y': 2} and p.moved(1) == Point(6, 3)",
    "attributes that go": "p = Point(1, 2)\ndel p.y\nassert p.y == 0 and Point.__doc__ == 'A point.'",
    "the order of objects": "assert Card(2) < Card(10) and Card(3) >= Card(3) and max(Card(2), Card(9)).rank == 9"
    "\nassert [c.rank for c in sorted([Card(9), Card(2)])] == [2, 9] and not Card(2) > Card(10)",
    "hashes": "assert len({Card(1), Card(1), Card(2)}) == 2 and {Card(1): 'a'}[Card(1)] == 'a'"
    "\nassert hash(Vector(1, 2)) == hash(Vector(1, 2))",
    "fields of a named tuple": "p = pair(1, 2)\nassert p == (1, 2) and p.first == 1 and p.second == 2 and p[0] == 1"
    "\na, b = p\nassert (a, b) == (1, 2) and p._asdict() == {'first': 1, 'second': 2} and pair(1, 2) == Pair(1, 2)",
    "an enumeration": "assert color('RED') is Color.RED and color('RED') == Color.RED != Color.BLUE"
    "\nassert Color.RED.value == 1 and Color(2) is Color.BLUE and [c.name for c in Color] == ['RED', 'BLUE']",
    "operators on objects": "v = Vector(3, 4)"
    "\nassert Vector(1, 2) + v == Vector(4, 6) and v - Vector(1, 1) == Vector(2, 3)"
    "\nassert -Vector(1, 2) == Vector(-1, -2) and Vector(1, 2) @ Vector(3, 4) == 11 and abs(Vector(3, 4)) == 5",
    "operators with numbers": "assert Vector(1, 2) * 2 == Vector(2, 4) and 2 * Vector(1, 2) == Vector(2, 4)"
    "\nassert (Vector(1, 2) * 3).x == 3\nv = Vector(1, 2)\nv += Vector(1, 1)\nassert v == Vector(2, 3)",
    "texts of objects": "v = Vector(1, 2)\nassert str(v) == '<1, 2>' and repr(v) == 'Vector(1, 2)'"
    "\nassert f'{v:.1f}' == '1.0|2.0' and f'{v}' == '1|2' and repr(Point(1)) == 'Point(x=1, y=0)'",
    "objects as containers": "v = Vector(1, 2)\nx, y = v\nassert (x, y) == (1, 2) and v[0] == 1 and v[0:1] == (1,)"
    "\nassert len(v) == 2 and list(v) == [1, 2] and tuple(v) == (1, 2) and v(3) == 7 and list(reversed(v)) == [2, 1]",
    "truth": "assert Vector(1, 0) and not Vector(0, 0) and not Stack() and bool(Stack([1])) is True",
    "properties and methods of classes": "assert Vector(3, 4).length == 5 and Vector.zero() == Vector(0, 0)"
    "\nassert Vector.unit().x == 1 and Vector.dimensions == 2",
    "numbers of objects": "c = Celsius(1.26)\nassert float(c) == 1.26 and int(c) == 1 and round(c, 1) == 1.3"
    "\nassert Celsius(1) < c",
    "membership": "s = Stack([1, 2])\ns.push(3)\nassert 3 in s and 4 not in s and s.pop() == 3 and len(s) == 2"
    "\ndel s[0]\nassert list(s) == [2]",
    "a context": "with Stack([1]) as s:\n    assert list(s) == [1, 'open']\nassert len(s) == 0"
    "\nwith opened(['a']) as n:\n    assert n == 2",
    "classes": "k = Kitten()\nassert isinstance(k, Cat) and isinstance(k, Kitten) and not isinstance(Cat(), Kitten)"
    "\nassert issubclass(Kitten, Cat) and Kitten.__name__ == 'Kitten' and k.speak() == 'meow'"
    "\nassert isinstance(k, (int, Cat)) and type(k).__name__ == 'Kitten' and type(k) is Kitten",
    "a coroutine": "import asyncio\nasync def main():\n    assert await later(1) == 2\n"
    "    assert await asyncio.gather(later(1), later(2)) == [2, 3]\nasyncio.run(main())"
    "\nassert asyncio.run(later(4)) == 5",
    "a cached function": "assert slow(3) == 3 and slow.cache_info().hits >= 0 and slow.__name__ == 'slow'",
}

#: Programs of other kinds, with their tests.
CASES = {
    "arguments that change in place": (
        """# passed
def reverse(xs): xs.reverse()
def add(d, key, *, value): d[key] = value
def grow(nested): nested[0].append(5); nested.append({6})
""",
        [
            "xs = [1, 2, 3]\nassert reverse(xs) is None\nassert xs == [3, 2, 1]",
            "d = {}\nadd(d, 'a', value=[1])\nassert d == {'a': [1]}",
            "inner = []\nouter = [inner]\ngrow(outer)\nassert inner == [5] and outer == [[5], {6}]",
        ],
    ),
    "objects of the program": (
        """# passed
class Node:
    kinds = ["node"]
    def __init__(self, value): self.value, self.next = value, None
    def __getitem__(self, index): return self if index == 0 else self.next[index - 1]
    def __setitem__(self, index, value): self[index].value = value
    def __iter__(self):
        yield self.value
        yield from self.next or ()
def chain(values):
    first = Node(values[0])
    if values[1:]: first.next = chain(values[1:])
    return first
def total(node): return sum(node)
def counter():
    n = 0
    while True:
        yield (n := n + 1)
""",
        [
            "first = chain([1, 2, 3])\nassert first.value == 1 and first.next.value == 2"
            "\nassert first.next.next.next is None",
            "assert list(first) == [1, 2, 3] and first[2].value == 3 and bool(first)",
            "node = Node(5)\nnode.next = first\nassert node.next is first and node.next == first and total(node) == 11",
            "node[1] = 7\nassert first.value == 7 and not isinstance(3, Node) and node.kinds == ['node']",
            "numbers = counter()\nassert next(numbers) == 1 and [next(numbers) for _ in range(3)] == [2, 3, 4]",
            "assert list(zip(counter(), 'ab')) == [(1, 'a'), (2, 'b')]",
            "assert 2 in chain([1, 2]) and 5 not in chain([1, 2])",
            "node._role, node._number, node._peer = 'leaf', 3, None\nassert (node._role, node._number) == ('leaf', 3)",
        ],
    ),
    "functions of the tests that are called back": (
        """# passed
def apply(f, xs): return [f(x) for x in xs]
def twice(f): return lambda x: f(f(x))
def sort(xs, key): return sorted(xs, key=key)
def each(function, *args, **kwargs): return function(*args, **kwargs)
def named(self): return self
def total(xs): return sum(xs)
def fill(grid): grid[0][0] = 5
def attempt(f):
    try:
        return f()
    except ValueError as error:
        return str(error)
""",
        [
            "assert apply(lambda x: x + 1, [1, 2]) == [2, 3]",
            "assert twice(lambda x: x * 3)(2) == 18",
            "assert sort(['bb', 'a'], key=len) == ['a', 'bb'] and apply(str, [1]) == ['1']",
            "def bad(): raise ValueError('no')\nassert attempt(bad) == 'no'",
            "same = lambda: 0\nassert apply(lambda f: f, [same])[0] is same",
            "seen = []\nassert apply(seen.append, [1, [2]]) == [None, None] and seen == [1, [2]]",
            "counts = {'a': 2, 'b': 1}\nassert sort(['a', 'b'], counts.get) == ['b', 'a']",
            "import operator as o\nassert each(o.add, 1, 2) == 3 and sort(['ab', 'ba'], o.itemgetter(1))[0] == 'ba'",
            "import functools, math\nassert each(functools.partial(pow, 2), 3) == 8 and each(math.gcd, 4, 6) == 2",
            "from functools import partial\nassert each(partial(lambda kind: kind.__name__, Exception)) == 'Exception'",
            "class A:\n    def two(self): return 2\nassert each(A().two) == 2 and apply(str.upper, ['a']) == ['A']",
            "assert each(map, lambda x: x, [1]) and each(type, 1) is int",
            "assert named(self=3) == 3",
            "assert total(x for x in [1, 2]) == 3 and total({1: 2}.values()) == 2 and total(iter([4])) == 4",
            "grid = [[0] * 2] * 2\nfill(grid)\nassert grid == [[5, 0], [5, 0]]",
        ],
    ),
    "a program that is not the main module": (
        """# passed
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Pair:
    a: int
    b: int = 2
name = __name__
if __name__ == "__main__":
    raise SystemExit
def total(): return Pair(1).a + Pair(1).b
def read():
    import sys
    print("nothing")
    return sys.stdin.read()
""",
        ["assert name == 'solution'", "assert total() == 3", "assert read() == ''"],
    ),
}

#: Tests that need the program's own process.
PLAIN = {
    "printed text": "# wrong answer\n"
    "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    shout('a')\n"
    "assert out.getvalue() == 'A\\n'",
    "a replaced input": "# raised EOFError\n"
    "from unittest.mock import patch\nwith patch('builtins.input', return_value='7'):\n"
    "    assert ask() == 7",
    "a subclass": "# the tests raised TypeError\n"
    "class Double(Base):\n    def value(self):\n        return 2\nassert Double().twice() == 4",
    "an object of the tests": "# the tests raised TypeError\nclass Fake:\n    price = 3\nassert cost(Fake()) == 3",
    "a signature": "# wrong answer\nimport inspect\nassert list(inspect.signature(cost).parameters) == ['thing']",
    "equality by other means than data": "# the tests raised TypeError\nassert Ratio(1, 2) == Ratio(2, 4)",
    "an object equal to a number": "# wrong answer\nassert Ratio(4, 2) == 2",
    "an object below a number": "# the tests raised TypeError\nassert Ratio(1, 2) < 1",
    "membership without iteration": "# the tests raised TypeError\nassert 3 in Span(1, 5)",
    "a context that swallows": "# the tests raised KeyError\nwith Ignoring():\n    raise KeyError",
    "an argument that is changed later": "# wrong answer\n"
    "seen = []\nchange = keep(seen)\nchange(1)\nassert seen == [1]",
}
PLAIN_PROGRAM = """# passed
class Base:
    def value(self): return 1
    def twice(self): return 2 * self.value()
class Ratio:
    def __init__(self, a, b): self.a, self.b = a, b
    def __eq__(self, other):
        other = other if isinstance(other, Ratio) else Ratio(other, 1)
        return self.a * other.b == self.b * other.a
    def __lt__(self, number): return self.a < number * self.b
class Span:
    def __init__(self, low, high): self.low, self.high = low, high
    def __contains__(self, x): return self.low <= x <= self.high
class Ignoring:
    def __enter__(self): return self
    def __exit__(self, kind, value, trace): return kind is KeyError
def shout(text): print(text.upper())
def ask(): return int(input())
def cost(thing): return thing.price
def keep(items): return lambda item: items.append(item)
"""
