import pytest
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy

from troll_lab.rewards.mathematics.parser import _NEEDED, check_parser


@pytest.mark.parametrize("name", _NEEDED)
@pytest.mark.parametrize("change", ["gone", "other parameters"])
def test_check_parser_names_changed_method(name: str, change: str) -> None:
    methods = {each: getattr(_Latex2Sympy, each) for each in _NEEDED}
    if change == "other parameters":
        methods[name] = lambda self: None
    elif name == "__init__":  # every class has one
        methods[name] = object.__init__
    else:
        del methods[name]
    with pytest.raises(ImportError, match=rf"lacks {name}\(.*pip install latex2sympy2_extended=="):
        check_parser(type("Parser", (), methods))
