"""docs/security.md has the core's table of rights, and docs/roles.md the table of roles."""

from kvgrpc.core.values.owners import RIGHTS
from kvgrpc.service.identity.assignments import assignments_of
from kvgrpc.service.identity.authorization_policy import policy_of
from kvgrpc.service.identity.roles import Role, table
from tests.docs.pages import DOCS, code, section, tables


def test_the_table_of_rights_is_that_of_the_core() -> None:
    rows = {(kind.value, verb.value): {ground.value for ground in grounds} for (kind, verb), grounds in RIGHTS.items()}
    (shown,) = tables(section(DOCS / "security.md", "## Who may do what"))
    assert {(row[0], row[1]): set(row[2].split(", ")) for row in shown} == rows


def test_the_page_of_roles_has_the_table_that_the_code_makes() -> None:
    """`python -c 'from kvgrpc.service.identity.roles import table; print("\\n".join(table()))'` makes it."""
    lines = (DOCS / "roles.md").read_text().splitlines()
    begins = next(number for number, line in enumerate(lines) if line.startswith("| Method |"))
    assert lines[begins : begins + len(table())] == table()
    assert not lines[begins + len(table())]


def test_the_page_of_roles_explains_each_role() -> None:
    (shown, _) = tables((DOCS / "roles.md").read_text())
    assert [row[0] for row in shown] == [role.value for role in Role]


def test_the_examples_of_roles_and_of_a_policy_can_be_used_as_they_are() -> None:
    (roles,), (policy,) = (code(section(DOCS / "security.md", "## Roles"), kind) for kind in ("toml", "json"))
    assert assignments_of(roles.encode()).of("dns:a.ops.example.test").roles == {Role.OPERATOR, Role.VIEWER}
    assert policy_of(policy.encode()).refusal("spiffe://prod.example/a", "/kvgrpc.v1.PoolService/ReadBlocks", ())
