"""Models: a checkpoint becomes a config and weights, and these become one decoder."""
