"""Documents, tokenizers and packing: text in, sequences out."""
