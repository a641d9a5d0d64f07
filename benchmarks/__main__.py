"""``python -m benchmarks NAME``."""

import argparse

from benchmarks import head, projection

BENCHMARKS = {"head": head.main, "projection": projection.main}

parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
parser.add_argument("name", choices=BENCHMARKS)
BENCHMARKS[parser.parse_args().name]()
