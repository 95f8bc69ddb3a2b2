"""Text to tokens and back, as a folder's tokenizer says: Hugging Face's tokenizer.json or Kimi's tiktoken file.

Chat templates and the text of a stream belong to `serving.chat`.
Begin with `tokenizer`, which opens either format.
"""
