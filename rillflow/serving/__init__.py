"""Service: streams over HTTP, for external training and inference engines."""
