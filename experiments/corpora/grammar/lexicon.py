"""The words of the quickstart grammar: nouns, adjectives, verbs and fixed phrases in German and English.

An entry holds only what cannot be derived: gender and plural of a noun, the principal parts of an irregular verb,
the cases a verb governs. ``german.py`` and ``english.py`` inflect; ``corpus.py`` puts words together. A noun or
adjective names its kinds (``person``, ``food``, …), and verbs say which kinds they take, so that sentences make sense.
"""

from dataclasses import dataclass

VOWELS = tuple("aeiou")


@dataclass(frozen=True)
class Noun:
    """A German noun and its English counterpart.

    `weak` nouns end in -n in every case but the nominative singular; `mass` nouns have no plural and no "a".
    For a noun that is a place, `location` and `direction` are (German, case, English) prepositions.
    """

    german: str
    gender: str  # m, f or n
    plural: str
    english: str
    english_plural: str
    kinds: tuple[str, ...]
    weak: bool = False
    mass: bool = False
    location: tuple[str, str, str] | None = None
    direction: tuple[str, str, str] | None = None


@dataclass(frozen=True)
class Adjective:
    """`english_of` overrides the translation for nouns of some kind: a man who is "groß" is tall, a house is big."""

    german: str
    english: str
    kinds: tuple[str, ...]
    comparative: tuple[str, str] | None = None
    english_of: tuple[tuple[str, str, str], ...] = ()

    @property
    def stem(self) -> str:
        """What the endings are added to: müde → müd-, teuer → teur-."""
        if self.german.endswith("er") and self.german[-3] in "aeiou":
            return self.german[:-2] + "r"
        return self.german.removesuffix("e")


@dataclass(frozen=True)
class Slot:
    """A complement of a verb: the case it stands in, the kinds of noun it takes, and its prepositions, if any.

    `prepositions` are (German, English) pairs to choose from; the German one may be empty where only English needs one.
    """

    case: str  # acc or dat; "direction" takes the noun's own preposition
    kinds: tuple[str, ...]
    prepositions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Verb:
    """A German verb (`prefix` is separable) with its forms, and the English verb it is translated by."""

    infinitive: str  # without the prefix
    prefix: str
    third: str
    participle: str
    auxiliary: str
    english: tuple[str, str, str, str]  # base, past, participle, -ing
    particle: str = ""
    slots: tuple[Slot, ...] = ()
    subjects: tuple[str, ...] = ("person",)
    stative: bool = False  # never progressive in English, no modal verb
    durative: bool = False  # goes with "seit zwei Jahren"
    reflexive: bool = False
    swap: bool = False  # the complement is the English subject: es gefällt mir, I like it
    located: bool = True  # may take a place adverbial
    gerund: bool = False  # as a control verb: stop working, not stop to work


@dataclass(frozen=True)
class Modal:
    """`present` and `past` are the forms for ich, du, er, wir, ihr, sie; in English a finite verb and what follows it."""

    present: tuple[str, ...]
    past: tuple[str, ...]
    english: str
    rest: tuple[str, ...]


@dataclass(frozen=True)
class Time:
    """A time phrase, and the kinds of clause it goes with (see `corpus.Sampler.tense`)."""

    german: str
    english: str
    uses: tuple[str, ...]
    frontable: bool = True


def plural_or_third(singular: str) -> str:
    """Append -s: the plural of a regular noun, or the third person of a verb."""
    if singular.endswith(("s", "x", "ch", "sh")):
        return singular + "es"
    if singular.endswith("y") and singular[-2] not in VOWELS:
        return singular[:-1] + "ies"
    return singular + "s"


def _nouns(table: str) -> list[Noun]:
    nouns = []
    for line in table.strip().splitlines():
        german, gender, plural, english, kinds, *more = line.split()
        singular, _, irregular = english.replace("_", " ").partition("/")
        options = dict(item.split("=") for item in more if "=" in item)
        places = {name: tuple(value.split(",")) for name, value in options.items()}
        nouns.append(
            Noun(
                german,
                gender,
                german if plural == "=" else plural,
                singular,
                irregular or plural_or_third(singular),
                tuple(kinds.split(",")),
                weak="weak" in more,
                mass=plural == "-",
                **places,
            )
        )
    return nouns


# German, gender, plural (= like the singular, - none), English[/irregular plural], kinds, options
NOUNS = _nouns("""
Mann m Männer man/men person,adult,public
Frau f Frauen woman/women person,adult,public
Kind n Kinder child/children person,public
Junge m Jungen boy person,public weak
Mädchen n = girl person,public
Lehrer m = teacher person,adult
Lehrerin f Lehrerinnen teacher person,adult
Arzt m Ärzte doctor person,adult
Ärztin f Ärztinnen doctor person,adult
Nachbar m Nachbarn neighbour person,adult weak
Nachbarin f Nachbarinnen neighbour person,adult
Freund m Freunde friend person,adult
Freundin f Freundinnen friend person,adult
Bruder m Brüder brother person,adult,kin
Schwester f Schwestern sister person,adult,kin
Vater m Väter father person,adult,kin,single
Mutter f Mütter mother person,adult,kin,single
Onkel m = uncle person,adult,kin
Tante f Tanten aunt person,adult,kin
Student m Studenten student person,adult weak
Bäcker m = baker person,adult
Maler m = painter person,adult,public
Gärtner m = gardener person,adult
König m Könige king person,adult,public,single
Königin f Königinnen queen person,adult,public,single
Polizist m Polizisten policeman/policemen person,adult,public weak
Gast m Gäste guest person,adult
Hund m Hunde dog animal
Katze f Katzen cat animal
Pferd n Pferde horse animal
Vogel m Vögel bird animal
Maus f Mäuse mouse/mice animal
Kuh f Kühe cow animal
Buch n Bücher book text,written,thing,told
Brief m Briefe letter text,written,small
Zeitung f Zeitungen newspaper text,thing
Gedicht n Gedichte poem text,written,told
Geschichte f Geschichten story/stories text,written,told,story
Apfel m Äpfel apple food
Birne f Birnen pear food
Brot n - bread food,baked
Käse m - cheese food
Fleisch n - meat food
Kuchen m = cake food,baked
Ei n Eier egg food,cooked
Suppe f Suppen soup food,cooked
Kartoffel f Kartoffeln potato/potatoes food,cooked
Kaffee m - coffee drink,brewed
Tee m - tea drink,brewed
Milch f - milk drink
Wasser n - water drink
Saft m - juice drink
Mantel m Mäntel coat clothing
Hut m Hüte hat clothing
Kleid n Kleider dress clothing
Jacke f Jacken jacket clothing
Hemd n Hemden shirt clothing
Schuh m Schuhe shoe clothing
Koffer m = suitcase thing,heavy,case
Tasche f Taschen bag thing,heavy,case
Schlüssel m = key thing,small
Bild n Bilder picture thing,painted
Uhr f Uhren watch thing,small,repairable
Lampe f Lampen lamp thing,repairable
Blume f Blumen flower thing,painted
Korb m Körbe basket thing,heavy
Regenschirm m Regenschirme umbrella thing,small
Geschenk n Geschenke present thing,small,parcel
Messer n = knife/knives thing,small
Auto n Autos car vehicle,repairable
Fahrrad n Fahrräder bicycle vehicle,repairable
Boot n Boote boat vehicle,repairable
Tisch m Tische table furniture,heavy
Stuhl m Stühle chair furniture,heavy
Bett n Betten bed furniture
Schrank m Schränke wardrobe furniture
Fenster n = window opening
Tür f Türen door opening
Zimmer n = room room,place location=in,dat,in direction=in,acc,into
Küche f Küchen kitchen room,place location=in,dat,in direction=in,acc,into
Garten m Gärten garden place,painted location=in,dat,in direction=in,acc,into
Wald m Wälder forest place,public location=in,dat,in direction=in,acc,into
Park m Parks park place,public location=in,dat,in direction=in,acc,to
Museum n Museen museum place,public location=in,dat,in direction=in,acc,to
Bibliothek f Bibliotheken library place,public location=in,dat,in direction=in,acc,to
Schule f Schulen school place,public location=in,dat,at direction=in,acc,to
Krankenhaus n Krankenhäuser hospital place,public location=in,dat,in direction=in,acc,to
Dorf n Dörfer village place location=in,dat,in direction=in,acc,to
Stadt f Städte town place,public location=in,dat,in direction=in,acc,to
Haus n Häuser house place,painted location=in,dat,in direction=in,acc,into
Bahnhof m Bahnhöfe station place,public location=an,dat,at direction=zu,dat,to
See m Seen lake place,public location=an,dat,at direction=an,acc,to
Markt m Märkte market place,public location=auf,dat,at direction=auf,acc,to
Fest n Feste party event
Konzert n Konzerte concert event
Reise f Reisen journey event
Ausflug m Ausflüge trip event
""")

# Genitive singular in -es, where -s alone would be wrong or stiff; feminine and weak nouns need no entry.
LONG_GENITIVE = {"Mann", "Kind", "Arzt", "Freund", "Gast", "Hund", "Pferd", "Dorf", "Haus", "Buch", "Brief"}

NAMES = {"Anna": "f", "Maria": "f", "Clara": "f", "Julia": "f", "Peter": "m", "Paul": "m", "Karl": "m", "Otto": "m"}
CITIES = ("Berlin", "Hamburg", "Leipzig", "Dresden", "Bremen")

_OBJECT = ("thing", "clothing", "vehicle", "furniture", "small")
_COLOURED = ("thing", "clothing", "vehicle", "furniture", "opening")

ADJECTIVES = [
    Adjective("alt", "old", ("adult", "animal", "place", *_OBJECT, "text"), ("älter", "older")),
    Adjective("jung", "young", ("adult", "animal"), ("jünger", "younger")),
    Adjective("klein", "small", ("person", "animal", "place", "room", "opening", *_OBJECT), ("kleiner", "smaller")),
    Adjective(
        "groß",
        "big",
        ("person", "animal", "place", "room", "opening", *_OBJECT),
        ("größer", "bigger"),
        (("person", "tall", "taller"),),
    ),
    Adjective("neu", "new", ("room", "text", *_OBJECT), ("neuer", "newer")),
    Adjective("schön", "beautiful", ("place", "event", *_OBJECT), ("schöner", "more beautiful")),
    Adjective("freundlich", "friendly", ("person",), ("freundlicher", "friendlier")),
    Adjective("müde", "tired", ("person", "animal")),
    Adjective("hungrig", "hungry", ("person", "animal")),
    Adjective("berühmt", "famous", ("person",), ("berühmter", "more famous")),
    Adjective("reich", "rich", ("person",), ("reicher", "richer")),
    Adjective("krank", "sick", ("person", "animal")),
    Adjective("glücklich", "happy", ("person",), ("glücklicher", "happier")),
    Adjective("traurig", "sad", ("person",), ("trauriger", "sadder")),
    Adjective("klug", "clever", ("person", "animal"), ("klüger", "cleverer")),
    Adjective("stark", "strong", ("person", "animal", "brewed"), ("stärker", "stronger")),
    Adjective("schnell", "fast", ("vehicle", "animal"), ("schneller", "faster")),
    Adjective("teuer", "expensive", _OBJECT, ("teurer", "more expensive")),
    Adjective("billig", "cheap", ("thing", "clothing", "vehicle"), ("billiger", "cheaper")),
    Adjective("schwer", "heavy", ("heavy",), ("schwerer", "heavier")),
    Adjective("leicht", "light", ("heavy",), ("leichter", "lighter")),
    Adjective("kaputt", "broken", ("repairable", "furniture", "opening")),
    Adjective("rot", "red", _COLOURED),
    Adjective("blau", "blue", _COLOURED),
    Adjective("grün", "green", _COLOURED),
    Adjective("schwarz", "black", ("clothing", "vehicle", "animal", "heavy")),
    Adjective("weiß", "white", ("clothing", "vehicle", "animal", "furniture")),
    Adjective("frisch", "fresh", ("food", "drink")),
    Adjective("kalt", "cold", ("drink",)),
    Adjective("warm", "warm", ("drink", "cooked")),
    Adjective("lang", "long", ("text", "event"), ("länger", "longer")),
    Adjective("kurz", "short", ("text", "event"), ("kürzer", "shorter")),
    Adjective("interessant", "interesting", ("text", "event", "place"), ("interessanter", "more interesting")),
    Adjective("langweilig", "boring", ("text", "event"), ("langweiliger", "more boring")),
    Adjective("ruhig", "quiet", ("place",), ("ruhiger", "quieter")),
]


def _third_person(infinitive: str) -> str:
    stem = infinitive.removesuffix("n") if infinitive[-2] == "r" else infinitive[:-2]
    return stem + ("et" if stem.endswith(("t", "d", "ffn")) else "t")


def _english_forms(parts: str) -> tuple[str, str, str, str]:
    """Base, past, participle, -ing from "walk", "read read read" or, with its own -ing, "run ran run running"."""
    base, *given = parts.split()
    if not given:
        past = (
            base + "d"
            if base.endswith("e")
            else base[:-1] + "ied"
            if base[-1] == "y" and base[-2] != "a"
            else base + "ed"
        )
        given = [past, past]
    if len(given) == 2:
        given.append((base if base.endswith("ee") else base.removesuffix("e")) + "ing")
    return base, given[0], given[1], given[2]


def _verb(german: str, participle: str, english: str, *slots: Slot, third: str = "", **options) -> Verb:
    """`german` is "kaufen" or, with a separable prefix, "ein|kaufen"; a + before the participle means: with sein."""
    prefix, _, infinitive = german.rpartition("|")
    parts, _, particle = english.partition(" + ")
    return Verb(
        infinitive,
        prefix,
        third or _third_person(infinitive),
        participle.removeprefix("+"),
        "sein" if participle.startswith("+") else "haben",
        _english_forms(parts),
        particle,
        slots,
        **options,
    )


def _accusative(*kinds: str) -> Slot:
    return Slot("acc", kinds)


def _dative(*kinds: str, to: str = "") -> Slot:
    return Slot("dat", kinds, (("", to),) if to else ())


def _with(german: str, case: str, english: str, *kinds: str) -> Slot:
    return Slot(case, kinds, ((german, english),))


_LIVING = ("person", "animal")
_GOODS = ("thing", "clothing", "vehicle", "furniture", "small", "food")
_DIRECTION = Slot("direction", ("place",))
_SPOTS = (("auf", "on"), ("unter", "under"), ("neben", "next to"), ("hinter", "behind"), ("vor", "in front of"))

VERBS = [
    # alone
    _verb("schlafen", "geschlafen", "sleep slept slept", third="schläft", subjects=_LIVING, durative=True),
    _verb("arbeiten", "gearbeitet", "work", durative=True),
    _verb("lachen", "gelacht", "laugh"),
    _verb("weinen", "geweint", "cry", durative=True),
    _verb("tanzen", "getanzt", "dance", durative=True),
    _verb("singen", "gesungen", "sing sang sung", durative=True),
    _verb("schwimmen", "+geschwommen", "swim swam swum swimming", located=False),
    _verb("kochen", "gekocht", "cook"),
    _verb("ein|kaufen", "eingekauft", "go went gone + shopping"),
    _verb("fern|sehen", "ferngesehen", "watch + television", third="sieht"),
    _verb("auf|stehen", "+aufgestanden", "get got got getting + up", located=False),
    _verb("ein|schlafen", "+eingeschlafen", "fall fell fallen + asleep", third="schläft", subjects=_LIVING),
    _verb("auf|wachen", "+aufgewacht", "wake woke woken + up", subjects=_LIVING),
    _verb("an|kommen", "+angekommen", "arrive"),
    _verb("mit|kommen", "+mitgekommen", "come came come + along", located=False),
    _verb("zurück|kommen", "+zurückgekommen", "come came come + back", located=False),
    # with an object
    _verb("lesen", "gelesen", "read read read", _accusative("text"), third="liest"),
    _verb("schreiben", "geschrieben", "write wrote written", _accusative("written")),
    _verb("kaufen", "gekauft", "buy bought bought", _accusative(*_GOODS)),
    _verb("verkaufen", "verkauft", "sell sold sold", _accusative(*_GOODS)),
    _verb("suchen", "gesucht", "look", Slot("acc", (*_OBJECT, "animal"), (("", "for"),)), durative=True),
    _verb("finden", "gefunden", "find found found", _accusative(*_OBJECT), stative=True),
    _verb("verlieren", "verloren", "lose lost lost", _accusative("small", "clothing"), stative=True),
    _verb("verstecken", "versteckt", "hide hid hidden", _accusative("small", "heavy", "clothing")),
    _verb("stehlen", "gestohlen", "steal stole stolen", _accusative(*_OBJECT), third="stiehlt", located=False),
    _verb("essen", "gegessen", "eat ate eaten", _accusative("food"), third="isst"),
    _verb("fressen", "gefressen", "eat ate eaten", _accusative("food"), third="frisst", subjects=("animal",)),
    _verb("trinken", "getrunken", "drink drank drunk", _accusative("drink")),
    _verb("kochen", "gekocht", "cook", _accusative("cooked")),
    _verb("kochen", "gekocht", "make made made", _accusative("brewed")),
    _verb("backen", "gebacken", "bake", _accusative("baked")),
    _verb("bestellen", "bestellt", "order", _accusative("food", "drink", "thing", "clothing")),
    _verb("bezahlen", "bezahlt", "pay paid paid", Slot("acc", _GOODS, (("", "for"),)), located=False),
    _verb("tragen", "getragen", "wear wore worn", _accusative("clothing"), third="trägt"),
    _verb("tragen", "getragen", "carry", _accusative("heavy"), third="trägt"),
    _verb("an|ziehen", "angezogen", "put put put putting + on", _accusative("clothing")),
    _verb("aus|ziehen", "ausgezogen", "take took taken + off", _accusative("clothing")),
    _verb("öffnen", "geöffnet", "open", _accusative("opening", "case", "parcel"), located=False),
    _verb("auf|machen", "aufgemacht", "open", _accusative("opening", "case", "parcel"), located=False),
    _verb("zu|machen", "zugemacht", "close", _accusative("opening", "case"), located=False),
    _verb("reparieren", "repariert", "repair", _accusative("repairable")),
    _verb("putzen", "geputzt", "clean", _accusative("opening", "room", "vehicle"), located=False),
    _verb("auf|räumen", "aufgeräumt", "tidy + up", _accusative("room"), located=False),
    _verb("waschen", "gewaschen", "wash", _accusative("vehicle", "clothing"), third="wäscht"),
    _verb("malen", "gemalt", "paint", _accusative("painted", "animal")),
    _verb("mit|bringen", "mitgebracht", "bring brought brought + along", _accusative("food", "small"), located=False),
    _verb(
        "mit|nehmen",
        "mitgenommen",
        "take took taken + along",
        _accusative("heavy", "small"),
        third="nimmt",
        located=False,
    ),
    _verb("füttern", "gefüttert", "feed fed fed", _accusative("animal")),
    _verb("sehen", "gesehen", "see saw seen", _accusative("person", "animal"), third="sieht", stative=True),
    _verb("hören", "gehört", "hear heard heard", _accusative("person", "animal"), stative=True),
    _verb("kennen", "gekannt", "know knew known", _accusative("person"), stative=True, durative=True, located=False),
    _verb("lieben", "geliebt", "love", _accusative("person", "animal"), stative=True, located=False),
    _verb("brauchen", "gebraucht", "need", _accusative("thing", "clothing", "vehicle"), stative=True, located=False),
    _verb(
        "verstehen",
        "verstanden",
        "understand understood understood",
        _accusative("person", "text"),
        stative=True,
        located=False,
    ),
    _verb(
        "vergessen",
        "vergessen",
        "forget forgot forgotten forgetting",
        _accusative("small"),
        third="vergisst",
        stative=True,
    ),
    _verb("besuchen", "besucht", "visit", _accusative("person"), located=False),
    _verb("treffen", "getroffen", "meet met met", _accusative("person"), third="trifft"),
    _verb("beobachten", "beobachtet", "watch", _accusative("person", "animal")),
    _verb("an|rufen", "angerufen", "call", _accusative("person"), located=False),
    _verb("ein|laden", "eingeladen", "invite", _accusative("person"), third="lädt", located=False),
    _verb("ab|holen", "abgeholt", "pick + up", _accusative("person"), located=False),
    # with the dative
    _verb("helfen", "geholfen", "help", _dative("person"), third="hilft"),
    _verb("danken", "gedankt", "thank", _dative("person"), located=False),
    _verb("folgen", "+gefolgt", "follow", _dative("person", "animal"), subjects=_LIVING, located=False),
    _verb("antworten", "geantwortet", "answer", _dative("person"), located=False),
    _verb("gratulieren", "gratuliert", "congratulate", _dative("person"), located=False),
    _verb("vertrauen", "vertraut", "trust", _dative("person"), stative=True, located=False),
    _verb("zu|hören", "zugehört", "listen", _dative("person", to="to")),
    _verb("gehören", "gehört", "belong", _dative("person", to="to"), subjects=_OBJECT, stative=True, located=False),
    _verb(
        "gefallen",
        "gefallen",
        "like",
        _dative("person"),
        third="gefällt",
        subjects=("text", "clothing", "place", "vehicle"),
        swap=True,
        stative=True,
        located=False,
    ),
    _verb(
        "schmecken", "geschmeckt", "like", _dative("person"), subjects=("food",), swap=True, stative=True, located=False
    ),
    _verb(
        "geben",
        "gegeben",
        "give gave given",
        _dative("person"),
        _accusative("thing", "small", "food"),
        third="gibt",
        located=False,
    ),
    _verb(
        "schenken", "geschenkt", "give gave given", _dative("person"), _accusative("thing", "clothing"), located=False
    ),
    _verb("zeigen", "gezeigt", "show showed shown", _dative("person"), _accusative("thing", "place"), located=False),
    _verb("schicken", "geschickt", "send sent sent", _dative("person"), _accusative("thing", "small"), located=False),
    _verb(
        "leihen",
        "geliehen",
        "lend lent lent",
        _dative("person"),
        _accusative("thing", "vehicle", "clothing"),
        located=False,
    ),
    _verb("erzählen", "erzählt", "tell told told", _dative("person"), _accusative("story"), located=False),
    _verb("erklären", "erklärt", "explain", _dative("person", to="to"), _accusative("told"), located=False),
    _verb(
        "vor|lesen",
        "vorgelesen",
        "read read read",
        _dative("person", to="to"),
        _accusative("text"),
        third="liest",
        located=False,
    ),
    _verb(
        "zurück|geben",
        "zurückgegeben",
        "give gave given + back",
        _dative("person", to="to"),
        _accusative("thing", "small"),
        third="gibt",
        located=False,
    ),
    # with a preposition
    _verb("warten", "gewartet", "wait", _with("auf", "acc", "for", "person"), durative=True),
    _verb("denken", "gedacht", "think thought thought", _with("an", "acc", "of", "person", "event"), located=False),
    _verb("sprechen", "gesprochen", "talk", _with("mit", "dat", "to", "person"), third="spricht"),
    _verb("sprechen", "gesprochen", "talk", _with("über", "acc", "about", "event", "text"), third="spricht"),
    _verb("spielen", "gespielt", "play", _with("mit", "dat", "with", "animal", "person"), durative=True),
    _verb("lachen", "gelacht", "laugh", _with("über", "acc", "at", "person", "animal")),
    _verb("träumen", "geträumt", "dream", _with("von", "dat", "of", "event", "vehicle"), durative=True, located=False),
    _verb(
        "teil|nehmen",
        "teilgenommen",
        "take took taken + part",
        _with("an", "dat", "in", "event"),
        third="nimmt",
        located=False,
    ),
    _verb("freuen", "gefreut", "look + forward", _with("auf", "acc", "to", "event"), reflexive=True, located=False),
    _verb(
        "erinnern",
        "erinnert",
        "remember",
        _with("an", "acc", "", "person", "event"),
        reflexive=True,
        stative=True,
        located=False,
    ),
    # places
    _verb("gehen", "+gegangen", "go went gone", _DIRECTION, located=False),
    _verb("laufen", "+gelaufen", "run ran run running", _DIRECTION, third="läuft", subjects=_LIVING, located=False),
    _verb("fahren", "+gefahren", "drive drove driven", _DIRECTION, third="fährt", located=False),
    _verb("zurück|gehen", "+zurückgegangen", "go went gone + back", _DIRECTION, located=False),
    _verb(
        "reisen", "+gereist", "travel travelled travelled travelling", _with("nach", "dat", "to", "city"), located=False
    ),
    _verb("wohnen", "gewohnt", "live", _with("in", "dat", "in", "city"), stative=True, durative=True, located=False),
    _verb(
        "legen",
        "gelegt",
        "put put put putting",
        _accusative("small", "clothing"),
        Slot("acc", ("furniture",), _SPOTS),
        located=False,
    ),
    _verb(
        "stellen",
        "gestellt",
        "put put put putting",
        _accusative("heavy"),
        Slot("acc", ("furniture",), _SPOTS[2:]),
        located=False,
    ),
    _verb(
        "liegen",
        "gelegen",
        "lie lay lain lying",
        Slot("dat", ("furniture",), _SPOTS),
        subjects=("small", "clothing"),
        located=False,
    ),
    _verb(
        "sitzen",
        "gesessen",
        "sit sat sat sitting",
        Slot("dat", ("furniture",), _SPOTS),
        subjects=_LIVING,
        durative=True,
        located=False,
    ),
]

SEIN = Verb("sein", "", "ist", "gewesen", "sein", ("be", "was", "been", "being"), stative=True)

# versuchen, das Buch zu lesen
CONTROL_VERBS = [
    _verb("versuchen", "versucht", "try"),
    _verb("planen", "geplant", "plan planned planned planning"),
    _verb("hoffen", "gehofft", "hope", stative=True),
    _verb("vergessen", "vergessen", "forget forgot forgotten forgetting", third="vergisst", stative=True),
    _verb("an|fangen", "angefangen", "begin began begun beginning", third="fängt"),
    _verb("auf|hören", "aufgehört", "stop stopped stopped stopping", stative=True, gerund=True),
]

# glauben, dass …; fragen, ob …
THAT_VERBS = [
    _verb("glauben", "geglaubt", "believe", stative=True),
    _verb("wissen", "gewusst", "know knew known", third="weiß", stative=True),
    _verb("sagen", "gesagt", "say said said", stative=True),
    _verb("denken", "gedacht", "think thought thought", stative=True),
    _verb("hoffen", "gehofft", "hope", stative=True),
]
WHETHER_VERBS = [
    _verb("fragen", "gefragt", "ask", stative=True),
    _verb("wissen", "gewusst", "know knew known", third="weiß", stative=True),
]

MODALS = [
    Modal(
        ("kann", "kannst", "kann", "können", "könnt", "können"),
        ("konnte", "konntest", "konnte", "konnten", "konntet", "konnten"),
        "can",
        (),
    ),
    Modal(
        ("muss", "musst", "muss", "müssen", "müsst", "müssen"),
        ("musste", "musstest", "musste", "mussten", "musstet", "mussten"),
        "have",
        ("to",),
    ),
    Modal(
        ("will", "willst", "will", "wollen", "wollt", "wollen"),
        ("wollte", "wolltest", "wollte", "wollten", "wolltet", "wollten"),
        "want",
        ("to",),
    ),
    Modal(
        ("darf", "darfst", "darf", "dürfen", "dürft", "dürfen"),
        ("durfte", "durftest", "durfte", "durften", "durftet", "durften"),
        "be",
        ("allowed", "to"),
    ),
    Modal(("soll", "sollst", "soll", "sollen", "sollt", "sollen"), (), "should", ()),
    Modal(("möchte", "möchtest", "möchte", "möchten", "möchtet", "möchten"), (), "would", ("like", "to")),
]

# The uses are "now", "habit", "past", "future" (also with a modal verb) and "since".
TIMES = [
    Time("heute", "today", ("now", "past", "future")),
    Time("jetzt", "now", ("now",)),
    Time("gerade", "right now", ("now",), frontable=False),
    Time("gestern", "yesterday", ("past",)),
    Time("letzte Woche", "last week", ("past",)),
    Time("vor einer Stunde", "an hour ago", ("past",)),
    Time("am Montag", "on Monday", ("past", "future")),
    Time("morgen", "tomorrow", ("future",)),
    Time("nächste Woche", "next week", ("future",)),
    Time("am Abend", "in the evening", ("habit", "past", "future")),
    Time("nach der Arbeit", "after work", ("habit", "past", "future")),
    Time("um acht Uhr", "at eight o'clock", ("habit", "past", "future")),
    Time("jeden Tag", "every day", ("habit",)),
    Time("jeden Morgen", "every morning", ("habit",)),
    Time("im Sommer", "in summer", ("habit",)),
    Time("am Wochenende", "at the weekend", ("habit",)),
    Time("seit einer Woche", "for a week", ("since",)),
    Time("seit zwei Jahren", "for two years", ("since",)),
]

FREQUENCIES = {"oft": "often", "manchmal": "sometimes", "immer": "always", "nie": "never", "selten": "rarely"}
EXPERIENCES = {"schon": "already", "noch nie": "never"}
