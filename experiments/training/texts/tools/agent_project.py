"""An invented project, as a coding agent meets it: folders, and files of settings, tasks or functions.

The path decides the split, and so does each name inside a file: no path and no fact of an evaluation occurs in
training, though every word of them does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from moonshard.experiments.training.texts import words
from moonshard.experiments.training.texts.conversation import is_of, pick
from moonshard.experiments.training.texts.tools import tool_words

# fmt: off
FOLDERS = (
    "cache", "parser", "server", "client", "router", "worker", "store", "search", "mail", "chat", "login",
    "image", "sound", "video", "report", "budget", "order", "ticket", "table", "chart", "map", "game", "clock",
    "timer", "printer", "editor", "reader", "writer", "loader", "sender",
)
# fmt: on
SETTINGS_STEMS = ["config", "limits", "defaults", "settings", "local"]
TASKS_STEMS = ["todo", "plan", "notes", "tasks"]
FUNCTIONS_STEMS = ["main", "core", "load", "check", "build"]
SUBJECTS = ["cache", "server", "client", "queue", "worker", "login", "mail", "image", "index", "log"]
SETTINGS = ["port", "size", "limit", "timeout", "retries", "level", "host", "owner", "colour"]
VERBS = ["load", "save", "find", "sort", "check", "send", "read", "write", "build", "count"]
THINGS = ["items", "users", "files", "orders", "words", "names", "pages", "rows", "keys", "images"]
ARGUMENTS = ["path", "name", "size", "limit", "index", "key", "value", "text", "mode", "count"]
TASK_FORMS = (
    "fix the {thing}",
    "test the {thing}",
    "rename the {thing}",
    "remove the {thing}",
    "sort the {thing}",
    "check the {thing}",
    "write about the {thing}",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A line of a file, its topic, and the answer to a question about it."""

    line: str
    about: str
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FileKind:
    """How such files are named and written, and how one asks about an entry."""

    name: str
    stems: Sequence[str]
    ending: str
    entry: Callable[[Random, str, str], Entry]
    questions: tuple[str, ...]
    search: str


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    path: str
    kind: FileKind
    entries: tuple[Entry, ...]

    @property
    def text(self) -> str:
        return "\n".join(entry.line for entry in self.entries)


def _own(random: Random, split: str, make: Callable[[Random], str]) -> str:
    """A name that belongs to the split."""
    while not is_of(split, name := make(random)):
        pass
    return name


def setting(random: Random, split: str, path: str) -> Entry:
    name = _own(random, split, lambda random: f"{random.choice(SUBJECTS)}_{random.choice(SETTINGS)}")
    value = _setting_value(random, name)
    return Entry(line=f"{name} = {value}", about=name, answer=f"In {path}, {name} is {value}.")


def _setting_value(random: Random, name: str) -> str:
    match name.rsplit("_", 1)[1]:
        case "host":
            return random.choice(words.CITIES).lower()
        case "owner":
            return random.choice(words.FIRST_NAMES).lower()
        case "colour":
            return random.choice(words.COLOURS)
        case _:
            return str(random.randrange(2, 10_000))


def task(random: Random, split: str, path: str) -> Entry:
    name = _own(random, split, tool_words.person)
    thing = f"{random.choice(SUBJECTS)} {random.choice(THINGS)}"
    todo = random.choice(TASK_FORMS).format(thing=thing)
    return Entry(line=f"- {name}: {todo}", about=name, answer=f"In {path}, {name} has to {todo}.")


def _function_name(random: Random) -> str:
    return f"{random.choice(VERBS)}_{random.choice(SUBJECTS)}_{random.choice(THINGS)}"


def function(random: Random, split: str, path: str) -> Entry:
    name = _own(random, split, _function_name)
    arguments = ", ".join(random.sample(ARGUMENTS, random.randint(1, 3)))
    return Entry(line=f"def {name}({arguments})", about=name, answer=f"In {path}, {name} takes {arguments}.")


KINDS = (
    FileKind(
        name="settings",
        stems=SETTINGS_STEMS,
        ending="toml",
        entry=setting,
        questions=(
            "What is {about} in {path}?",
            "What does {path} say of {about}?",
            "Which value has {about} in {path}?",
            "In {path}, what is {about}?",
        ),
        search="Search for {about}: what is it?",
    ),
    FileKind(
        name="tasks",
        stems=TASKS_STEMS,
        ending="md",
        entry=task,
        questions=(
            "What does {about} have to do in {path}?",
            "What is the task of {about} in {path}?",
            "In {path}, what is the task of {about}?",
            "Which task has {about} in {path}?",
        ),
        search="Search for {about}: what is the task?",
    ),
    FileKind(
        name="functions",
        stems=FUNCTIONS_STEMS,
        ending="py",
        entry=function,
        questions=(
            "What does {about} take in {path}?",
            "Which arguments has {about} in {path}?",
            "In {path}, what does {about} take?",
            "How do I call {about} from {path}?",
        ),
        search="Search for {about}: what does it take?",
    ),
)


def about_folder(random: Random, split: str, forms: Sequence[str], name: str) -> str:
    """A question about a folder that belongs to the split, in one of the forms."""
    return pick(random, split, forms, name).format(folder=name)


def new_path(random: Random, split: str, kind: FileKind) -> str:
    return _own(random, split, lambda random: f"{random.choice(FOLDERS)}/{random.choice(kind.stems)}.{kind.ending}")


def file(random: Random, split: str, path: str, kind: FileKind, num_entries: int) -> File:
    """A file in which each line has another topic."""
    entries: dict[str, Entry] = {}
    for _ in range(num_entries):
        entry = kind.entry(random, split, path)
        entries.setdefault(entry.about, entry)
    return File(path=path, kind=kind, entries=tuple(entries.values()))


def project(random: Random, split: str, num_files: int, max_entries: int) -> tuple[File, ...]:
    """Files with different paths, no two of them about the same name, so that a search finds one."""
    files: dict[str, File] = {}
    abouts: set[str] = set()
    for _ in range(num_files):
        kind = random.choice(KINDS)
        path = new_path(random, split, kind)
        if path in files:
            continue
        found = file(random, split, path, kind, random.randint(3, max_entries))
        own = tuple(entry for entry in found.entries if entry.about not in abouts)
        abouts |= {entry.about for entry in own}
        if own:
            files[path] = File(path=path, kind=kind, entries=own)
    return tuple(files.values())
