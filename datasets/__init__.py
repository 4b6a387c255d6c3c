"""Data sources of the pipeline: each module turns one source into a `GraphStore`. Part of the checkout, not installed.

`python -m datasets.prepare NAME --out DIR` prepares one; `datasets/cards/` describes each.
"""
