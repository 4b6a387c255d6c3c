"""Data: graphs on disk (`store`) and the sequences of nodes that a training step sees (`sequences`)."""
