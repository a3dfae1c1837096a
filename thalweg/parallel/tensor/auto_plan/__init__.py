"""A tensor-parallel plan derived by running the model."""
