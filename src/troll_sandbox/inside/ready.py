"""Runs inside the sandbox: shows that the namespaces, the limits and the filter are to be had here.

Further arguments are modules that it has to find the libraries for; a Python may lack some of the modules.
"""

import contextlib
import os
import sys

import confine

confine.confine(sys.argv[1])
for folder in filter(os.path.isdir, sys.path):
    os.listdir(folder)  # as the user that programs are
for name in sys.argv[2:]:
    with contextlib.suppress(ModuleNotFoundError):
        __import__(name)
try:
    os.fork()
except PermissionError:
    os.write(1, b"ready")
