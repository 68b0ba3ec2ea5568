"""docs/compatibility.md has the code's table of other connectors' settings."""

from kvgrpc.integrations.old_settings import OLD_SETTINGS
from tests.docs.pages import DOCS, plain, section, tables


def test_every_setting_of_other_connectors_is_documented_with_what_does_it_here() -> None:
    (rows,) = tables(section(DOCS / "compatibility.md", "## Settings"))
    found = [(plain(name), plain(place), ours, fate) for name, place, ours, fate in rows]
    assert found == [(row.name, row.place.value, row.ours, row.fate.value) for row in OLD_SETTINGS]
