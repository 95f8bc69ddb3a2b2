"""What is let in of requests' bodies, before anything is made of them.

Three bounds, each by what could ever be served: the bytes of one body, by the longest text that fits into the model's
context as JSON may spell it; the bytes of all bodies that are here at once, together with what is made of them; and how
many values a body has, since 32 MB of token ids take 25 times as long to decode as a text of that length, and of an
object's members 260 times. So no request costs more than its context is worth, and whoever sends more is told at once.
What the fields may be, and how many tokens a text has, is others'.
"""

from collections.abc import Callable
from dataclasses import dataclass

from moonshard.rpc.status import ContextLengthExceeded, InvalidArgument, Overloaded, TooLarge, Unavailable
from moonshard.serving.gateway.aside import Aside
from moonshard.serving.gateway.intake.json_marks import Contents, contents_of

JSON_BYTES_PER_TEXT_BYTE = 6  # \u0041
PROTO_BYTES_PER_TEXT_BYTE = 1
MAX_ID_BYTES = 5  # of a token id in a gRPC message: a varint of 32 bits
OTHER_BYTES = 1 << 20  # of a body besides its text: tools, schemas, names, white space
MAX_OTHER_VALUES = 1 << 14  # of a body besides token ids: of an object each takes a microsecond to decode
MAX_LISTS_BESIDE_IDS = 64  # of a body whose many values are taken to be one prompt's token ids
MAX_OBJECTS = 1 << 14  # messages, parts, calls and what schemas are made of: each is built, again and again
MAX_MEMBERS = 1 << 16
MAX_LISTS = 1 << 14
MAX_LEVELS = 512  # of objects and lists within each other: all that read them call themselves for each
MAX_SCANS = 2  # bodies looked through at a time
TOKENIZED_CONTEXTS = 2  # times the context: how long a text may be that is only counted or spelt out
RETRY_AFTER_S = 1.0


@dataclass
class BytesInFlight:
    """How many bytes bodies take, with what is made of them, and the most that they may. Runs on one event loop."""

    limit: int
    num: int = 0

    def take(self, num_bytes: int) -> None:
        """Overloaded where that would be too many. Whoever takes bytes gives them back."""
        if self.num + num_bytes > self.limit:
            raise Overloaded(
                f"all requests' bodies and what is made of them take {self.num} bytes, "
                f"{num_bytes} more would be over {self.limit}",
                retry_after_s=RETRY_AFTER_S,
            )
        self.num += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num -= num_bytes


class BytesShare:
    """One request's part of the bytes in flight: it grows as its body arrives, and is given back when all is over."""

    def __init__(self, of: BytesInFlight) -> None:
        self._of = of
        self._num_bytes = 0

    def grow_to(self, num_bytes: int) -> None:
        """Grows to so many bytes. Overloaded where there is no room."""
        if num_bytes > self._num_bytes:
            self._of.take(num_bytes - self._num_bytes)
            self._num_bytes = num_bytes

    def count_in(self, num_bytes: int) -> None:
        """Counts bytes that exist already, whether or not there is room: requests that come later are refused
        instead.
        """
        self._of.num += num_bytes
        self._num_bytes += num_bytes

    def grow_to_hold(self, num_bytes: int, contents: Contents) -> None:
        """Grows to a body's bytes and what is made of it. There is always room for that where nothing else is in
        flight.

        Overloaded as `grow_to`.
        """
        self.grow_to(min(num_bytes + contents.num_bytes, max(num_bytes, self._of.limit)))

    def give_back(self) -> None:
        self._of.give_back(self._num_bytes)
        self._num_bytes = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The bounds of one body. None where a bound is not known, as the context is not until a worker has told it."""

    max_body_bytes: int
    max_context_tokens: int | None
    max_token_bytes: int | None

    def check_bytes(
        self, num_bytes: int, num_contexts: int = 1, bytes_per_text_byte: int = JSON_BYTES_PER_TEXT_BYTE
    ) -> None:
        """Before and while a body arrives.

        Raises:
            TooLarge: beyond what is configured.
            ContextLengthExceeded: no text of `num_contexts` times the context takes so many.
        """
        if num_bytes > self.max_body_bytes:
            raise TooLarge(f"the body has {num_bytes} bytes, the limit is {self.max_body_bytes}")
        if self.max_context_tokens is None or self.max_token_bytes is None:
            return
        token_bytes = max(bytes_per_text_byte * self.max_token_bytes, MAX_ID_BYTES)
        if num_bytes > token_bytes * self.max_context_tokens * num_contexts + OTHER_BYTES:
            raise ContextLengthExceeded.of(self.max_context_tokens, f"the body of {num_bytes} bytes")

    def max_values(self, num_contexts: int = 1) -> int:
        """The most values of a body: its token ids and everything else. Until a worker has told its context, everything
        else alone.
        """
        return MAX_OTHER_VALUES + (self.max_context_tokens or 0) * num_contexts

    def too_many_values(self, what: str, num_contexts: int = 1) -> ContextLengthExceeded | Unavailable:
        """The error of a body (`what`) with more token ids than that."""
        if self.max_context_tokens is None:
            return Unavailable("no worker has told its context yet", retry_after_s=RETRY_AFTER_S)
        return ContextLengthExceeded.of(
            self.max_context_tokens, f"{what} with more than {self.max_values(num_contexts)} values"
        )

    def check_contents(self, contents: Contents, num_contexts: int = 1) -> None:
        """Before a body is decoded. InvalidArgument where it has more values, or deeper, than could be served.

        ContextLengthExceeded where most of them are token ids. Unavailable where it has many and no worker has told yet
        how many could be.
        """
        if contents.num_in_all > (limit := self.max_values(num_contexts)):
            is_of_ids = contents.num_members <= MAX_OTHER_VALUES and contents.num_lists <= MAX_LISTS_BESIDE_IDS
            if is_of_ids or self.max_context_tokens is None:
                raise self.too_many_values("the body", num_contexts)
            raise InvalidArgument(f"the body has more than {limit} values: lists, objects and what is in them")
        if contents.num_objects > MAX_OBJECTS:
            raise InvalidArgument(f"the body has more than {MAX_OBJECTS} objects: messages, parts and what is in them")
        if contents.num_members > MAX_MEMBERS:
            raise InvalidArgument(f"the body has more than {MAX_MEMBERS} members of objects")
        if contents.num_lists > MAX_LISTS:
            raise InvalidArgument(f"the body has more than {MAX_LISTS} lists")
        if contents.num_levels > MAX_LEVELS:
            raise InvalidArgument(f"the body is nested too deeply: more than {MAX_LEVELS} levels")


class Intake:
    """The gate of both fronts. `bounds` gives the present ones: the context is known once a worker has told it."""

    def __init__(self, max_bytes_in_flight: int, bounds: Callable[[], Bounds]) -> None:
        self.in_flight = BytesInFlight(max_bytes_in_flight)
        self.bounds = bounds
        self._scans = Aside(MAX_SCANS, "scan")

    async def checked(self, body: bytes, share: BytesShare, num_contexts: int = 1) -> Contents:
        """What is in a body, which counts as in flight from now on. Raises as `Bounds.check_contents`, and
        Overloaded.
        """
        bounds = self.bounds()
        contents = await self._scans.run(len(body), contents_of, body, bounds.max_values(num_contexts))
        bounds.check_contents(contents, num_contexts)
        share.grow_to_hold(len(body), contents)
        return contents

    def admission(
        self, num_contexts: int = 1, bytes_per_text_byte: int = JSON_BYTES_PER_TEXT_BYTE
    ) -> tuple[BytesShare, Callable[[int], None]]:
        """A request's share, and what is to be told how many bytes of its body are known of, as they become more.

        The latter raises as `Bounds.check_bytes`, and Overloaded.
        """
        share, bounds = BytesShare(self.in_flight), self.bounds()

        def admit(num_bytes: int) -> None:
            bounds.check_bytes(num_bytes, num_contexts, bytes_per_text_byte)
            share.grow_to(num_bytes)

        return share, admit
