"""OpenAI's Responses API: its bodies to the chat that they mean, the pipeline's events to response objects and events,
and the answers that are kept for requests that go on from them.

Routes belong in `gateway.http`, what a chat may ask in `gateway.openai`. Begin with `requests`; `answers` is the way
back.
"""
