"""Writes the prompts on whose answers the EAGLE-3 head of SmolLM2 is trained: python prompts.py N FILE.

Their material is of Debian's packages wordnet-base (words and what they mean), dict-foldoc (articles on computing) and
trans-de-en (German sentences), and of the Python documentation in the standard library. Six kinds, in turn: questions
about a passage, summaries, translations from German, sums in words, questions of knowledge, and requests to write.
No question of a benchmark is read here.
"""

import gzip
import json
import pydoc_data.topics
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

DICTD, WORDNET, GERMAN = Path("/usr/share/dictd"), Path("/usr/share/wordnet"), Path("/usr/share/trans/de-en")
PASSAGE = (300, 1200)  # characters of a passage
PERSON, PLACE, THING = "18", "15", "06"  # WordNet's files of nouns
NAMES = ["Ada", "Ben", "Carla", "David", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Keiko", "Liam", "Mona",
         "Nils", "Olga", "Pablo", "Rosa", "Sam", "Tara", "Victor"]  # fmt: skip
GOODS = ["apples", "books", "candles", "eggs", "marbles", "notebooks", "pencils", "plums", "shirts", "stamps",
         "tickets", "toys"]  # fmt: skip
FORMS = (
    "Write a short story about {}.", "Write a friendly email to a colleague about {}.", "Write a poem about {}.",
    "Draft a blog post on {}, with headings.", "List five arguments for and against {}.", "Explain {} to a child.",
    "Give me ten tips about {}.", "Pretend that you are an expert on {}. What would you tell a beginner?",
    "Compare {} and {} in a table, then say which you prefer.", "Write a Python function that models {}, with a test.",
    "Imagine a conversation between two people about {}.", "What are the main causes and effects of {}?",
)  # fmt: skip
SUMS = (
    "{a} has {x} {g}. {b} gives {a} {y} more, and then {a} loses a third of all of them. How many {g} are left?",
    "A shop sells {g} at ${x} each. On Monday it sells {y} of them, on Tuesday twice as many. "
    "How much does it take in?",
    "{a} packs {g} into boxes of {x}. How many boxes are needed for {z} {g}, and how many {g} are in the last one?",
    "{a} walks {x} miles each day for {y} days, {b} walks {z} miles in all. Who walks farther, and by how much?",
    "If {x} {g} cost ${z}, what do {y} {g} cost?",
    "{a} is {x} years older than {b}. In {y} years they will be {z} years old together. How old is each of them now?",
    "A train needs {x} hours for {z} miles. How far does it go in {y} hours at the same speed?",
    "{a} saves ${x} a week, and spends ${y} of it every second week. After how many weeks are ${z} saved?",
)  # fmt: skip
ABOUT = ("What does this say about", "According to this text, what is", "Explain")
ASKED = {
    PERSON: ("Who was {}?", "What is {} known for?", "When and where did {} live?"),
    PLACE: ("Where is {}?", "What is {} famous for?", "What language do people speak in {}?"),
    THING: ("What is {} used for?", "How does {} work?", "Who invented {}?"),
}


def articles() -> list[tuple[str, str]]:
    """Titles and texts of FOLDOC and of Python's documentation."""
    text = gzip.decompress((DICTD / "foldoc.dict.dz").read_bytes()).decode("utf-8", "replace")
    found = []
    for part in re.split(r"\n(?=\S[^\n]*\n\n? {3}<)", text)[1:]:
        title, _, body = part.partition("\n")
        found.append((title.strip(), re.sub(r"[{}]", "", body)))
    found += [(name, body.split("\n", 3)[-1]) for name, body in sorted(pydoc_data.topics.topics.items())]
    tidy = ((title, re.sub(r"\s+", " ", body).strip()) for title, body in found)
    return [(title, body) for title, body in tidy if PASSAGE[0] <= len(body)]


def nouns(kind: str) -> list[str]:
    """Words of one of WordNet's files of nouns; of persons and places the names alone."""
    lines = (WORDNET / "data.noun").read_text(encoding="latin-1").splitlines()
    words = [
        line.split()[4].replace("_", " ") for line in lines if not line.startswith(" ") and line.split()[1] == kind
    ]
    return [word for word in words if (word[0].isupper() and " " in word) or kind == THING]


def german() -> list[str]:
    """German sentences of the dictionary's examples."""
    sides = (line.partition("::")[0] for line in GERMAN.read_text(encoding="utf-8").splitlines() if "::" in line)
    parts = (re.sub(r"[{\[(][^}\])]*[}\])]", "", part) for side in sides for part in re.split(r"[|;]", side))
    return [part.strip() for part in parts if re.fullmatch(r"\s*[A-ZÄÖÜ][^.!?]{30,160}[.!?]\s*", part)]


def sums(rng: random.Random) -> str:
    a, b = rng.sample(NAMES, 2)
    x, y = rng.randint(3, 12), rng.randint(2, 9)
    return rng.choice(SUMS).format(a=a, b=b, g=rng.choice(GOODS), x=x, y=y, z=x * y * rng.randint(2, 6))


def prompts(rng: random.Random) -> Iterator[str]:
    texts, sentences, words = articles(), german(), {kind: nouns(kind) for kind in ASKED}
    while True:
        title, body = rng.choice(texts)
        begin = max(0, rng.randint(0, len(body)) - PASSAGE[1])
        passage = body[begin : begin + rng.randint(*PASSAGE)]
        kind = rng.choice(sorted(ASKED))
        yield f"{passage}\n\n{rng.choice(ABOUT)} {title}?"
        yield f"Summarize: {passage}"
        yield f"Translate German to English: {rng.choice(sentences)}"
        yield sums(rng)
        yield rng.choice(ASKED[kind]).format(rng.choice(words[kind]))
        yield rng.choice(FORMS).format(*(rng.choice(words[rng.choice((THING, PLACE))]) for _ in range(2)))


def main(count: int, path: Path) -> None:
    found = prompts(random.Random(0))
    path.write_text("".join(json.dumps({"prompt": next(found)}) + "\n" for _ in range(count)), encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
