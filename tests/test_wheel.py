"""What the wheel holds. A file that it lacks is not missed in an editable install, where most tests run."""

from hatchling.builders.wheel import WheelBuilder

from tests import checkout


def in_the_wheel() -> dict[str, str]:
    """The wheel's files and those of the checkout that they are copied from, as hatchling will find them."""
    found = WheelBuilder(str(checkout.ROOT)).recurse_included_files()
    return {file.distribution_path: file.relative_path for file in found}


@checkout.needs_git
def test_wheel_holds_every_file_of_src_and_no_other() -> None:
    expected = {name.removeprefix("src/"): name for name in checkout.files("src")}
    assert in_the_wheel() == expected
    for kind in (".py", ".yaml", ".md", "/py.typed"):
        assert any(name.endswith(kind) for name in expected), kind


def test_every_package_in_the_wheel_is_typed() -> None:
    files = in_the_wheel()
    packages = {name.removesuffix("/__init__.py") for name in files if name.count("/") == 1}
    packages = {name for name in packages if f"{name}/__init__.py" in files}
    assert {"troll", "troll_lab", "troll_sandbox"} <= packages
    assert {f"{package}/py.typed" for package in packages} <= files.keys()
