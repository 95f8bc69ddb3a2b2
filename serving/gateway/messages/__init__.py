"""Anthropic's Messages API: its bodies to the chat that they mean, the pipeline's events to its messages and events.

Routes belong in `gateway.http`, what a chat may ask in `gateway.openai`. Begin with `requests`; `answers` is the way
back.
"""
