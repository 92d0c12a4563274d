"""A user's own package: specbench knows nothing of it."""
