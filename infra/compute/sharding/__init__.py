"""One model over many ranks: data, expert and sequence parallel."""
