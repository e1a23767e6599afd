"""Engine: requests are scheduled over a paged KV cache, and every forward pass goes through the graph layer."""
