"""Whether a turn is right: text by text, calls by their parsed JSON.

Strict: an answer is right when it is the expected text, but for white space around it. Of calls neither their order
within a turn nor how their JSON is spelt matters; everything else does.
"""

import json
import re
from collections.abc import Sequence

from moonshard.experiments.common.turns import WrittenCall, result_message
from moonshard.experiments.evaluation.replies import Reply
from moonshard.experiments.training.texts.conversation import Call, CallRound, Message
from moonshard.serving.chat.tool_calls import ARGUMENTS_BEGIN, CALL_BEGIN, CALL_END, NAMES, SECTION_BEGIN, SECTION_END

_BEGIN, _CALL, _ARGUMENTS, _CALL_END, _END = (
    re.escape(NAMES[mark]) for mark in (SECTION_BEGIN, CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END, SECTION_END)
)
_ONE_CALL = re.compile(rf"\s*{_CALL}(?:(?!<\|tool_call).)*{_ARGUMENTS}((?:(?!<\|tool_call).)*){_CALL_END}", re.DOTALL)
_SECTION = re.compile(rf"{_BEGIN}((?:{_ONE_CALL.pattern})+)\s*{_END}", re.DOTALL)


def is_answer(reply: Reply, expected: str) -> bool:
    return not reply.calls and reply.content.strip() == expected.strip()


def attempts_calls(reply: Reply) -> bool:
    """Whether the reply has a call in it, or a piece of one."""
    return bool(reply.calls) or _has_marks(reply.content)


def has_whole_calls(reply: Reply) -> bool:
    """Whether the reply has calls, each complete with a JSON object as its arguments.

    A section that calls a function nobody declared comes back as text; its JSON may be sound all the same.
    """
    sections = _SECTION.findall(reply.content)
    rest = _SECTION.sub("", reply.content)
    written = [call.arguments for call in reply.calls]
    written += [arguments for section, _ in sections for arguments in _ONE_CALL.findall(section)]
    return bool(written) and not _has_marks(rest) and all(parsed_object(arguments) is not None for arguments in written)


def parsed_object(text: str) -> dict[str, object] | None:
    """The parsed text; None where it is no JSON object. NaN and Infinity are refused, as when serving."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def results_of(reply: Reply, expected: CallRound) -> list[str] | None:
    """What each of the reply's calls returns, in its order; None unless they are exactly the expected ones."""
    pending = list(zip(expected.calls, expected.results, strict=True))
    results: list[str] = []
    for written in reply.calls:
        found = next((pair for pair in pending if _is_call(written, pair[0])), None)
        if found is None:
            return None
        pending.remove(found)
        results.append(found[1])
    return None if pending or _has_marks(reply.content) else results  # pieces of calls beside calls that are valid


def _is_call(written: WrittenCall, expected: Call) -> bool:
    return written.name == expected.name and _same(parsed_object(written.arguments), dict(expected.arguments))


def _same(one: object, other: object) -> bool:
    """Whether JSON values have the same value and type: 1 is neither true nor 1.0."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _has_marks(text: str) -> bool:
    """Whether a text contains any piece of a call's markers."""
    return any(name in text for name in NAMES.values())


def tool_messages(reply: Reply, results: Sequence[str]) -> list[Message]:
    """The results as the messages that a client sends back."""
    return [result_message(call, result) for call, result in zip(reply.calls, results, strict=True)]
