"""Versions, readable without importing anything else."""

__version__ = "0.1.0"

# Part of every run's configuration. Raise it when a change alters what a run computes or measures:
# the pipeline then redoes every run instead of mixing old and new numbers.
RESULTS_VERSION = 1
