"""Read data files into records, and encode records into tables of token ids."""
