"""The code that all APIs share: reading a body, errors, replies, streams, and the OpenAPI document."""
