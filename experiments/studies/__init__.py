"""The committed studies: each a configuration, a notebook and what was found."""
