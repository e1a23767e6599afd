"""Operations of a layer: matrices, and projections with them."""
