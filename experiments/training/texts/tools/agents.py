"""Sessions of a coding agent: many questions about the files of an invented project, in one growing context.

A file is read when it is first asked about; what was read, listed or written stands in the context and is answered from
there without a call. A question that names no file says "Search", and takes two rounds: the search, then the file it
found. Tests are run anew each time.
"""

import json
from dataclasses import dataclass, field
from random import Random

from moonshard.experiments.training.texts.conversation import Call, CallRound, Conversation, Exchange, Tool
from moonshard.experiments.training.texts.lengths import exchange_tokens, opening_tokens
from moonshard.experiments.training.texts.recall import UNKNOWN
from moonshard.experiments.training.texts.tools.agent_project import (
    FOLDERS,
    KINDS,
    Entry,
    File,
    about_folder,
    new_path,
    project,
)

SYSTEMS = (
    "You are a coding agent.",
    "You are a coding agent. Use the tools to read files.",
    "You are Pocket Kimi, a coding agent. Do not read a file again.",
    "You help with a small project. Use the tools.",
)
TOOLS = {  # what it is for: names, description, names of each parameter
    "list": (("list_files", "list_folder", "ls"), "List a folder", (("folder", "directory"),)),
    "read": (("read_file", "open_file", "show_file"), "Read a file", (("path", "file"),)),
    "search": (("search", "find_text", "grep"), "Find the file with a text", (("text", "query"),)),
    "test": (("run_tests", "test_folder"), "Run the tests of a folder", (("folder", "directory"),)),
    "write": (("write_file", "save_file"), "Write a file", (("path", "file"), ("text", "content"))),
}
LISTINGS = ("List the files in {folder}.", "Which files are in {folder}?", "What is in {folder}?")
RUNS = ("Run the tests in {folder}.", "Test {folder}.", "Do the tests in {folder} pass?")
WRITES = ('Write "{text}" to {path}.', 'Make the file {path} with "{text}".', 'Save "{text}" as {path}.')
NO_SUCH_FILE = "no such file"
MAX_FILES = 24
SHORT_TOKENS = 400  # in shorter sessions there is no room for all the declarations


@dataclass(frozen=True, kw_only=True, slots=True)
class _AgentTool:
    """A tool, under the names that one session gives it."""

    name: str
    description: str
    parameter_names: tuple[str, ...]

    def declaration(self) -> Tool:
        parameters = {
            "type": "object",
            "properties": {name: {"type": "string"} for name in self.parameter_names},
            "required": list(self.parameter_names),
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(slots=True)
class _AgentSession:
    """The project, and how much of it the conversation has shown."""

    random: Random
    split: str
    tools: dict[str, _AgentTool]
    unread: list[File]
    read: list[File] = field(default_factory=list)
    listed: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)

    @property
    def paths(self) -> list[str]:
        return [file.path for file in [*self.read, *self.unread]]

    def round(self, purpose: str, result: str, *values: str) -> CallRound:
        """One call, by the declared names."""
        tool = self.tools[purpose]
        arguments = dict(zip(tool.parameter_names, values, strict=True))
        return CallRound(calls=(Call(name=tool.name, arguments=arguments),), results=(result,))


def agent_tools(random: Random, num_tokens: int) -> dict[str, _AgentTool]:
    """Reading always, the others mostly, in random order; short sessions can only read and search."""
    optional = ("search",) if num_tokens < SHORT_TOKENS else ("list", "search", "test", "write")
    purposes = ["read", *(purpose for purpose in optional if random.random() < 0.75)]
    return {purpose: _declared(random, purpose) for purpose in random.sample(purposes, len(purposes))}


def _declared(random: Random, purpose: str) -> _AgentTool:
    names, description, parameters = TOOLS[purpose]
    parameter_names = tuple(random.choice(choices) for choices in parameters)
    return _AgentTool(name=random.choice(names), description=description, parameter_names=parameter_names)


def _ask(random: Random, file: File, about: str) -> str:
    return random.choice(file.kind.questions).format(about=about, path=file.path)


def _fact(session: _AgentSession, file: File) -> tuple[str, str]:
    """A question about the file, and its answer; sometimes about something that the file does not have."""
    random = session.random
    if random.random() < 0.1:
        about = _absent(session, file).about
        return _ask(random, file, about), UNKNOWN
    entry = random.choice(file.entries)
    return _ask(random, file, entry.about), entry.answer


def _absent(session: _AgentSession, file: File) -> Entry:
    present = {entry.about for entry in file.entries}
    while (entry := file.kind.entry(session.random, session.split, file.path)).about in present:
        pass
    return entry


def _from_context(session: _AgentSession) -> Exchange:
    question, answer = _fact(session, session.random.choice(session.read))
    return Exchange(question=question, answer=answer)


def _by_reading(session: _AgentSession) -> Exchange:
    file = session.unread.pop()
    question, answer = _fact(session, file)
    session.read.append(file)
    return Exchange(question=question, answer=answer, rounds=(session.round("read", file.text, file.path),))


def _by_searching(session: _AgentSession) -> Exchange:
    file = session.unread.pop()
    entry = session.random.choice(file.entries)
    session.read.append(file)
    rounds = (session.round("search", file.path, entry.about), session.round("read", file.text, file.path))
    return Exchange(question=file.kind.search.format(about=entry.about), answer=entry.answer, rounds=rounds)


def _missing(session: _AgentSession) -> Exchange:
    """A file that the project does not have: the tool's error is the answer."""
    random = session.random
    kind = random.choice(KINDS)
    while (path := new_path(random, session.split, kind)) in {*session.paths, *session.missing}:
        kind = random.choice(KINDS)
    session.missing.add(path)
    question = random.choice(kind.questions).format(about=kind.entry(random, session.split, path).about, path=path)
    result = json.dumps({"error": NO_SUCH_FILE})
    answer = f"The tool says: {NO_SUCH_FILE}."
    return Exchange(question=question, answer=answer, rounds=(session.round("read", result, path),))


def _listing(session: _AgentSession) -> Exchange:
    """Lists a folder once; asked again, the answer is taken from the conversation."""
    random = session.random
    name = random.choice(session.paths).split("/")[0]
    inside = sorted(path for path in session.paths if path.startswith(f"{name}/"))
    question = about_folder(random, session.split, LISTINGS, name)
    answer = f"In {name} there are: {', '.join(inside)}."
    rounds = () if name in session.listed else (session.round("list", "\n".join(inside), name),)
    session.listed.add(name)
    return Exchange(question=question, answer=answer, rounds=rounds)


def _tests(session: _AgentSession) -> Exchange:
    """Runs the tests, each time anew."""
    random = session.random
    name = random.choice(FOLDERS)
    question = about_folder(random, session.split, RUNS, name)
    outcome = f"{random.randint(1, 99)} passed, {random.randint(0, 9)} failed"
    rounds = (session.round("test", outcome, name),)
    return Exchange(question=question, answer=f"The tests in {name}: {outcome}.", rounds=rounds)


def _writing(session: _AgentSession) -> Exchange | None:
    """A new file of one line, which from now on stands in the context. None if its path is taken."""
    random = session.random
    kind = random.choice(KINDS)
    path = new_path(random, session.split, kind)
    entry = kind.entry(random, session.split, path)
    folder_name = path.split("/")[0]
    if path in session.paths or path in session.missing or folder_name in session.listed:
        return None
    session.read.append(File(path=path, kind=kind, entries=(entry,)))
    question = random.choice(WRITES).format(text=entry.line, path=path)
    rounds = (session.round("write", "ok", path, entry.line),)
    return Exchange(question=question, answer=f"I wrote {path}.", rounds=rounds)


def _next(session: _AgentSession) -> Exchange:
    kind, tools = session.random.random(), session.tools
    if kind < 0.04:
        return _missing(session)
    if kind < 0.09 and "list" in tools:
        return _listing(session)
    if kind < 0.14 and "test" in tools:
        return _tests(session)
    if kind < 0.21 and "write" in tools and (written := _writing(session)) is not None:
        return written
    if not session.unread or (session.read and kind < 0.68):
        return _from_context(session)
    return _by_searching(session) if "search" in tools and session.random.random() < 0.35 else _by_reading(session)


def agent_conversation(random: Random, split: str, num_tokens: int) -> Conversation:
    """A session about one project, until it is about `num_tokens` long."""
    max_entries = 10 if num_tokens > 800 else 6
    files = project(random, split, random.randint(4, MAX_FILES), max_entries)
    session = _AgentSession(random, split, agent_tools(random, num_tokens), list(files))
    system = random.choice(SYSTEMS)
    tools = tuple(tool.declaration() for tool in session.tools.values())
    exchanges: list[Exchange] = []
    length = opening_tokens(system, tools)
    while length < num_tokens or not exchanges:
        exchanges.append(_next(session))
        length += exchange_tokens(exchanges[-1])
    return Conversation(exchanges=tuple(exchanges), system=system, tools=tools)
