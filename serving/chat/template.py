"""Chat messages to prompt ids, through the model folder's Jinja template.

A special token's name is a special token where the template's source writes it, and plain text where a message contains
it. To tell the two apart after rendering, every such name in the template's own literals is compiled as one lone
surrogate: a character that no message can contain (messages are checked), so nothing that a client sends can forge one
or make one out of pieces. The sandbox and its extras follow transformers' `apply_chat_template`, and without special
names in the messages so do the ids.

Two limits: a special name that the template puts together while rendering (`'<|' + role + '|>'`) is plain text; a
template that looks for a special name inside a message does not find it. Whether `content` may be a list of parts is
the template's own affair.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import final

import jinja2
from jinja2 import nodes

from moonshard.models.folder.json_file import read_json_object
from moonshard.models.tokenizers.tokenizer import TextTooLongError, Tokenizer, check_text
from moonshard.models.tokenizers.vocabulary import name_pattern
from moonshard.serving.chat.declarations import declare_tools, sorted_tools
from moonshard.serving.chat.sandbox.budget import RenderBudget, allowed_units
from moonshard.serving.chat.sandbox.clock import OwnTime
from moonshard.serving.chat.sandbox.environment import BUDGET, TemplateSandbox
from moonshard.serving.chat.thoughts import NAMES as THOUGHT_NAMES
from moonshard.serving.chat.thoughts import THOUGHT_BEGIN

MAX_MESSAGE_CHARS = 1000  # of what a template says when it fails
FIRST_MARK, MAX_MARKS = 0xD800, 0x800  # the surrogates
MARK = re.compile(f"([{chr(FIRST_MARK)}-{chr(FIRST_MARK + MAX_MARKS - 1)}])")
THINKING_SWITCHES = ("thinking", "enable_thinking")  # Kimi's name, and that of others
KEEP_THOUGHTS = "preserve_thinking"
OWN_VARIABLES = frozenset({"messages", "add_generation_prompt"})

# what Jinja lets through from the expressions of a template, and from its parser and Python's compiler
RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)
SOURCE_ERRORS = (*RENDER_ERRORS, SyntaxError)


class TemplateFileError(ValueError):
    """A folder's chat template that cannot be used: names file and cause."""


class TemplateError(ValueError):
    """Messages that the template refuses, or that it cannot render."""


@final
class ChatTemplate:
    """A parsed template. May be used from several threads."""

    def __init__(self, source: str, variables: Mapping[str, str]):
        """`variables`: what the folder lets the template name, such as bos_token. Raises SOURCE_ERRORS."""
        self._environment = TemplateSandbox()
        self._environment.compile_tree(self._environment.parse(source))  # parsing alone would pass an unknown filter
        self._source = source
        self._variables = variables
        tree = self._environment.parse(source)
        # Not by `jinja2.meta`, which computes what is constant, outside of every bound: a center(1000000000) of 1 GB.
        self._names = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
        written = [*(data.data for data in tree.find_all(nodes.TemplateData)), *_strings(tree)]
        self.writes_thoughts = any(THOUGHT_NAMES[THOUGHT_BEGIN] in text for text in written)
        self._marked = lru_cache(maxsize=4)(self._mark)  # by the tokenizer's special names: in practice one

    def takes(self, variable: str) -> bool:
        return variable in self._names

    @property
    def takes_tools(self) -> bool:
        return self.takes("tools")

    @property
    def thinking_switch(self) -> str | None:
        """The variable by which thinking is switched on and off; None where the template has none."""
        return next((name for name in THINKING_SWITCHES if name in self._names), None)

    @property
    def may_keep_thoughts(self) -> bool:
        """Whether the thoughts of all turns can be kept, by the variable `preserve_thinking` of Kimi K2.6."""
        return self.takes(KEEP_THOUGHTS)

    def encode_chat(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, object]],
        *,
        template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        is_continued: bool = False,
        max_tokens: int | None = None,
    ) -> list[int]:
        """The prompt's ids. `template_kwargs` are the client's: tools, documents, thinking, ...

        Where the answer is the rest of the last message (`is_continued`), the prompt ends with that message's content,
        a string. A template that names `tools_ts_str` gets the tools sorted, and declared in that variable.

        Raises TemplateError, ToolSchemaError, TextError at a lone surrogate in anything the client sent, and
        TextTooLongError at a prompt that certainly has more than `max_tokens` (`Tokenizer.encode`).
        """
        kwargs = dict(template_kwargs or {})
        if clash := OWN_VARIABLES & kwargs.keys():
            raise TemplateError(f"the template's variable {min(clash)!r} cannot be set")
        units = _checked_units([list(messages), kwargs])
        if kwargs.get("tools") and "tools_ts_str" in self._names - kwargs.keys():
            tools = sorted_tools(kwargs["tools"])
            kwargs |= {"tools": tools, "tools_ts_str": declare_tools(tools)}
        marked = self._marked(frozenset(tokenizer.special_tokens))
        begun = str(messages[-1]["content"]) if is_continued else ""
        if is_continued and not begun:
            messages = messages[:-1]  # it says nothing that could be gone on with
        own = {"messages": messages, "add_generation_prompt": add_generation_prompt and not begun}
        with OwnTime() as clock:
            rendered = marked.render({**kwargs, **own}, RenderBudget(units, clock))
        return marked.encode(tokenizer, _up_to(rendered, begun) if begun else rendered, max_tokens)

    def _mark(self, special_names: frozenset[str]) -> "MarkedTemplate":
        return MarkedTemplate(self._environment, self._source, self._variables, special_names)


@final
class MarkedTemplate:
    """The template with every special name of its own replaced by a mark; `names` gives the name of each mark."""

    def __init__(
        self, environment: TemplateSandbox, source: str, variables: Mapping[str, str], special_names: frozenset[str]
    ):
        self._specials = name_pattern(special_names)
        self._mark_of: dict[str, str] = {}
        tree = environment.parse(source)
        for data in tree.find_all(nodes.TemplateData):
            data.data = self._mark(data.data)
        for constant in tree.find_all(nodes.Const):
            if isinstance(constant.value, str):
                constant.value = self._mark(constant.value)
        self._template = environment.compile_tree(tree)
        # transformers always defines these two
        self._variables: dict[str, object] = {"tools": None, "documents": None}
        self._variables.update((name, self._mark(text)) for name, text in variables.items())
        self._names = {mark: name for name, mark in self._mark_of.items()}

    def _mark(self, text: str) -> str:
        return self._specials.sub(lambda match: self._new_mark(match[0]), text)

    def _new_mark(self, name: str) -> str:
        if name not in self._mark_of and len(self._mark_of) == MAX_MARKS:
            raise TemplateError(f"the chat template names more than {MAX_MARKS} special tokens")
        return self._mark_of.setdefault(name, chr(FIRST_MARK + len(self._mark_of)))

    def render(self, variables: Mapping[str, object], budget: RenderBudget) -> str:
        """The text, in which a special token is its mark. Raises TemplateError."""
        try:
            parts: list[str] = []
            for part in self._template.generate({**self._variables, **variables, BUDGET: budget}):
                budget.extend_prompt(part)
                parts.append(part)
            return "".join(parts)
        except RENDER_ERRORS as cause:
            said = str(cause) or type(cause).__name__
            message = "".join(self._names.get(char, char) for char in said[:MAX_MESSAGE_CHARS])
            raise TemplateError(f"the model's chat template failed: {message}") from cause

    def encode(self, tokenizer: Tokenizer, rendered: str, max_tokens: int | None = None) -> list[int]:
        """Ids of what `render` gave. TextTooLongError as `Tokenizer.encode`."""
        parts = MARK.split(rendered)  # text, mark, text, ..., text
        restored = [self._names.get(part, part) for part in parts]
        starts = accumulate(map(len, restored), initial=0)
        placed = zip(starts, restored, parts, strict=False)  # the last start is the end
        marked = [(start, name) for start, name, part in placed if part in self._names]
        text = "".join(restored)
        if [(match.start(), match[0]) for match in self._specials.finditer(text)] == marked:
            # one call, as transformers does it: some tokenizers treat text beside a special token in their own way
            return tokenizer.encode(text, allow_special=True, max_tokens=max_tokens)
        ids: list[int] = []
        for part in parts:
            name = self._names.get(part)
            ids += [tokenizer.special_tokens[name]] if name else tokenizer.encode(part, max_tokens=max_tokens)
            if max_tokens is not None and len(ids) > max_tokens:
                raise TextTooLongError(len(ids))
        return ids


def _strings(tree: nodes.Template) -> list[str]:
    return [constant.value for constant in tree.find_all(nodes.Const) if isinstance(constant.value, str)]


def _up_to(rendered: str, begun: str) -> str:
    """The prompt up to the end of the last message's content, without what the template writes after it. Raises
    TemplateError.
    """
    for said in (begun, begun.strip()):  # some templates strip what they are given
        before, found, _ = rendered.rpartition(said)
        if said and found:
            return before + found
    raise TemplateError("the last message cannot be gone on with: the model's chat template does not write it as it is")


def _checked_units(values: Sequence[object]) -> int:
    """The units of work that these values allow, after a check of every string in them, keys included.

    Without recursion, since a client chooses how deep the values are nested.
    """
    pending = list(values)
    num_chars = num_nodes = 0
    while pending:
        value = pending.pop()
        num_nodes += 1
        if isinstance(value, str):
            check_text(value)
            num_chars += len(value)
        elif isinstance(value, Mapping):
            pending += value.keys()
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value
    return allowed_units(num_chars, num_nodes)


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """From chat_template.jinja, else tokenizer_config.json; None when neither has one. Raises TemplateFileError."""
    config_path = folder / "tokenizer_config.json"
    config = read_json_object(config_path, TemplateFileError)
    path, source = _source(folder, config_path, config)
    if source is None:
        return None
    try:
        return ChatTemplate(source, _token_variables(config))
    except SOURCE_ERRORS as cause:
        line = f" line {cause.lineno}:" if isinstance(cause, jinja2.TemplateSyntaxError) else ""
        raise TemplateFileError(f"{path}:{line} {cause}") from cause


def _source(folder: Path, config_path: Path, config: Mapping[str, object]) -> tuple[Path, str | None]:
    path = folder / "chat_template.jinja"
    try:
        return path, path.read_text("utf-8")
    except FileNotFoundError:
        return config_path, _default_template(config.get("chat_template"), config_path)
    except (OSError, UnicodeDecodeError) as cause:
        raise TemplateFileError(f"{path}: {cause}") from cause


def _default_template(value: object, path: Path) -> str | None:
    """The template itself: the file has a string, or a list of {name, template} of which one is called default."""
    if value is None or isinstance(value, str):
        return value
    named = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    template = next((item.get("template") for item in named if item.get("name") == "default"), None)
    if not isinstance(template, str):
        raise TemplateFileError(f"{path}: chat_template is neither a string nor a list with one named 'default'")
    return template


def _token_variables(config: Mapping[str, object]) -> dict[str, str]:
    """The variables bos_token, eos_token and so on: strings in the file, or objects with their `content`."""
    contents = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token")
    }
    return {key: content for key, content in contents.items() if isinstance(content, str)}
