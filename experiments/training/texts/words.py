"""The closed vocabulary of the generated text: names, places, things. Small, so that each word is met often."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _words("""
    Ada Amos Anna Arno Bela Bert Cara Carl Clara Cora Dana Dora Edda Egon Elsa Emil Enno Erna Eva Felix Finn Flora
    Fritz Gerda Greta Hanna Hugo Ida Ines Iris Ivan Jana Jonas Julia Karla Kurt Lara Lena Leo Linda Lotta Lukas Mara
    Maria Max Mila Mona Nadia Nina Noah Nora Olga Oscar Otto Paul Petra Pia Rita Rosa Ruth Sara Silas Simon Sonja
    Tara Theo Tilda Tom Udo Vera Viktor Wanda Willi Xenia Yara Zoe
""")
LAST_NAMES = _words("""
    Abbot Adler Baker Barlow Becker Berg Brandt Carter Castle Cook Dahl Dalton Drake Ellis Falk Farmer Fisher Ford
    Fox Frost Gibson Graham Grant Hale Hansen Harper Hart Hill Holm Hunter Jensen Jordan Keller Knight Koch Lake
    Lang Larsen Lewis Marsh Mason Meyer Miller Moss Nash Nelson Norris Olsen Owen Palmer Parker Pike Porter Reed
    Rivers Roth Sanders Schmidt Sharp Stein Stone Swan Taylor Thorne Turner Vogel Wagner Walker Ward Weber West
    Winter Wolf Wood Young
""")
CITIES = _words("""
    Oslo Lima Rome Paris Cairo Delhi Tokyo Berlin Madrid Dublin Athens Vienna Prague Lisbon Boston Denver Havana
    Quito Seoul Sydney Geneva Milan Naples Turin Zurich Bergen Dover Leeds York Perth Dallas Austin Tunis Accra
    Lagos Nairobi Hanoi Manila Riga Malmo
""")
COLOURS = _words("""
    red blue green yellow white black brown grey orange purple pink silver golden violet scarlet turquoise
""")
MATERIALS = _words("""
    copper wooden glass paper cotton leather iron plastic woolen bamboo marble rubber ceramic velvet cork brass
    linen steel canvas stone
""")
ITEMS = _words("""
    kettle lamp chair table clock basket blanket bottle box brush bucket candle carpet comb cup curtain drum fan
    fork hammer helmet jar key knife ladder mirror mug needle pan pen pillow plate pot ring rope scarf shelf spoon
    stool towel tray vase wallet whistle
""")
FRUITS = _words("""
    apple pear plum cherry lemon melon grape peach mango banana fig olive almond walnut berry date
""")
ANIMALS = _words("""
    cat dog horse cow goat sheep duck goose owl eagle bear lion tiger otter rabbit badger heron falcon salmon trout
""")
TEAMS = _words("""
    Harbor Meadow Summit Valley Canyon Forest Island Desert Prairie Glacier Lagoon Orchard
""")
DAYS = _words("""
    Monday Tuesday Wednesday Thursday Friday Saturday Sunday
""")
LETTERS = _words("""
    A B C D E F G H K L M N P R S T
""")
