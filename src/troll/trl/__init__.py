"""TROLL in TRL: change `GRPOConfig` to `TrollConfig` and `GRPOTrainer` to `TrollTrainer`."""

try:
    import trl  # noqa: F401 (first: everything here needs it)
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise ImportError('troll.trl needs TRL: pip install "troll-rl[trl]"') from None

import troll.trl.seam  # noqa: F401 (first of ours: it says what is wrong with TRL)
from troll.trl.config import TrollConfig
from troll.trl.estimators import Estimator, register_estimator
from troll.trl.sampling import complete
from troll.trl.surrogates import register_surrogate
from troll.trl.trainer import TrollTrainer

__all__ = ["Estimator", "TrollConfig", "TrollTrainer", "complete", "register_estimator", "register_surrogate"]
