"""Runs first inside the sandbox: does the set-up that bubblewrap cannot do, and then runs a script.

Arguments: the name of the script, the size of the work folder in bytes (0: there is one already), a descriptor that
bubblewrap has left open (-1: none), the process that must be its parent (0: any), and the script's own arguments.
Bubblewrap leaves this process the capabilities to mount the folder and to change the user. It drops them before any
code of a program arrives.
"""

import os
import sys
from _frozen_importlib_external import SourceFileLoader

import confine

script, disk, left, parent = sys.argv[1:5]
del sys.argv[1:5]
if int(parent):
    confine.die_with_parent(int(parent))
if int(left) > 2:
    os.closerange(int(left), int(left) + 1)
if int(disk):
    confine.settle(int(disk))
# A script that is run by its path would be compiled every time.
exec(SourceFileLoader("__main__", f"{sys.path[0]}/{script}.py").get_code("__main__"))  # type: ignore[arg-type]
