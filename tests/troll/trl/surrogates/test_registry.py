"""Surrogates of a user's own: how they are registered, and what is checked of them."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from trl import TrlParser

from tests.troll.trl.surrogates.scored import pair, scored_tokens
from troll.trl import TrollConfig, register_surrogate
from troll.trl.surrogates import SURROGATES, NoSettings, ScoredTokens, Surrogate, Terms, kl_penalty, number


@pytest.fixture(autouse=True)
def registry() -> Iterator[dict[str, Surrogate]]:
    """What a test registers is gone after it."""
    with mock.patch.dict(SURROGATES):
        yield SURROGATES


@dataclass(frozen=True)
class ShareSettings:
    share: float = number(0.25, "in [0, 1]")


def shared(tokens: ScoredTokens, args: Any, own: ShareSettings) -> Terms:
    return Terms(log_ratio=own.share * tokens.log_ratio)


def other(tokens: ScoredTokens, args: Any, own: NoSettings) -> Terms:
    return Terms()


def made(power: int) -> Any:
    def within(tokens: ScoredTokens, args: Any, own: NoSettings) -> Terms:
        return Terms(penalty=tokens.log_ratio**power)

    return within


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (Surrogate(other), Surrogate(kl_penalty)),
        (Surrogate(partial(other)), Surrogate(partial(kl_penalty))),
        (Surrogate(sets={"loss_type": "grpo"}), Surrogate(sets={"loss_type": "bnpo"})),
        (Surrogate(), Surrogate(other)),
    ],
    ids=["functions", "without a module", "without a function", "with and without"],
)
def test_register_surrogate_refuses_another_one_of_the_name(one, two):
    register_surrogate("mine", one)
    with pytest.raises(ValueError, match=r"surrogate 'mine' is registered already: choose another name"):
        register_surrogate("mine", two)
    assert SURROGATES["mine"] is one


def test_register_surrogate_refuses_the_names_of_the_package():
    with pytest.raises(ValueError, match="surrogate 'clip' is registered already: choose another"):
        register_surrogate("clip", Surrogate(shared, ShareSettings))


@pytest.mark.parametrize(
    "surrogate",
    [Surrogate(shared, ShareSettings), Surrogate(made(2)), Surrogate()],
    ids=["with settings", "without", "without a function"],
)
def test_register_surrogate_takes_the_same_one_again(surrogate):
    register_surrogate("mine", surrogate)
    register_surrogate("mine", surrogate)
    assert SURROGATES["mine"] == surrogate


def test_register_surrogate_takes_a_new_one_of_the_same_module():
    for surrogate in (Surrogate(made(2)), Surrogate(made(3)), Surrogate(lambda *_: Terms()), Surrogate(other)):
        register_surrogate("mine", surrogate)
        assert SURROGATES["mine"] is surrogate


MODULE = """
from dataclasses import dataclass
from troll.trl import register_surrogate
from troll.trl.surrogates import Surrogate, Terms, number

@dataclass(frozen=True)
class Settings:
    share: float = number({default}, "in [0, 1]")

def mine(tokens, args, own):
    return Terms(log_ratio=own.share * tokens.log_ratio)

register_surrogate("mine", Surrogate(mine, Settings))
"""


def test_a_reloaded_module_registers_its_surrogate_anew(config, tmp_path, monkeypatch):
    """Not another file with a function of that name."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_first.py").write_text(MODULE.format(default=0.25))
    (tmp_path / "my_second.py").write_text(MODULE.format(default=0.25))
    module = importlib.import_module("my_first")
    assert config(surrogate="mine").own_settings.share == 0.25
    (tmp_path / "my_first.py").write_text(MODULE.format(default=0.125))
    importlib.reload(module)
    assert config(surrogate="mine").own_settings.share == 0.125
    with pytest.raises(ValueError, match="surrogate 'mine' is registered already: choose another name"):
        importlib.import_module("my_second")


@dataclass(frozen=True)
class Unset:
    share: float


@pytest.mark.parametrize(
    ("name", "surrogate", "message"),
    [
        ("my surrogate", Surrogate(other), "name must consist of letters, digits and _, .* got 'my surrogate'"),
        ("mine", Surrogate(Terms()), "terms of surrogate 'mine' must be a function or None, got Terms"),  # type: ignore[arg-type]
        ("mine", Surrogate(other, dict), "own of surrogate 'mine' must be a dataclass, got <class 'dict'>"),
        ("mine", Surrogate(other, ShareSettings()), "own of surrogate 'mine' must be a dataclass, got Share"),  # type: ignore[arg-type]
        ("mine", Surrogate(other, Unset), "must have a default for each field, and share has none"),
        ("mine", Surrogate(other, fields="kl_bound"), "fields of surrogate 'mine' must be a tuple of names, got 'kl_b"),  # type: ignore[arg-type]
        ("mine", Surrogate(other, sets={"los_type": "grpo"}), "got 'los_type', did you mean loss_type"),
    ],
)
def test_register_surrogate_refuses_wrong_parts(name, surrogate, message):
    with pytest.raises(ValueError, match=message):
        register_surrogate(name, surrogate)
    assert "mine" not in SURROGATES


def test_number_refuses_an_unknown_range():
    with pytest.raises(ValueError, match=r"takes must be one of above 0, .*, got 'positive'"):
        number(1.0, "positive")


def test_config_refuses_a_surrogate_that_reads_an_unknown_field(config):
    register_surrogate("mine", Surrogate(other, fields=("kl_bond",)))
    with pytest.raises(ValueError, match="fields of surrogate 'mine' must be settings, got 'kl_bond', did you mean kl"):
        config(surrogate="mine")


def test_a_registered_surrogate_is_a_choice_of_later_parsers(config, tmp_path):
    words = [f"--output_dir={tmp_path}", "--report_to=none", "--use_cpu=true", "--bf16=false", "--surrogate=mine"]
    parser: Any = TrlParser
    with pytest.raises(SystemExit):
        parser(TrollConfig).parse_args_and_config(words)
    register_surrogate("mine", Surrogate(shared, ShareSettings))
    (args,) = parser(TrollConfig).parse_args_and_config([*words, '--surrogate_kwargs={"share": 1}'])
    assert (args.surrogate, args.own_settings) == ("mine", ShareSettings(1.0))
    with pytest.raises(ValueError, match=r"share of surrogate 'mine' must be in \[0, 1\], got 2"):
        config(surrogate="mine", surrogate_kwargs={"share": 2})


@pytest.mark.parametrize(
    ("reads_policies", "needed"), [(False, False), (True, True), (lambda own: own.share > 0, True)]
)
def test_config_asks_the_surrogate_whether_it_reads_policies(config, reads_policies, needed):
    register_surrogate("mine", Surrogate(shared, ShareSettings, reads_policies=reads_policies))
    assert config(surrogate="mine").reads_policies is needed


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (lambda tokens: None, "a surrogate must return Terms, got NoneType"),
        (lambda tokens: tokens.log_ratio, "a surrogate must return Terms, got Tensor"),
        (lambda tokens: Terms(penalty=tokens.log_ratio.mean()), r"penalty of a surrogate must be \(6\), got \(\)"),
        (lambda tokens: Terms(log_ratio=tokens.log_ratio[:1]), r"log_ratio of a surrogate must be \(6\), got \(1\)"),
        (lambda tokens: Terms(keep=tokens.counts[:, None]), r"keep of a surrogate must be \(6\), got \(6, 1\)"),
        (lambda tokens: Terms(keep=tokens.advantages), "keep of a surrogate must be bool, got torch.float"),
        (lambda tokens: Terms(log_ratio=tokens.log_ratio.detach()), "log_ratio of a surrogate must have a gradient"),
    ],
    ids=["nothing", "a tensor", "a mean", "a part", "a column", "weights", "detached"],
)
def test_terms_of_another_form_are_refused(terms, message):
    surrogate = Surrogate(lambda tokens, args, own: terms(tokens))
    with pytest.raises(ValueError, match=message):
        surrogate.apply(scored_tokens(*pair()), None, NoSettings())
    with torch.no_grad():
        kept = Surrogate(shared, ShareSettings).apply(scored_tokens(*pair()), None, ShareSettings())
    assert kept.log_ratio is not None
