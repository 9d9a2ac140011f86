"""Hypothesis without a deadline: how long an example takes says nothing on a busy machine."""

from hypothesis import HealthCheck, settings

settings.register_profile("repository", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repository")
