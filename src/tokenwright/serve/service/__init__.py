"""The service behind all APIs: requests are admitted, prepared, run by the engine, and read as deltas."""
