"""A model's speed on this machine, and how near it is to the machine's limits, for `tokenwright bench`."""
