"""Compares manifests with the schemas of Kubernetes. `make operators-check` runs this file by itself, with another
Python, which has kubernetes-validate.

    python schemas.py FOLDER_OF_CRDS < manifests.yaml

Prints a list in JSON, of one object for each manifest: its `kind` and `name`, its `error` (empty: none), `known`
(false: there is no schema of its kind), and the manifest as `body`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

KUBERNETES = "1.37"


def closed(schema: Any) -> Any:
    """Returns a schema that allows no field that it does not name."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(made.get("properties"), dict) and "type" in made:
        made.setdefault("additionalProperties", bool(made.get("x-kubernetes-preserve-unknown-fields")))
    return made


def custom(folder: Path) -> dict[tuple[str, str], Any]:
    """Returns the schema of each custom resource, by version and kind."""
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        spec = yaml.safe_load(path.read_text())["spec"]
        for version in spec["versions"]:
            schema = closed(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}  # the API server has the schema of these
            found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return found


def error_of(body: Any, schemas: dict[tuple[str, str], Any]) -> str | None:
    """Returns the first error of a manifest, empty if there is none; None: there is no schema of its kind."""
    schema = schemas.get((body["apiVersion"], body["kind"]))
    try:
        if schema is not None:
            jsonschema.validate(body, schema)
        else:
            kubernetes_validate.validate(body, KUBERNETES, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return None
    except jsonschema.ValidationError as error:
        return f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
    return ""


def main() -> None:
    """Reads, compares and prints."""
    schemas, rows = custom(Path(sys.argv[1])), []
    for body in yaml.safe_load_all(sys.stdin):
        if body is not None:
            error = error_of(body, schemas)
            head = {"kind": body["kind"], "name": body["metadata"]["name"]}
            rows.append(head | {"error": error or "", "known": error is not None, "body": body})
    sys.stdout.write(json.dumps(rows))


if __name__ == "__main__":
    main()
