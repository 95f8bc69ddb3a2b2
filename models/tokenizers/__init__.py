"""Text to tokens and back, as a folder's tokenizer says: Hugging Face's tokenizer.json or Kimi's tiktoken file.

Begin with `tokenizer`, which opens either. Chat templates and streams of text are `serving.chat`'s.
"""
