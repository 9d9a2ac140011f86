"""Hypothesis without a deadline: how long an example takes says nothing on a busy machine.

cuBLAS is told its workspace before it starts: without, a deterministic product on a GPU warns, an error here.
"""

import os

from hypothesis import HealthCheck, settings

settings.register_profile("repository", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repository")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
