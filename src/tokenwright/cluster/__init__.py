"""Many replicas of one model: their pages as they report them, the router, and their processes."""
