"""Files of targets, judged by the targets' own validators. Reads a list of files as JSON, prints
what is wrong as JSON.

Runs in an environment of its own (`make launch-tools`), so it imports nothing of farthing.
Kubernetes: strict schemas of kubernetes-validate; Vertex AI: the CustomJob proto; SkyPilot:
`Task.from_yaml_config`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

VERSIONS = ("1.30", "1.37")
"""Of Kubernetes; the older requires what the newer does not."""


def kubernetes(text: str) -> None:
    """Raises for a document that the API server would refuse."""
    import kubernetes_validate
    import yaml

    for document in yaml.safe_load_all(text):
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)


def vertex(text: str) -> None:
    """Raises for unknown fields, enums and durations."""
    from google.cloud.aiplatform_v1.types import CustomJob

    CustomJob.from_json(text)


def skypilot(text: str) -> None:
    """Raises for a task that is none, and for another number of resources than one."""
    import sky
    import yaml

    task = sky.Task.from_yaml_config(yaml.safe_load(text))
    assert len(task.resources) == 1, "a task rents one offer"


JUDGES: dict[tuple[str, str], Any] = {
    ("kubernetes", "job.k8s.yaml"): kubernetes,
    ("vertex", "custom_job.json"): vertex,
    ("skypilot", "task.sky.yaml"): skypilot,
}


def main() -> int:
    """Judge every file on standard input that a judge is known for."""
    wrong = []
    for file in json.load(sys.stdin):
        judge = JUDGES.get((file["target"], file["name"]))
        if judge is not None:
            try:
                judge(file["text"])
            except ImportError:
                raise
            except Exception as error:
                wrong.append(
                    f"{file['target']}, {file['offer']}, {file['name']}: {type(error).__name__}: {error}"[  # noqa: E501
                        :500
                    ]
                )
    print(json.dumps(wrong))
    return 0


if __name__ == "__main__":
    sys.exit(main())
