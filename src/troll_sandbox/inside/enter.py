"""Runs inside the sandbox, first: does what bubblewrap cannot, and then runs a script as it would run by itself.

Arguments: the name of the script, the size of the work folder in bytes (0: there is one already), a descriptor that
bubblewrap has left open (-1: none), and the script's own. Bubblewrap leaves this process the capabilities that it takes
to mount the folder and to change the user. It gives them up before anything of a program's is there.
"""

import os
import sys
from _frozen_importlib_external import SourceFileLoader

import confine

script, disk, left = sys.argv[1:4]
del sys.argv[1:4]
if int(left) > 2:
    os.closerange(int(left), int(left) + 1)
if int(disk):
    confine.settle(int(disk))
# Unlike what is run by its path, this has been compiled before.
exec(SourceFileLoader("__main__", f"{sys.path[0]}/{script}.py").get_code("__main__"))  # type: ignore[arg-type]
