"""Secrets that are none, to be looked for where no secret may be."""

import pytest

NAMES = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "OPENAI_API_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "GOOGLE_API_KEY",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "AZURE_STORAGE_KEY",
    "RUNPOD_API_KEY",
    "VAST_API_KEY",
    "LAMBDA_API_KEY",
)
CANARIES = {
    name: f"canary-{number}-{name.lower()}-{'0123456789abcdef' * 2}"
    for number, name in enumerate(NAMES)
}


@pytest.fixture
def secrets(monkeypatch):
    for name, secret in CANARIES.items():
        monkeypatch.setenv(name, secret)
