"""Forward passes: one file each, the declarations that name them, and how they are chained."""
