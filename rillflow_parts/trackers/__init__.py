"""Trackers: send a run's metrics to Weights & Biases, TensorBoard, MLflow, or a class of your own."""
