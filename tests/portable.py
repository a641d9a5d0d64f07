"""The numerical tests under the arithmetic of other CPUs, with a third of every tolerance: `make test-portable`.

A test that passes on one machine may fail on the next, whose sums have another order. So the tests run once for each of

- what torch's kernels may use: nothing but the baseline (`default`), AVX2, and what the machine has;
- AVX2 in the libraries that multiply matrices;
- one thread and two,

each time with `TROLL_TEST_MARGIN=3`: no comparison's error may exceed a third of its tolerance. A setting that the
machine cannot tell from another one runs all the same. What runs are the files below: tests of numbers, and not those
that train for long or interpret Triton's kernels. It takes more than an hour on two cores; name
environments (`trl`, `verl`) or settings to have a part of it.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def files(folder: str, names: str) -> tuple[str, ...]:
    """The paths of test files of a folder, named without `test_`."""
    return tuple(f"tests/{folder}/test_{name}.py" for name in names.split())


#: Environment and folder or files.
TESTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "trl": (
        ".venv",
        (
            *("tests/troll/trust_region", "--ignore-glob=*_triton.py", "-k", "not triton"),
            "tests/troll/huggingface",
            *files("troll/trl", "anchor architectures bounds diagnostics distributed estimators loss seam surrogates"),
            *files("troll/trl", "trainer"),
            *files("troll_lab/trl", "advantages critic diagnostics distributed estimators value_model"),
        ),
    ),
    "verl": (".venv-verl", files("troll/verl", "agent_loop cpu fsdp hooks loss megatron reported vision vllm_rollout")),
}

SETTINGS: dict[str, dict[str, str]] = {
    "own": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    # What torch.compile writes for a CPU without vectors does not compile.
    "default": {"ATEN_CPU_CAPABILITY": "default", "TORCHDYNAMO_DISABLE": "1"},
    "libraries": {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}


def run(tests: str, setting: str, threads: int, margin: float, folder: Path) -> tuple[int, int, list[str]]:
    """Passed and failed tests of one pytest, and the failed ones' names. Its output stays in `folder`."""
    environment, arguments = TESTS[tests]
    variables = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "TROLL_TEST_THREADS": str(threads),
        "TROLL_TEST_MARGIN": str(margin),
        # Code that was compiled under another setting would be found, and is wrong under this one.
        "TORCHINDUCTOR_CACHE_DIR": str(folder / f"{setting}-compiled"),
        **SETTINGS[setting],
    }
    workers = max(1, 2 // threads)
    command = [str(ROOT / environment / "bin" / "pytest"), "-q", "-n", str(workers), "--dist", "worksteal", *arguments]
    log = folder / f"{tests}-{setting}-{threads}.log"
    with log.open("w") as output:
        status = subprocess.run(
            command, cwd=ROOT, env=os.environ | variables, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    lines = log.read_text().splitlines()
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?)", lines[-1])}
    failed = sum(number for word, number in counts.items() if word != "passed")
    # A pytest that did not come as far as its tests has failed too.
    names = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return counts.get("passed", 0), max(failed, int(status != 0)), names


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the matrix and prints a table; 1 if a test failed anywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", nargs="+", choices=TESTS, default=list(TESTS))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--margin", type=float, default=3)
    chosen = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="troll-portable-"))
    print(
        f"logs in {folder}\n{'tests':8}{'setting':12}{'threads':>8}{'passed':>8}{'failed':>8}{'seconds':>9}", flush=True
    )
    total = 0
    for setting in chosen.settings:
        for threads in chosen.threads:
            for tests in chosen.tests:
                start = time.monotonic()
                passed, failed, names = run(tests, setting, threads, chosen.margin, folder)
                seconds = time.monotonic() - start
                row = f"{tests:8}{setting:12}{threads:8}{passed:8}{failed:8}{seconds:9.0f}"
                print("\n".join([row, *(f"    {name}" for name in names)]), flush=True)
                total += failed
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
