"""Pairs that train a translation model to copy: numbers, addresses, code, names, emoji, capitals.

There are three kinds: sentences from templates with random spans, lines of spans alone, and real
pairs with a span that both sides share, replaced on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

Pair = tuple[str, str]  # English and its translation

LANGUAGES = ("en", "fr", "de")
MONTHS = (
    "January February March April May June July August September October November December",
    "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
    "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
)
_FIRST_NAMES = (
    "Anna Ben Chloé David Émile Fatima George Hannah Ivan Julia Kenji Léa Mohammed Nina Olga Pedro "
    "Quentin Rosa Sven Thomas Ursula Víctor Wang Xenia Yusuf Zoë Aisha Björn Carlos Dmitri Elena "
    "François Grace Hiroshi Ingrid Jack Karim Lucía Marie Noah Omar Priya Rachel Søren Tara Viktor"
)
_LAST_NAMES = (
    "Andersson Bianchi Chen Dubois Eriksen Fischer García Huber Ivanov Jensen Kowalski Lefèvre "
    "Müller Nakamura O'Brien Petrov Quinn Rossi Schäfer Tanaka Usman Varga Weber Xu Yildiz Zhang "
    "Abdi Becker Costa Diallo Evans Fontaine Grünwald Haddad Jones Kimura Larsson McKenzie Novák"
)
_PLACES = (
    "Kyoto Oslo Nairobi Montréal Zürich Kraków Lagos Lima Hanoi Porto Tromsø Boston Leipzig Nantes "
    "Bergen Manchester Toulouse Graz Winnipeg Santiago Reykjavík Dakar Perth Osaka Utrecht Gdańsk"
)
_WORD_PARTS = "ba co di fe gu ha in jo ka lu mi no or pa qui ra sto ti un ve wa xi yo zen"
_CODE_WORDS = "get set main user file data list index value count load save print config"
FIRST_NAMES, LAST_NAMES, PLACES, WORD_PARTS, CODE_WORDS = map(
    str.split, (_FIRST_NAMES, _LAST_NAMES, _PLACES, _WORD_PARTS, _CODE_WORDS)
)
MONTH_NAMES = dict(zip(LANGUAGES, map(str.split, MONTHS), strict=True))
SCRIPTS = {  # first and last letter of a range
    "Cyrillic": (0x0430, 0x044F),
    "Greek": (0x03B1, 0x03C9),
    "Hebrew": (0x05D0, 0x05EA),
    "Arabic": (0x0627, 0x064A),
    "Devanagari": (0x0905, 0x0939),
    "Thai": (0x0E01, 0x0E2E),
    "Hiragana": (0x3042, 0x3093),
    "Katakana": (0x30A2, 0x30F3),
    "Han": (0x4E00, 0x9FA5),
    "Hangul": (0xAC00, 0xD7A3),
    "Georgian": (0x10D0, 0x10F0),
    "Armenian": (0x0561, 0x0586),
}
EMOJI = "😀😂😍🙏👍👋🎉🔥❤💡🚀🐱🐶🌍☕🍕✅❌⚠📌📅📎🔒🛒🎵🏠🚗✈⭐🌧☀🤔😢😎💪"


def random_word(random: Random) -> str:
    return "".join(random.choice(WORD_PARTS) for _ in range(random.randint(2, 4)))


def number(random: Random) -> str:
    size = random.choice((1, 2, 2, 3, 3, 4, 5, 6, 7, 9))
    digits = str(random.randrange(10 ** (size - 1), 10**size))
    form = random.random()
    if form < 0.2:
        return f"{int(digits):,}"
    if form < 0.3:
        return f"{int(digits):,}.{random.randrange(100):02}"
    if form < 0.4:
        return f"{digits}.{random.randrange(10 ** random.randint(1, 3))}"
    if form < 0.45:
        return f"{digits},{random.randrange(100):02}"
    if form < 0.5:
        return f"{digits}%"
    if form < 0.54:
        return f"-{digits}"
    if form < 0.6:
        return f"{random.choice('$€£')}{int(digits):,}"
    return digits


def version(random: Random) -> str:
    return ".".join(str(random.randrange(30)) for _ in range(random.randint(2, 4)))


def identifier(random: Random) -> str:
    letters = "".join(random.choice("ABCDEFGHJKLMNPRSTUVWXZ") for _ in range(random.randint(1, 4)))
    digits = "".join(random.choice("0123456789") for _ in range(random.randint(2, 8)))
    return letters + random.choice(("", "-", "-", "/", "_")) + digits


def numeric_date(random: Random) -> str:
    year, month, day = random.randint(1900, 2060), random.randint(1, 12), random.randint(1, 28)
    return random.choice(
        (
            f"{year}-{month:02}-{day:02}",
            f"{day:02}/{month:02}/{year}",
            f"{day}.{month}.{year}",
            f"{month}/{day}/{year % 100:02}",
        )
    )


def clock(random: Random) -> str:
    hour, minute = random.randrange(24), random.randrange(60)
    return random.choice((f"{hour}:{minute:02}", f"{hour:02}:{minute:02}")) + random.choice(
        ("", "", "", f":{random.randrange(60):02}")
    )


def phone(random: Random) -> str:
    def digits(count: int) -> str:
        return "".join(random.choice("0123456789") for _ in range(count))

    return random.choice(
        (
            f"+{random.randint(1, 98)} {digits(2)} {digits(3)} {digits(4)}",
            f"0{digits(1)} {digits(2)} {digits(2)} {digits(2)} {digits(2)}",
            f"({digits(3)}) {digits(3)}-{digits(4)}",
            f"{digits(3)}-{digits(3)}-{digits(4)}",
            f"0{digits(3)}/{digits(6)}",
            f"+{random.randint(30, 49)}{digits(10)}",
        )
    )


def mail(random: Random) -> str:
    name = random.choice((random_word(random), random.choice(FIRST_NAMES).lower()))
    if random.random() < 0.5:
        name += random.choice("._-") + random.choice(LAST_NAMES).lower().replace("'", "")
    if random.random() < 0.3:
        name += str(random.randrange(2000))
    return f"{name}@{domain(random)}"


def domain(random: Random) -> str:
    name = "example" if random.random() < 0.3 else random_word(random)
    return f"{name}.{random.choice(('com', 'org', 'net', 'fr', 'de', 'io', 'co.uk', 'eu'))}"


def url(random: Random) -> str:
    start = random.choice(("https://", "http://", "https://www.", "www."))
    path = "".join(f"/{random_word(random)}" for _ in range(random.randrange(3)))
    end = random.choice(
        ("", "", "/", f"?id={random.randrange(9999)}", f"#{random_word(random)}", ".html", ".pdf")
    )
    return start + domain(random) + path + (end if path or end in ("", "/") else "")


def path(random: Random) -> str:
    parts = [random_word(random) for _ in range(random.randint(1, 3))]
    end = random.choice((".txt", ".py", ".pdf", ".tar.gz", ".jpg", "", ".csv", ".conf"))
    return random.choice(
        (
            "/" + "/".join(["etc", *parts]) + end,
            "~/" + "/".join(parts) + end,
            "C:\\" + "\\".join(part.title() for part in parts) + end,
            parts[0] + (end or ".md"),
        )
    )


def code(random: Random) -> str:
    first, second = random.choice(CODE_WORDS), random.choice(CODE_WORDS)
    return random.choice(
        (
            f"{first}_{second}()",
            f"{first}{second.title()}({random_word(random)})",
            f"{first}.{second}[{random.randrange(100)}]",
            f"--{first}-{second}",
            f"--{first}={random_word(random)}",
            f"${first.upper()}",
            f"${{{first}_{second}}}",
            f"%{random.choice('sdi')}",
            f"%{random.randint(1, 4)}$s",
            f"{{{random.randrange(4)}}}",
            f"{{{first}}}",
            f"`{first} -{random.choice('abcdefx')} {random_word(random)}`",
            f"{first} = {random.randrange(1000)}",
            f'"{first}": {random.choice(("true", "false", "null", str(random.randrange(100))))}',
            f"{second.title()}Error",
            f"0x{random.randrange(2**32):x}",
        )
    )


def tag(random: Random) -> str:
    name = random.choice(("b", "i", "code", "em", "br", "p", "div", "span", random_word(random)))
    return random.choice(
        (
            f"<{name}>",
            f"</{name}>",
            f"<{name}/>",
            f'<{name} id="{random_word(random)}">',
            f"#{random_word(random)}",
            f"@{random_word(random)}{random.randrange(100)}",
            f"[{random_word(random)}]",
        )
    )


def person(random: Random) -> str:
    first, last = random.choice(FIRST_NAMES), random.choice(LAST_NAMES)
    form = random.random()
    if form < 0.3:
        return first
    if form < 0.45:
        return random_word(random).title()
    if form < 0.6:
        return f"{first} {random_word(random).title()}"
    return f"{first} {last}"


def place(random: Random) -> str:
    return random.choice(PLACES) if random.random() < 0.6 else random_word(random).title()


def foreign(random: Random) -> str:
    first, last = SCRIPTS[random.choice(list(SCRIPTS))]
    words = [
        "".join(chr(random.randint(first, last)) for _ in range(random.randint(2, 6)))
        for _ in range(random.randint(1, 3))
    ]
    return " ".join(words)


def emoji(random: Random) -> str:
    return "".join(random.choice(EMOJI) for _ in range(random.choice((1, 1, 1, 2, 3))))


SPANS: dict[str, Callable[[Random], str]] = {
    "number": number,
    "version": version,
    "identifier": identifier,
    "date": numeric_date,
    "time": clock,
    "phone": phone,
    "mail": mail,
    "url": url,
    "path": path,
    "code": code,
    "tag": tag,
    "person": person,
    "place": place,
    "foreign": foreign,
    "emoji": emoji,
}

# English, French, German. {kind} is a random span, {long_date} a date with the month's name.
TEMPLATES = [
    line.split(" | ")
    for line in """\
My e-mail address is {mail}. | Mon adresse e-mail est {mail}. | Meine E-Mail-Adresse ist {mail}.
Please write to {mail}. | Veuillez écrire à {mail}. | Bitte schreiben Sie an {mail}.
Send the file to {mail} before {time}. | Envoyez le fichier à {mail} avant {time}. | Senden Sie die Datei vor {time} an {mail}.
Contact {person} at {mail}. | Contactez {person} à l'adresse {mail}. | Kontaktieren Sie {person} unter {mail}.
You can reach us at {phone}. | Vous pouvez nous joindre au {phone}. | Sie erreichen uns unter {phone}.
Call me at {phone}. | Appelle-moi au {phone}. | Ruf mich unter {phone} an.
My phone number is {phone}. | Mon numéro de téléphone est le {phone}. | Meine Telefonnummer ist {phone}.
Call {phone} or write to {mail}. | Appelez le {phone} ou écrivez à {mail}. | Rufen Sie {phone} an oder schreiben Sie an {mail}.
See {url} for more information. | Voir {url} pour plus d'informations. | Weitere Informationen finden Sie unter {url}.
The website is {url}. | Le site web est {url}. | Die Webseite ist {url}.
Visit {url} to download version {version}. | Visitez {url} pour télécharger la version {version}. | Besuchen Sie {url}, um Version {version} herunterzuladen.
I found it at {url}. | Je l'ai trouvé sur {url}. | Ich habe es auf {url} gefunden.
Open {url} in your browser. | Ouvrez {url} dans votre navigateur. | Öffnen Sie {url} in Ihrem Browser.
The meeting is on {date} at {time}. | La réunion a lieu le {date} à {time}. | Die Besprechung ist am {date} um {time}.
The train leaves at {time}. | Le train part à {time}. | Der Zug fährt um {time} ab.
The shop opens at {time} and closes at {time2}. | Le magasin ouvre à {time} et ferme à {time2}. | Das Geschäft öffnet um {time} und schließt um {time2}.
She was born on {long_date}. | Elle est née le {long_date}. | Sie wurde am {long_date} geboren.
The contract ends on {long_date}. | Le contrat prend fin le {long_date}. | Der Vertrag endet am {long_date}.
On {long_date}, we moved to {place}. | Le {long_date}, nous avons déménagé à {place}. | Am {long_date} zogen wir nach {place}.
The deadline is {long_date}. | La date limite est le {long_date}. | Die Frist endet am {long_date}.
The report was published on {long_date} by {person}. | Le rapport a été publié le {long_date} par {person}. | Der Bericht wurde am {long_date} von {person} veröffentlicht.
We arrive on {long_date} at {time}. | Nous arrivons le {long_date} à {time}. | Wir kommen am {long_date} um {time} an.
It was {month_year}. | C'était en {month_year}. | Es war im {month_year}.
The invoice {identifier} is due on {date}. | La facture {identifier} est à payer le {date}. | Die Rechnung {identifier} ist am {date} fällig.
Your order number is {identifier}. | Votre numéro de commande est {identifier}. | Ihre Bestellnummer lautet {identifier}.
The flight {identifier} to {place} is delayed. | Le vol {identifier} pour {place} est retardé. | Der Flug {identifier} nach {place} hat Verspätung.
The total is {number}. | Le total est de {number}. | Die Summe beträgt {number}.
It costs {number}. | Cela coûte {number}. | Es kostet {number}.
The city has {number} inhabitants. | La ville compte {number} habitants. | Die Stadt hat {number} Einwohner.
He paid {number} for {number2} books. | Il a payé {number} pour {number2} livres. | Er hat {number} für {number2} Bücher bezahlt.
The temperature rose from {number} to {number2}. | La température est passée de {number} à {number2}. | Die Temperatur stieg von {number} auf {number2}.
Room {number} is on floor {number2}. | La chambre {number} est à l'étage {number2}. | Zimmer {number} ist im Stockwerk {number2}.
The file is {number} MB. | Le fichier fait {number} Mo. | Die Datei ist {number} MB groß.
Add {number}, {number2} and {number3}. | Additionnez {number}, {number2} et {number3}. | Addieren Sie {number}, {number2} und {number3}.
We sold {number} tickets in {month_year}. | Nous avons vendu {number} billets en {month_year}. | Wir haben im {month_year} {number} Karten verkauft.
Version {version} is available. | La version {version} est disponible. | Version {version} ist verfügbar.
Update from {version} to {version2}. | Mettez à jour de {version} vers {version2}. | Aktualisieren Sie von {version} auf {version2}.
The server address is {version}. | L'adresse du serveur est {version}. | Die Adresse des Servers ist {version}.
The file {path} does not exist. | Le fichier {path} n'existe pas. | Die Datei {path} existiert nicht.
Open {path} and look for {code}. | Ouvrez {path} et cherchez {code}. | Öffnen Sie {path} und suchen Sie nach {code}.
Save it as {path}. | Enregistrez-le sous {path}. | Speichern Sie es als {path}.
Cannot read {path}: {code} | Impossible de lire {path} : {code} | {path} kann nicht gelesen werden: {code}
Run {code} to start. | Exécutez {code} pour démarrer. | Führen Sie {code} aus, um zu starten.
The function {code} returns {number}. | La fonction {code} renvoie {number}. | Die Funktion {code} gibt {number} zurück.
Use {code} instead of {code2}. | Utilisez {code} au lieu de {code2}. | Verwenden Sie {code} anstelle von {code2}.
The option {code} is not supported. | L'option {code} n'est pas prise en charge. | Die Option {code} wird nicht unterstützt.
Error in {code}: value {number} expected. | Erreur dans {code} : valeur {number} attendue. | Fehler in {code}: Wert {number} erwartet.
Set {code} to {number}. | Réglez {code} sur {number}. | Setzen Sie {code} auf {number}.
Use the {tag} tag here. | Utilisez ici la balise {tag}. | Verwenden Sie hier das Tag {tag}.
Follow {tag} for news. | Suivez {tag} pour les nouvelles. | Folgen Sie {tag} für Neuigkeiten.
Click <b>{person}</b> to continue. | Cliquez sur <b>{person}</b> pour continuer. | Klicken Sie auf <b>{person}</b>, um fortzufahren.
{person} lives in {place}. | {person} habite à {place}. | {person} wohnt in {place}.
My name is {person}. | Je m'appelle {person}. | Ich heiße {person}.
{person} and {person2} met in {place}. | {person} et {person2} se sont rencontrés à {place}. | {person} und {person2} haben sich in {place} getroffen.
Have you seen {person}? | As-tu vu {person} ? | Hast du {person} gesehen?
I went to {place} with {person}. | Je suis allé à {place} avec {person}. | Ich bin mit {person} nach {place} gefahren.
{person} called at {time}. | {person} a appelé à {time}. | {person} hat um {time} angerufen.
Hello {person}, | Bonjour {person}, | Hallo {person},
According to {person}, {number} people came. | Selon {person}, {number} personnes sont venues. | Laut {person} kamen {number} Personen.
The word {foreign} is not French. | Le mot {foreign} n'est pas français. | Das Wort {foreign} ist nicht französisch.
He said "{foreign}" and left. | Il a dit « {foreign} » et il est parti. | Er sagte "{foreign}" und ging.
The sign says {foreign}. | Le panneau indique {foreign}. | Auf dem Schild steht {foreign}.
What does {foreign} mean? | Que signifie {foreign} ? | Was bedeutet {foreign}?
Her name is written {foreign}. | Son nom s'écrit {foreign}. | Ihr Name wird {foreign} geschrieben.
Thank you {emoji} | Merci {emoji} | Danke {emoji}
See you tomorrow! {emoji} | À demain ! {emoji} | Bis morgen! {emoji}
{emoji} Happy birthday, {person}! | {emoji} Joyeux anniversaire, {person} ! | {emoji} Alles Gute zum Geburtstag, {person}!
I love this {emoji} | J'adore ça {emoji} | Ich liebe das {emoji}
That's great news {emoji} {emoji2} | C'est une excellente nouvelle {emoji} {emoji2} | Das sind tolle Neuigkeiten {emoji} {emoji2}
{emoji} Warning: {path} was deleted. | {emoji} Attention : {path} a été supprimé. | {emoji} Achtung: {path} wurde gelöscht.
Good morning {emoji} | Bonjour {emoji} | Guten Morgen {emoji}
Ticket {identifier}: {person} reported {code}. | Ticket {identifier} : {person} a signalé {code}. | Ticket {identifier}: {person} hat {code} gemeldet.""".splitlines()  # noqa: E501
]
_SLOT = re.compile(r"\{([a-z_]+?)(\d?)\}")


def _dates(random: Random) -> dict[str, tuple[str, str, str]]:
    """A random date with the month's name in each language, and the same for month and year."""
    day, month, year = random.randint(1, 28), random.randrange(12), random.randint(1900, 2060)
    en, fr, de = (MONTH_NAMES[language][month] for language in LANGUAGES)
    english = random.choice((f"{day} {en} {year}", f"{en} {day}, {year}", f"{day} {en} {year}"))
    return {
        "long_date": (english, f"{'1er' if day == 1 else day} {fr} {year}", f"{day}. {de} {year}"),
        "month_year": (f"{en} {year}", f"{fr} {year}", f"{de} {year}"),
    }


def from_template(random: Random, language: str) -> Pair:
    """A sentence with random spans, in English and in ``language``."""
    template = random.choice(TEMPLATES)
    dates, spans = _dates(random), dict[str, str]()

    def filled(side: int) -> str:
        def span(slot: re.Match[str]) -> str:
            if slot[1] in dates:
                return dates[slot[1]][side]
            return spans.setdefault(slot[0], SPANS[slot[1]](random))

        return _SLOT.sub(span, template[side])

    english, other = filled(0), filled(LANGUAGES.index(language))
    return (english.upper(), other.upper()) if random.random() < 0.03 else (english, other)


def span_alone(random: Random) -> Pair:
    """A line of one or two spans, which is its own translation."""
    # Languages may write dates in different orders.
    kinds = [kind for kind in SPANS if kind != "date"]
    text = " ".join(SPANS[random.choice(kinds)](random) for _ in range(random.choice((1, 1, 2))))
    return text, text


_NUMBER = re.compile(r"(?<![\w.,:/-])\d[\d.,:]*\d(?![\w/-])|(?<![\w.,:/-])\d(?![\w.,:/-]*\w)")
_ADDRESS = re.compile(r"(?:https?://|www\.)[^\s<>()«»\"]*[\w/]|[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_NAME = re.compile(r"(?<=[a-zà-ÿ,] )[A-ZÀ-Þ][a-zà-ÿ]{2,}\b")


def substituted(pair: Pair, random: Random, common: frozenset[str]) -> Pair | None:
    """The pair with another number, address or name, or None if the sides share none.

    ``common`` has words that also occur in lower case, so that they are not taken for names.
    """
    english, other = pair
    for pattern, spans in (
        (_ADDRESS, (url, mail)),
        (_NUMBER, (number,)),
        (_NAME, (person, place, person, foreign)),
    ):
        shared = [
            span
            for span in dict.fromkeys(pattern.findall(english))
            if english.count(span) == 1
            and other.count(span) == 1
            and not (pattern is _NAME and span.lower() in common)
            and (pattern is not _NUMBER or len(span) > 1)
        ]
        if shared:
            old = random.choice(shared)
            new = spans[random.randrange(len(spans))](random)
            if pattern is _NUMBER and old.isdigit():
                new = str(random.randrange(10 ** (len(old) - 1), 10 ** len(old)))
            return english.replace(old, new), other.replace(old, new)
    return None
