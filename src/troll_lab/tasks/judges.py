"""How answers to each data set of reasoning-gym are judged: by its own verifier, by comparing texts, or not at all."""

from __future__ import annotations

from enum import Enum

from troll_lab.tasks.registry import TaskError


class Judge(Enum):
    """How answers to a data set's questions are judged.

    `VERIFIER` is the data set's own verifier. It has been shown to give its full score only to right answers, not to
    ignore words, and to finish on any text. `TEXT` compares an answer with the data set's own, where that is the only
    right answer in the form that the question asks for or shows.
    """

    VERIFIER = "verifier"
    TEXT = "text"


_CODE = "its verifier evaluates the answer as Python code, and an answer can be written in many ways"
_OTHERS = "each process draws other questions from it, since it chooses from sets of texts, whose order Python varies"

#: How each data set of reasoning-gym 0.1.25 is judged, or the reason why it is refused. A comment says why the text is
#: compared although the data set has a verifier that does more than this.
JUDGES: dict[str, Judge | str] = {
    "ab": Judge.TEXT,
    "acre": Judge.TEXT,
    "advanced_geometry": "its verifier ignores a third coordinate, and its own angles lack a digit that is asked for",
    "aiw": Judge.TEXT,
    "arc_1d": Judge.TEXT,
    "arc_agi": Judge.TEXT,  # its verifier ignores lines that begin with `Shape:`
    "base_conversion": Judge.TEXT,
    "basic_arithmetic": "some of its own answers are wrong: they drop the remainder of a division",
    "bf": Judge.TEXT,
    "binary_alternation": Judge.TEXT,
    "binary_matrix": Judge.TEXT,  # its verifier evaluates the answer as Python code
    "bitwise_arithmetic": Judge.TEXT,  # its verifier also accepts decimals, where hexadecimals are asked for
    "boxnet": "its verifier lets a plan move the targets to the boxes",
    "caesar_cipher": Judge.TEXT,
    "calendar_arithmetic": Judge.TEXT,  # its verifier rewards neighbours of a negative number
    "chain_sum": Judge.VERIFIER,
    "circuit_logic": Judge.TEXT,
    "codeio": "its verifier takes minutes for nested JSON, and several answers are right",
    "coin_flip": "its verifier rewards 0 where the probability is small, and no form of a probability is asked for",
    "color_cube_rotation": Judge.VERIFIER,
    "complex_arithmetic": "its verifier rewards nan, and no number of decimals is asked for",
    "composite": "it mixes other data sets, each of which is judged in its own way",
    "count_bits": Judge.TEXT,
    "count_primes": Judge.TEXT,
    "countdown": _CODE,
    "course_schedule": Judge.TEXT,
    "cryptarithm": "its verifier reads only the last of several digits for a letter",
    "decimal_arithmetic": "its verifier rewards answers that are only near, and its own are rounded at every step",
    "decimal_chain_sum": Judge.VERIFIER,
    "dice": Judge.TEXT,  # its verifier accepts a number that is split over two lines
    "emoji_mystery": Judge.TEXT,
    "family_relationships": Judge.VERIFIER,
    "figlet_font": Judge.TEXT,  # its verifier rewards extra letters after a long word
    "fraction_simplification": Judge.TEXT,  # its verifier rewards any text around the fraction
    "futoshiki": Judge.VERIFIER,
    "game_of_life": Judge.TEXT,  # its verifier rewards extra rows and cells
    "game_of_life_halting": Judge.TEXT,  # its verifier rewards any text
    "gcd": Judge.TEXT,
    "graph_color": "its verifier reads only the last of several colours for a vertex",
    "group_anagrams": "its verifier reads only the names in an object that stands for a group",
    "gsm_symbolic": Judge.TEXT,  # its verifier reads the first number of any text, without its sign
    "intermediate_integration": _CODE,
    "isomorphic_strings": _OTHERS,
    "jugs": "its verifier ignores text after a move, and there are many solutions",
    "kakurasu": Judge.TEXT,  # its verifier ignores other characters
    "knight_swap": "some of the puzzles that it calls impossible have a solution",
    "knights_knaves": "its verifier ignores a negation, and its own answers have a full stop that is not asked for",
    "largest_island": Judge.TEXT,
    "lcm": Judge.TEXT,
    "leg_counting": Judge.TEXT,
    "letter_counting": Judge.TEXT,
    "letter_jumble": Judge.TEXT,  # its verifier rewards extra words after the sentence
    "list_functions": Judge.TEXT,
    "mahjong_puzzle": Judge.TEXT,
    "manipulate_matrix": Judge.VERIFIER,
    "maze": Judge.TEXT,
    "mini_sudoku": Judge.TEXT,
    "modulo_grid": Judge.TEXT,
    "n_queens": _CODE,
    "needle_haystack": Judge.VERIFIER,
    "number_filtering": Judge.TEXT,
    "number_format": "its verifier rewards neighbouring numbers, and no format of the number is asked for",
    "number_sequence": Judge.TEXT,
    "number_sorting": Judge.TEXT,  # its verifier rewards neighbouring numbers and nan
    "palindrome_generation": Judge.VERIFIER,
    "palindrome_partitioning": "its verifier reads only the names in an object that stands for a partition",
    "path_star": Judge.VERIFIER,
    "polynomial_equations": "its verifier ignores words, and a solution can be written in several ways",
    "polynomial_multiplication": _CODE,
    "pool_matrix": "its verifier rewards an error of one percent, and a number can be written in several ways",
    "power_function": Judge.VERIFIER,
    "prime_factorization": Judge.VERIFIER,
    "products": Judge.VERIFIER,
    "propositional_logic": "its verifier can take minutes, and rewards a copy of a premise",
    "puzzle24": _CODE,
    "quantum_lock": "its verifier reads the letters A, B and C of any words, and there are several solutions",
    "ransom_note": _OTHERS,
    "rearc": Judge.TEXT,  # its verifier ignores lines that begin with `Shape:`
    "rectangle_count": Judge.VERIFIER,
    "rotate_matrix": Judge.TEXT,
    "rotten_oranges": Judge.TEXT,
    "rubiks_cube": "its verifier takes gigabytes for a move with a large number, and there are many solutions",
    "rush_hour": "its verifier skips illegal moves, and can take minutes",
    "self_reference": Judge.TEXT,
    "sentence_reordering": Judge.VERIFIER,
    "shortest_path": Judge.VERIFIER,
    "simple_equations": Judge.TEXT,
    "simple_geometry": Judge.TEXT,
    "simple_integration": _CODE,
    "sokoban": "its verifier skips what is not a move, and there are many solutions",
    "spell_backward": Judge.TEXT,  # its verifier rewards extra letters after the word
    "spiral_matrix": Judge.TEXT,  # its verifier evaluates the answer as Python code
    "string_insertion": Judge.TEXT,  # its verifier evaluates the answer as Python code
    "string_manipulation": Judge.TEXT,
    "string_splitting": Judge.TEXT,
    "string_synthesis": Judge.TEXT,
    "sudoku": Judge.TEXT,
    "survo": "its verifier ignores words, and some puzzles have several solutions",
    "syllogism": Judge.TEXT,
    "time_intervals": "its verifier ignores text after the days, and its own milliseconds are often one too low",
    "tower_of_hanoi": "its verifier ignores text before a move, and there are many solutions",
    "tsumego": Judge.VERIFIER,
    "word_ladder": Judge.VERIFIER,
    "word_sequence_reversal": Judge.TEXT,
    "word_sorting": Judge.TEXT,  # its verifier rewards extra words after the list
    "zebra_puzzles": Judge.VERIFIER,
}


def judge_of(data_set: str) -> Judge:
    """How answers to a data set's questions are judged.

    Raises:
        TaskError: If the data set is refused, or `JUDGES` does not name it.
    """
    judge = JUDGES.get(data_set, "nobody has checked yet that its verifier rewards only right answers")
    if isinstance(judge, Judge):
        return judge
    raise TaskError(
        f"the reasoning-gym data set {data_set!r} is refused: {judge}; "
        "to train on it, write a task in Python with a reward of your own (docs/tasks.md)"
    )
