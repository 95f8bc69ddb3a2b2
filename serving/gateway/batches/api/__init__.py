"""The HTTP API of files and batches: what is asked, and how the answers look."""
