"""Runs a program and its tests on a server; `fusion.py` puts the modules that this needs in front of it."""

import sys

from one_process import main

# As in the other sandboxes, except recursion: the server's stack is smaller.
sys.set_int_max_str_digits(0)
sys.setrecursionlimit(10_000)
main()
