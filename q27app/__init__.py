"""q27app: Qwen3.6-27B and Qwen3.8-27B on one consumer NVIDIA card."""

__version__ = "0.1.0"
