"""From a Hugging Face model, a folder or a live one, to an engine."""
