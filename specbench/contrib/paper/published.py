"""Numbers of the paper, as printed, each with the formula that should give it and the inputs printed beside it.

An input's decimals say how far it may have been rounded: the formula is evaluated at the ends of that range too.
`ELSEWHERE` are numbers that others print by the same formula.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product

from specbench import theory

Formula = Callable[..., float]


@dataclass(frozen=True)
class Given:
    """A printed input, and half a unit of its last digit."""

    value: float
    half: float


@dataclass(frozen=True)
class Claim:
    """A printed number. Without a formula it is a measurement."""

    where: Mapping[str, str]  # the other cells of its row
    what: str
    printed: str
    formula: Formula | None = None
    inputs: Mapping[str, Given] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return float(self.printed)

    @property
    def decimals(self) -> int:
        return len(self.printed.partition(".")[2])

    def expected(self) -> float | None:
        """What the formula gives for the inputs as printed."""
        if self.formula is None:
            return None
        return self.formula(**{name: given.value for name, given in self.inputs.items()})

    def span(self) -> tuple[float, float] | None:
        """The least and the most that it gives for inputs that round to the printed ones (it is monotonic in each)."""
        if self.formula is None:
            return None
        ends = [(given.value - given.half, given.value + given.half) for given in self.inputs.values()]
        found = [self.formula(**dict(zip(self.inputs, corner, strict=True))) for corner in product(*ends)]
        return min(found), max(found)

    def judgement(self) -> str:
        """Whether the printed number is the formula's: "agrees", "rounding" (of its inputs) or "differs"."""
        expected, span, half = self.expected(), self.span(), 0.5 * 10**-self.decimals + 1e-9
        if expected is None or span is None:
            return "-"
        if abs(expected - self.value) <= half:
            return "agrees"
        return "rounding" if span[0] - half <= self.value <= span[1] + half else "differs"


def inputs(**printed: str) -> dict[str, Given]:
    """Inputs by name from their printed digits; an integer is exact."""
    return {
        name: Given(float(text), 0.5 * 10.0 ** -len(text.partition(".")[2]) if "." in text else 0.0)
        for name, text in printed.items()
    }


def best_speed(alpha: float, c: float) -> float:
    """Theorem 3.8 with the best gamma."""
    return theory.walltime_improvement(alpha, theory.optimal_gamma(alpha, c), c)


def mean_accepted(alpha: float, gamma: float) -> float:
    """Accepted guesses of a round: equation 1 without the token that follows them."""
    return theory.expected_tokens(alpha, gamma) - 1


def free_operations(alpha: float, gamma: float) -> float:
    """Theorem 3.11 with a drafter that costs nothing."""
    return theory.operations_factor(alpha, gamma, 0)


def free_speed(alpha: float, gamma: float) -> float:
    """Theorem 3.8 with a drafter that costs nothing."""
    return theory.walltime_improvement(alpha, gamma, 0)


def _exact(**printed: str) -> dict[str, Given]:
    """Inputs that were chosen, not measured."""
    return {name: Given(float(text), 0.0) for name, text in printed.items()}


TABLE_1 = [  # alpha, gamma, operations, speed; c = c_hat = 0
    (".6", "2", "1.53", "1.96"), (".7", "3", "1.58", "2.53"), (".8", "2", "1.23", "2.44"),
    (".8", "5", "1.63", "3.69"), (".9", "2", "1.11", "2.71"), (".9", "10", "1.60", "6.86"),
]  # fmt: skip
TABLE_4 = [  # task, M_q, temperature, gamma, alpha, c, Exp, Emp; Emp, alpha and gamma are Table 2 too
    ("EnDe", "T5-small", "0", "7", "0.75", "0.02", "3.2", "3.4"),
    ("EnDe", "T5-base", "0", "7", "0.80", "0.04", "3.3", "2.8"),
    ("EnDe", "T5-large", "0", "7", "0.82", "0.11", "2.5", "1.7"),
    ("EnDe", "T5-small", "1", "7", "0.62", "0.02", "2.3", "2.6"),
    ("EnDe", "T5-base", "1", "5", "0.68", "0.04", "2.4", "2.4"),
    ("EnDe", "T5-large", "1", "3", "0.71", "0.11", "2.0", "1.4"),
    ("CNNDM", "T5-small", "0", "5", "0.65", "0.02", "2.4", "3.1"),
    ("CNNDM", "T5-base", "0", "5", "0.73", "0.04", "2.6", "3.0"),
    ("CNNDM", "T5-large", "0", "3", "0.74", "0.11", "2.0", "2.2"),
    ("CNNDM", "T5-small", "1", "5", "0.53", "0.02", "1.9", "2.3"),
    ("CNNDM", "T5-base", "1", "3", "0.55", "0.04", "1.8", "2.2"),
    ("CNNDM", "T5-large", "1", "3", "0.56", "0.11", "1.6", "1.7"),
]
TABLE_3 = {  # M_p: (M_q, alpha at T = 0, alpha at T = 1)
    "GPT-like (97M)": [("unigram", "0.03", "0.03"), ("bigram", "0.05", "0.05"), ("GPT-like (6M)", "0.88", "0.89")],
    "T5-XXL (EnDe)": [("unigram", "0.08", "0.07"), ("bigram", "0.20", "0.19"), ("T5-small", "0.75", "0.62"),
                      ("T5-base", "0.80", "0.68"), ("T5-large", "0.82", "0.71")],
    "T5-XXL (CNNDM)": [("unigram", "0.13", "0.08"), ("bigram", "0.23", "0.16"), ("T5-small", "0.65", "0.53"),
                       ("T5-base", "0.73", "0.55"), ("T5-large", "0.74", "0.56")],
    "LaMDA (137B)": [("LaMDA (100M)", "0.61", "0.57"), ("LaMDA (2B)", "0.71", "0.71"), ("LaMDA (8B)", "0.75", "0.74")],
}  # fmt: skip
LENIENCES = ("1", "0.5", "0.3", "0.1")
TABLE_5 = {  # M_q: alpha by lenience, EnDe, T = 1
    "unigram": ("0.07", "0.1", "0.11", "0.16"), "bigram": ("0.19", "0.23", "0.25", "0.32"),
    "T5-small": ("0.62", "0.71", "0.76", "0.84"), "T5-base": ("0.68", "0.8", "0.83", "0.90"),
}  # fmt: skip
SPEEDS_5 = ("2.5", "3.1", "3.6", "5")  # of T5-small at c = .015
AT_ZERO = (("0.75", "3.3"), ("0.75", "3.3"), ("0.8", "3.9"), ("0.87", "4.9"))  # T = 0: alpha, speed at gamma 8
AKUNU_CHAPTER = 'the chapter "Speculative Decoding with N-grams" of the book on the inference engine akunu'
AKUNU = ((".5", "0.94"), (".7", "2.05"), (".9", "3.28"))  # accepted of 4 guesses, by alpha


def published_table_1() -> list[Claim]:
    """Operations and speed at chosen alpha and gamma."""
    rows = []
    for alpha, gamma, operations, speed in TABLE_1:
        where, chosen = {"alpha": alpha, "gamma": gamma}, _exact(alpha=alpha, gamma=gamma)
        rows.append(Claim(where, "operations (Thm 3.11)", operations, free_operations, chosen))
        rows.append(Claim(where, "speed (Thm 3.8)", speed, free_speed, chosen))
    return rows


def table_4() -> list[Claim]:
    """Expected speedups of Table 4."""
    return _speedups("Exp (Thm 3.8)", 6)


def table_2() -> list[Claim]:
    """Measured speedups of Table 2, beside Theorem 3.8 with the c of Table 4."""
    return _speedups("measured speed", 7)


def _speedups(name: str, printed: int) -> list[Claim]:
    """One column of TABLE_4 beside Theorem 3.8 for its rows."""
    keys = ("task", "M_q", "T", "gamma", "alpha", "c")
    found = []
    for row in TABLE_4:
        where = dict(zip(keys, row, strict=False))
        chosen = inputs(alpha=row[4], gamma=row[3], c=row[5])
        found.append(Claim(where, name, row[printed], theory.walltime_improvement, chosen))
    return found


def table_3() -> list[Claim]:
    """Measured alphas, and the bigram's speedup of sections 3.6 and 4.2."""
    rows = [
        Claim({"M_p": target, "M_q": drafter, "T": t}, "alpha", alpha)
        for target, drafters in TABLE_3.items()
        for place, t in enumerate(("0", "1"))
        for drafter, *alphas in drafters
        for alpha in [alphas[place]]
    ]
    where = {"M_p": "T5-XXL (EnDe)", "M_q": "bigram, gamma 3, alpha 0.2", "T": "-"}
    return [*rows, Claim(where, "speed (section 3.6)", "1.25", free_speed, inputs(alpha="0.20", gamma="3"))]


def table_5() -> list[Claim]:
    """Alphas by lenience, and the speedups that A.5 derives from them."""
    rows = [
        Claim({"M_q": name, "l": lenience, "T": "1"}, "alpha", alpha)
        for name, alphas in TABLE_5.items()
        for lenience, alpha in zip(LENIENCES, alphas, strict=True)
    ]
    for lenience, alpha, speed in zip(LENIENCES, TABLE_5["T5-small"], SPEEDS_5, strict=True):
        where = {"M_q": f"T5-small, alpha {alpha}, best gamma", "l": lenience, "T": "1"}
        rows.append(Claim(where, "speed at c = .015", speed, best_speed, inputs(alpha=alpha, c="0.015")))
    for lenience, (alpha, speed) in zip(LENIENCES, AT_ZERO, strict=True):
        where = {"M_q": f"T5-small, alpha {alpha}, gamma 8", "l": lenience, "T": "0"}
        given = inputs(alpha=alpha, gamma="8", c="0.015")
        rows.append(Claim(where, "speed at c = .015", speed, theory.walltime_improvement, given))
    return rows


def ngram_chapter() -> list[Claim]:
    """Values of equation 1 in akunu's chapter."""
    return [
        Claim({"alpha": alpha, "gamma": "4"}, "accepted guesses", value, mean_accepted, _exact(alpha=alpha, gamma="4"))
        for alpha, value in AKUNU
    ]


def nothing() -> list[Claim]:
    """A figure without numbers, or an appendix with a formula alone."""
    return []


CLAIMS: dict[str, Callable[[], list[Claim]]] = {
    "table1": published_table_1, "table2": table_2, "table3": table_3, "table4": table_4, "table5": table_5,
    "figure1": nothing, "figure2": nothing, "figure3": nothing, "figure4": nothing, "figure5": nothing,
    "appendix_a2": nothing, "appendix_a4": nothing, "ngram_chapter": nothing, "runner_design": nothing,
}  # fmt: skip
ELSEWHERE: dict[str, tuple[str, Callable[[], list[Claim]]]] = {  # by table or figure: who prints them, and the numbers
    "figure2": (AKUNU_CHAPTER, ngram_chapter),
}
