"""verl's process group between workers, on a CPU.

verl names one backend for the CPU and one for its device, here `cpu:gloo,cpu:gloo`, and torch refuses a device that is
named twice. This is the one function of verl's that is exchanged.
"""

from functools import partial

import verl.utils.distributed as distributed

distributed.initialize_global_process_group_ray = partial(
    distributed.initialize_global_process_group_ray, backend="cpu:gloo"
)
