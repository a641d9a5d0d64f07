"""Runs inside the sandbox: a program and its tests in one process, as in one file; see `one_process.py`."""

import sys

import confine
from one_process import main

confine.die_with_parent()
confine.confine(sys.argv[1])
confine.main_module()
main(b"+")
