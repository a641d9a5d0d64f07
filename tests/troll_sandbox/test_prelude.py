import builtins
from typing import Any

import pytest

from tests.troll_sandbox.processes import inside_module

prelude = inside_module("prelude")


def names_after(source: str, provided: bool = True) -> dict[str, Any]:
    space: dict[str, Any] = {}
    prelude.execute(source, "program.py", space, provided)
    return space


USES = """
class Solution:
    def f(self, nums: List[int], k: Optional[int] = None, head: Optional[ListNode] = None) -> Dict[str, Tuple[int]]:
        @lru_cache(None)
        def go(i):
            return go(i - 1) + next(count(1)) if i else 0
        queue, table, times = deque(nums), defaultdict(list), Counter(nums)
        heapq.heapify(nums), heappush(nums, 1), bisect.bisect_left(nums, 1), bisect_left(nums, 2), insort(nums, 3)
        assert math.inf == inf and gcd(4, 6) == 2 and reduce(add, [1, 2]) == 3 and pi < 4 and ascii_lowercase[0] == "a"
        assert list(accumulate([1, 2])) == [1, 3] and cmp_to_key(lambda a, b: a - b) and re.sub("a", "", "a") == ""
        assert collections.OrderedDict is OrderedDict and TreeNode(1).left is None and ListNode(1, ListNode()).next
        assert random.random() < 1 and string.digits and itertools.chain and functools.partial and sys.maxsize
        assert cache and inf and deepcopy([1]) == [1] and Fraction(1, 2) and mean([1, 3]) == 2 and datetime.date
        return go(5)
"""


def test_execute_provides_names_to_starter_code():
    space = names_after(USES)
    assert space["Solution"]().f([3, 1]) == 5
    assert space.keys() == {"__builtins__", "Solution"}
    with pytest.raises(NameError, match="List"):
        names_after(USES, provided=False)


def test_execute_prefers_names_of_the_program_and_of_python():
    space = names_after(
        "from __future__ import annotations\nfrom string import *\nclass Counter: own = True\ndef f(x: Missing):\n"
        "    global pow_\n    pow_ = pow(2, 5, 7)\n    return Counter.own, sum([1]), open\ncount = 5\n"
    )
    assert space["f"](1) == (True, 1, open) and space["count"] == 5 and space["pow_"] == 4
    assert space["__builtins__"] is vars(builtins)  # no name was provided


@pytest.mark.parametrize("source", ["x = nosuchname", "def f(): return nosuchname", "_Environ", "def f(:"])
def test_execute_leaves_unknown_names_undefined(source):
    with pytest.raises((NameError, SyntaxError)) as raised:
        names_after(f"\n\n{source}").get("f", lambda: None)()
        raise NameError("name 'nosuchname' is not defined")
    assert "prelude" not in str(raised.value)


def test_is_provided_for_one_function_or_solution():
    assert prelude.is_provided({"function": "f"})
    assert prelude.is_provided({"names": [], "inferred": ["Solution"]})
    assert prelude.is_provided({"names": ["Solution"], "inferred": []})
    assert not prelude.is_provided({"names": ["f"], "inferred": ["np"]})
