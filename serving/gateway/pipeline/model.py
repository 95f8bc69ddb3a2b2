"""What the gateway itself knows of the model: its name, tokenizer, chat template and generation defaults.

Read from the model's folder once, at start. Vocabulary and context are the workers' to say
(`control.members.fleet.ModelLimits`): they hold the weights. Texts become tokens here and nowhere else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moonshard.models.folder.generation import GenerationDefaults, load_generation_defaults
from moonshard.models.tokenizers.tokenizer import TextError, TextTooLongError, TokenIdError, Tokenizer, load_tokenizer
from moonshard.rpc.status import ContextLengthExceeded, InvalidArgument, NotFound
from moonshard.serving.chat.declarations import ToolSchemaError
from moonshard.serving.chat.detokenizer import Detokenizer
from moonshard.serving.chat.template import ChatTemplate, TemplateError, load_chat_template
from moonshard.serving.chat.thoughts import ThoughtParser, answer_start, thought_marks
from moonshard.serving.chat.tool_calls import CALL_END, NAMES, ToolCallParser, call_marks
from moonshard.serving.gateway.aside import Aside
from moonshard.serving.gateway.intake.bounds import TOKENIZED_CONTEXTS
from moonshard.serving.gateway.pipeline.choice import ChoiceStream, Opening, forced_call
from moonshard.serving.gateway.pipeline.thinking import template_kwargs
from moonshard.serving.gateway.pipeline.unanswered import UnansweredChoice
from moonshard.serving.gateway.quoted import quoted
from moonshard.serving.gateway.request import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt

LONG_TEXT_CHARS = 2_000  # from here on tokenising would hold up every other request's tokens
MAX_ENCODING = 2  # at a time; the others wait, and are dropped where their client leaves meanwhile
MAX_TEXT_CHARS = 1 << 22  # of what token ids are spelt out as: every stream waits while it is written as JSON
MESSAGE_CHARS = 50  # rendering one more message takes as long as tokenising that many characters


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """The most tokens that a prompt may have, and the context that this comes from."""

    context_tokens: int
    max_tokens: int

    @classmethod
    def to_generate(cls, context_tokens: int) -> "PromptLimit":
        """The limit of a prompt to be answered: the answer has at least one token."""
        return cls(context_tokens, context_tokens - 1)

    @classmethod
    def to_tokenize(cls, context_tokens: int) -> "PromptLimit":
        return cls(context_tokens, TOKENIZED_CONTEXTS * context_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A model's folder as the gateway sees it. Tokenizer and template are None where the folder has none."""

    name: str
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    defaults: GenerationDefaults
    threads: Aside = field(default_factory=lambda: Aside(MAX_ENCODING, "encode", max_inline_size=LONG_TEXT_CHARS))

    def check_name(self, name: str) -> None:
        """NotFound unless the client means this model; an empty name means the one there is."""
        if name not in ("", self.name):
            raise NotFound(f"the model {quoted(name)} does not exist; this server has {self.name!r}", field="model")

    async def tokenize(self, request: GenerationRequest, limit: PromptLimit) -> Sequence[int]:
        """The prompt's token ids. Long texts are tokenised in a thread, and not begun for a client that has left.

        Raises:
            ContextLengthExceeded: more than the limit; of a long text that may be said after a part of it.
            InvalidArgument: there is no way to tokenise it.
        """
        max_tokens = limit.max_tokens
        if isinstance(request.prompt, TokenPrompt):
            ids = request.prompt.token_ids
        elif (num_least := self._least_tokens(request.prompt)) > max_tokens:
            raise too_long(request, f"at least {num_least}", limit)
        else:
            ids = await self.threads.run(_size(request.prompt), self._encode, request, limit)
        if len(ids) > max_tokens:
            raise too_long(request, f"{len(ids)}", limit)
        return ids

    def _least_tokens(self, prompt: TextPrompt | ChatPrompt) -> int:
        """The fewest tokens that the text can be: as if each token stood for as many characters as any does."""
        most = None if self.tokenizer is None else self.tokenizer.max_token_bytes
        return 0 if most is None else _num_chars(prompt) // most

    def opening(self, request: GenerationRequest, prompt: Sequence[int]) -> Opening:
        """How every choice begins after this prompt: of a chat whose template writes thoughts, in one or before one."""
        if self.tokenizer is None:
            return Opening()
        start, use, specials = None, request.tool_use, self.tokenizer.special_tokens
        if isinstance(request.prompt, ChatPrompt) and self._may_think:
            start = answer_start(prompt, specials)
        if use is None or use.forced is None:
            return Opening(start)
        return Opening(start, forced_call(self.tokenizer, use.forced, use.call_ids, start))

    def choice(self, index: int, request: GenerationRequest, opening: Opening) -> ChoiceStream:
        """One choice on its way out. Of tools and thoughts the markers are marks in its text, for parsers to read."""
        if not request.is_answered:
            return UnansweredChoice(index)
        if self.tokenizer is None:
            return ChoiceStream(index, None)
        calls = {} if request.tool_use is None else call_marks(self.tokenizer.special_tokens)
        thoughts = {} if opening.start is None else thought_marks(self.tokenizer.special_tokens)
        detokenizer = Detokenizer(
            self.tokenizer,
            skip_special=request.skip_special_tokens,
            stop=tuple(request.stop),
            min_tokens=max(0, request.min_tokens - opening.num_forced),  # what is forced is not detokenised
            marks=calls | thoughts,
        )
        hidden_ids = self.tokenizer.hidden_ids if request.skip_special_tokens else frozenset()
        hidden = [mark for token_id, mark in thoughts.items() if token_id in hidden_ids]
        return ChoiceStream(
            index,
            detokenizer,
            self._call_parser(request),
            thoughts=opening.start and ThoughtParser(opening.start, thoughts, hidden=hidden, left=calls.values()),
            forced=opening.forced,
            call_end=self.call_end(request),
        )

    @property
    def _may_think(self) -> bool:
        """Whether the template writes thoughts, and the tokenizer has their markers."""
        if self.template is None or self.tokenizer is None or not self.template.writes_thoughts:
            return False
        return bool(thought_marks(self.tokenizer.special_tokens))

    @staticmethod
    def _call_parser(request: GenerationRequest) -> ToolCallParser | None:
        """The parser of one choice's tool calls; None where the request has no tools."""
        if request.tool_use is None:
            return None
        use = request.tool_use
        return ToolCallParser(use.functions, use.call_ids, max_calls=use.max_calls)

    def call_end(self, request: GenerationRequest) -> int | None:
        """The token that ends a choice which may have one call; None where it may have more."""
        if self.tokenizer is None or request.tool_use is None or request.tool_use.max_calls != 1:
            return None
        return self.tokenizer.special_tokens[NAMES[CALL_END]]

    async def detokenize(self, token_ids: Sequence[int], max_tokens: int, *, field: str) -> str:
        """The text of token ids, specials left out; of many, in a thread.

        InvalidArgument naming `field`: more than `max_tokens`, an id that is none, a model without a tokenizer, a text
        that is too long to be sent in one piece.
        """
        if self.tokenizer is None:
            raise InvalidArgument(f"{field}: the model has no tokenizer", field=field)
        if len(token_ids) > max_tokens:
            raise InvalidArgument(f"{field}: at most {max_tokens} token ids, not {len(token_ids)}", field=field)
        try:
            text = await self.threads.run(len(token_ids), self.tokenizer.decode, token_ids)
        except TokenIdError as error:
            raise InvalidArgument(f"{field}: {error}", field=field) from error
        if len(text) > MAX_TEXT_CHARS:
            raise InvalidArgument(f"{field}: at most {MAX_TEXT_CHARS} characters, not {len(text)}", field=field)
        return text

    def _encode(self, request: GenerationRequest, limit: PromptLimit) -> Sequence[int]:
        if self.tokenizer is None:
            raise request.invalid("prompt", "the model has no tokenizer: send token ids")
        try:
            match request.prompt:
                case ChatPrompt() as prompt:
                    if self.template is None:
                        raise request.invalid("prompt", "the model has no chat template")
                    if request.tool_use is not None:
                        self._check_tools(request, self.tokenizer, self.template)
                    return self.template.encode_chat(
                        self.tokenizer,
                        prompt.messages,
                        template_kwargs=template_kwargs(request, prompt, self.template),
                        add_generation_prompt=prompt.add_generation_prompt,
                        is_continued=prompt.is_continued,
                        max_tokens=limit.max_tokens,
                    )
                case TextPrompt(text):
                    return self.tokenizer.encode(text, max_tokens=limit.max_tokens)
                case TokenPrompt(token_ids):
                    return token_ids
        except TextTooLongError as error:
            raise too_long(request, f"at least {error.num_tokens}", limit) from error
        except ToolSchemaError as error:
            raise request.invalid("tools", str(error)) from error
        except (TemplateError, TextError) as error:
            raise request.invalid("prompt", str(error)) from error

    @staticmethod
    def _check_tools(request: GenerationRequest, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """Refuses tools that the template does not show, or whose calls nobody can parse: the model would seem to
        decide against them.
        """
        if not template.takes_tools:
            raise request.invalid("tools", "the model's chat template takes no tools")
        if not call_marks(tokenizer.special_tokens):
            raise request.invalid("tools", "the model's tokenizer has no tokens for tool calls")


def too_long(request: GenerationRequest, num_tokens: str, limit: PromptLimit) -> ContextLengthExceeded:
    """The error of a prompt of so many tokens; `num_tokens` in words."""
    more = "" if limit.max_tokens < limit.context_tokens else f", more than the {limit.max_tokens} that are tokenised,"
    return request.too_long("prompt", limit.context_tokens, f"{{}} of {num_tokens} tokens{more}")


def _num_chars(prompt: TextPrompt | ChatPrompt) -> int:
    """How many characters a text has, or a chat's messages, to which a template may add and from which it seldom
    takes.
    """
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    contents = (message.get("content") for message in prompt.messages)
    return sum(len(content) for content in contents if isinstance(content, str))


def _size(prompt: TextPrompt | ChatPrompt) -> int:
    """The size in characters; a large number where a template was given nested values, which may be of any size."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    values = [value for message in prompt.messages for value in message.values()]
    values += prompt.template_kwargs.values()
    if any(isinstance(value, Mapping | list) for value in values):
        return LONG_TEXT_CHARS + 1
    texts = [value for value in values if isinstance(value, str)]
    return sum(map(len, texts)) + MESSAGE_CHARS * len(prompt.messages)


def load_served_model(path: Path, name: str) -> ServedModel:
    """Errors are those of the files: they end the start."""
    return ServedModel(
        name=name,
        tokenizer=load_tokenizer(path),
        template=load_chat_template(path),
        defaults=load_generation_defaults(path),
    )
