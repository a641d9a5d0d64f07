"""The names that judges provide to starter code such as LeetCode's: `def f(self, nums: List[int])` without an import.

They stand where Python's own names do, so a program's definitions come first, and its module has no further names. Only
what a program names is imported. Imports nothing of ours, for a server gets it as text; see `fusion.py`.
"""

from __future__ import annotations

import builtins

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

#: What is there of each module, besides the module. Its name is the module where it is a function's as well: `bisect`.
_NAMES = {
    **dict.fromkeys(["array", "cmath", "enum", "json", "queue", "re", "statistics", "sys", "time"], ""),
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "copy": "deepcopy",
    "dataclasses": "dataclass field",
    "datetime": "date timedelta",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce total_ordering wraps",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "itertools": "accumulate chain combinations combinations_with_replacement compress count cycle dropwhile groupby "
    "islice pairwise permutations product repeat starmap takewhile tee zip_longest",
    "math": "acos asin atan atan2 ceil comb cos dist exp fabs factorial floor fmod gcd hypot inf isclose isqrt lcm log "
    "log10 log2 nan perm pi prod sin sqrt tan trunc",
    "operator": "add and_ attrgetter itemgetter mul or_ sub xor",
    "random": "choice randint randrange sample shuffle",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Iterable Iterator List Mapping NamedTuple "
    "Optional Sequence Set Tuple Type TypeVar Union",
}
_PLACES = {name: module for module, names in _NAMES.items() for name in names.split()}
_PLACES |= dict.fromkeys(("ListNode", "TreeNode"), __name__)


class ListNode:
    """LeetCode's."""

    def __init__(self, val: Any = 0, next: Any = None) -> None:
        self.val, self.next = val, next


class TreeNode:
    """LeetCode's."""

    def __init__(self, val: Any = 0, left: Any = None, right: Any = None) -> None:
        self.val, self.left, self.right = val, left, right


def is_provided(job: dict[str, Any]) -> bool:
    """Whether a program gets these names: where one function is called, and where the tests use a class `Solution`."""
    return "function" in job or "Solution" in (*job["names"], *job["inferred"])


def execute(source: str, name: str, space: dict[str, Any], provided: bool) -> None:
    """Runs the source of a module, of which `space` has the names; `provided`: whether it gets those of judges."""
    code = compile(source, name, "exec", dont_inherit=True)
    used = _names(code) if provided else set()
    found = {each: getattr(__import__(_PLACES[each]), each) for each in used & _PLACES.keys()}
    found |= {each: __import__(each) for each in used & _NAMES.keys()}
    if found:
        space["__builtins__"] = found | vars(builtins)
    exec(code, space)


def _names(code: CodeType) -> set[str]:
    """The names in a program but for those of local variables."""
    found, waiting = set[str](), [code]
    while waiting:
        code = waiting.pop()
        found.update(code.co_names)
        waiting += [each for each in code.co_consts if isinstance(each, type(code))]
    return found
