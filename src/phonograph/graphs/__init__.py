"""Graph layer: slots, buffers, backends, runner, plan and verification, for any PyTorch callable."""
