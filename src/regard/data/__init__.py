"""From files to records to tables of token ids."""
