"""Converts GBNF, the grammar format of llama.cpp, to a Lark grammar for llguidance.

GBNF has no lexer: a grammar describes characters. llguidance has one: it splits the text into lexemes, the longest
match first. `convert_gbnf_to_lark` keeps the meaning in three steps:

1. Every largest part of a rule without recursion becomes one lexeme, since masks of long lexemes are fast.
2. If the longest match of a lexeme can differ from the grammar, the lexeme is split into its parts.
   `_UnambiguousLexemeChooser` repeats this until there is no such lexeme. A lexeme of one character is always right.
3. Each lexeme and each rule becomes a rule of Lark.

Example: in ``root ::= [a-z]* "end"`` the longest match of ``[a-z]*`` would include ``end``. So the lexemes are single
characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations

from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError
from .gbnf_parser import (
    EMPTY_SEQUENCE,
    LAST_CHARACTER,
    ROOT_RULE,
    CharacterRanges,
    Choice,
    Expression,
    GbnfParser,
    LexemeMark,
    Reference,
    Repetition,
    Rules,
    Sequence,
    TokenIdRanges,
)

GBNF_PATTERN = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
LARK_PATTERN = re.compile(r"^\s*(%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
MAX_LEXEME_STATES = 5000
"""Largest number of automaton states of a lexeme; a lexeme with more states is split."""


def convert_gbnf_to_lark(
    grammar: str, token_id: Callable[[str], int | None], token_count: int, end_ids: frozenset[int]
) -> str:
    """Convert a GBNF grammar to a Lark grammar for llguidance.

    A Lark grammar is returned unchanged.

    Args:
        grammar: GBNF, or Lark.
        token_id: The id of the one token with this text, or None.
        token_count: Tokens of the vocabulary, for references such as ``!<[5]>``.
        end_ids: Tokens that end a text; ``!<[5]>`` does not match them.

    Raises:
        ModelError: The grammar is neither valid GBNF nor Lark.
    """
    if not GBNF_PATTERN.search(grammar) and LARK_PATTERN.search(grammar):
        return grammar
    try:
        return _format_lark_grammar(GbnfParser(grammar, token_id, token_count, end_ids).parse())
    except RecursionError:
        raise ModelError("its rules refer to each other over too many steps; write them with fewer") from None


# --------------------------------------------------------------------------------------------------------- lexemes


def _list_children(expression: Expression) -> tuple[Expression, ...]:
    match expression:
        case Sequence(items) | Choice(items):
            return items
        case Repetition(item):
            return (item,)
        case LexemeMark(body):
            return (body,)
    return ()


def _find_references(expression: Expression) -> Iterator[str]:
    if isinstance(expression, Reference):
        yield expression.name
    for item in _list_children(expression):
        yield from _find_references(item)


def _has_tokens(expression: Expression) -> bool:
    return isinstance(expression, TokenIdRanges) or any(map(_has_tokens, _list_children(expression)))


def _find_rules_without_recursion_or_tokens(rules: Rules) -> frozenset[str]:
    """Find the names of the rules that can be part of a lexeme: rules without recursion and without tokens."""
    regular: set[str] = set()
    left = {name: set(_find_references(body)) for name, body in rules.items() if not _has_tokens(body)}
    while ready := [name for name, needed in left.items() if needed <= regular]:
        regular.update(ready)
        for name in ready:
            del left[name]
    return frozenset(regular)


@cache
def _compute_utf8_lead_bytes(first: int, last: int) -> int:
    """Compute the set of first bytes that the characters `first` to `last` have in UTF-8, as a bit mask."""
    bits = 0
    for low, high in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, LAST_CHARACTER)):
        a, b = max(first, low), min(last, high)
        if a <= b:
            # Surrogates have no UTF-8 form; `surrogatepass` gives their lead byte.
            ends = [chr(c).encode("utf-8", "surrogatepass")[0] for c in (a, b)]
            bits |= (1 << (ends[1] + 1)) - (1 << ends[0])
    return bits


@cache
def _compute_first_bytes(characters: CharacterRanges) -> int:
    """Compute the set of bytes with which a text of these characters can begin, as a bit mask."""
    ranges = sorted(characters.ranges)
    if characters.is_negated:
        edges, low = [], 0
        for first, last in ranges:
            edges.append((low, first - 1))
            low = max(low, last + 1)
        ranges = [*edges, (low, LAST_CHARACTER)]
    bits = 0
    for first, last in ranges:
        if first <= last:
            bits |= _compute_utf8_lead_bytes(first, last)
    return bits


@dataclass(frozen=True, slots=True)
class _GlushkovAutomaton:
    """The first and last positions of an expression without recursion, as in a Glushkov automaton (1961).

    A position is one occurrence of a character set in the expression. `is_nullable` tells whether the expression
    matches the empty text.
    """

    is_nullable: bool
    first: frozenset[int]
    last: frozenset[int]


class _UnambiguousLexemeChooser:
    """Chooses which parts of grammar rules become lexemes, so that the longest match never differs from the grammar.

    A lexeme is a unit of the lexer. `bodies` has the bodies of the rules, with `LexemeMark`. Two lexemes conflict if
    both may match at the same position. The check is conservative: it may report a conflict that does not exist, but it
    never misses one. It compares first bytes instead of characters, and treats bounded repetitions as unbounded.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules, self.regular = rules, _find_rules_without_recursion_or_tokens(rules)
        self.split_expressions: set[Expression] = set()
        self.edges: dict[Expression, tuple[int, int, bool, bool]] = {}
        while True:
            self.bodies = self.mark_rules()
            conflicts = self.find_conflicts()
            if not conflicts:
                break
            self.split_expressions |= conflicts

    # ---- splitting rules into lexemes

    def mark_rules(self) -> dict[str, Expression]:
        bodies: dict[str, Expression] = {}
        left = [ROOT_RULE]
        while left:
            name = left.pop()
            if name not in bodies:
                bodies[name] = self.mark_lexemes(self.rules[name])
                left += self.find_rule_references_outside_lexemes(bodies[name])
        return bodies

    def find_rule_references_outside_lexemes(self, expression: Expression) -> Iterator[str]:
        """Yield the names of the rules that an expression references outside of its lexemes."""
        if isinstance(expression, Reference):
            yield expression.name
        elif not isinstance(expression, LexemeMark):
            for item in _list_children(expression):
                yield from self.find_rule_references_outside_lexemes(item)

    def is_regular(self, expression: Expression) -> bool:
        return not _has_tokens(expression) and all(name in self.regular for name in _find_references(expression))

    def mark_lexemes(self, expression: Expression) -> Expression:
        if self.is_regular(expression) and expression not in self.split_expressions and expression != EMPTY_SEQUENCE:
            return LexemeMark(expression)
        match expression:
            case Sequence(items):
                parts: list[Expression] = []
                run: list[Expression] = []
                for item in (*items, None):
                    if item is not None and self.is_regular(item):
                        run.append(item)
                        continue
                    whole = run[0] if len(run) == 1 else Sequence(tuple(run))
                    if whole in self.split_expressions or len(run) == len(items):
                        parts += map(self.mark_lexemes, run)
                    elif run:
                        parts.append(self.mark_lexemes(whole))
                    run = []
                    if item is not None:
                        parts.append(self.mark_lexemes(item))
                return Sequence(tuple(parts))
            case Choice(items):
                return Choice(tuple(map(self.mark_lexemes, items)))
            case Repetition(item, minimum, maximum):
                return Repetition(self.mark_lexemes(item), minimum, maximum)
        return expression

    # ---- lexemes with a longest match that differs from the grammar

    def find_conflicts(self) -> set[Expression]:
        nullable = self.find_nullable_rules()
        first: dict[str, frozenset[Expression]] = {name: frozenset() for name in self.bodies}
        after: dict[str, frozenset[Expression]] = {name: frozenset() for name in self.bodies}
        following: dict[Expression, frozenset[Expression]] = {}

        def walk(expression: Expression, then: frozenset[Expression]) -> frozenset[Expression]:
            """Record the followers of each lexeme; return the first lexemes of an expression that precedes `then`."""
            match expression:
                case LexemeMark(body):
                    following[body] = following.get(body, frozenset()) | then
                    return frozenset((body,)) | (
                        then if self.compute_first_and_extension_byte_masks(body)[2] else frozenset()
                    )
                case Reference(name):
                    after[name] |= then
                    return first[name] | (then if name in nullable else frozenset())
                case Sequence(items):
                    for item in reversed(items):
                        then = walk(item, then)
                    return then
                case Choice(items):
                    return frozenset[Expression]().union(*(walk(item, then) for item in items))
                case Repetition(item, minimum, maximum):
                    leading = walk(item, then)
                    if maximum != 1:
                        leading |= walk(item, then | leading)
                    return leading | (then if not minimum else frozenset())
            return frozenset()  # a token

        size = -1
        while size != (size := sum(map(len, (*first.values(), *after.values(), *following.values())))):
            for name, body in self.bodies.items():
                walk(body, after[name])
                first[name] = walk(body, frozenset())
        groups = self.find_lexeme_sets_matching_together(following, first[ROOT_RULE])
        found: set[Expression] = set()
        for group in groups:
            for a, b in combinations(group, 2):
                if (
                    self.compute_first_and_extension_byte_masks(a)[0]
                    & self.compute_first_and_extension_byte_masks(b)[0]
                ):
                    found.update(each for each in (a, b) if not self.compute_first_and_extension_byte_masks(each)[3])
        for lexeme, next_ones in following.items():
            leading = 0
            for each in next_ones:
                leading |= self.compute_first_and_extension_byte_masks(each)[0]
            if self.compute_first_and_extension_byte_masks(lexeme)[1] & leading:
                found.add(lexeme)
        return found

    def find_lexeme_sets_matching_together(
        self, following: dict[Expression, frozenset[Expression]], start: frozenset[Expression]
    ) -> set[frozenset[Expression]]:
        """Find all sets of lexemes that may match at the same position of a text.

        Two lexemes of one character that share a first byte may match together. Their sets of followers are then
        merged.

        Args:
            following: The lexemes that may follow each lexeme.
            start: The lexemes at the beginning of a text.
        """
        while True:
            groups = {start, *following.values()}
            is_stable = True
            for group in groups:
                singles = [each for each in group if self.compute_first_and_extension_byte_masks(each)[3]]
                for a, b in combinations(singles, 2):
                    if (
                        following[a] != following[b]
                        and self.compute_first_and_extension_byte_masks(a)[0]
                        & self.compute_first_and_extension_byte_masks(b)[0]
                    ):
                        following[a] = following[b] = following[a] | following[b]
                        is_stable = False
            if is_stable:
                return groups

    def find_nullable_rules(self) -> set[str]:
        nullable: set[str] = set()

        def is_nullable(expression: Expression) -> bool:
            match expression:
                case LexemeMark(body):
                    return self.compute_first_and_extension_byte_masks(body)[2]
                case Reference(name):
                    return name in nullable
                case Sequence(items):
                    return all(map(is_nullable, items))
                case Choice(items):
                    return any(map(is_nullable, items))
                case Repetition(item, minimum):
                    return not minimum or is_nullable(item)
            return False

        while new := {n for n, body in self.bodies.items() if n not in nullable and is_nullable(body)}:
            nullable |= new
        return nullable

    def compute_first_and_extension_byte_masks(self, lexeme: Expression) -> tuple[int, int, bool, bool]:
        """Compute four properties of a lexeme that reveal conflicts with other lexemes.

        Returns:
            The bytes with which it may begin, and the bytes with which a complete match may go on, both as bit masks.
            Then whether it may be empty, and whether it is one character.
        """
        if lexeme not in self.edges:
            sets: list[int] = []
            follow: list[set[int]] = []
            whole = self.build_automaton(lexeme, sets, follow)
            first_bytes = 0
            for p in whole.first:
                first_bytes |= sets[p]
            is_single = isinstance(lexeme, CharacterRanges)
            self.edges[lexeme] = (
                first_bytes,
                _compute_extension_byte_mask(whole, sets, follow),
                whole.is_nullable,
                is_single,
            )
        return self.edges[lexeme]

    def build_automaton(self, expression: Expression, sets: list[int], follow: list[set[int]]) -> _GlushkovAutomaton:
        if len(sets) > MAX_LEXEME_STATES:
            return _GlushkovAutomaton(True, frozenset(), frozenset())
        match expression:
            case CharacterRanges():
                sets.append(_compute_first_bytes(expression))
                follow.append(set())
                here = frozenset((len(sets) - 1,))
                return _GlushkovAutomaton(False, here, here)
            case Reference(name):
                return self.build_automaton(self.rules[name], sets, follow)
            case Sequence(items):
                is_nullable, first, last = True, frozenset[int](), frozenset[int]()
                for item in items:
                    part = self.build_automaton(item, sets, follow)
                    for p in last:
                        follow[p] |= part.first
                    first |= part.first if is_nullable else frozenset()
                    last = part.last | (last if part.is_nullable else frozenset())
                    is_nullable &= part.is_nullable
                return _GlushkovAutomaton(is_nullable, first, last)
            case Choice(items):
                parts = [self.build_automaton(item, sets, follow) for item in items]
                return _GlushkovAutomaton(
                    any(part.is_nullable for part in parts),
                    frozenset[int]().union(*(part.first for part in parts)),
                    frozenset[int]().union(*(part.last for part in parts)),
                )
            case Repetition(item, minimum, maximum):
                part = self.build_automaton(item, sets, follow)
                if maximum != 1:
                    for p in part.last:
                        follow[p] |= part.first
                return _GlushkovAutomaton(part.is_nullable or not minimum, part.first, part.last)
        raise AssertionError(expression)  # lexemes have no tokens, and are not nested


def _compute_extension_byte_mask(whole: _GlushkovAutomaton, sets: list[int], follow: list[set[int]]) -> int:
    """Compute the bytes that may follow a complete match of a lexeme so that the match goes on, as a bit mask.

    If the automaton is too large, the result has all bytes.

    Args:
        whole: The automaton of a lexeme.
        sets: The bytes of each position, as bit masks.
        follow: The positions that may follow each position.
    """
    everything = (1 << 256) - 1
    if len(sets) > MAX_LEXEME_STATES:
        return everything
    longer = 0
    states, left = {whole.first}, [whole.first]  # sets of positions that may match next
    while left:
        at: dict[int, set[int]] = {}
        for p in left.pop():
            bits = sets[p]
            while bits:
                at.setdefault(bits & -bits, set()).add(p)
                bits &= bits - 1
        for read in {frozenset(read) for read in at.values()}:
            then = frozenset[int]().union(*(follow[p] for p in read))
            if not whole.last.isdisjoint(read):
                for p in then:
                    longer |= sets[p]
            if then not in states:
                states.add(then)
                left.append(then)
                if len(states) > MAX_LEXEME_STATES:
                    return everything
    return longer


# --------------------------------------------------------------------------------------------------------- writing


def _format_lark_grammar(rules: Rules) -> str:
    """Format GBNF rules as the text of a Lark grammar."""
    bodies = _UnambiguousLexemeChooser(rules).bodies
    numbers = {name: i for i, name in enumerate(rules)}
    terminals: dict[Expression, str] = {}
    inside: dict[str, str] = {}

    def format_body(expression: Expression, in_lexeme: bool) -> str:
        match expression:
            case CharacterRanges() | TokenIdRanges():
                return expression.text
            case LexemeMark(body):
                if body not in terminals:
                    terminals[body] = f"L{len(terminals)}"
                return terminals[body]
            case Reference(name):
                if not in_lexeme:
                    return f"rule{numbers[name]}"
                if name not in inside:
                    inside[name] = f"RULE{numbers[name]}"
                    inside[name] += f": {format_body(rules[name], True)}"
                return inside[name].partition(":")[0]
            case Sequence(items):
                return f"({' '.join(format_body(item, in_lexeme) for item in items)})" if items else '""'
            case Choice(items):
                return f"({' | '.join(format_body(item, in_lexeme) for item in items)})"
            case Repetition(item, minimum, maximum):
                count = f"{{{minimum},{'' if maximum is None else maximum}}}"
                return f"({format_body(item, in_lexeme)}){count}"

    lines = [f"rule{numbers[name]}: {format_body(body, False)}" for name, body in bodies.items()]
    lines += [f"{name}: {format_body(body, True)}" for body, name in [*terminals.items()]]
    return "\n".join([f"start: rule{numbers[ROOT_RULE]}", *lines, *inside.values()]) + "\n"
