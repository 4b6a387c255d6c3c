"""Training: configuration, systems, the loop, checkpoints, records, and the supervising process."""
