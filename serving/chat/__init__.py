"""Between text and what a chat means: templates, text out of tokens, tool calls. Knows no server."""
