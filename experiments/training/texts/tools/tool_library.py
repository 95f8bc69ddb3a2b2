"""The functions that tool conversations declare: what is asked, what comes back, how the answer reads.

A purpose goes by several names, as do its parameters, so that a call has to be written from the declaration and cannot
be recited. Every placeholder of an answer stands in the question (an argument) or in the result (a field); nothing is
computed, and results are random even where arithmetic would know better.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from moonshard.experiments.training.texts import words
from moonshard.experiments.training.texts.conversation import Call, Tool
from moonshard.experiments.training.texts.recall import UNKNOWN
from moonshard.experiments.training.texts.tools import tool_words
from moonshard.experiments.training.texts.tools.tool_words import Between, OneOf, Value

NO_TOOL = "I have no tool for that."
Maker = Callable[[Random], Value]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolParameter:
    """`names[0]` is the placeholder of question and answer; a declaration uses any of the names."""

    names: tuple[str, ...]
    value: Maker

    @property
    def json_type(self) -> str:
        return "integer" if isinstance(self.value, Between) else "string"


@dataclass(frozen=True, kw_only=True, slots=True)
class Purpose:
    """`follow_ups` repeat the question for another first argument; `pair` asks it of {first} and {second}."""

    names: tuple[str, ...]
    description: str
    parameters: tuple[ToolParameter, ...]
    questions: tuple[str, ...]
    answer: str
    result: Mapping[str, Maker]
    follow_ups: tuple[str, ...] = ()
    pair: str | None = None
    errors: tuple[str, ...] = ()
    without: str = NO_TOOL


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """A purpose under the names that one conversation gives it."""

    purpose: Purpose
    name: str
    parameter_names: tuple[str, ...]
    has_hints: bool = field(default=False)

    def call(self, values: tuple[Value, ...]) -> Call:
        return Call(name=self.name, arguments=dict(zip(self.parameter_names, values, strict=True)))

    def tool(self) -> Tool:
        """The declaration in OpenAI's shape; with hints, each parameter has a description of one word."""
        properties: dict[str, dict[str, str]] = {}
        for name, parameter in zip(self.parameter_names, self.purpose.parameters, strict=True):
            properties[name] = {"type": parameter.json_type}
            if self.has_hints:
                properties[name]["description"] = parameter.names[0]
        parameters = {"type": "object", "properties": properties, "required": list(self.parameter_names)}
        function = {"name": self.name, "description": self.purpose.description, "parameters": parameters}
        return {"type": "function", "function": function}


def placeholders(purpose: Purpose, values: tuple[Value, ...]) -> dict[str, Value]:
    return {parameter.names[0]: value for parameter, value in zip(purpose.parameters, values, strict=True)}


def _takes(*names: str, value: Maker) -> ToolParameter:
    return ToolParameter(names=names, value=value)


def _city() -> ToolParameter:
    return _takes("city", "place", "town", value=tool_words.city)


AND_CITY = ("And in {city}?", "What about {city}?", "Now {city}, please.")
AND_ITEM = ("And the {item}?", "What about the {item}?")
AND_PERSON = ("And {person}?", "What about {person}?")

PURPOSES = (
    Purpose(
        names=("get_weather", "weather_of", "check_weather", "current_weather"),
        description="Weather in a city",
        parameters=(_city(),),
        questions=(
            "What is the weather in {city}?",
            "How is the weather in {city}?",
            "Tell me the weather in {city}.",
            "What is the weather like in {city}?",
            "Check the weather in {city}.",
            "Weather in {city}?",
        ),
        follow_ups=AND_CITY,
        pair="What is the weather in {first} and in {second}?",
        result={"degrees": Between(-9, 35), "sky": OneOf(tool_words.SKIES)},
        answer="It is {degrees} degrees and {sky} in {city}.",
        errors=("unknown city", "no weather today"),
    ),
    Purpose(
        names=("get_time", "clock", "local_time", "time_in"),
        description="Time in a city",
        parameters=(_city(),),
        questions=(
            "What time is it in {city}?",
            "What is the time in {city}?",
            "Tell me the time in {city}.",
            "Which time is it now in {city}?",
            "Time in {city}?",
        ),
        follow_ups=AND_CITY,
        pair="What time is it in {first} and in {second}?",
        result={"time": tool_words.clock},
        answer="It is {time} in {city}.",
        errors=("unknown city",),
    ),
    Purpose(
        names=("convert_money", "exchange", "convert"),
        description="Convert dollars to other money",
        parameters=(
            _takes("amount", "dollars", "sum", value=Between(2, 999)),
            _takes("currency", "to", "target", value=OneOf(tool_words.CURRENCIES)),
        ),
        questions=(
            "How many {currency} are {amount} dollars?",
            "Convert {amount} dollars to {currency}.",
            "Change {amount} dollars to {currency}, please.",
            "What are {amount} dollars in {currency}?",
        ),
        result={"total": Between(2, 9999)},
        answer="{amount} dollars are {total} {currency}.",
        errors=("no rate",),
    ),
    Purpose(
        names=("order_status", "track_order", "find_order"),
        description="State of an order",
        parameters=(_takes("order", "order_id", "number", value=tool_words.code),),
        questions=(
            "Where is order {order}?",
            "What is the state of order {order}?",
            "Track order {order}.",
            "How is order {order} doing?",
            "Is order {order} on the way?",
        ),
        follow_ups=("And order {order}?", "What about order {order}?"),
        pair="Where are the orders {first} and {second}?",
        result={"status": OneOf(tool_words.ORDER_STATES)},
        answer="Order {order} is {status}.",
        errors=("unknown order",),
    ),
    Purpose(
        names=("get_stock", "stock_of", "count_item"),
        description="Stock of an item",
        parameters=(_takes("item", "article", "thing", value=tool_words.item),),
        questions=(
            "What is the stock of the {item}?",
            "How many of the {item} are in stock?",
            "Check the stock of the {item}.",
            "Do we have the {item} in stock?",
        ),
        follow_ups=AND_ITEM,
        pair="What is the stock of the {first} and of the {second}?",
        result={"count": Between(2, 999)},
        answer="The stock of the {item} is {count}.",
        errors=("unknown item",),
    ),
    Purpose(
        names=("get_price", "price_of", "item_price"),
        description="Price of an item",
        parameters=(_takes("item", "article", "thing", value=tool_words.item),),
        questions=(
            "What is the price of the {item}?",
            "How much is the {item}?",
            "What does the {item} cost?",
            "Tell me the price of the {item}.",
        ),
        follow_ups=AND_ITEM,
        pair="What is the price of the {first} and of the {second}?",
        result={"price": Between(2, 999)},
        answer="The price of the {item} is {price} dollars.",
        errors=("unknown item",),
    ),
    Purpose(
        names=("set_timer", "start_timer", "timer"),
        description="Start a timer",
        parameters=(_takes("minutes", "length", "duration", value=Between(2, 240)),),
        questions=(
            "Set a timer for {minutes} minutes.",
            "Start a timer of {minutes} minutes.",
            "Please wake me in {minutes} minutes.",
            "Timer for {minutes} minutes, please.",
        ),
        result={"end": tool_words.clock},
        answer="The timer of {minutes} minutes ends at {end}.",
        errors=("too many timers",),
    ),
    Purpose(
        names=("send_message", "message", "write_to"),
        description="Send a message to a person",
        parameters=(
            _takes("person", "to", "name", value=tool_words.person),
            _takes("text", "message", "body", value=tool_words.chore),
        ),
        questions=(
            'Send "{text}" to {person}.',
            'Write "{text}" to {person}.',
            'Send {person} the message "{text}".',
            'Tell {person}: "{text}".',
        ),
        result={"status": OneOf(("sent", "delivered", "saved"))},
        answer="The message to {person} was {status}.",
        errors=("unknown person",),
    ),
    Purpose(
        names=("find_contact", "phone_of", "get_contact", "lookup"),
        description="Phone number of a person",
        parameters=(_takes("person", "name", "who", value=tool_words.person),),
        questions=(
            "What is the phone number of {person}?",
            "How can I call {person}?",
            "Find the number of {person}.",
            "Tell me the phone number of {person}.",
        ),
        follow_ups=AND_PERSON,
        pair="What are the phone numbers of {first} and {second}?",
        result={"phone": Between(1000, 9999)},
        answer="The phone number of {person} is {phone}.",
        errors=("unknown person", "no number"),
    ),
    Purpose(
        names=("translate", "translate_word", "word_in"),
        description="Translate an English word",
        parameters=(
            _takes("word", "text", "term", value=OneOf([*words.ITEMS, *words.ANIMALS, *words.FRUITS])),
            _takes("language", "to", "target", value=OneOf(tool_words.LANGUAGES)),
        ),
        questions=(
            "What is {word} in {language}?",
            "Translate {word} to {language}.",
            "How do you say {word} in {language}?",
            "Tell me the word for {word} in {language}.",
        ),
        result={"translation": tool_words.foreign_word},
        answer="The word for {word} in {language} is {translation}.",
        errors=("unknown word",),
    ),
    Purpose(
        names=("book_room", "reserve_room", "take_room"),
        description="Book a meeting room",
        parameters=(
            _takes("room", "number", "room_id", value=tool_words.place_code),
            _takes("day", "date", "when", value=tool_words.day),
        ),
        questions=(
            "Book room {room} for {day}.",
            "I need room {room} on {day}.",
            "Please reserve room {room} for {day}.",
            "Can I have room {room} on {day}?",
        ),
        result={"code": tool_words.code},
        answer="Room {room} is booked for {day} with code {code}.",
        errors=("room is taken", "unknown room"),
    ),
    Purpose(
        names=("add_note", "save_note", "note"),
        description="Save a note",
        parameters=(_takes("text", "note", "content", value=tool_words.chore),),
        questions=('Note: "{text}".', 'Add the note "{text}".', 'Save a note: "{text}".', 'Write down "{text}".'),
        result={"number": Between(1, 99)},
        answer='Note {number} is saved: "{text}".',
        errors=("notes are full",),
    ),
    Purpose(
        names=("set_reminder", "remind", "remind_me"),
        description="Set a reminder",
        parameters=(
            _takes("text", "task", "what", value=tool_words.chore),
            _takes("time", "at", "when", value=tool_words.clock),
        ),
        questions=(
            'Remind me at {time}: "{text}".',
            'Set a reminder for {time}: "{text}".',
            'At {time}, remind me of "{text}".',
            'Remind me of "{text}" at {time}.',
        ),
        result={"status": OneOf(("set", "saved"))},
        answer="The reminder for {time} is {status}.",
        errors=("time is over",),
    ),
    Purpose(
        names=("play_song", "play", "start_song"),
        description="Play a song",
        parameters=(_takes("song", "title", "name", value=tool_words.song),),
        questions=("Play {song}.", "Play the song {song}.", "I want to hear {song}.", "Put on {song}, please."),
        result={"artist": tool_words.person},
        answer="Now playing {song} by {artist}.",
        errors=("unknown song",),
    ),
    Purpose(
        names=("distance", "get_distance", "how_far"),
        description="Distance between two cities",
        parameters=(
            _takes("start", "from", "origin", value=tool_words.city),
            _takes("end", "to", "target", value=tool_words.city),
        ),
        questions=(
            "How far is it from {start} to {end}?",
            "What is the distance from {start} to {end}?",
            "Tell me the distance between {start} and {end}.",
            "How many kilometers are between {start} and {end}?",
        ),
        result={"km": Between(100, 9999)},
        answer="From {start} to {end} it is {km} km.",
        errors=("unknown city", "no road"),
    ),
    Purpose(
        names=("next_train", "find_train", "train_to"),
        description="Next train to a city",
        parameters=(_city(),),
        questions=(
            "When is the next train to {city}?",
            "When does the train to {city} leave?",
            "Find the next train to {city}.",
            "I need a train to {city}.",
        ),
        follow_ups=("And to {city}?", "What about {city}?"),
        pair="When are the next trains to {first} and to {second}?",
        result={"time": tool_words.clock, "platform": Between(1, 20)},
        answer="The next train to {city} leaves at {time} from platform {platform}.",
        errors=("no train today", "unknown city"),
    ),
    Purpose(
        names=("find_meeting", "meeting_with", "get_meeting"),
        description="Next meeting with a person",
        parameters=(_takes("person", "name", "who", value=tool_words.person),),
        questions=(
            "When is my meeting with {person}?",
            "When do I meet {person}?",
            "Find my meeting with {person}.",
            "On which day do I meet {person}?",
        ),
        follow_ups=AND_PERSON,
        pair="When do I meet {first} and {second}?",
        result={"day": tool_words.day, "time": tool_words.clock},
        answer="The meeting with {person} is on {day} at {time}.",
        errors=("no meeting", "unknown person"),
    ),
    Purpose(
        names=("set_light", "light", "dim_light"),
        description="Set the light of a room",
        parameters=(
            _takes("room", "place", "where", value=OneOf(tool_words.ROOMS)),
            _takes("level", "percent", "value", value=Between(1, 100)),
        ),
        questions=(
            "Set the light in the {room} to {level} percent.",
            "Light in the {room} to {level} percent, please.",
            "I want the light in the {room} at {level} percent.",
            "Turn the light in the {room} to {level} percent.",
        ),
        result={"state": OneOf(("on", "ok"))},
        answer="The light in the {room} is at {level} percent.",
        errors=("no light there",),
    ),
    Purpose(
        names=("set_heating", "heat_room", "heating"),
        description="Set the heating of a room",
        parameters=(
            _takes("room", "place", "where", value=OneOf(tool_words.ROOMS)),
            _takes("degrees", "target", "value", value=Between(5, 30)),
        ),
        questions=(
            "Heat the {room} to {degrees} degrees.",
            "Set the heating in the {room} to {degrees} degrees.",
            "I want {degrees} degrees in the {room}.",
            "Make it {degrees} degrees in the {room}.",
        ),
        result={"state": OneOf(("on", "ok"))},
        answer="The heating in the {room} is at {degrees} degrees.",
        errors=("no heating there",),
    ),
    Purpose(
        names=("flight_info", "find_flight", "get_flight"),
        description="Gate and time of a flight",
        parameters=(_takes("flight", "code", "flight_id", value=tool_words.code),),
        questions=(
            "When does flight {flight} leave?",
            "What is the gate of flight {flight}?",
            "Find flight {flight}.",
            "Where do I go for flight {flight}?",
        ),
        follow_ups=("And flight {flight}?", "What about flight {flight}?"),
        pair="When do the flights {first} and {second} leave?",
        result={"gate": tool_words.place_code, "time": tool_words.clock},
        answer="Flight {flight} leaves from gate {gate} at {time}.",
        errors=("unknown flight", "flight is over"),
    ),
    Purpose(
        names=("get_balance", "balance_of", "account_balance"),
        description="Balance of an account",
        parameters=(_takes("account", "account_id", "number", value=Between(1000, 9999)),),
        questions=(
            "What is the balance of account {account}?",
            "How much is on account {account}?",
            "Check account {account}.",
            "Tell me the balance of account {account}.",
        ),
        follow_ups=("And account {account}?", "What about account {account}?"),
        pair="What is the balance of the accounts {first} and {second}?",
        result={"balance": Between(2, 9999)},
        answer="The balance of account {account} is {balance} dollars.",
        errors=("unknown account", "account is closed"),
    ),
    Purpose(
        names=("calories", "get_calories", "food_info"),
        description="Calories of a fruit",
        parameters=(
            _takes("fruit", "food", "name", value=tool_words.fruit),
            _takes("grams", "weight", "amount", value=Between(10, 500)),
        ),
        questions=(
            "How many calories are in {grams} grams of {fruit}?",
            "What are the calories of {grams} grams of {fruit}?",
            "I had {grams} grams of {fruit}: how many calories?",
            "Count the calories of {grams} grams of {fruit}.",
        ),
        result={"calories": Between(10, 999)},
        answer="{grams} grams of {fruit} have {calories} calories.",
        errors=("unknown food",),
    ),
    Purpose(
        names=("reserve_table", "book_table", "get_table"),
        description="Reserve a table for guests",
        parameters=(
            _takes("guests", "people", "seats", value=Between(2, 20)),
            _takes("time", "at", "when", value=tool_words.clock),
        ),
        questions=(
            "Reserve a table for {guests} people at {time}.",
            "I need a table for {guests} at {time}.",
            "Book a table at {time} for {guests} people.",
            "A table for {guests} at {time}, please.",
        ),
        result={"table": Between(1, 99)},
        answer="Table {table} is reserved for {guests} people at {time}.",
        errors=("no free table",),
    ),
    Purpose(
        names=("find_book", "search_book", "get_book"),
        description="Author and shelf of a book",
        parameters=(_takes("book", "title", "name", value=tool_words.book),),
        questions=("Who wrote {book}?", "Find the book {book}.", "Where is the book {book}?", "Look for {book}."),
        follow_ups=("And {book}?", "What about {book}?"),
        pair="Who wrote {first} and {second}?",
        result={"author": tool_words.person, "shelf": tool_words.place_code},
        answer="{book} is by {author} and stands on shelf {shelf}.",
        errors=("unknown book",),
    ),
    Purpose(
        names=("multiply", "times", "product"),
        description="Multiply two numbers",
        parameters=(
            _takes("a", "x", "first", value=Between(2, 99)),
            _takes("b", "y", "second", value=Between(2, 99)),
        ),
        questions=("What is {a} times {b}?", "Multiply {a} by {b}.", "How much is {a} times {b}?", "{a} times {b}?"),
        result={"product": Between(4, 9801)},
        answer="{a} times {b} is {product}.",
        errors=("too large",),
        without=UNKNOWN,
    ),
)
