"""Options that commands share, and their defaults."""
