"""Trust regions of Gaussian policies, for continuous actions, by the dual of the token case; needs torch only.

A projection takes the network's current policy and the policy that acted, and returns a policy inside the trust region,
with an exact gradient. Use the result where the loss would use the network's policy, and add `trust_region_loss`.
"""

from torch.serialization import add_safe_globals

from troll.gaussian.divergence import kl, kl_parts
from troll.gaussian.entropy import entropy_of_scale, project_entropy
from troll.gaussian.frobenius import project_frobenius
from troll.gaussian.mixture import project_joint_kl, project_kl
from troll.gaussian.parameters import factor_from, scale_from, write_back
from troll.gaussian.policy import DiagonalGaussian, Gaussian, from_distribution
from troll.gaussian.projection import GaussianProjection
from troll.gaussian.pull import trust_region_loss
from troll.gaussian.wasserstein import project_wasserstein

__all__ = [
    "DiagonalGaussian",
    "Gaussian",
    "GaussianProjection",
    "entropy_of_scale",
    "factor_from",
    "from_distribution",
    "kl",
    "kl_parts",
    "project_entropy",
    "project_frobenius",
    "project_joint_kl",
    "project_kl",
    "project_wasserstein",
    "scale_from",
    "trust_region_loss",
    "write_back",
]

# Lets `torch.load` with its default arguments read what `torch.save` wrote of these.
add_safe_globals([Gaussian, DiagonalGaussian, GaussianProjection])
