"""Runs inside the sandbox: a trial that namespaces, limits and filter work here.

Further arguments are modules whose libraries it has to find. A Python may lack some of the modules themselves.
"""

import contextlib
import os
import sys

import confine

confine.confine(sys.argv[1])
os.stat(os.__file__)  # imports need it, and a missing module is not an error below
for folder in filter(os.path.isdir, sys.path):
    os.listdir(folder)  # as the user of programs
for name in sys.argv[2:]:
    with contextlib.suppress(ModuleNotFoundError):
        __import__(name)
try:
    os.fork()
except PermissionError:
    os.write(1, b"ready")
