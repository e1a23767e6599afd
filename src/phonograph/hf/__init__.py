"""hf: Hugging Face models with graphs."""
