"""From scores to sequences; all decoding settings."""
