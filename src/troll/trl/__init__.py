"""TROLL in TRL: change `GRPOConfig` to `TrollConfig` and `GRPOTrainer` to `TrollTrainer`."""

try:
    import troll.trl.seam  # noqa: F401 (first: it says what is wrong with TRL)
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise ImportError('troll.trl needs TRL: pip install "troll-rl[trl]"') from None

from troll.trl.config import TrollConfig
from troll.trl.trainer import TrollTrainer

__all__ = ["TrollConfig", "TrollTrainer"]
