"""Successive halving over the settings of a job, each trial continued from its own checkpoint."""
