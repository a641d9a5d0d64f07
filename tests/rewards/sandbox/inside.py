"""Modules of the sandbox's inside, which find each other by their file names there."""

import sys
from types import ModuleType

from troll.rewards.sandbox.launch import INSIDE


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(INSIDE))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(INSIDE))
