"""Runs inside the sandbox: shows that the namespaces, the limits and the filter are to be had here."""

import os
import sys

import confine

confine.confine(sys.argv[1])
try:
    os.fork()
except PermissionError:
    os.write(1, b"ready")
