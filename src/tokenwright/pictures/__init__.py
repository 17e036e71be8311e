"""Open pictures within limits, resize them, and lay them out as tokens and pixels for a tower."""
