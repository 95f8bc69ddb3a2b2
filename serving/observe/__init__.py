"""What is recorded of requests and steps beside metrics: rows in files, spans for collectors."""
