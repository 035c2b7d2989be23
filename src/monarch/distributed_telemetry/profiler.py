"""`profile`: a block of a program as a trace for Perfetto; `job.profile()` returns one."""

from monarch._traces.recording import export_profile, profile

__all__ = ["export_profile", "profile"]
