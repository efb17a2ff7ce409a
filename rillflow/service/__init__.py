"""Streams over HTTP, for training and inference engines that are not ours."""
