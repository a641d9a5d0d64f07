"""TROLL in TRL: change ``GRPOConfig`` to ``TrollConfig`` and ``GRPOTrainer`` to ``TrollTrainer``."""

from importlib.metadata import PackageNotFoundError, version

#: TRL's hooks are private methods, so one minor version is supported.
SUPPORTED_TRL = "1.16"

try:
    _installed = version("trl")
except PackageNotFoundError:
    raise ImportError('troll.trl needs TRL: pip install "troll-rl[trl]"') from None
if not f"{_installed}.".startswith(f"{SUPPORTED_TRL}."):
    raise ImportError(
        f"troll.trl builds on TRL {SUPPORTED_TRL}.x and found {_installed}: pip install 'trl=={SUPPORTED_TRL}.*'"
    )

from troll.trl.config import TrollConfig  # noqa: E402 (only where the version fits)
from troll.trl.trainer import TrollTrainer  # noqa: E402

__all__ = ["TrollConfig", "TrollTrainer"]
