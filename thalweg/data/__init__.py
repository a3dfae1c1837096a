"""Text to documents, documents to tokens, tokens to blocks, blocks to each rank's batches."""
