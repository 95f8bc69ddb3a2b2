"""What the gateway itself knows of the model: its name, tokenizer, chat template and generation defaults.

Read from the model's folder once, at start. Vocabulary and context are the workers' to say (`pool.ModelLimits`): they
hold the weights. Texts become tokens here and nowhere else.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moonshard.models.generation import GenerationDefaults, load_generation_defaults
from moonshard.models.tokenizer import TextError, TokenIdError, Tokenizer, load_tokenizer
from moonshard.rpc.status import InvalidArgument, NotFound
from moonshard.serving.chat import ChatTemplate, TemplateError, load_chat_template
from moonshard.serving.detokenizer import Detokenizer
from moonshard.serving.gateway.choice import ForcedCall, forced_call
from moonshard.serving.gateway.parameters import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt
from moonshard.serving.tool_calls import CALL_END, NAMES, ToolCallParser, call_marks

LONG_TEXT_CHARS = 20_000  # from here on tokenising would hold up every other request's tokens
MESSAGE_CHARS = 50  # rendering one more message takes as long as tokenising that many characters


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A model's folder as the gateway sees it. Tokenizer and template are None where the folder has none."""

    name: str
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    defaults: GenerationDefaults

    def check_name(self, name: str) -> None:
        """NotFound unless the client means this model; an empty name means the one there is."""
        if name not in ("", self.name):
            raise NotFound(f"the model {name!r} does not exist; this server has {self.name!r}", field="model")

    async def tokenize(self, request: GenerationRequest) -> Sequence[int]:
        """The prompt's token ids. Long texts are tokenised in a thread. InvalidArgument where there is no way to."""
        if isinstance(request.prompt, TokenPrompt):
            return request.prompt.token_ids
        if _may_be_long(request.prompt):
            return await asyncio.to_thread(self._encode, request)
        return self._encode(request)

    def detokenizer(self, request: GenerationRequest) -> Detokenizer | None:
        """Of one choice. With tools, the markers of their calls are marks in the text: they are a parser's to read."""
        if self.tokenizer is None:
            return None
        forced = self.forced_call(request)
        num_forced = 0 if forced is None else len(forced.token_ids)  # they come before what is detokenised
        return Detokenizer(
            self.tokenizer,
            skip_special=request.skip_special_tokens,
            stop=tuple(request.stop),
            min_tokens=max(0, request.min_tokens - num_forced),
            marks=None if request.tool_use is None else call_marks(self.tokenizer.special_tokens),
        )

    def call_parser(self, request: GenerationRequest) -> ToolCallParser | None:
        """Of one choice; None where the request has no tools."""
        if request.tool_use is None:
            return None
        use = request.tool_use
        return ToolCallParser(use.functions, use.call_ids, max_calls=use.max_calls)

    def forced_call(self, request: GenerationRequest) -> ForcedCall | None:
        """How every choice begins; None where the model is free. The prompt was tokenised."""
        use = request.tool_use
        if self.tokenizer is None or use is None or use.forced is None:
            return None
        return forced_call(self.tokenizer, use.forced, use.call_ids)

    def call_end(self, request: GenerationRequest) -> int | None:
        """The token that ends a choice which may have one call; None where it may have more."""
        if self.tokenizer is None or request.tool_use is None or request.tool_use.max_calls != 1:
            return None
        return self.tokenizer.special_tokens[NAMES[CALL_END]]

    async def detokenize(self, token_ids: Sequence[int], *, field: str) -> str:
        """The text of token ids, specials left out; of many, in a thread. InvalidArgument naming `field`."""
        if self.tokenizer is None:
            raise InvalidArgument(f"{field}: the model has no tokenizer", field=field)
        try:
            if len(token_ids) > LONG_TEXT_CHARS:
                return await asyncio.to_thread(self.tokenizer.decode, token_ids)
            return self.tokenizer.decode(token_ids)
        except TokenIdError as error:
            raise InvalidArgument(f"{field}: {error}", field=field) from error

    def _encode(self, request: GenerationRequest) -> Sequence[int]:
        if self.tokenizer is None:
            raise request.invalid("prompt", "the model has no tokenizer: send token ids")
        try:
            match request.prompt:
                case ChatPrompt(messages, template_kwargs, add_generation_prompt, is_continued):
                    if self.template is None:
                        raise request.invalid("prompt", "the model has no chat template")
                    if request.tool_use is not None:
                        self._check_tools(request, self.tokenizer, self.template)
                    return self.template.encode_chat(
                        self.tokenizer,
                        messages,
                        template_kwargs=template_kwargs,
                        add_generation_prompt=add_generation_prompt,
                        is_continued=is_continued,
                    )
                case TextPrompt(text):
                    return self.tokenizer.encode(text)
                case TokenPrompt(token_ids):
                    return token_ids
        except (TemplateError, TextError) as error:
            raise request.invalid("prompt", str(error)) from error

    @staticmethod
    def _check_tools(request: GenerationRequest, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """A model that is not told of its tools, or whose calls nobody can read, would seem to decide against them."""
        if not template.takes_tools:
            raise request.invalid("tools", "the model's chat template takes no tools")
        if not call_marks(tokenizer.special_tokens):
            raise request.invalid("tools", "the model's tokenizer has no tokens for tool calls")


def _may_be_long(prompt: TextPrompt | ChatPrompt) -> bool:
    """Whether the texts are many characters, or the template was given something nested, which may be of any size."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text) > LONG_TEXT_CHARS
    values = [value for message in prompt.messages for value in message.values()]
    values += prompt.template_kwargs.values()
    if any(isinstance(value, Mapping | list) for value in values):
        return True
    texts = [value for value in values if isinstance(value, str)]
    return sum(map(len, texts)) + MESSAGE_CHARS * len(prompt.messages) > LONG_TEXT_CHARS


def load_served_model(path: Path, name: str) -> ServedModel:
    """Errors are those of the files: they end the start."""
    return ServedModel(
        name=name,
        tokenizer=load_tokenizer(path),
        template=load_chat_template(path),
        defaults=load_generation_defaults(path),
    )
