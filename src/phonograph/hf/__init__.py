"""hf: Hugging Face models with graphs."""

from phonograph.hf.accelerate import Accelerated, accelerate

__all__ = ["Accelerated", "accelerate"]
