"""Text to tokens: sources, documents, blocks, packing and mixing."""
