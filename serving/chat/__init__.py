"""What lies between text and the meaning of a chat: prompts from templates, text from tokens, tool calls from text.

It knows no server and no client. OpenAI's message shapes belong in `gateway.openai`, tokenizers in `models.tokenizers`.
Begin with `template`, then `detokenizer` and `tool_calls`; `sandbox` bounds what a template may do.
"""
