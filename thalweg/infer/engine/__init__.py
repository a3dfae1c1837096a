"""The engine: scheduler, block pool, sampler, and the step that joins them."""
