"""Vision towers, and a bounded memory of their results."""
