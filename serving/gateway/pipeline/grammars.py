"""The grammar that a request carries to its workers, compiled here once before any of them hears of it.

So that a worker never meets one that cannot be served, and its client is told why by the field at fault. Compiling may
take seconds and is done in a thread; of a grammar that was found good its hash is kept, and nobody waits for it again.

Tools alone ask for no grammar: they get one, so that calls are well formed, where the model can have it. A form, a
schema to keep to and a call that must be made ask for it, and are refused where there can be none.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import final

from moonshard.models.folder.generation import GenerationDefaults
from moonshard.models.tokenizers.tokenizer import Tokenizer
from moonshard.rpc.status import InvalidArgument
from moonshard.serving.constrained.answer import Calls, answer_grammar, call_grammar, part_grammar
from moonshard.serving.constrained.grammars import GrammarError, Grammars
from moonshard.serving.constrained.parts import Part
from moonshard.serving.constrained.schemas import place_of
from moonshard.serving.gateway.aside import Aside
from moonshard.serving.gateway.pipeline.choice import Opening
from moonshard.serving.gateway.request import ChatPrompt, GenerationRequest, ToolUse

MAX_GOOD = 1 << 12  # hashes
MAX_CHECK_S = 4.0  # of processor time, of one request's parts together
_HASH_BYTES = 16


def grammar_of(request: GenerationRequest, opening: Opening, tokenizer: Tokenizer | None) -> str:
    """What the answer keeps to; empty for nothing."""
    use = request.tool_use
    if tokenizer is None or (use is None and request.form is None):
        return ""
    specials = tokenizer.special_tokens
    if use is not None and use.forced is not None:
        return call_grammar(use.arguments.get(use.forced), specials)
    return answer_grammar(request.form, _calls(use), opening.start, specials)


@final
class AnswerGrammars:
    """The grammars of the served model. Runs on the event loop."""

    def __init__(self, tokenizer: Tokenizer | None, defaults: GenerationDefaults):
        self._tokenizer = tokenizer
        self._end_ids = defaults.stop_token_ids
        self._grammars: Grammars | None = None
        self._vocab_size = 0
        self._good: OrderedDict[bytes, None] = OrderedDict()
        self._thread = Aside(name="grammars", max_inline_size=0)

    async def checked(self, request: GenerationRequest, grammar: str, vocab_size: int) -> str:
        """The grammar, once it is known to compile; empty where it was not asked for and cannot be had.

        InvalidArgument where it was asked for, by the field that did.
        """
        if not grammar and request.form is None:
            return ""
        _check_whole(request)
        asker = _asker(request)
        if (grammars := self._of(vocab_size)) is None or request.ignore_eos:
            if asker is None:
                return ""
            raise _unserved(request, asker)
        name = hashlib.blake2b(grammar.encode(), digest_size=_HASH_BYTES).digest()
        if name in self._good:
            self._good.move_to_end(name)
            return grammar
        try:
            await self._thread.run(1, _check, grammars, grammar, _parts(request))
        except _Fault as fault:
            if asker is None:
                return ""
            raise request.invalid(asker if fault.part is None else fault.part.field, str(fault)) from fault
        self._good[name] = None
        while len(self._good) > MAX_GOOD:
            self._good.popitem(last=False)
        return grammar

    def _of(self, vocab_size: int) -> Grammars | None:
        """None where the model has no tokenizer, or no token to end an answer with."""
        end_ids = [token_id for token_id in self._end_ids if token_id < vocab_size]
        if self._tokenizer is None or not end_ids:
            return None
        if self._grammars is None or self._vocab_size != vocab_size:
            self._grammars, self._vocab_size = Grammars(self._tokenizer, end_ids, vocab_size, max_kept=1), vocab_size
            self._good.clear()
        return self._grammars


def _calls(use: ToolUse | None) -> Calls | None:
    if use is None:
        return None
    return Calls(
        functions=use.functions,
        arguments=use.arguments,
        is_required=use.is_required,
        is_single=use.max_calls == 1,
    )


def _parts(request: GenerationRequest) -> Sequence[Part]:
    """What the client wrote, of all that the answer's grammar is made of."""
    forms = () if request.form is None else (request.form,)
    use = request.tool_use
    if use is None:
        return forms
    if use.forced is not None:
        return tuple(part for name, part in use.arguments.items() if name == use.forced)
    return (*forms, *use.arguments.values())


def _asker(request: GenerationRequest) -> str | None:
    """The client's field that asks for a grammar; None where none does."""
    if parts := _parts(request):
        return parts[0].field
    return "tool_choice" if request.tool_use is not None and request.tool_use.is_required else None


def _check_whole(request: GenerationRequest) -> None:
    """A form is of a whole answer, and not of the rest of a message."""
    if request.form is not None and isinstance(request.prompt, ChatPrompt) and request.prompt.is_continued:
        raise request.invalid(request.form.field, "an answer that goes on with a partial message cannot keep to it")


def _unserved(request: GenerationRequest, asker: str) -> InvalidArgument:
    if request.ignore_eos:
        return request.invalid("ignore_eos", f"with {asker} the answer ends where it is complete")
    return request.invalid(asker, "the model has no tokenizer, or its folder names no token that ends an answer")


class _Fault(Exception):
    """Why a grammar is not served; `part` is None where that is no single part's fault."""

    def __init__(self, part: Part | None, words: str):
        super().__init__(words)
        self.part = part


def _check(grammars: Grammars, grammar: str, parts: Sequence[Part]) -> None:
    """Raises _Fault. Each part by itself too, up to a first token: a thought may come before it in the answer."""
    begun_s = time.thread_time()
    for part in parts:
        _compile(grammars, part_grammar(part), part)
        if time.thread_time() - begun_s > MAX_CHECK_S:
            raise _Fault(None, f"it is too complex: to check all of it takes over {MAX_CHECK_S:g} s")
    _compile(grammars, grammar, None)


def _compile(grammars: Grammars, grammar: str, part: Part | None) -> None:
    try:
        grammars.matcher(grammar)
    except GrammarError as error:
        schema = None if part is None else part.schema
        place = None if schema is None else place_of(schema, str(error))
        raise _Fault(part, str(error) if place is None else f"{error}, at {place}") from error
