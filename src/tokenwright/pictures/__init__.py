"""Pictures before the model: opened within limits, resized, and laid out as tokens and pixels."""
