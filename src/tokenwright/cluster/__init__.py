"""Many replicas of one model: what they report of their pages, the router before them, and their processes."""
