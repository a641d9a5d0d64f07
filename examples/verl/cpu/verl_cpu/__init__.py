"""What verl lacks to run on a CPU: for trying it and for tests, not for training.

`import verl` imports this package, and with it registers everything below, in every process whose environment has

    VERL_PLATFORM=cpu
    VERL_USE_EXTERNAL_MODULES=verl_cpu
    PYTHONPATH=examples/verl/cpu        the folder that this package lies in
    OMP_NUM_THREADS=1                   where workers are as many as cores

Ray's workers inherit it. What is registered: the platform `cpu`, with gloo between processes; verl's own FSDP engines
for that platform (`strategy: fsdp2`); and the rollout `transformers`. `embedded.yaml` beside this package has settings
that go with it.
"""

# In this order: verl asks for its platform, and binds what makes process groups, while its engines are imported.
# isort: off
import verl_cpu.platform
import verl_cpu.process_group
import verl_cpu.engine
import verl_cpu.rollout  # noqa: F401
