"""docs/security.md has the core's table of rights, its way to mutual TLS can be gone, and docs/roles.md has the table
of roles.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from kvgrpc.core.values.owners import RIGHTS
from kvgrpc.service.identity.assignments import assignments_of
from kvgrpc.service.identity.authorization_policy import policy_of
from kvgrpc.service.identity.roles import METHODS, Role
from tests.docs.pages import DOCS, ROOT, code, section, tables


def test_the_table_of_rights_is_that_of_the_core() -> None:
    rows = {(kind.value, verb.value): {ground.value for ground in grounds} for (kind, verb), grounds in RIGHTS.items()}
    (shown,) = tables(section(DOCS / "security.md", "## Who may do what"))
    assert {(row[0], row[1]): set(row[2].split(", ")) for row in shown} == rows


def test_the_way_to_mutual_tls_can_be_gone(tmp_path: Path) -> None:
    """As it is written, but in another folder and at free ports."""
    text = section(DOCS / "security.md", "### From nothing to mutual TLS")
    (shell,), (program,) = code(text, "console"), code(text, "python")
    with socket.socket() as one, socket.socket() as other:
        for found, port in ((one, "50051"), (other, "50052")):
            found.bind(("127.0.0.1", 0))
            shell, program = (part.replace(port, str(found.getsockname()[1])) for part in (shell, program))
    shell = shell.replace("make certs", "python -m examples.certs").replace(".venv/bin/kvgrpc", "python -m kvgrpc")
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVGRPC_")}
    environment = {**own, "PYTHONPATH": str(ROOT)}
    with ExitStack() as ends:
        for line in shell.splitlines():
            arguments = [sys.executable, *shlex.split(line.removesuffix("&"))[1:]]
            if not line.endswith("&"):
                subprocess.run(arguments, cwd=tmp_path, env=environment, check=True, capture_output=True)
                continue
            server = subprocess.Popen(arguments, cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
            ends.enter_context(server)
            ends.callback(server.send_signal, signal.SIGTERM)
            assert server.stdout is not None
            assert server.stdout.readline().startswith(b"kvgrpc serving")
        command = [sys.executable, "-c", program]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("1 group of blocks moved\n", "")


def table() -> list[str]:
    """Returns the table of roles as lines of the page."""
    head = ["| Method | " + " | ".join(role.value for role in Role) + " |", "|---|" + "---|" * len(Role)]
    lines = []
    for method, roles in METHODS.items():
        service, _, name = method.rpartition("/")
        marks = [" yes " if role in (roles or Role) else "  " for role in Role]
        lines.append(f"| `{service.rpartition('.')[2]}/{name}` |" + "|".join(marks) + "|")
    return head + lines


def test_the_page_of_roles_has_the_table_that_the_code_makes() -> None:
    """`python -c 'from tests.docs.test_security import table; print("\\n".join(table()))'` makes it."""
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
