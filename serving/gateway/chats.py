"""What another API asks, as the chat that it means: the chat route's own body, so that nothing is decided twice.

What the chat route refuses, it refuses by a chat's names; here it is put into those of the client.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.control.sampling_parameters import PARAMETERS
from moonshard.serving.gateway.openai.requests import ChatBody, chat_request
from moonshard.serving.gateway.request import GenerationRequest


def sampling_of(body: msgspec.Struct) -> dict[str, Any]:
    """The sampling parameters of a body that has them (`SamplingBody`), for a chat's."""
    return {each.name: getattr(body, each.name) for each in PARAMETERS}


def raw(value: object) -> msgspec.Raw:
    """A value for a field that the chat route decodes itself; null where there is none."""
    return msgspec.Raw(msgspec.json.encode(value))


def meant_by(chat: ChatBody, names: Mapping[str, str], *, request_id: str, received_ns: int) -> GenerationRequest:
    """The request of this chat; `names`: how the client spells a chat's fields, where it does otherwise; of two
    that fit, the first counts.

    InvalidArgument as `chat_request`, under the client's names.
    """
    try:
        asked = chat_request(chat, request_id=request_id, received_ns=received_ns)
    except InvalidArgument as error:
        raise _respelt(error, names) from error
    chats = {here: names.get(there, there) for here, there in asked.spelling.items()}
    return replace(asked, spelling={**names, **chats})


def _respelt(error: InvalidArgument, names: Mapping[str, str]) -> InvalidArgument:
    field = error.field or ""
    name = next((name for name in names if field == name or field.startswith((f"{name}.", f"{name}["))), None)
    if name is None:
        return error
    spelt = names[name] + field.removeprefix(name)
    return type(error)(error.message.replace(field, spelt, 1), field=spelt)
