"""For all tests: one thread for torch, and no time limits.

The models are small: on a busy machine threads would mostly wait for each other. Hypothesis draws new examples at
every run on a person's machine, and the same ones in CI.
"""

import os

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "house", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("house")
