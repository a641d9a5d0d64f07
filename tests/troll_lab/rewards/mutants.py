"""Wrong programs made from right ones, and a plain run of their tests to tell which of them are wrong."""

import ast
import copy
import os
import random
import resource
import signal
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

_SWAPPED = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Add, ast.Sub)]
FLIPPED: dict[type, type] = {
    **dict(_SWAPPED),
    **{second: first for first, second in _SWAPPED},
    **{ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.FloorDiv, ast.Mod: ast.FloorDiv},
    **{ast.And: ast.Or, ast.Or: ast.And},
}


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in FLIPPED:
        yield ast.Compare(node.left, [FLIPPED[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in FLIPPED:
        yield ast.BinOp(node.left, FLIPPED[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(FLIPPED[type(node.op)](), node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.Expr):
        yield ast.Pass()


class _Replace(ast.NodeTransformer):
    def __init__(self, number: int, variant: ast.AST):
        self.number, self.variant, self.count = number, variant, -1

    def visit(self, node: ast.AST) -> ast.AST:
        self.count += 1
        return self.variant if self.count == self.number else self.generic_visit(node)


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, as `_Replace` visits them."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


def mutants(source: str, count: int, seed: int) -> list[str]:
    """Up to `count` programs, each with one change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    changes = [(number, variant) for number, node in enumerate(_in_order(tree)) for variant in _variants(node)]
    chosen = random.Random(seed).sample(changes, min(count, len(changes)))
    return [
        ast.unparse(ast.fix_missing_locations(_Replace(number, variant).visit(copy.deepcopy(tree))))
        for number, variant in chosen
    ]


def plain_run_passes(program: str, setup: str, names: Sequence[str], tests: Sequence[str], seconds: int = 2) -> bool:
    """Whether program, setup and tests run in one plain process; for programs known to do no harm.

    The setup comes after the program, and of what both define only `names` stay the program's.
    """
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            memory = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 2**29
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            signal.alarm(20)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(null, stream)
            defined = {"__name__": "solution"}
            exec(program, defined)
            space = dict(defined)
            exec(setup, space)
            space.update({name: defined[name] for name in names if name in defined})
            for test in tests:
                exec(test, space)
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0
