"""Reading server-sent events the way a client does."""

import json


def events_of(text: str) -> list[dict]:
    """The decoded events of a whole stream, which must end with [DONE]."""
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return decoded(blocks[:-2])


def decoded(blocks: list[str]) -> list[dict]:
    assert all(block.startswith(("data: ", ": ")) for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks if block.startswith("data: ")]


def tokens_of(events: list[dict], choice: int = 0) -> list[int]:
    return [
        token
        for event in events
        for part in event["choices"]
        if part["index"] == choice
        for token in part.get("token_ids", ())
    ]
