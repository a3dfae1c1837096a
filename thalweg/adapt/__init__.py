"""What changes a model before it trains."""
