"""Operations of a layer: protocols of attention and kernels, matrices, and implementations for every device."""
